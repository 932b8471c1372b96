"""What a tuning could find out at best: the smallest gain that its traffic would still confirm.

It is known before anything is searched. How much figures vary beside each other on this traffic is
seen from the present configuration and a few that are drawn at random, with every seed on the half
for tuning, which is as long as the one that judges. A gain is confirmed if the 95 % interval of the
difference does not hold 0; one that is as large as `PowerSummary.gains` is so in four of five
tunings, a smaller one less often.

What varies is taken for a share of the larger of both figures: a configuration that is ten times
worse also varies ten times as much, and would tell of no other.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from sim.measurement.intervals import CONFIDENCE, REPETITIONS_NEEDED, Varied, student_t
from sim.measurement.measures import six_digits
from sim.measurement.summaries import DifferenceSummary, PowerSummary

PILOTS: Final = 3
"""Configurations from which it is seen; what each shows is averaged."""
POWER: Final = 0.8
"""Share of tunings that confirm a gain as large as is told."""
GAIN_WANTED: Final = 0.1
"""For which it is told how much traffic it would take."""
SEEDS_MAX: Final = 30
"""That are proposed; with more hardly anything gets narrower."""


def power_of(
    pilots: Sequence[Mapping[str, DifferenceSummary]], varied: Varied, *, requests: int
) -> PowerSummary:
    """`pilots`: differences from the present configuration by measure; `requests`: of the trace."""
    seeds = varied.repetitions
    gains: dict[str, float] = {}
    if not varied.lacking:
        for measure in pilots[0] if pilots else ():
            shares = [share for one in pilots if (share := _half(one[measure])) > 0]
            if shares:
                # Variances are what is added up: the mean of widths would be too narrow.
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
            # What varies falls with the root of what there is of it.
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
    """Half of the interval, as a share of the larger figure; 0: there is nothing to learn from."""
    reference = found.known_reference
    if found.low is None or found.high is None or found.value is None or reference is None:
        return 0.0
    level = max(abs(reference), abs(reference + found.value))
    return (found.high - found.low) / 2 / level if level else 0.0


def _factor(varied: Varied, seeds: int) -> float:
    """Gain that `POWER` of all tunings confirm, as times half of an interval."""
    freedom = _freedom(varied, seeds)
    # One-sided quantile of `POWER`, from the two-sided one.
    return 1 + student_t(2 * POWER - 1, freedom) / student_t(CONFIDENCE, freedom)


def _freedom(varied: Varied, seeds: int) -> int:
    return seeds - 1 if varied.generated else seeds - 2


def _seeds_needed(gain: float, varied: Varied) -> int | None:
    """With which `GAIN_WANTED` would be confirmed on the same traffic; None: with none."""

    def error(seeds: int) -> float:
        """In units of what does not depend on the number of seeds."""
        quantile = student_t(CONFIDENCE, _freedom(varied, seeds)) * _factor(varied, seeds)
        # A recording does not get longer by being resampled more often.
        return quantile / math.sqrt(seeds) if varied.generated else quantile

    now = varied.repetitions
    least = max(now + 1, REPETITIONS_NEEDED)
    enough = GAIN_WANTED / gain * error(now)
    return next((one for one in range(least, SEEDS_MAX + 1) if error(one) <= enough), None)
