"""The measured speed of KV transfers to each endpoint, from the sums on its metrics page.

An engine that receives KV blocks adds the bytes and the time of each transfer to two sums. Their
increase from one page to the next gives the speed of the transfers that ended in between. A
transfer that shares the network with others takes longer, and the rule by time counts the others
itself. The speed of an endpoint is therefore near the fastest of its last transfers.

An engine with several ranks counts a transfer of each rank for one request. These run at the same
time, so the speed of a request's transfer is the sum of theirs. The number of ranks is the largest
number that divides nearly all increases of the count of transfers.

Any server may answer at an endpoint's address. An increase without a plausible speed is ignored and
counted. An endpoint without a measured speed has the median of the others, so one wrong page has no
effect on the rest of the pool.
"""

import math
from collections import deque
from math import isnan
from statistics import median_low
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Columns
from epp.core.types import KvTransfers, Seconds

RISES_MAX: Final = 32
"""Maximum number of increases of an endpoint's sums of KV transfers that are remembered."""
REMEMBERED_S: Final[Seconds] = 300.0
"""Time in seconds after which an increase of an endpoint's sums of KV transfers is forgotten."""
DOUBLED_S: Final[Seconds] = 300.0
"""Time in seconds without any KV transfer after which the pool's assumed speed of transfers begins
to rise, and in which it then doubles. If the measured speed is so low that no request uses the
network, nothing else would show that it has become faster.
"""
FORGOTTEN_S: Final[Seconds] = 1_800.0
"""Time in seconds without any KV transfer after which the pool's speed of transfers is unknown
again, so that the configured one is used.
"""
FASTEST_SHARE: Final = 0.1
"""Share of the remembered KV transfers to an endpoint, by increases of its sums, that are at least
as fast as its measured speed.
"""
BYTES_PER_S_MIN: Final = 1e6
BYTES_PER_S_MAX: Final = 1e13
"""This and `BYTES_PER_S_MIN` are the range of plausible speeds of a KV transfer; NVLink has 6e11.
"""
RANKS_MAX: Final = 64
"""Maximum number of ranks that receive the KV blocks of one request at the same time."""
RISES_OF_RANKS: Final = 8
"""Number of increases of an endpoint's sums of KV transfers from which on its number of ranks may
exceed the median of all endpoints. With fewer, several requests may look like several ranks.
"""
DIVIDED_SHARE: Final = 7 / 8
"""Least share of the increases of an endpoint's count of KV transfers that its number of ranks must
divide. A page may be read while only some ranks have received the blocks of a request.
"""


class _Rise(Struct, frozen=True, gc=False):
    """The KV transfers to an endpoint that ended between two of its metrics pages."""

    at_s: Seconds
    ended: int
    """Number of KV transfers that ended between the two pages."""
    bytes_per_s: float
    """Mean speed of the KV transfers that ended between the two pages, each of one rank."""


class _Link:
    """The KV transfers to one endpoint since its engine started."""

    __slots__ = ("bytes_per_s", "last", "ranks", "rises")

    def __init__(self, first: KvTransfers) -> None:
        self.last = first
        """Sums of KV transfers on the endpoint's last metrics page."""
        self.rises: deque[_Rise] = deque(maxlen=RISES_MAX)
        self.ranks = 1
        """Number of ranks that receive the blocks of one request, by the remembered transfers."""
        self.bytes_per_s = math.nan
        """Speed in bytes per second of one rank's KV transfer; NaN if no transfer is remembered."""

    def measure(self) -> None:
        """Compute the speed and the number of ranks from the remembered KV transfers."""
        speeds = sorted([rise.bytes_per_s for rise in self.rises])
        at = int((1.0 - FASTEST_SHARE) * len(speeds))
        self.bytes_per_s = speeds[at] if speeds else math.nan
        self.ranks = _ranks([rise.ended for rise in self.rises])

    def forget_before(self, time_s: Seconds) -> bool:
        """Forget the KV transfers before `time_s`. Return whether there were any."""
        rises = self.rises
        before = len(rises)
        while rises and rises[0].at_s < time_s:
            rises.popleft()
        return len(rises) < before


class LinkSpeeds:
    """The measured speeds of KV transfers to the endpoints of a pool, which it writes into the
    columns. The class has no clock and no randomness.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._links: dict[int, _Link] = {}
        self._median = math.nan
        """Median of the endpoints' speeds of KV transfers after the last one; NaN if there was
        none, or none for long.
        """
        self._risen_at_s: Seconds = -math.inf
        """Time of the last metrics page that showed the end of a KV transfer."""
        self._uncounted = False
        """True if an engine received KV blocks without counting a transfer, because the sender
        writes them.
        """
        self.ignored = 0
        """Number of changes of endpoints' sums of KV transfers that were ignored, because they give
        no plausible speed.
        """

    @property
    def bytes_per_s(self) -> float | None:
        """Return the pool's speed of KV transfers in bytes per second, or None if it is unknown."""
        common = self._columns.pool_link_bytes_per_s
        return common if common > 0.0 else None

    def scraped(self, slot: int, transfers: KvTransfers, now: Seconds) -> None:
        """Read the sums of KV transfers on a good metrics page of the endpoint in `slot`."""
        link = self._links.get(slot)
        if link is None:
            self._links[slot] = _Link(transfers)
            if isnan(self._median):
                self._write_common(math.nan)
            return
        before, link.last = link.last, transfers
        # No transfer has ended since the last page, as in most cases.
        if transfers.ended == before.ended:
            if transfers.received_tokens > before.received_tokens and not link.rises:
                self._receive_uncounted()
            return
        rise = _rise(before, transfers, now)
        if rise is None:
            self.ignored += 1
            return
        self._risen_at_s = now
        link.rises.append(rise)
        link.measure()
        self._write(slot, link)
        self._write_median()

    def tick(self, now: Seconds) -> None:
        """Forget KV transfers that are too old. If none has ended for long, raise the pool's speed;
        after `FORGOTTEN_S`, forget it.
        """
        old_s = now - REMEMBERED_S
        for slot, link in self._links.items():
            if link.forget_before(old_s):
                link.measure()
                self._write(slot, link)
        idle_s = now - self._risen_at_s
        if isnan(self._median) or idle_s <= DOUBLED_S:
            return
        if idle_s > FORGOTTEN_S:
            self._median = math.nan
        self._write_common(self._median * 2.0 ** (idle_s / DOUBLED_S - 1.0))

    def forget(self, slot: int) -> None:
        """Drop the measured speed of KV transfers to `slot`, because its endpoint left or
        restarted.
        """
        self._links.pop(slot, None)
        self._columns.link_bytes_per_s[slot] = math.nan

    def _receive_uncounted(self) -> None:
        self._uncounted = True
        if isnan(self._median):
            self._write_common(math.nan)

    def _write(self, slot: int, link: _Link) -> None:
        ranks = link.ranks
        if len(link.rises) < RISES_OF_RANKS:
            usual = median_low([one.ranks for one in self._links.values() if one.rises] or [1])
            ranks = min(ranks, usual)
        self._columns.link_bytes_per_s[slot] = link.bytes_per_s * ranks

    def _write_median(self) -> None:
        """Set the pool's speed of KV transfers to the median of the endpoints' speeds."""
        columns = self._columns
        speeds = columns.link_bytes_per_s[: len(columns)]
        self._median = float(np.median(speeds[~np.isnan(speeds)]))
        self._write_common(self._median)

    def _write_common(self, bytes_per_s: float) -> None:
        """Set the pool's speed of KV transfers. If it is unknown (NaN), set it to 0 if the next
        transfer will show it.
        """
        if isnan(bytes_per_s) and self._links and not self._uncounted:
            bytes_per_s = 0.0
        self._columns.pool_link_bytes_per_s = bytes_per_s


def _rise(before: KvTransfers, after: KvTransfers, now: Seconds) -> _Rise | None:
    """Return the KV transfers that ended between two metrics pages, or None if they have no
    plausible speed.
    """
    ended = after.ended - before.ended
    size_bytes = after.received_bytes - before.received_bytes
    seconds = after.ended_s - before.ended_s
    # The comparisons also reject NaN.
    if not (1.0 <= ended < math.inf and 0.0 < size_bytes < math.inf and 0.0 < seconds < math.inf):
        return None
    bytes_per_s = size_bytes / seconds
    if not BYTES_PER_S_MIN <= bytes_per_s <= BYTES_PER_S_MAX:
        return None
    return _Rise(now, int(ended), bytes_per_s)


def _ranks(counts: list[int]) -> int:
    """Return the largest number that divides nearly all of `counts`; 1 if there are none."""
    needed = DIVIDED_SHARE * len(counts)
    largest = min(max(counts, default=1), RANKS_MAX)
    return next(
        number
        for number in range(largest, 0, -1)
        if sum([count % number == 0 for count in counts]) >= needed
    )
