"""Decide which connections to --peer-port are accepted, and hold them until they authenticate.

With a secret, every host may try to authenticate. Without one, only the addresses of replicas and
this machine are accepted. Strangers cannot block replicas: if there are too many new connections,
the one that is least likely to be a replica is closed.
"""

from collections import Counter
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.peers.connection import Connection, Stage

ACCEPTS_PER_BEAT_MAX: Final = 32
NEWCOMERS_MAX: Final = 256
"""Maximum number of connections that wait for authentication.

Accepting this number takes at least eight beats. A replica needs three beats to pass the gate,
which is the check before TLS. Strangers with the replica's address therefore cannot displace it
before it passes.
"""
NEWCOMER_S_MAX: Final[Seconds] = 5.0
"""Time in seconds after which an incoming connection that has not authenticated is closed."""


class Newcomer(Struct, eq=False):
    """An incoming connection to --peer-port that has not authenticated yet."""

    host: str
    connection: Connection
    known: bool = False
    """True if this connection comes from the address of a known replica or from this machine."""


class Admission:
    """The incoming connections that have not authenticated yet, with their priorities."""

    def __init__(self, *, has_secret: bool) -> None:
        self.hosts: frozenset[str] = frozenset()
        """IP addresses of the replicas that this process knows. Without a secret, only these and
        this machine may connect.
        """
        self.newcomers: list[Newcomer] = []
        """Connections that have not authenticated yet, oldest first."""
        self._has_secret = has_secret
        self._counts: Counter[str] = Counter()
        """Number of connections that have not authenticated yet, by host."""

    def admits(self, host: str) -> bool:
        """Return True if an incoming connection from the IP address `host` may try to
        authenticate.
        """
        return self._has_secret or self._is_known(host)

    def add(self, newcomer: Newcomer) -> Newcomer | None:
        """Add the new connection `newcomer`. Return the connection that must be closed for it,
        which may be `newcomer` itself, or None.

        Connections that have not passed the gate (the check before TLS) are closed first. Among
        them, strangers are closed before hosts with the address of a replica. If these are equal,
        the host with most waiting connections loses its oldest one.
        """
        newcomer.known = self._is_known(newcomer.host)
        self.newcomers.append(newcomer)
        self._counts[newcomer.host] += 1
        if len(self.newcomers) <= NEWCOMERS_MAX:
            return None
        gives_way = min(self.newcomers, key=self._standing)
        self.remove(gives_way)
        return gives_way

    def remove(self, newcomer: Newcomer) -> None:
        """Remove a connection that has authenticated or was closed."""
        self.newcomers.remove(newcomer)
        self._counts[newcomer.host] -= 1
        if not self._counts[newcomer.host]:
            del self._counts[newcomer.host]

    def _standing(self, newcomer: Newcomer) -> tuple[bool, bool, int]:
        has_passed = newcomer.connection.stage is not Stage.GATE
        return has_passed, newcomer.known, -self._counts[newcomer.host]

    def _is_known(self, host: str) -> bool:
        address = plain_host(host)
        return address is not None and (address.is_loopback or str(address) in self.hosts)


def plain_host(address: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address, without a zone and with IPv4-mapped IPv6 as IPv4; return None if
    `address` is not an IP address.
    """
    try:
        host = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host
