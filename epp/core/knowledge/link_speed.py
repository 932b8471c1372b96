"""The measured speed of KV transfers to each endpoint, from the sums on its metrics page.

An engine that receives KV blocks adds the bytes and the time of each transfer to two sums. Their
increase from one page to the next gives the speed of the transfers that ended in between. A
transfer that shares the network with others takes longer, and the rule by time counts the others
itself. The speed of an endpoint is therefore near the fastest of its last transfers.

An engine with several ranks counts one transfer of each rank for a request. They run at the same
time, so the speed of a request's transfer is the sum of theirs. The number of ranks is the largest
number that divides nearly all increases of the count of transfers.

Any server may answer at an endpoint's address. A sum that falls begins anew, and an increase without
a plausible speed is ignored and counted. An endpoint without transfers has the median of the others,
so one wrong page has no effect on the rest of the pool.
"""

import math
from collections import deque
from math import isnan
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Columns
from epp.core.types import KvTransfers, Seconds

RISES_MAX: Final = 32
"""Maximum number of increases that are remembered for an endpoint."""
RISE_REMEMBERED_S: Final[Seconds] = 300.0
"""Time in seconds after which an increase is forgotten. If no transfer is fast enough to be used,
none is measured any more, so that the configured speed is tried again after this time.
"""
FASTEST_SHARE: Final = 0.25
"""Share of the remembered increases of an endpoint that are faster than its measured speed."""
BYTES_PER_S_MIN: Final = 1e6
BYTES_PER_S_MAX: Final = 1e13
"""This and `BYTES_PER_S_MIN` are the range of plausible speeds of a transfer. NVLink has 6e11."""
RANKS_MAX: Final = 64
"""Maximum number of ranks that receive the KV blocks of one request at the same time."""
COUNTS_REMEMBERED: Final = 64
"""Number of increases of the pool by which the number of ranks is found."""
COUNTS_MIN: Final = 8
"""Number of increases from which on the number of ranks may be more than 1."""
DIVIDED_SHARE: Final = 7 / 8
"""Share of the increases that the number of ranks divides. A page may be read while only some ranks
have received the blocks of a request.
"""


class _Rise(Struct, frozen=True, gc=False):
    """The transfers that ended at an endpoint between two pages."""

    at_s: Seconds
    bytes_per_s: float
    """Speed of one rank's transfer."""


class _Link:
    """The transfers to one endpoint since its engine started."""

    __slots__ = ("bytes_per_s", "last", "rises")

    def __init__(self, first: KvTransfers) -> None:
        self.last = first
        self.rises: deque[_Rise] = deque(maxlen=RISES_MAX)
        self.bytes_per_s = math.nan
        """Measured speed of one rank's transfer; NaN without a remembered increase."""

    def measure(self) -> None:
        """Compute the speed from the remembered increases."""
        speeds = sorted(rise.bytes_per_s for rise in self.rises)
        at = int((1.0 - FASTEST_SHARE) * len(speeds))
        self.bytes_per_s = speeds[at] if speeds else math.nan

    def forget_before(self, time_s: Seconds) -> bool:
        """Forget the increases before `time_s`. Return whether there were any."""
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
        self._counts: deque[int] = deque(maxlen=COUNTS_REMEMBERED)
        """Last increases of the count of transfers, of all endpoints."""
        self.ranks: int | None = None
        """Number of ranks that receive the KV blocks of one request, or None if unknown."""
        self.ignored = 0
        """Number of increases that were ignored because they have no plausible speed."""

    def scraped(self, slot: int, transfers: KvTransfers, now: Seconds) -> None:
        """Read the sums on a good metrics page of the endpoint in `slot`."""
        link = self._links.get(slot)
        if link is None:
            self._links[slot] = _Link(transfers)
            return
        before, link.last = link.last, transfers
        transfers_ended = transfers.ended - before.ended
        # No transfer has ended since the last page, as in most cases.
        if transfers_ended == 0.0:
            return
        bytes_per_s = _speed(before, transfers)
        if bytes_per_s is None:
            self.ignored += 1
            return
        link.rises.append(_Rise(now, bytes_per_s))
        link.measure()
        self._counts.append(int(transfers_ended))
        ranks = _ranks(self._counts)
        if ranks != self.ranks:
            self.ranks = ranks
            self._write_all()
        else:
            self._write(slot, link)
            self._write_median()

    def tick(self, now: Seconds) -> None:
        """Forget increases that are too old."""
        old_s = now - RISE_REMEMBERED_S
        changed = [one for one in self._links.values() if one.forget_before(old_s)]
        for link in changed:
            link.measure()
        if changed:
            self._write_all()

    def forget(self, slot: int) -> None:
        """Drop the measured speed of `slot`, because its endpoint left or restarted."""
        if self._links.pop(slot, None) is not None:
            self._columns.link_bytes_per_s[slot] = math.nan
            self._write_median()

    def _write_all(self) -> None:
        for slot, link in self._links.items():
            self._write(slot, link)
        self._write_median()

    def _write(self, slot: int, link: _Link) -> None:
        ranks = math.nan if self.ranks is None else self.ranks
        self._columns.link_bytes_per_s[slot] = link.bytes_per_s * ranks

    def _write_median(self) -> None:
        """Set the pool's speed to the median of the endpoints' speeds."""
        columns = self._columns
        speeds = columns.link_bytes_per_s[: len(columns)]
        known = speeds[~np.isnan(speeds)]
        columns.pool_link_bytes_per_s = float(np.median(known)) if len(known) else math.nan


def _speed(before: KvTransfers, after: KvTransfers) -> float | None:
    """Return the speed in bytes per second of the transfers that ended between two pages, or None if
    it is not plausible.
    """
    ended = after.ended - before.ended
    size_bytes = after.received_bytes - before.received_bytes
    seconds = after.ended_s - before.ended_s
    if not (0.0 < ended < math.inf and 0.0 < size_bytes < math.inf and 0.0 < seconds < math.inf):
        return None
    bytes_per_s = size_bytes / seconds
    return bytes_per_s if BYTES_PER_S_MIN <= bytes_per_s <= BYTES_PER_S_MAX else None


def _ranks(counts: deque[int]) -> int | None:
    """Return the largest number that divides nearly all of `counts`, or None if there are too few to
    tell it from 1.
    """
    needed = DIVIDED_SHARE * len(counts)
    ranks = next(
        number
        for number in range(RANKS_MAX, 0, -1)
        if sum(count % number == 0 for count in counts) >= needed
    )
    return ranks if ranks == 1 or len(counts) >= COUNTS_MIN else None
