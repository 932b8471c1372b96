"""Who may be connected: as many as a picker can serve, and not all of them from one address.

Above a limit not the newest is turned away, which may be a gateway that has just been started, but
the idlest is asked to leave: of the same address if that has as many as it may, else of the address
that has most. Who was asked keeps its connection until its streams are over. As many again may be on
their way out; then the newest is refused after all.
"""

from collections import Counter
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from epp.core.types import Seconds

CONNECTIONS_MAX: Final = 1_024
HOST_CONNECTIONS_MAX: Final = 256
"""Of one address. An Envoy opens one for each of its threads, and behind a NAT or the proxy of a
mesh there may be several gateways."""


class Guest(Protocol):
    """A connection."""

    @property
    def host(self) -> str:
        """The address that it comes from, without the port."""
        ...

    @property
    def open_streams(self) -> int: ...

    @property
    def heard_at_s(self) -> Seconds:
        """When something last came from it."""
        ...


AnyGuest = TypeVar("AnyGuest", bound=Guest)


class Admission(Struct, Generic[AnyGuest], frozen=True):
    """Whether one more has a place, and who is to leave for it."""

    admitted: bool
    evicted: AnyGuest | None = None


class Places(Generic[AnyGuest]):
    """Who stays, which is bounded in all and for each address, and who is leaving.

    Others leave for those who come only while fewer than may stay are leaving already.
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
        """A place for `guest`; who is evicted for it counts as leaving from here on."""
        idlest = None
        crowded = self._crowded(guest.host)
        if crowded is not None:
            if (
                self._leaving[crowded] >= self._host_guests_max
                or self._leaving_count >= self._guests_max
            ):
                return Admission(admitted=False)
            # One without a stream loses nothing.
            idlest = min(
                self._staying[crowded], key=lambda one: (one.open_streams > 0, one.heard_at_s)
            )
            self.leaving(idlest)
        self._staying.setdefault(guest.host, set()).add(guest)
        self._staying_count += 1
        return Admission(admitted=True, evicted=idlest)

    def leaving(self, guest: AnyGuest) -> None:
        """`guest`, which has a place, was asked to leave, perhaps not for the first time."""
        if guest not in self._staying.get(guest.host, ()):
            return
        self._remove(guest)
        self._leaving[guest.host] += 1
        self._leaving_count += 1

    def left(self, guest: AnyGuest) -> None:
        """`guest`, which had a place, is gone."""
        if guest in self._staying.get(guest.host, ()):
            self._remove(guest)
            return
        self._leaving_count -= 1
        self._leaving[guest.host] -= 1
        if not self._leaving[guest.host]:
            del self._leaving[guest.host]

    def _crowded(self, host: str) -> str | None:
        """The address that must give up a place for one more of `host`; None: there is room."""
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
