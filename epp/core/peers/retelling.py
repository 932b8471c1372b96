"""Requests for missed frames: the sender's kept frames, and the receiver's list of gaps.

Both are bounded. A sender keeps only records, because a past load is useless. A receiver that
requested a frame `ASKS_MAX` times in vain stops, and requests a snapshot instead.
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
"""Maximum number of frames repeated at once, beside new ones: 400 a second."""
AGAIN_BYTES_PER_OUTGOING: Final = 64 * 1024
"""Size after which no more frames are repeated at once: 3 MB a second to each peer."""
RANGES_MAX: Final = 64
"""Maximum number of gaps of one origin; beyond it the oldest are given up."""
RANGE_FRAMES_MAX: Final = KEPT_FRAMES_MAX
"""Maximum number of frames requested of a longer gap, from its end; no sender keeps more."""
RANGES_ASKED_MAX: Final = 16
"""Maximum number of ranges requested of one origin in one heartbeat."""
ASKS_MAX: Final = 15
"""Maximum number of requests for a frame, one per heartbeat: twelve seconds for all kept frames,
plus losses.
"""


class _Kept(Struct, frozen=True, gc=False):
    frame: Frame
    sent_at_s: Seconds


class SentFrames:
    """The live frames that we sent last, for repetition to peers that missed them."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._wanted: dict[int, None] = {}
        """Requested numbers, in the order in which they are sent."""

    def keep(self, frame: Frame, now: Seconds) -> None:
        """Keep `frame`, which is sent now; a gap in the numbers drops all earlier frames."""
        if self._kept and frame.number != self._kept[-1].frame.number + 1:
            self._kept.clear()
            self._bytes = 0
        bare = msgspec.structs.replace(frame, load=b"", whole=False, unread=(), wanted=())
        self._kept.append(_Kept(bare, now))
        self._bytes += len(bare.records)
        while (
            len(self._kept) > KEPT_FRAMES_MAX
            or self._bytes > KEPT_BYTES_MAX
            or now - self._kept[0].sent_at_s > KEPT_S_MAX
        ):
            self._bytes -= len(self._kept.popleft().frame.records)

    def want(self, first: int, last: int) -> None:
        """Queue the frames from `first` to `last` for repetition, as far as they are kept."""
        if self._kept:
            oldest, newest = self._kept[0].frame.number, self._kept[-1].frame.number
            self._wanted.update(dict.fromkeys(range(max(first, oldest), min(last, newest) + 1)))

    def again(self, now: Seconds) -> list[Frame]:
        """Return some of the requested frames, with their age."""
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
    """The missed frames of one origin, by number."""

    def __init__(self) -> None:
        self._gaps: list[_Gap] = []

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def add(self, first: int, last: int) -> None:
        """Add the numbers from `first` to `last`, which were skipped."""
        self._gaps.append(_Gap(max(first, last - RANGE_FRAMES_MAX + 1), last))
        del self._gaps[:-RANGES_MAX]

    def came(self, number: int) -> bool:
        """Remove `number`, which came late. Return False if it was not missed, or was given up."""
        for at, gap in enumerate(self._gaps):
            if gap.first <= number <= gap.last:
                parts = (
                    _Gap(gap.first, number - 1, gap.asks),
                    _Gap(number + 1, gap.last, gap.asks),
                )
                self._gaps[at : at + 1] = [part for part in parts if part.first <= part.last]
                del self._gaps[:-RANGES_MAX]
                return True
        return False

    def asked(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the ranges to request now as (first, last), and whether some were requested in
        vain.
        """
        lasting = [gap for gap in self._gaps if gap.asks < ASKS_MAX]
        given_up = len(lasting) < len(self._gaps)
        self._gaps = lasting
        chosen = lasting[:RANGES_ASKED_MAX]
        for gap in chosen:
            gap.asks += 1
        return [(gap.first, gap.last) for gap in chosen], given_up
