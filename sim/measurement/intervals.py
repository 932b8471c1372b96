"""How sure a difference between two runs is: paired over seeds, or over blocks of the trace.

Requests of one run depend on each other through queues and caches, so that an interval over single
requests would be far too narrow. Seeds are independent; blocks of 120 s nearly are, being long
against queues and answers. One block under several seeds is one unit: it is the same requests each
time, and what they make of a difference is much alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.types import Seconds
from sim.measurement.measures import Floats, Series

CONFIDENCE: Final = 0.95
SEEDS_MIN: Final = 5
"""Seeds from which on differences are paired over seeds."""
BLOCK_S: Final[Seconds] = 120.0
BLOCKS_MIN: Final = 5
BLOCKS_MAX: Final = 200
"""A trace of days has longer blocks instead of more."""

_REPLICATES: Final = 200
_BOOTSTRAP_SEED: Final = 1

Measure = Callable[[Series], Mapping[str, float]]
"""All measures of one run, the same names for every run; NaN: it has none. Called often."""


class Difference(Struct, frozen=True, kw_only=True):
    """One measure of a configuration less the same measure of the reference."""

    reference: float
    value: float
    difference: float
    low: float | None
    """Ends of the 95 % interval; None: there is too little to tell from."""
    high: float | None
    over: str
    """The units of the interval and how many there are: "5 seeds", "30 blocks of 120 s"."""
    lacking: str = ""
    """Why there is no interval; "": there is one."""

    @property
    def significant(self) -> bool:
        """The interval does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def compare_runs(
    reference: Sequence[Series], other: Sequence[Series], measure: Measure
) -> dict[str, Difference]:
    """`reference[k]` and `other[k]` have the same seed: the same requests at the same times."""
    assert len(reference) == len(other)
    assert reference
    names = list(measure(reference[0]))
    before = _told(reference, measure)
    after = _told(other, measure)
    seeds = len(reference)
    if seeds >= SEEDS_MIN and not (_alike(before) and _alike(after)):
        spread = np.std(after - before, axis=0, ddof=1)
        return _differences(
            names, before, after, spread / math.sqrt(seeds), seeds, f"{seeds} seeds"
        )
    errors, blocks, block_s = _bootstrap(reference, other, measure)
    over = f"{blocks} block{'' if blocks == 1 else 's'} of {block_s:.4g} s"
    if seeds >= SEEDS_MIN:
        # Nothing was drawn in these runs, so that they are one run.
        over += ", all seeds being alike"
    return _differences(names, before, after, errors, blocks, over)


def means_of(runs: Sequence[Series], measure: Measure) -> dict[str, float]:
    """Each measure's mean over runs; NaN if one of them does not have it."""
    return dict(zip(measure(runs[0]), _told(runs, measure).mean(axis=0).tolist(), strict=True))


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: Cornish and Fisher's expansion, 0.3 % off at 4 degrees."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _told(runs: Sequence[Series], measure: Measure) -> Floats:
    """float64[runs, measures]."""
    return np.array([list(measure(one).values()) for one in runs])


def _alike(told: Floats) -> bool:
    """Every row is the same."""
    return np.array_equal(told, told[:1].repeat(len(told), axis=0), equal_nan=True)


def _differences(
    names: Sequence[str],
    before: Floats,
    after: Floats,
    errors: Floats,
    units: int,
    over: str,
) -> dict[str, Difference]:
    """`errors`: standard errors, NaN where there is too little to tell from; or one for all."""
    errors = np.broadcast_to(errors, len(names))
    told: dict[str, Difference] = {}
    for at, name in enumerate(names):
        reference, value = float(before[:, at].mean()), float(after[:, at].mean())
        difference, error = value - reference, float(errors[at])
        lacking = ""
        if math.isnan(difference):
            lacking = "not every run has it"
        elif units < BLOCKS_MIN:
            lacking = f"{over}, {BLOCKS_MIN} are needed"
        elif math.isnan(error):
            lacking = "too few blocks have it"
        half = math.nan if lacking else student_t(CONFIDENCE, units - 1) * error
        told[name] = Difference(
            reference=reference,
            value=value,
            difference=difference,
            low=None if lacking else difference - half,
            high=None if lacking else difference + half,
            over=over,
            lacking=lacking,
        )
    return told


def _bootstrap(
    reference: Sequence[Series], other: Sequence[Series], measure: Measure
) -> tuple[Floats, int, Seconds]:
    """Standard errors of the differences when blocks of arrivals are drawn anew.

    Besides, how many blocks there are, and their length. All runs draw the same blocks, so that
    what they have in common cancels out between the two sides, and does not between seeds. (A
    jackknife over blocks is as good for means but too sure of percentiles.)
    """
    runs = [*reference, *other]
    latest_s = max((float(part.arrived_s.max()) for part in runs if len(part)), default=0.0)
    block_s = max(BLOCK_S, latest_s / BLOCKS_MAX)
    members = [_members(part, block_s) for part in runs]
    blocks = sorted(set().union(*members))
    count = len(blocks)
    if count < BLOCKS_MIN:
        return np.array(math.nan), count, block_s
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    drawn = []
    for _ in range(_REPLICATES):
        chosen = random.choice(blocks, size=count)
        told = _told(
            [
                part.take(np.concatenate([found.get(at, _NOTHING) for at in chosen]))
                for part, found in zip(runs, members, strict=True)
            ],
            measure,
        )
        drawn.append((told[len(reference) :] - told[: len(reference)]).mean(axis=0))
    # Of `count` blocks drawn with replacement the variance is too small by 1 / count.
    errors: Floats = np.std(drawn, axis=0, ddof=1) * math.sqrt(count / (count - 1))
    return errors, count, block_s


def _members(part: Series, block_s: Seconds) -> dict[int, npt.NDArray[np.int64]]:
    """Block -> positions of the requests that arrived in it."""
    if not len(part):
        return {}
    number = (part.arrived_s // block_s).astype(np.int64)
    order = np.argsort(number, kind="stable")
    blocks, starts = np.unique(number[order], return_index=True)
    return dict(zip(blocks.tolist(), np.split(order, starts[1:]), strict=True))


_NOTHING: Final = np.empty(0, dtype=np.int64)
