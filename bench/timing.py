"""Timing for the benchmarks: the best of many small batches.

Other programs often use the machine. A batch is short enough that some of them run undisturbed, so
the best one shows the cost of the code; the mean would also show other programs. Times are CPU time
of the thread, which excludes waiting for a core.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

BATCHES: Final = 60
Item = TypeVar("Item")


class Timed(NamedTuple):
    """A function whose calls are timed in batches."""

    work: Callable[[Any], object]
    items: Callable[[], Iterable[Any]]
    """Function that returns the arguments of the calls of one batch."""
    after: Callable[[], object] = lambda: None
    """Function that is called after each batch."""


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
    (best,) = best_in_turns_us([Timed(work, items, after)], batches=batches)
    return best


def best_in_turns_us(timed: Sequence[Timed], *, batches: int = BATCHES) -> list[float]:
    """Return the result of `best_us` for each of `timed`, whose batches take turns, so that all of
    them see the same state of the machine.
    """
    best_s = [float("inf")] * len(timed)
    gc.disable()
    try:
        for _ in range(batches):
            for number, (work, items, after) in enumerate(timed):
                prepared = list(items())
                gc.collect(1)
                started = time.thread_time()
                for item in prepared:
                    work(item)
                taken_s = (time.thread_time() - started) / len(prepared)
                best_s[number] = min(best_s[number], taken_s)
                after()
    finally:
        gc.enable()
    return [one * 1e6 for one in best_s]
