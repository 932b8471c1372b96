"""Estimates of the arrival times of streams that the event loop read late.

The waiting time of a stream begins when its first bytes could have been read. If the event loop
reads in time, that is the time of reading. If the loop is late, it reads everything that arrived
meanwhile at once. Then only two times are known: the loop's previous poll of its sockets, and the
kernel's time of the newest bytes.
"""

import socket
import struct
import sys
from typing import Final, Protocol

from epp.core.types import Seconds

_LAST_DATA_AT: Final = 52
"""Offset in bytes of the field `tcpi_last_data_recv` in `struct tcp_info` (`linux/tcp.h`). The
field has the age of the newest data in milliseconds.
"""
_INFO_BYTES: Final = 104


class Lag(Protocol):
    """A source of estimates of how late the event loop reads from its sockets."""

    def overdue_s(self, now: Seconds) -> Seconds:
        """Return how many seconds data that the event loop reads at `now` may have waited in the
        socket, or 0.0 if the loop is on time.
        """
        ...

    def backlog_s(self, now: Seconds) -> Seconds:
        """Return how many seconds data queued for the event loop by another thread has waited on
        average at `now`; 0.0 if the loop was not blocked recently.
        """
        ...


class NoLag:
    """A `Lag` that always reports zero, for an event loop whose lag is not measured."""

    def overdue_s(self, _: Seconds) -> Seconds:
        return 0.0

    def backlog_s(self, _: Seconds) -> Seconds:
        return 0.0


def newest_data_age_s(connection: socket.socket | None) -> Seconds | None:
    """Return the age of the newest bytes of a TCP connection, or None if the kernel does not report
    it.

    The resolution is the tick of the kernel's clock, 1 to 10 ms.
    """
    if connection is None or sys.platform != "linux":
        return None
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (age_ms,) = struct.unpack_from("=I", told, _LAST_DATA_AT)
    except (OSError, struct.error):
        # The connection is closed, or is not TCP.
        return None
    return float(age_ms) / 1e3


def arrivals(
    streams: int, now: Seconds, overdue_s: Seconds, newest_age_s: Seconds | None
) -> list[Seconds]:
    """Return the estimated arrival times, in order, of `streams` new streams that the event loop
    reads together at `now`.

    The streams are assumed to arrive evenly in the `overdue_s` seconds since the loop's last poll.
    The last stream arrives with the newest bytes. If the age of those bytes is unknown, the last
    stream arrives one interval before `now`.
    """
    since_s = now - overdue_s
    if newest_age_s is None:
        return [since_s + overdue_s * at / (streams + 1) for at in range(1, streams + 1)]
    until_s = min(max(since_s, now - newest_age_s), now)
    return [since_s + (until_s - since_s) * at / streams for at in range(1, streams + 1)]
