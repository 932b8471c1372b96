"""Confidence intervals of a run's figures, and of differences between two configurations.

Requests of one run depend on each other through queues and caches, so their variation inside a run
gives no standard error. Therefore the whole run is repeated with other traffic of the same kind
(`sim/traces/variation.py`) and another random seed. All configurations get the same traffic in a
repetition, so that the effect of the traffic cancels out of their differences.

The K repetitions of generated traffic are independent random draws. The figure is their mean. Its
standard error is s / sqrt(K), with Student's t for K - 1 degrees of freedom.

A recorded trace is a single sample. The first repetition replays it unchanged and gives the figure;
the other repetitions replay resamples of it (Efron's bootstrap). The figures of the resamples vary
around the figure of the sample as the sample varies around the truth. Their standard deviation is
therefore the standard error of the figure, with Student's t for K - 2 degrees of freedom. More
repetitions improve this estimate of the error, but they cannot lengthen the trace.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from msgspec import Struct

CONFIDENCE: Final = 0.95
REPETITIONS_NEEDED: Final = 3
"""Minimum number of repetitions of a run for a confidence interval. With two of generated traffic,
Student's t is 12.7, so that an interval would say nothing.
"""
BLOCKS_NEEDED: Final = 5
"""Minimum number of blocks of a recorded trace for a confidence interval. Fewer blocks allow too
few different resamples.
"""


class Varied(Struct, frozen=True, kw_only=True):
    """The number of repetitions of a run, and the way in which they get different traffic."""

    repetitions: int
    generated: bool
    """True if each repetition has its own random draw of the traffic. False if all repetitions but
    the first resample a recorded trace.
    """
    blocks: int = 0
    """Number of blocks of the recorded trace from which the repetitions are resampled; 0 if none is
    resampled.
    """
    cut: str = ""
    """Number and length of `blocks` in words, for example "30 blocks of 120 s"."""

    @property
    def lacking(self) -> str:
        """Reason why the repetitions allow no confidence intervals, or "" if they do."""
        if self.repetitions < REPETITIONS_NEEDED:
            seeds = f"{self.repetitions} seed{'' if self.repetitions == 1 else 's'}"
            return f"{seeds} given, confidence intervals need at least {REPETITIONS_NEEDED}"
        if not self.generated and self.blocks < BLOCKS_NEEDED:
            return f"the trace has {self.cut}, confidence intervals need at least {BLOCKS_NEEDED}"
        return ""

    @property
    def over(self) -> str:
        """The repetitions over which intervals are computed, in words, for example "10 random draws
        of the traffic".
        """
        if self.generated:
            return f"{self.repetitions} random draws of the traffic"
        return f"{self.repetitions - 1} resamples of {self.cut}"


class Estimate(Struct, frozen=True, kw_only=True):
    """A figure of a configuration with its 95 % confidence interval over repetitions."""

    value: float
    low: float | None
    """This and `high` are the ends of the 95 % confidence interval; None if there is too little
    data for an interval.
    """
    high: float | None
    lacking: str = ""
    """Reason why the figure has no confidence interval, or "" if it has one."""

    @property
    def significant(self) -> bool:
        """True if the confidence interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


class Difference(Struct, frozen=True, kw_only=True):
    """A figure of a configuration minus the same figure of the reference configuration."""

    reference: float
    """The figure of the reference configuration."""
    difference: Estimate


def estimated(values: Sequence[float], varied: Varied) -> Estimate:
    """Return a figure with its confidence interval, from its value in each repetition.

    A value is NaN if the run does not have the figure.
    """
    told = np.asarray(values, dtype=np.float64)
    value = float(told.mean() if varied.generated else told[0])
    lacking = "some runs do not have this figure" if np.isnan(told).any() else varied.lacking
    if lacking:
        return Estimate(value=value, low=None, high=None, lacking=lacking)
    spread = told if varied.generated else told[1:]
    error = float(spread.std(ddof=1))
    if varied.generated:
        error /= math.sqrt(len(spread))
    else:
        # The variance of B blocks drawn with replacement is too small by 1 / B.
        error *= math.sqrt(varied.blocks / (varied.blocks - 1))
    half = student_t(CONFIDENCE, len(spread) - 1) * error
    return Estimate(value=value, low=value - half, high=value + half)


def confidence_limit(values: Sequence[float], varied: Varied, *, upper: bool) -> float | None:
    """Return the end of the one-sided 95 % confidence interval of a figure: the upper or the lower
    end. None if there is too little data.

    This limit is nearer to the figure than the ends from `estimated`, which leave 2.5 % on either
    side.
    """
    found = estimated(values, varied)
    if found.high is None:
        return None
    freedom = varied.repetitions - (1 if varied.generated else 2)
    two_sided, one_sided = student_t(CONFIDENCE, freedom), student_t(2 * CONFIDENCE - 1, freedom)
    half = (found.high - found.value) * one_sided / two_sided
    return found.value + half if upper else found.value - half


def prediction_limit(values: Sequence[float], varied: Varied, *, upper: bool) -> float | None:
    """Return the value above which one more repetition comes only once in 20 times if `upper`, else
    the value below which it does; None if there is too little data.

    The limit for generated traffic is the one-sided 95 % prediction limit of a new random draw: the
    mean plus or minus t s sqrt(1 + 1 / K), where `confidence_limit` has t s sqrt(1 / K)
    (NIST/SEMATECH e-Handbook, 7.2.6). For a recording, this limit equals `confidence_limit`,
    because resamples vary as much as the figure may be wrong.
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
    """Return the difference between two configurations in every figure, by name of the figure.

    `reference[k]` and `other[k]` are the figures in repetition k, in which both configurations had
    the same requests at the same times.
    """
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
    """Return the two-sided quantile of Student's t distribution; `freedom` is at least 1.

    It is exact for 1 and 2 degrees of freedom. From 3 on it is Cornish and Fisher's expansion,
    which is at most 0.8 % too small for a confidence of up to 95 %.
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
