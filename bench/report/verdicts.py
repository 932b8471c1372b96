"""Medians, spread, and verdicts about aims, or the reason why there is none."""

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
"""Maximum share of disturbed rounds; a median tolerates one in five."""
GENERATOR_SHARE_MAX: Final = 0.9
"""Maximum share of the generator's core; above it the generator may have been measured."""


class Verdict(StrEnum):
    MET = "met"
    NOT_MET = "not met"
    BUSY = "machine busy, no verdict"
    STARVED = "the generator was the bottleneck, no verdict"
    FEW = f"fewer than {ROUNDS_MIN} rounds, no verdict"
    MISSING = "nothing to compare with, no verdict"


class Figure(Struct, frozen=True):
    """Median and spread over rounds."""

    median: float
    low: float
    high: float
    rounds: int


def figure(values: Sequence[float]) -> Figure | None:
    """Return median and spread, or None if there are no values."""
    if not values:
        return None
    return Figure(median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of them do not exceed; 0 if there are none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), rank) - 1)]


def ratios(of: Mapping[int, float], to: Mapping[int, float]) -> list[float]:
    """Return ratios round by round, in the rounds that both have, so variation between rounds
    cancels.
    """
    return [value / to[number] for number, value in sorted(of.items()) if to.get(number)]


def is_busy(disturbances: Sequence[Disturbance]) -> bool:
    """Return True if others disturbed so many rounds that the median is not reliable."""
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
    """Return whether the median is within the aim, if this can be decided."""
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
    """Return True if single rounds disagree with their median."""
    return seen.low <= aim_max < seen.high
