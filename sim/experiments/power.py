"""Statistical power of a tuning: the smallest gain that the traffic of a tuning can confirm.

The power is estimated before the search. The present configuration and a few random ones run with
every seed on the tuning half of the trace, which is as long as the hold-out half, and show how much
figures vary on this traffic. A gain is confirmed if the 95 % confidence interval of the difference
excludes 0. A gain as large as `PowerSummary.gains` is confirmed in four of five tunings, a smaller
one less often.

The variation is expressed as a share of the larger of the two compared figures. Otherwise a
configuration that is ten times worse, and varies ten times as much, would distort the estimate.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from sim.measurement.intervals import CONFIDENCE, REPETITIONS_NEEDED, Varied, student_t
from sim.measurement.measures import six_digits
from sim.measurement.summaries import DifferenceSummary, PowerSummary

PILOTS: Final = 3
"""Maximum number of random configurations from which the power is estimated; their variations are
averaged.
"""
POWER: Final = 0.8
"""Statistical power: share of tunings that would confirm a gain of the reported size."""
GAIN_WANTED: Final = 0.1
"""Relative gain (0.1 is 10 %) for which the report states how many requests or seeds would confirm
it.
"""
SEEDS_MAX: Final = 30
"""Maximum number of seeds that the report proposes; more seeds hardly narrow the confidence
interval.
"""


def power_of(
    pilots: Sequence[Mapping[str, DifferenceSummary]], varied: Varied, *, requests: int
) -> PowerSummary:
    """Return the statistical power of a tuning. `pilots` has, for each random configuration, its
    difference from the present configuration by measure.

    `varied` describes the repetitions of these runs, and `requests` is the number of requests of
    the trace.
    """
    seeds = varied.repetitions
    gains: dict[str, float] = {}
    if not varied.lacking:
        for measure in pilots[0] if pilots else ():
            shares = [share for one in pilots if (share := _half(one[measure])) > 0]
            if shares:
                # Variances are additive; the mean of widths would be too small.
                width = math.sqrt(fmean(share**2 for share in shares))
                gains[measure] = six_digits(width * _factor(varied, seeds))
    short = {measure: gain for measure, gain in gains.items() if gain > GAIN_WANTED}
    return PowerSummary(
        lacking=varied.lacking,
        requests=requests,
        seeds=seeds,
        gains=gains,
        wanted=GAIN_WANTED,
        requests_needed={
            # Variation decreases with the square root of the number of requests.
            measure: math.ceil(requests * (gain / GAIN_WANTED) ** 2)
            for measure, gain in short.items()
        },
        seeds_needed={
            measure: needed
            for measure, gain in short.items()
            if (needed := _seeds_needed(gain, varied)) is not None
        },
    )


def _half(found: DifferenceSummary) -> float:
    """Return half of the width of a difference's confidence interval, as a share of the larger of
    the two figures, or 0 if a value is unknown.
    """
    reference = found.known_reference
    if found.low is None or found.high is None or found.value is None or reference is None:
        return 0.0
    level = max(abs(reference), abs(reference + found.value))
    return (found.high - found.low) / 2 / level if level else 0.0


def _factor(varied: Varied, seeds: int) -> float:
    """Return the smallest gain that a share `POWER` of all tunings confirms, as a multiple of half
    the width of the confidence interval.
    """
    freedom = _freedom(varied, seeds)
    # The one-sided quantile of `POWER` follows from the two-sided one.
    return 1 + student_t(2 * POWER - 1, freedom) / student_t(CONFIDENCE, freedom)


def _freedom(varied: Varied, seeds: int) -> int:
    return seeds - 1 if varied.generated else seeds - 2


def _seeds_needed(gain: float, varied: Varied) -> int | None:
    """Return the number of seeds that would confirm `GAIN_WANTED` on the same traffic, if the
    present number confirms `gain`. None if up to `SEEDS_MAX` seeds would not.
    """

    def error(seeds: int) -> float:
        """Return a number that is proportional to the smallest gain that a tuning with `seeds`
        seeds confirms, with the same factor for all numbers of seeds.
        """
        quantile = student_t(CONFIDENCE, _freedom(varied, seeds)) * _factor(varied, seeds)
        # More resamples do not make a recording longer.
        return quantile / math.sqrt(seeds) if varied.generated else quantile

    now = varied.repetitions
    least = max(now + 1, REPETITIONS_NEEDED)
    enough = GAIN_WANTED / gain * error(now)
    return next((one for one in range(least, SEEDS_MAX + 1) if error(one) <= enough), None)
