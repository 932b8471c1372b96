"""When streams came that were read late.

A stream's clock begins when its first bytes could have been read. Where the loop looks in time that
is when they are read. Where it does not, everything that came meanwhile is read at once, and all
that is known is when the loop looked last, and of the newest bytes what the kernel noted.
"""

import socket
import struct
import sys
from typing import Final, Protocol

from epp.core.types import Seconds

_LAST_DATA_AT: Final = 52
"""Where `struct tcp_info` has `tcpi_last_data_recv`, in milliseconds; `linux/tcp.h`."""
_INFO_BYTES: Final = 104


class Lag(Protocol):
    """What is known of how late the loop looks."""

    def overdue_s(self, now: Seconds) -> Seconds:
        """For how long what the loop reads at `now` may have waited; 0.0: it looked in time."""
        ...

    def backlog_s(self, now: Seconds) -> Seconds:
        """For how long, on average, what another thread keeps for the loop until `now` has waited."""
        ...


class NoLag:
    """Of a loop that nobody watches."""

    def overdue_s(self, _: Seconds) -> Seconds:
        return 0.0

    def backlog_s(self, _: Seconds) -> Seconds:
        return 0.0


def newest_data_age_s(connection: socket.socket | None) -> Seconds | None:
    """How long ago the kernel took in the newest bytes of a TCP connection, to its clock's tick of
    1 to 10 ms; None: it does not tell.
    """
    if connection is None or sys.platform != "linux":
        return None
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (age_ms,) = struct.unpack_from("=I", told, _LAST_DATA_AT)
    except (OSError, struct.error):
        # Closed meanwhile, or no TCP.
        return None
    return float(age_ms) / 1e3


def arrivals(
    streams: int, now: Seconds, overdue_s: Seconds, newest_age_s: Seconds | None
) -> list[Seconds]:
    """When each of so many `streams` came that are read together at `now`, in order.

    They are taken to have come evenly, after the loop looked last, `overdue_s` ago: the last of them
    when the newest bytes came or, where that is not known, as long before `now` as any two are apart.
    """
    since_s = now - overdue_s
    if newest_age_s is None:
        return [since_s + overdue_s * at / (streams + 1) for at in range(1, streams + 1)]
    until_s = min(max(since_s, now - newest_age_s), now)
    return [since_s + (until_s - since_s) * at / streams for at in range(1, streams + 1)]
