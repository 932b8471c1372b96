"""Free soon the memory that only the garbage collector can free.

grpcio leaves a cycle of three objects behind each stream. ngh2 leaves no garbage in the ordinary
course of a request, but a failed or reset request or a traceback may leave some. Python looks for
such garbage after 50,000 new objects, which takes minutes at 100 requests a second. Objects in use
at that time are examined much later, and their memory stays allocated until then. Objects that
exist when the picker starts never become garbage. The collector does not examine the prefix index,
the only structure that grows large. Examining everything else takes less than a millisecond while
few requests are in flight, and 21 ms with 20,000.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable
from typing import Final

from epp.core.types import Seconds

GARBAGE_THRESHOLDS: Final = (50_000, 20, 20)
"""Thresholds of Python's garbage collector: the first is the number of new objects after which it
runs, and the others count runs of the younger generations.

Python's default of 700 makes it traverse each large body several times while it is decoded.
Decoding 8 MB of small arrays, the maximum, then takes a fifth longer.
"""
PAUSE_S: Final = 1.0
WHOLE_PAUSE_S_MIN: Final = 10.0
SHARE_MAX: Final = 1e-3
"""Maximum share of the event loop's time for full garbage collections, which block the loop."""
_YOUNG: Final = 1
_WHOLE: Final = 2
"""Numbers of the garbage collector's generations: young objects, and all objects."""


def exempt_existing_objects() -> None:
    """Collect garbage, then exclude all remaining objects from later garbage collections."""
    gc.collect()
    gc.freeze()


class GarbageCollection:
    """A periodic garbage collector.

    Each second it collects garbage among new objects, which takes time in proportion to the
    traffic. It rarely collects everything: the longer a full collection takes, the less often it
    happens.
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
        """Collect garbage periodically until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self.look()

    def look(self) -> None:
        """Collect garbage among new objects, and among all objects if a full collection is due."""
        self._collect(_YOUNG)
        self.looks_until_whole -= 1
        if self.looks_until_whole > 0:
            return
        # The young garbage is freed before the measurement, because its amount must not delay the
        # next full collection.
        started_s = self._clock()
        self._collect(_WHOLE)
        took_s = self._clock() - started_s
        self.looks_until_whole = math.ceil(max(WHOLE_PAUSE_S_MIN, took_s / SHARE_MAX) / PAUSE_S)
