"""Who may connect to --peer-port, and who waits there until it has shown who it is.

With a secret whoever knows it is let in, from wherever. Without one: who connects from the address
of a replica, or from this machine. Strangers cannot use up the places of newcomers: where there are
too many, one gives way that is least likely to be a replica.
"""

from collections import Counter
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.peers.connection import Connection, Stage

ACCEPTS_PER_BEAT_MAX: Final = 32
NEWCOMERS_MAX: Final = 256
"""So many are accepted in eight beats at the least, so that a replica, which needs three to pass
the gate, is not pushed out before by strangers of its own address either."""
NEWCOMER_S_MAX: Final[Seconds] = 5.0
"""A connection that is not open by then is closed."""


class Newcomer(Struct, eq=False):
    """A connection to us that is not open yet."""

    host: str
    connection: Connection
    known: bool = False
    """It comes from the address of a replica, or from this machine."""


class Admission:
    """The newcomers, and what speaks for each."""

    def __init__(self, *, has_secret: bool) -> None:
        self.hosts: frozenset[str] = frozenset()
        """Addresses of the replicas that are known."""
        self.newcomers: list[Newcomer] = []
        """Who came first is first."""
        self._has_secret = has_secret
        self._counts: Counter[str] = Counter()
        """Host -> newcomers."""

    def admits(self, host: str) -> bool:
        """Whether who connects from the IP address `host` may show who it is."""
        return self._has_secret or self._is_known(host)

    def add(self, newcomer: Newcomer) -> Newcomer | None:
        """Let `newcomer` wait; who has to give way for it, to be closed.

        Before who has passed the gate who has not; of these a stranger before who has the address
        of a replica; of these one whose address has most newcomers, the one that waits longest.
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
        """It is open, or closed."""
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
    """The address without a zone, and IPv4 as IPv4; None: it is no IP address."""
    try:
        host = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host
