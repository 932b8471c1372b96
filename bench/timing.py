"""Timing for the benchmarks: the best of many small batches.

Other programs often use the machine. A batch is short enough that some of them run undisturbed, so
the best one shows the cost of the code; the mean would also show other programs. Times are CPU time
of the thread, which excludes waiting for a core.
"""

import gc
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

BATCHES: Final = 60
Item = TypeVar("Item")


def best_us(
    work: Callable[[Item], object],
    items: Callable[[], Iterable[Item]],
    *,
    batches: int = BATCHES,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Return the CPU microseconds of one call `work(item)`: the lowest mean of `batches` batches,
    each over `items()`.

    `items` and `after` are called once per batch, and are not timed. The garbage collector runs
    between batches and not in them; its cost is a row of its own.
    """
    best_s = float("inf")
    gc.disable()
    try:
        for _ in range(batches):
            prepared = list(items())
            gc.collect(1)
            started = time.thread_time()
            for item in prepared:
                work(item)
            best_s = min(best_s, (time.thread_time() - started) / len(prepared))
            after()
    finally:
        gc.enable()
    return best_s * 1e6
