"""Repetition of missed frames: the frames that a sender stores to repeat them, and a receiver's
list of gaps.

Both are bounded. A sender stores only records, because a past load is useless. A receiver that
requested a frame `ASKS_MAX` times in vain, or that drops a gap above a limit, requests a snapshot
instead.
"""

from collections import deque
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.peers.frames import Frame
from epp.core.types import Seconds

KEPT_S_MAX: Final[Seconds] = 60.0
KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
KEPT_FRAMES_MAX: Final = 4_096
AGAIN_PER_OUTGOING_MAX: Final = 8
"""Maximum number of frames that one call of `again` repeats to peers, beside new frames: 400 a
second.
"""
AGAIN_BYTES_PER_OUTGOING: Final = 64 * 1024
"""Size in bytes after which one call of `again` repeats no more frames to peers: 3 MB a second to
each peer.
"""
RANGES_MAX: Final = 64
"""Maximum number of gaps in the frames of one peer whose frames are still requested; the oldest are
dropped when there are more.
"""
RANGE_FRAMES_MAX: Final = KEPT_FRAMES_MAX
"""Maximum number of frames requested of one gap, from its end; no sender stores more."""
RANGES_ASKED_MAX: Final = 16
"""Maximum number of frame ranges that are requested of one peer in one heartbeat."""
ASKS_MAX: Final = 15
"""Maximum number of requests for one frame, one in each heartbeat (1 s). Repeating all frames that
a sender stores takes about ten seconds; the other requests allow for losses.
"""


class _Kept(Struct, frozen=True, gc=False):
    frame: Frame
    sent_at_s: Seconds


class SentFrames:
    """The live frames that this picker sent last, stored for repetition to peers that missed them."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._wanted: dict[int, None] = {}
        """Numbers of the frames to repeat to peers, in the order in which they are repeated."""

    def keep(self, frame: Frame, now: Seconds) -> None:
        """Store the records of `frame`, which is sent now. If its number does not follow that of
        the last one, drop all earlier frames; above a limit of age, number or size, drop the
        oldest.
        """
        if self._kept and frame.number != self._kept[-1].frame.number + 1:
            self._kept.clear()
            self._bytes = 0
        bare = msgspec.structs.replace(
            frame, load=b"", tokens=b"", whole=False, unread=(), wanted=()
        )
        self._kept.append(_Kept(bare, now))
        self._bytes += len(bare.records)
        while (
            len(self._kept) > KEPT_FRAMES_MAX
            or self._bytes > KEPT_BYTES_MAX
            or now - self._kept[0].sent_at_s > KEPT_S_MAX
        ):
            self._bytes -= len(self._kept.popleft().frame.records)

    def want(self, first: int, last: int) -> None:
        """Queue the frames with numbers from `first` to `last` for repetition, as far as they are
        stored.
        """
        if self._kept:
            oldest, newest = self._kept[0].frame.number, self._kept[-1].frame.number
            self._wanted.update(dict.fromkeys(range(max(first, oldest), min(last, newest) + 1)))

    def again(self, now: Seconds) -> list[Frame]:
        """Return the next of the queued frames to repeat to peers, with their ages, and remove them
        from the queue. There are at most `AGAIN_PER_OUTGOING_MAX`, and no more after
        `AGAIN_BYTES_PER_OUTGOING`; frames that are no longer stored are left out.
        """
        found: list[Frame] = []
        left = AGAIN_BYTES_PER_OUTGOING
        while self._wanted and left > 0 and len(found) < AGAIN_PER_OUTGOING_MAX:
            number = next(iter(self._wanted))
            del self._wanted[number]
            at = number - self._kept[0].frame.number if self._kept else -1
            if 0 <= at < len(self._kept):
                kept = self._kept[at]
                left -= len(kept.frame.records)
                age_s = max(0.0, now - kept.sent_at_s)
                found.append(msgspec.structs.replace(kept.frame, age_s=age_s))
        return found


class _Gap(Struct):
    first: int
    last: int
    asks: int = 0


class MissedFrames:
    """The numbers of those frames of one peer that were missed here."""

    def __init__(self) -> None:
        self._gaps: list[_Gap] = []
        self._dropped = False
        """True if missed frames were dropped above a limit since the last call of `asked`."""

    def __bool__(self) -> bool:
        return bool(self._gaps) or self._dropped

    def add(self, first: int, last: int) -> None:
        """Add the frame numbers from `first` to `last`, or the last `RANGE_FRAMES_MAX` of them, to
        those missed, because the peer's frames skipped them.
        """
        requested = max(first, last - RANGE_FRAMES_MAX + 1)
        self._dropped |= requested > first
        self._gaps.append(_Gap(requested, last))
        self._limit()

    def came(self, number: int) -> bool:
        """Remove the frame `number`, which came late. Return False if it was not among the missed
        frames.
        """
        for at, gap in enumerate(self._gaps):
            if gap.first <= number <= gap.last:
                parts = (
                    _Gap(gap.first, number - 1, gap.asks),
                    _Gap(number + 1, gap.last, gap.asks),
                )
                self._gaps[at : at + 1] = [part for part in parts if part.first <= part.last]
                self._limit()
                return True
        return False

    def asked(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the ranges of frame numbers to request now as (first, last), and whether other
        frames were given up since the last call: after `ASKS_MAX` requests in vain, or above
        `RANGES_MAX` or `RANGE_FRAMES_MAX`. The returned ranges count as requested once more.
        """
        lasting = [gap for gap in self._gaps if gap.asks < ASKS_MAX]
        given_up = self._dropped or len(lasting) < len(self._gaps)
        self._gaps, self._dropped = lasting, False
        chosen = lasting[:RANGES_ASKED_MAX]
        for gap in chosen:
            gap.asks += 1
        return [(gap.first, gap.last) for gap in chosen], given_up

    def _limit(self) -> None:
        """Drop the oldest gaps above `RANGES_MAX`."""
        if len(self._gaps) > RANGES_MAX:
            del self._gaps[:-RANGES_MAX]
            self._dropped = True
