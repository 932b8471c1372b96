"""How sure a difference between two runs is: paired over seeds, or over blocks of the trace.

Requests of one run depend on each other through queues and caches, so that an interval over single
requests would be far too narrow. Seeds are independent; blocks of 120 s nearly are, being long
against queues and answers.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.types import Seconds
from sim.measures import Series

CONFIDENCE: Final = 0.95
SEEDS_MIN: Final = 5
"""Seeds from which on differences are paired over seeds."""
BLOCK_S: Final[Seconds] = 120.0
BLOCKS_MIN: Final = 5
BLOCKS_MAX: Final = 200
"""A trace of days has longer blocks instead of more."""

Measure = Callable[[Series], float]


class Difference(Struct, frozen=True, kw_only=True):
    """One measure of a configuration less the same measure of the reference."""

    reference: float
    value: float
    difference: float
    low: float | None
    """Ends of the 95 % interval; None: there is too little to tell from."""
    high: float | None
    over: str
    """"seeds" or "blocks", and how many of them."""

    @property
    def significant(self) -> bool:
        """The interval does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def compare_runs(
    reference: Sequence[Series], other: Sequence[Series], measure: Measure
) -> Difference:
    """`reference[k]` and `other[k]` have the same seed: the same requests at the same times."""
    assert len(reference) == len(other)
    assert reference
    before = [measure(one) for one in reference]
    after = [measure(one) for one in other]
    if len(before) >= SEEDS_MIN:
        gaps = np.array(after) - np.array(before)
        error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        return _difference(before, after, error, len(gaps), "seeds")
    # Each seed's blocks are units of their own: seeds differ, blocks of one seed hardly depend.
    errors, blocks = [], 0
    for one, two in zip(reference, other, strict=True):
        error, count = _jackknife(one, two, measure)
        errors.append(error)
        blocks += count
    if blocks < BLOCKS_MIN or any(math.isnan(error) for error in errors):
        return _difference(before, after, math.nan, blocks, "blocks")
    error = math.sqrt(sum(error**2 for error in errors)) / len(errors)
    return _difference(before, after, error, blocks, "blocks")


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: Cornish and Fisher's expansion, 0.3 % off at 4 degrees."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _difference(
    before: Sequence[float], after: Sequence[float], error: float, units: int, over: str
) -> Difference:
    reference, value = float(np.mean(before)), float(np.mean(after))
    difference = value - reference
    if math.isnan(error) or math.isnan(difference):
        return Difference(
            reference=reference, value=value, difference=difference, low=None, high=None,
            over=f"{units} {over}",
        )  # fmt: skip
    half = student_t(CONFIDENCE, units - 1) * error
    return Difference(
        reference=reference,
        value=value,
        difference=difference,
        low=difference - half,
        high=difference + half,
        over=f"{units} {over}",
    )


def _jackknife(one: Series, other: Series, measure: Measure) -> tuple[float, int]:
    """Standard error of the difference, each block of arrivals left out once; and the blocks.

    For a mean this is the usual linearisation; for percentiles a grouped jackknife.
    """
    latest_s = max((float(part.arrived_s.max()) for part in (one, other) if len(part)), default=0.0)
    block_s = max(BLOCK_S, latest_s / BLOCKS_MAX)
    blocks_one = (one.arrived_s // block_s).astype(np.int64)
    blocks_other = (other.arrived_s // block_s).astype(np.int64)
    blocks = np.union1d(blocks_one, blocks_other)
    count = len(blocks)
    if count < BLOCKS_MIN:
        return math.nan, count
    left_out = np.array(
        [
            measure(other.take(blocks_other != block)) - measure(one.take(blocks_one != block))
            for block in blocks
        ]
    )
    variance = (count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum())
    return math.sqrt(variance), count
