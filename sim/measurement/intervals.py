"""How sure a figure is, or a difference between two configurations: what was varied, and what follows.

Requests of one run depend on each other through queues and caches, so that nothing can be learnt
from how they vary inside it. What is repeated is therefore the whole run: with other traffic of the
same kind (`sim/traces/variation.py`) and other dice, the same for every configuration, so that what
traffic does to all of them cancels out of their differences.

Of generated traffic the K repetitions are independent draws: the mean over them is the figure, its
standard error s / sqrt(K), Student's t with K - 1 degrees of freedom.

Of recorded traffic there is one sample, which the first repetition replays as it is and from which
the others are resampled. The first is the figure. The others vary around what the sample says as the
sample varies around the truth (Efron's bootstrap), so that their standard deviation is the standard
error of the figure, Student's t with K - 2 degrees of freedom. More repetitions make that estimate
better; they cannot make the trace longer.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from msgspec import Struct

CONFIDENCE: Final = 0.95
REPETITIONS_NEEDED: Final = 3
"""Of two draws the interval exists and says nothing: Student's t is 12.7."""
BLOCKS_NEEDED: Final = 5
"""Fewer blocks of a recorded trace could be drawn in too few ways."""


class Varied(Struct, frozen=True, kw_only=True):
    """What differs between the repetitions, of which there are `repetitions`."""

    repetitions: int
    generated: bool
    """The traffic is drawn anew each time; else all but the first are resampled from the first."""
    blocks: int = 0
    """Of which they are resampled."""
    cut: str = ""
    """These in words: "30 blocks of 120 s"."""

    @property
    def lacking(self) -> str:
        """Why there are no intervals; "": there are."""
        if self.repetitions < REPETITIONS_NEEDED:
            seeds = f"{self.repetitions} seed{'' if self.repetitions == 1 else 's'}"
            return f"{seeds}, {REPETITIONS_NEEDED} are needed"
        if not self.generated and self.blocks < BLOCKS_NEEDED:
            return f"the trace has {self.cut}, {BLOCKS_NEEDED} are needed"
        return ""

    @property
    def over(self) -> str:
        """The units of the intervals, in words."""
        if self.generated:
            return f"{self.repetitions} draws of the traffic"
        return f"{self.repetitions - 1} resamples of {self.cut}"


class Estimate(Struct, frozen=True, kw_only=True):
    """A figure with its interval."""

    value: float
    low: float | None
    """Ends of the 95 % interval; None: there is too little to tell from."""
    high: float | None
    lacking: str = ""
    """Why there is no interval; "": there is one."""

    @property
    def significant(self) -> bool:
        """The interval does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


class Difference(Struct, frozen=True, kw_only=True):
    """One figure of a configuration less the same figure of the reference."""

    reference: float
    """The figure of the reference itself."""
    difference: Estimate


def estimated(values: Sequence[float], varied: Varied) -> Estimate:
    """A figure, from its value in each repetition; NaN: that run does not have it."""
    told = np.asarray(values, dtype=np.float64)
    value = float(told.mean() if varied.generated else told[0])
    lacking = "not every run has it" if np.isnan(told).any() else varied.lacking
    if lacking:
        return Estimate(value=value, low=None, high=None, lacking=lacking)
    spread = told if varied.generated else told[1:]
    error = float(spread.std(ddof=1))
    if varied.generated:
        error /= math.sqrt(len(spread))
    else:
        # Of B blocks drawn with replacement the variance is too small by 1 / B.
        error *= math.sqrt(varied.blocks / (varied.blocks - 1))
    half = student_t(CONFIDENCE, len(spread) - 1) * error
    return Estimate(value=value, low=value - half, high=value + half)


def confidence_limit(values: Sequence[float], varied: Varied, *, upper: bool) -> float | None:
    """The end of the one-sided 95 % interval, above or below; None: there is too little to tell from.

    Nearer to the figure than the ends of `estimated`, which leave 2.5 % on either side.
    """
    found = estimated(values, varied)
    if found.high is None:
        return None
    freedom = varied.repetitions - (1 if varied.generated else 2)
    two_sided, one_sided = student_t(CONFIDENCE, freedom), student_t(2 * CONFIDENCE - 1, freedom)
    half = (found.high - found.value) * one_sided / two_sided
    return found.value + half if upper else found.value - half


def prediction_limit(values: Sequence[float], varied: Varied, *, upper: bool) -> float | None:
    """Return the limit that one more repetition keeps 19 times out of 20; None if there are too few.

    Of generated traffic it is the one-sided 95 % prediction limit for a fresh draw: the mean plus or
    minus t s sqrt(1 + 1 / K), where `confidence_limit` has t s sqrt(1 / K) (NIST/SEMATECH e-Handbook,
    7.2.6). Of a recording both are one, because resamples vary as much as the figure may be off.
    """
    limit = confidence_limit(values, varied, upper=upper)
    if limit is None or not varied.generated:
        return limit
    value = float(np.mean(values))
    return value + (limit - value) * math.sqrt(varied.repetitions + 1)


def compare_runs(
    reference: Sequence[Mapping[str, float]],
    other: Sequence[Mapping[str, float]],
    varied: Varied,
) -> dict[str, Difference]:
    """Every figure; `reference[k]` and `other[k]` are repetition k: the same requests and times."""
    assert len(reference) == len(other) == varied.repetitions
    return {
        name: Difference(
            reference=estimated([run[name] for run in reference], varied).value,
            difference=estimated(
                [
                    after[name] - before[name]
                    for before, after in zip(reference, other, strict=True)
                ],
                varied,
            ),
        )
        for name in reference[0]
    }


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t with `freedom` of at least 1.

    Exact for 1 and 2 degrees; from 3 on Cornish and Fisher's expansion, at most 0.8 % too small.
    """
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
