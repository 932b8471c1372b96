"""SLO bounds on the figures of a service, and the test whether repeated runs show that the service
meets them.

A bound is met if the 95 % limit of its figure is within the bound (`intervals.prediction_limit`).
One more repetition of the whole run, with other traffic, then meets it 19 times out of 20. The
joint claim that all bounds are met is wrong at most 5 % of the time for any number of bounds (an
intersection-union test), so the error probability is not divided among them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final

from msgspec import UNSET, Struct
from msgspec.structs import replace

from sim.measurement.intervals import Varied, estimated, prediction_limit
from sim.measurement.measures import rounded
from sim.measurement.summaries import BoundSummary, ComparedRun, EstimateSummary, PartSummary

_RANKS: Final = ("mean", "p50", "p90", "p95", "p99")
_TIMES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ttft": ("ttft_s", _RANKS),
    "tpot": ("tpot_s", _RANKS),
    "itl": ("itl_s", ("mean", "p50", "p99")),
    "e2e": ("e2e_s", _RANKS),
}
"""The field of `RunSummary` that has a latency, and the statistics in that field, by the latency's
name in bounds.
"""
GOODPUT: Final = "goodput"
LOST: Final = "lost"
SHARES: Final = (GOODPUT, LOST)
"""Names of the bounds that limit a share of the requests. All other bounds limit times in seconds.
"""
NAMES: Final = (
    *(f"{name}-{rank}" for name, (_, ranks) in _TIMES.items() for rank in ranks),
    GOODPUT,
    LOST,
)
"""Names of all bounds. Times are upper limits in seconds. `goodput` is a lower limit for the share
of requests within the latency targets; `lost` is an upper limit for the share of requests that were
refused, failed or aborted.
"""
LOST_SHARE_MAX: Final = 0.01
"""Upper limit of `lost`, the share of requests without an answer, if no bound for it is given.
Percentiles cover only answered requests, so a pool that refuses the others would look fast.
"""


class ObjectiveError(ValueError):
    """A bound of `--slo` is malformed. The text of the error is one sentence."""


class Bound(Struct, frozen=True, kw_only=True):
    """An SLO bound: a limit for one figure of a run."""

    name: str
    """Name of the figure that the bound limits, one of `NAMES`."""
    limit: float

    @property
    def at_least(self) -> bool:
        """True if the limit is a lower one (goodput), False if it is an upper one."""
        return self.name == GOODPUT

    @property
    def best(self) -> float:
        """Best value of the figure that a run can have: 1 for goodput, 0 for all others."""
        return 1.0 if self.at_least else 0.0

    def kept_by(self, value: float) -> bool:
        """Return whether a value of the figure is within the bound. NaN is never within it."""
        return value >= self.limit if self.at_least else value <= self.limit

    def value_of(self, run: ComparedRun | PartSummary) -> float:
        """Return the bound figure of a run or of its busiest part; NaN if the run does not have the
        figure.
        """
        if self.name == LOST:
            return run.requests.share_lost
        if self.name == GOODPUT:
            told = run.goodput.share
        else:
            name, _, rank = self.name.partition("-")
            told = getattr(getattr(run, _TIMES[name][0]), rank)
        return math.nan if told is None else told

    def used(self, value: float) -> float:
        """Return the share of the bound that a value uses: 1 is exactly at the limit, above 1 the
        bound is not met. If the limit is the best value, the share is 0 or infinity.
        """
        if not self.at_least:
            return value / self.limit if self.limit else math.inf if value else 0.0
        return (1 - value) / (1 - self.limit) if self.limit < 1 else math.inf if value < 1 else 0.0


def bounds_in(text: str) -> tuple[Bound, ...]:
    """Parse SLO bounds such as `ttft-p90=2,goodput=0.99`. Add the default bound of `lost` if it is
    missing.

    Raises `ObjectiveError` if a bound is malformed.
    """
    found: dict[str, Bound] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in NAMES or not equals:
            raise ObjectiveError(
                f"{part.strip()!r} is not a bound; expected NAME=LIMIT with one of "
                f"{', '.join(NAMES)}"
            )
        highest = 1.0 if name in SHARES else 86_400.0
        lowest = 0.0 if name == LOST else 1e-6
        if not lowest <= limit <= highest:
            raise ObjectiveError(
                f"{name}={number}: expected a number from {lowest:g} to {highest:g}"
            )
        if name in found:
            raise ObjectiveError(f"{name} has two bounds; expected one")
        found[name] = Bound(name=name, limit=limit)
    found.setdefault(LOST, Bound(name=LOST, limit=LOST_SHARE_MAX))
    return tuple(found.values())


def bound_summaries(
    bounds: Sequence[Bound], runs: Sequence[ComparedRun], varied: Varied
) -> list[BoundSummary]:
    """Return the result for each bound over repeated runs: first for all traffic, then for its
    busiest part.

    The busiest part is judged only if every run reports it.
    """
    parts = _busiest_of(runs)
    found = [bound_summary(bound, runs, varied) for bound in bounds]
    if parts:
        found += [replace(bound_summary(bound, parts, varied), busiest=True) for bound in bounds]
    return found


def _busiest_of(runs: Sequence[ComparedRun]) -> list[PartSummary]:
    """Return the figures of the busiest part of each run; an empty list if at least one run does
    not report them.
    """
    parts = [run.busiest for run in runs if run.busiest is not UNSET]
    return parts if len(parts) == len(runs) else []


def bound_summary(
    bound: Bound, runs: Sequence[ComparedRun] | Sequence[PartSummary], varied: Varied
) -> BoundSummary:
    """Return the result for one bound over `runs`, which are repetitions of one configuration or
    the busiest parts of them.
    """
    values = [bound.value_of(run) for run in runs]
    found = estimated(values, varied)
    limit = prediction_limit(values, varied, upper=not bound.at_least)
    return BoundSummary(
        name=bound.name,
        limit=bound.limit,
        figure=EstimateSummary(
            value=rounded(found.value),
            low=None if found.low is None else rounded(found.low),
            high=None if found.high is None else rounded(found.high),
        ),
        sure=None if limit is None else rounded(limit),
        used=rounded(bound.used(found.value if limit is None else limit)),
        kept=limit is not None and bound.kept_by(limit),
        kept_by_figure=bound.kept_by(found.value),
    )


def cannot_be_kept(
    bounds: Sequence[Bound], runs: Sequence[ComparedRun], *, repetitions: int, generated: bool
) -> bool:
    """Return whether some bound cannot be met, whatever the missing repetitions result in. A run
    without the figure of a bound does not meet it.

    The figure of recorded traffic is that of the first repetition. The figure of generated traffic
    is the mean, to which each missing repetition can add at most the best value. The 95 % limit
    lies on the worse side of the figure, so it is outside the bound as well.
    """
    parts: list[Sequence[ComparedRun] | Sequence[PartSummary]] = [runs, _busiest_of(runs)]
    for bound, part in product(bounds, parts):
        values = [bound.value_of(one) for one in part]
        if not values:
            continue
        if any(math.isnan(value) for value in values):
            return True
        if generated:
            left = repetitions - len(values)
            best = (sum(values) + left * bound.best) / repetitions
        else:
            best = values[0]
        if not bound.kept_by(best):
            return True
    return False
