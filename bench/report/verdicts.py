"""Medians, spread, and verdicts about the report's aims, or the reason why there is no verdict."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Final

from msgspec import Struct

from bench.report.accounting import Disturbance

ROUNDS_MIN: Final = 5
OTHERS_CORES_MAX: Final = 0.1
STOLEN_CORES_MAX: Final = 0.02
DISTURBED_SHARE_MAX: Final = 0.2
"""Maximum share of measurements that other programs or guests of the host disturbed; a median
tolerates one in five.
"""
GENERATOR_SHARE_MAX: Final = 0.9
"""Maximum share of its core that the generator may use; above it, the generator may have been the
bottleneck.
"""


class Verdict(StrEnum):
    MET = "met"
    NOT_MET = "not met"
    BUSY = "machine busy, no verdict"
    STARVED = "the generator was the bottleneck, no verdict"
    FEW = f"fewer than {ROUNDS_MIN} rounds, no verdict"
    MISSING = "nothing to compare with, no verdict"


class Figure(Struct, frozen=True):
    """Median, minimum and maximum of a value over the rounds."""

    median: float
    low: float
    high: float
    rounds: int


def figure(values: Sequence[float]) -> Figure | None:
    """Return median, minimum and maximum of `values`, or None if there are none."""
    if not values:
        return None
    return Figure(median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least of `values` that a share `share` of them do not exceed; 0 if there
    are none.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), rank) - 1)]


def ratios(of: Mapping[int, float], to: Mapping[int, float]) -> list[float]:
    """Return the ratio of the value in `of` to that in `to`, for each round that both have.

    Variation between rounds cancels in a ratio.
    """
    return [value / to[number] for number, value in sorted(of.items()) if to.get(number)]


def is_busy(disturbances: Sequence[Disturbance]) -> bool:
    """Return True if other programs or guests of the host disturbed so many measurements that the
    median is not reliable.
    """
    disturbed = sum(
        each.others_cores > OTHERS_CORES_MAX or each.stolen_cores > STOLEN_CORES_MAX
        for each in disturbances
    )
    return disturbed > DISTURBED_SHARE_MAX * len(disturbances)


def judge(
    seen: Figure | None,
    aim_max: float,
    *,
    disturbances: Sequence[Disturbance],
    generator_shares: Sequence[float] = (),
) -> Verdict:
    """Return the verdict: whether the median is at most `aim_max`, or why this cannot be
    decided.
    """
    if seen is None:
        return Verdict.MISSING
    if seen.rounds < ROUNDS_MIN:
        return Verdict.FEW
    if is_busy(disturbances):
        return Verdict.BUSY
    if any(share > GENERATOR_SHARE_MAX for share in generator_shares):
        return Verdict.STARVED
    return Verdict.MET if seen.median <= aim_max else Verdict.NOT_MET


def crosses(seen: Figure, aim_max: float) -> bool:
    """Return True if some rounds meet the aim `aim_max` and others do not."""
    return seen.low <= aim_max < seen.high
