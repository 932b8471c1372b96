"""The parts of a sum that made the difference between the chosen endpoint and another one."""

from collections.abc import Sequence
from typing import Final

LEVEL: Final = 1e-9
"""Relative difference below which two sums differ only by rounding."""


def decisive(chosen: Sequence[float], other: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of the fewest parts that put `chosen` ahead, the largest lead first.

    Both arguments hold parts of a sum, in the same order; the larger sum is ahead. Return () if
    `chosen` is not ahead.
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
