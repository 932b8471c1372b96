"""How sure a difference between two runs is: paired over seeds, or over blocks of the trace.

Requests of one run depend on each other through queues and caches, so that an interval over single
requests would be far too narrow. Seeds are independent; blocks of 120 s nearly are, being long
against queues and answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.types import Seconds
from sim.measures import Floats, Series

CONFIDENCE: Final = 0.95
SEEDS_MIN: Final = 5
"""Seeds from which on differences are paired over seeds."""
BLOCK_S: Final[Seconds] = 120.0
BLOCKS_MIN: Final = 5
BLOCKS_MAX: Final = 200
"""A trace of days has longer blocks instead of more."""

_REPLICATES: Final = 200
_BOOTSTRAP_SEED: Final = 1

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
    reference: Sequence[Series], other: Sequence[Series], measures: Mapping[str, Measure]
) -> dict[str, Difference]:
    """`reference[k]` and `other[k]` have the same seed: the same requests at the same times."""
    assert len(reference) == len(other)
    assert reference
    before = _told(reference, measures)
    after = _told(other, measures)
    if len(reference) >= SEEDS_MIN:
        spread = np.std(after - before, axis=0, ddof=1)
        return _differences(measures, before, after, spread / math.sqrt(len(before)), "seeds")
    # Each seed's blocks are units of their own: seeds differ, blocks of one seed hardly depend.
    found = [_bootstrap(one, two, measures) for one, two in zip(reference, other, strict=True)]
    errors = np.sqrt(np.sum([error**2 for error, _ in found], axis=0)) / len(found)
    return _differences(measures, before, after, errors, "blocks", sum(count for _, count in found))


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: Cornish and Fisher's expansion, 0.3 % off at 4 degrees."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _told(runs: Sequence[Series], measures: Mapping[str, Measure]) -> Floats:
    """float64[runs, measures]."""
    return np.array([[measure(one) for measure in measures.values()] for one in runs])


def _differences(
    measures: Mapping[str, Measure],
    before: Floats,
    after: Floats,
    errors: Floats,
    over: str,
    units: int | None = None,
) -> dict[str, Difference]:
    """`errors`: standard errors, NaN where there is too little to tell from."""
    units = len(before) if units is None else units
    told: dict[str, Difference] = {}
    for at, name in enumerate(measures):
        reference, value = float(before[:, at].mean()), float(after[:, at].mean())
        half = math.nan
        if units >= BLOCKS_MIN:
            half = student_t(CONFIDENCE, units - 1) * float(errors[at])
        known = not math.isnan(half) and not math.isnan(value - reference)
        told[name] = Difference(
            reference=reference,
            value=value,
            difference=value - reference,
            low=value - reference - half if known else None,
            high=value - reference + half if known else None,
            over=f"{units} {over}",
        )
    return told


def _bootstrap(one: Series, other: Series, measures: Mapping[str, Measure]) -> tuple[Floats, int]:
    """Standard errors of the differences when blocks of arrivals are drawn anew; and the blocks.

    Both runs draw the same blocks, so that what they have in common cancels out. (A jackknife over
    blocks is as good for means but too sure of percentiles.)
    """
    latest_s = max((float(part.arrived_s.max()) for part in (one, other) if len(part)), default=0.0)
    block_s = max(BLOCK_S, latest_s / BLOCKS_MAX)
    members = [_members(part, block_s) for part in (one, other)]
    blocks = np.union1d(*(list(found) for found in members))
    count = len(blocks)
    if count < BLOCKS_MIN:
        return np.full(len(measures), math.nan), count
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    drawn = []
    for _ in range(_REPLICATES):
        chosen = random.choice(blocks, size=count)
        told = [
            _told([part.take(np.concatenate([found.get(at, _NOTHING) for at in chosen]))], measures)
            for part, found in zip((one, other), members, strict=True)
        ]
        drawn.append(told[1][0] - told[0][0])
    # Of `count` blocks drawn with replacement the variance is too small by 1 / count.
    errors: Floats = np.std(drawn, axis=0, ddof=1) * math.sqrt(count / (count - 1))
    return errors, count


def _members(part: Series, block_s: Seconds) -> dict[int, npt.NDArray[np.int64]]:
    """Block -> positions of the requests that arrived in it."""
    if not len(part):
        return {}
    number = (part.arrived_s // block_s).astype(np.int64)
    order = np.argsort(number, kind="stable")
    blocks, starts = np.unique(number[order], return_index=True)
    return dict(zip(blocks.tolist(), np.split(order, starts[1:]), strict=True))


_NOTHING: Final = np.empty(0, dtype=np.int64)
