"""Which parts made the difference between who was chosen and who was not."""

from collections.abc import Sequence
from typing import Final

LEVEL: Final = 1e-9
"""Sums that differ by less than this share of their parts differ by rounding."""


def decisive(chosen: Sequence[float], other: Sequence[float]) -> tuple[int, ...]:
    """Positions of the fewest parts without which `chosen` would not be ahead, the greatest first.

    Both are parts of a sum, in the same order; the greater sum is ahead. Empty: it is not.
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
