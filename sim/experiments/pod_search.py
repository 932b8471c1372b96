"""The smallest number of pods that is enough, of as few tries as can be.

That more pods are better holds on average and not of every try: caches are divided among more, and
runs are noisy. The answer is therefore the smallest number from which on none is found that is not
enough: where it is found, the number above it is tried too, and the one below it has been. If the
one above is not enough, the search goes on beyond it.
"""

from collections.abc import Generator, Mapping

from msgspec import Struct


class Step(Struct, frozen=True, kw_only=True):
    """Where a search is."""

    ask: int | None = None
    """The number that is to be tried next; None: it has ended."""
    found: int | None = None
    """What it has found; None: it goes on, or no number is enough."""


def next_step(known: Mapping[int, bool], *, start: int, highest: int, lowest: int = 1) -> Step:
    """What to try next, given what is known: number of pods -> whether it is enough.

    The search begins at `start` and looks from `lowest` to `highest`; fewer are not enough. It
    depends on nothing but what is given, so that it can be gone on with anywhere.
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
    """The same of a table of all numbers: the smallest from which on every one is enough.

    To go down from the highest and stop at the first that is not shown to be enough is to test in a
    fixed sequence: what is found is too small no more often than one such claim is wrong, however
    many numbers there are.
    """
    found = None
    for number in sorted(known, reverse=True):
        if not known[number]:
            break
        found = number
    return found


def _search(start: int, lowest: int, highest: int) -> Generator[int, bool, int | None]:
    """Yields numbers, is sent whether they are enough, returns the answer."""
    lower, upper = lowest - 1, 0
    """Not enough, and enough; 0: none is known."""
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
    """The first number that is enough, in strides that double; 0: none up to `highest`."""
    step = 1
    while lower < highest:
        number = min(lower + step, highest)
        if (yield number):
            return number
        lower, step = number, 2 * step
    return 0
