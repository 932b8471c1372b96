"""How the rest is measured: the best of many small batches.

The machine is rarely alone. A batch is short enough that some of them run undisturbed, so the best
one tells what the code costs and the mean would tell what else was running. Times are CPU time of
the thread, in which waiting for a core does not count.
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
    """Microseconds of one `work(item)`: the best mean of `batches`, each over what `items()` gives.

    `items` and `after` are called once a batch, and are not timed. The garbage collector runs
    between batches and not in them; what it costs is a row of its own.
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
