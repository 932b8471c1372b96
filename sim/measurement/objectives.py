"""Limits that a service must keep (SLOs), and the test whether repeated runs show that it keeps
them.

A bound is kept if the 95 % limit of its figure is within the bound (`intervals.prediction_limit`).
One more repetition of the whole run, with other traffic, then keeps it 19 times out of 20. All
bounds are kept if each of them is. This joint claim is wrong at most 5 % of the time for any number
of bounds (an intersection-union test), so the error probability is not divided among them.
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
"""Field of a run, and the ranks that the run has, by the name in a bound."""
GOODPUT: Final = "goodput"
LOST: Final = "lost"
SHARES: Final = (GOODPUT, LOST)
"""Bounds that are shares of the requests; all others are times in seconds."""
NAMES: Final = (
    *(f"{name}-{rank}" for name, (_, ranks) in _TIMES.items() for rank in ranks),
    GOODPUT,
    LOST,
)
"""Names of all bounds. Times are upper limits in seconds. `goodput` is a lower limit for the share
of good requests; `lost` is an upper limit for the share of requests that were refused, failed or
aborted."""
LOST_SHARE_MAX: Final = 0.01
"""Bound for `lost` if none is given. Percentiles cover only answered requests, so a pool that
refuses the others would look fast."""


class ObjectiveError(ValueError):
    """The text of a bound is invalid. The message is one sentence."""


class Bound(Struct, frozen=True, kw_only=True):
    """A limit for one figure."""

    name: str
    """One of `NAMES`."""
    limit: float

    @property
    def at_least(self) -> bool:
        """True if more is better."""
        return self.name == GOODPUT

    @property
    def best(self) -> float:
        """Best value that a run can reach."""
        return 1.0 if self.at_least else 0.0

    def kept_by(self, value: float) -> bool:
        """Return whether a figure is within the limit. NaN, the figure of a run without it, is
        never within.
        """
        return value >= self.limit if self.at_least else value <= self.limit

    def value_of(self, run: ComparedRun | PartSummary) -> float:
        """Return the figure of a run or of a part of it; NaN if it has none."""
        if self.name == LOST:
            return run.requests.share_lost
        if self.name == GOODPUT:
            told = run.goodput.share
        else:
            name, _, rank = self.name.partition("-")
            told = getattr(getattr(run, _TIMES[name][0]), rank)
        return math.nan if told is None else told

    def used(self, value: float) -> float:
        """Return the used share of the bound: 1 is at the limit, above 1 the bound is broken."""
        if not self.at_least:
            return value / self.limit if self.limit else math.inf if value else 0.0
        return (1 - value) / (1 - self.limit) if self.limit < 1 else math.inf if value < 1 else 0.0


def bounds_in(text: str) -> tuple[Bound, ...]:
    """Parse bounds such as `ttft-p90=2,goodput=0.99`; add the default of `lost` if it is missing.

    Raises `ObjectiveError`.
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
    """Return the result for each bound over repeated runs: for all traffic first, then for its
    busiest part.

    The busiest part is judged only if every run reports it.
    """
    parts = _busiest_of(runs)
    found = [bound_summary(bound, runs, varied) for bound in bounds]
    if parts:
        found += [replace(bound_summary(bound, parts, varied), busiest=True) for bound in bounds]
    return found


def _busiest_of(runs: Sequence[ComparedRun]) -> list[PartSummary]:
    """Return the busiest part of each run, or none if a run does not report it."""
    parts = [run.busiest for run in runs if run.busiest is not UNSET]
    return parts if len(parts) == len(runs) else []


def bound_summary(
    bound: Bound, runs: Sequence[ComparedRun] | Sequence[PartSummary], varied: Varied
) -> BoundSummary:
    """Return the result for one bound over `runs`, which are repetitions of one configuration."""
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
    """Return whether some bound is broken regardless of the repetitions that are still to come.

    The figure of recorded traffic is that of the first repetition. The figure of generated traffic
    is the mean, to which each missing repetition can add at most the best value. The limit lies on
    the worse side of the figure, so it breaks the bound as well.
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
