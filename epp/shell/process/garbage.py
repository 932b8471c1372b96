"""Freeing soon what only the garbage collector frees.

grpcio leaves a cycle of three objects behind each stream; of the ordinary course of a request ngh2
leaves none, but what failed, was reset or has a traceback may. Python looks for such garbage when
50,000 objects were added, minutes at 100 requests a second, and for what was in use at that instant
much later: meanwhile memory is taken from the machine for what is long gone. What is there when the picker starts never becomes garbage, and the prefix index, the
one thing that grows large, the collector does not look at: a look at all the rest takes less than
a millisecond.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable
from typing import Final

from epp.core.types import Seconds

GARBAGE_THRESHOLDS: Final = (50_000, 20, 20)
"""The collector looks when so many objects were added. With Python's 700 it goes through each large
body several times while it is decoded: 8 MB of small arrays, as many as are let in, take a fifth
longer."""
PAUSE_S: Final = 1.0
WHOLE_PAUSE_S_MIN: Final = 10.0
SHARE_MAX: Final = 1e-3
"""Of the time of the loop, for looks at the whole: it stands still meanwhile."""
_YOUNG: Final = 1
_WHOLE: Final = 2
"""Generations of the collector."""


def spare_what_is_there() -> None:
    """The collector looks from now on only at what is added."""
    gc.collect()
    gc.freeze()


class GarbageCollection:
    """Looks for garbage by the clock.

    Each second at what is new, which takes time in proportion to the traffic. Seldom at the whole:
    the longer it takes the less often.
    """

    def __init__(
        self,
        collect: Callable[[int], object] = gc.collect,
        clock: Callable[[], Seconds] = time.thread_time,
        *,
        pause_s: Seconds = PAUSE_S,
    ) -> None:
        self._collect = collect
        self._clock = clock
        self._pause_s = pause_s
        self.looks_until_whole = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self.look()

    def look(self) -> None:
        """Free what is garbage of what is new, and if it is time, of the whole."""
        self._collect(_YOUNG)
        self.looks_until_whole -= 1
        if self.looks_until_whole > 0:
            return
        # After the young garbage has gone: to free that much more is no reason to wait longer.
        started_s = self._clock()
        self._collect(_WHOLE)
        took_s = self._clock() - started_s
        self.looks_until_whole = math.ceil(max(WHOLE_PAUSE_S_MIN, took_s / SHARE_MAX) / PAUSE_S)
