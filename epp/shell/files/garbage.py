"""Freeing soon what only the garbage collector frees.

Both transports leave cycles of objects behind each stream, ten to twenty objects a request. Python
looks for such garbage when 50,000 objects were added, a minute at 100 requests a second, and for
what was in use at that instant much later: meanwhile memory is taken from the machine for what is
long gone. What is there when the picker starts never becomes garbage, and the prefix index, the
one thing that grows large, the collector does not look at: a look at all the rest takes less than
a millisecond.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Final

from epp.core.types import Seconds

PAUSE_S_MIN: Final = 1.0
SHARE_MAX: Final = 0.01
"""Of the time of the loop, which stands still meanwhile."""


def spare_what_is_there() -> None:
    """The collector looks from now on only at what is added."""
    gc.collect()
    gc.freeze()


class GarbageCollection:
    """Looks for garbage by the clock: every `pause_s`, and less often the longer a look takes."""

    def __init__(
        self,
        collect: Callable[[], object] = gc.collect,
        clock: Callable[[], Seconds] = time.thread_time,
    ) -> None:
        self._collect = collect
        self._clock = clock
        self.pause_s = PAUSE_S_MIN

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.pause_s)
            self.look()

    def look(self) -> None:
        """Free what is garbage, and set the pause by what that took."""
        started_s = self._clock()
        self._collect()
        self.pause_s = max(PAUSE_S_MIN, (self._clock() - started_s) / SHARE_MAX)
