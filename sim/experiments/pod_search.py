"""Search for the smallest sufficient number of pods with few simulations.

More pods are better on average, but not in every simulation: requests are spread over more caches,
and runs are noisy. A number is therefore accepted only if both neighbours in the searched range
confirm it: the number below was tried and is too small, and the number above is sufficient too. If
the number above is too small, the search continues beyond it.
"""

from collections.abc import Generator, Mapping

from msgspec import Struct


class Step(Struct, frozen=True, kw_only=True):
    """The next step of a search for a number of pods: a number to try, or the result."""

    ask: int | None = None
    """Number of pods to try next, or None if the search has ended."""
    found: int | None = None
    """Smallest sufficient number of pods. None if the search has not ended, or if no number up to
    the highest is sufficient.
    """


def next_step(known: Mapping[int, bool], *, start: int, highest: int, lowest: int = 1) -> Step:
    """Return the next step of a search for the smallest sufficient number of pods.

    `known` maps each tried number of pods to whether it is sufficient. The search begins at `start`
    and covers `lowest` to `highest`; fewer pods than `lowest` are known to be too few. A number counts
    only if the next larger one is sufficient too, unless it is `highest`. The step depends only on
    the arguments, so an interrupted search can resume anywhere.
    """
    search = _search(min(max(start, lowest), highest), lowest, highest)
    try:
        asked = next(search)
        while asked in known:
            asked = search.send(known[asked])
    except StopIteration as end:
        return Step(found=end.value)
    return Step(ask=asked)


def smallest_of_all(known: Mapping[int, bool]) -> int | None:
    """Return the smallest number of pods from which on every number in `known` is sufficient; None
    if the highest number is not. `known` maps each tried number of pods to whether it is
    sufficient.

    The function goes down from the highest number and stops at the first that is not shown to be
    sufficient. This is a fixed-sequence test: the probability of a result that is too small is not
    larger than that of one wrong claim about one number, however many numbers are tested.
    """
    found = None
    for number in sorted(known, reverse=True):
        if not known[number]:
            break
        found = number
    return found


def _search(start: int, lowest: int, highest: int) -> Generator[int, bool, int | None]:
    """Yield numbers of pods to try, receive for each whether it is sufficient, and return the
    smallest sufficient number or None.
    """
    # The largest known number that is too small, and the smallest sufficient one; 0 if none is known.
    lower, upper = lowest - 1, 0
    if (yield start):
        upper, step = start, 1
        while lower < upper - 1:
            below = max(lower + 1, upper - step)
            if not (yield below):
                lower = below
                break
            upper, step = below, 2 * step
    else:
        lower = start
    while True:
        if upper <= lower:
            upper = yield from _above(lower, highest)
            if not upper:
                return None
        while upper - lower > 1:
            middle = (lower + upper) // 2
            if (yield middle):
                upper = middle
            else:
                lower = middle
        if upper == highest or (yield upper + 1):
            return upper
        lower = upper + 1


def _above(lower: int, highest: int) -> Generator[int, bool, int]:
    """Yield numbers of pods above `lower` in strides that double, receive for each whether it is
    sufficient, and return the first sufficient one. 0 if none up to `highest` is sufficient.
    """
    step = 1
    while lower < highest:
        number = min(lower + step, highest)
        if (yield number):
            return number
        lower, step = number, 2 * step
    return 0
