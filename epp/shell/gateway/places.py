"""Limits of the number of gateways' connections, in total and for each address.

Above a limit, the newest connection is not rejected, because it may be from a gateway that has just
started. Instead, another connection is asked to leave: one without streams, if there is one, and
among several the one that has been silent for longest. It is chosen from the same address if that
is at its limit, else from the address with most connections. It stays open until its streams have
ended. As many connections may be leaving at a time as may stay; beyond that the newest connection
is rejected.
"""

from collections import Counter
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from epp.core.types import Seconds

CONNECTIONS_MAX: Final = 1_024
HOST_CONNECTIONS_MAX: Final = 256
"""Maximum number of connections of gateways from one address. An Envoy opens one for each of its
threads, and several gateways may share an address behind a NAT or a mesh proxy.
"""


class Guest(Protocol):
    """A gateway's connection that occupies one of the limited places for connections."""

    @property
    def host(self) -> str:
        """Address of the gateway on this connection as gRPC spells it, without the port, such as
        "ipv4:10.0.0.1".
        """
        ...

    @property
    def open_streams(self) -> int: ...

    @property
    def heard_at_s(self) -> Seconds:
        """Time when data last arrived on the connection."""
        ...


AnyGuest = TypeVar("AnyGuest", bound=Guest)


class Admission(Struct, Generic[AnyGuest], frozen=True):
    """The decision about a new connection: whether it is admitted, and which connection must leave
    for it.
    """

    admitted: bool
    evicted: AnyGuest | None = None


class Places(Generic[AnyGuest]):
    """The connections that stay, limited in total and for each address, and those that are leaving.

    A connection is evicted for a new one only while fewer connections are leaving than may stay, in
    total and from its address.
    """

    def __init__(self, guests_max: int, host_guests_max: int) -> None:
        self._guests_max = guests_max
        self._host_guests_max = host_guests_max
        self._staying: dict[str, set[AnyGuest]] = {}
        self._staying_count = 0
        self._leaving: Counter[str] = Counter()
        self._leaving_count = 0

    def __repr__(self) -> str:
        return f"<Places [{self._staying_count} taken, {self._leaving_count} leaving]>"

    def take(self, guest: AnyGuest) -> Admission[AnyGuest]:
        """Give the new connection `guest` a place, or reject it. A connection that is evicted for
        it counts as leaving from now on.
        """
        idlest = None
        crowded = self._crowded(guest.host)
        if crowded is not None:
            if (
                self._leaving[crowded] >= self._host_guests_max
                or self._leaving_count >= self._guests_max
            ):
                return Admission(admitted=False)
            # Connections without streams are evicted first, because they lose nothing.
            idlest = min(
                self._staying[crowded], key=lambda one: (one.open_streams > 0, one.heard_at_s)
            )
            self.leaving(idlest)
        self._staying.setdefault(guest.host, set()).add(guest)
        self._staying_count += 1
        return Admission(admitted=True, evicted=idlest)

    def leaving(self, guest: AnyGuest) -> None:
        """Note that the connection `guest`, which has a place, was asked to leave; repeated calls
        have no effect.
        """
        if guest not in self._staying.get(guest.host, ()):
            return
        self._remove(guest)
        self._leaving[guest.host] += 1
        self._leaving_count += 1

    def left(self, guest: AnyGuest) -> None:
        """Note that the connection `guest`, which had a place or was leaving, is closed."""
        if guest in self._staying.get(guest.host, ()):
            self._remove(guest)
            return
        self._leaving_count -= 1
        self._leaving[guest.host] -= 1
        if not self._leaving[guest.host]:
            del self._leaving[guest.host]

    def _crowded(self, host: str) -> str | None:
        """Return the address whose connections must give up a place for a new one from `host`, or
        None if there is room.
        """
        if len(self._staying.get(host, ())) >= self._host_guests_max:
            return host
        if self._staying_count >= self._guests_max:
            return max(self._staying, key=lambda other: len(self._staying[other]))
        return None

    def _remove(self, guest: AnyGuest) -> None:
        staying = self._staying[guest.host]
        staying.remove(guest)
        self._staying_count -= 1
        if not staying:
            del self._staying[guest.host]
