"""Determination of the summands that made the difference between the chosen endpoint and another
one.
"""

from collections.abc import Sequence
from typing import Final

LEVEL: Final = 1e-9
"""Difference of two sums up to which it counts as rounding, relative to the sum of all absolute
summands. For what is left of the difference without the largest leads, it is an absolute bound.
"""


def decisive(chosen: Sequence[float], other: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of the fewest summands without which the sum of `chosen` would not be
    above that of `other`, the largest lead first.

    Both arguments hold the summands in the same order. Return () if the sum of `chosen` is not
    larger.
    """
    leads = [part - against for part, against in zip(chosen, other, strict=True)]
    ahead = sum(leads)
    if ahead <= LEVEL * sum(map(abs, (*chosen, *other))):
        return ()
    found: list[int] = []
    for at in sorted(range(len(leads)), key=lambda at: -leads[at]):
        found.append(at)
        ahead -= leads[at]
        if ahead <= LEVEL:
            break
    return tuple(found)
