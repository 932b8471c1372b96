"""Limits that a service must keep (SLOs), and whether repeated runs show that it keeps them.

A bound is kept if the 95 % limit of its figure lies within it (`intervals.prediction_limit`):
one more repetition of the whole run, with other traffic, keeps it 19 times out of 20. All bounds are
kept if each of them is: whoever claims all only if each is shown with 95 % is wrong at most 5 % of the
time, whatever their number (an intersection-union test), so that nothing is divided between them.
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
"""Name in a bound -> field of a run, and which of its ranks a run has."""
GOODPUT: Final = "goodput"
LOST: Final = "lost"
SHARES: Final = (GOODPUT, LOST)
"""Bounds that are shares of the requests; all others are times in seconds."""
NAMES: Final = (
    *(f"{name}-{rank}" for name, (_, ranks) in _TIMES.items() for rank in ranks),
    GOODPUT,
    LOST,
)
"""Of what there may be bounds. Times are at most so many seconds; goodput is at least such a share of
the requests, lost at most such a share of them: refused, failed or given up."""
LOST_SHARE_MAX: Final = 0.01
"""Where nothing is said of it: percentiles are of requests that were answered, and a pool that
refuses the others would look fast."""


class ObjectiveError(ValueError):
    """A bound is none: one sentence."""


class Bound(Struct, frozen=True, kw_only=True):
    """One figure, and how far it may go."""

    name: str
    """One of `NAMES`."""
    limit: float

    @property
    def at_least(self) -> bool:
        """More is better."""
        return self.name == GOODPUT

    @property
    def best(self) -> float:
        """What no run can be better than."""
        return 1.0 if self.at_least else 0.0

    def kept_by(self, value: float) -> bool:
        """NaN, which is of runs that do not have the figure, keeps nothing."""
        return value >= self.limit if self.at_least else value <= self.limit

    def value_of(self, run: ComparedRun | PartSummary) -> float:
        """The figure of one run, or of a part of it; NaN: it does not have it."""
        if self.name == LOST:
            return run.requests.share_lost
        if self.name == GOODPUT:
            told = run.goodput.share
        else:
            name, _, rank = self.name.partition("-")
            told = getattr(getattr(run, _TIMES[name][0]), rank)
        return math.nan if told is None else told

    def used(self, value: float) -> float:
        """How much of what is allowed is used: 1 is all, above it the bound is broken."""
        if not self.at_least:
            return value / self.limit if self.limit else math.inf if value else 0.0
        return (1 - value) / (1 - self.limit) if self.limit < 1 else math.inf if value < 1 else 0.0


def bounds_in(text: str) -> tuple[Bound, ...]:
    """`ttft-p90=2,goodput=0.99` and the like; `lost` besides if it is not named.

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
                f"{part.strip()!r} is no bound; expected NAME=LIMIT with one of {', '.join(NAMES)}"
            )
        highest = 1.0 if name in SHARES else 86_400.0
        lowest = 0.0 if name == LOST else 1e-6
        if not lowest <= limit <= highest:
            raise ObjectiveError(
                f"{name}={number}: expected a number from {lowest:g} to {highest:g}"
            )
        if name in found:
            raise ObjectiveError(f"{name} is bounded twice: expected once")
        found[name] = Bound(name=name, limit=limit)
    found.setdefault(LOST, Bound(name=LOST, limit=LOST_SHARE_MAX))
    return tuple(found.values())


def bound_summaries(
    bounds: Sequence[Bound], runs: Sequence[ComparedRun], varied: Varied
) -> list[BoundSummary]:
    """Return how repetitions of one thing stand to each bound: all of the traffic, then its busiest part.

    The busiest part is judged where every run tells it.
    """
    parts = _busiest_of(runs)
    found = [bound_summary(bound, runs, varied) for bound in bounds]
    if parts:
        found += [replace(bound_summary(bound, parts, varied), busiest=True) for bound in bounds]
    return found


def _busiest_of(runs: Sequence[ComparedRun]) -> list[PartSummary]:
    """Return the busiest part of each run; none if a run does not tell it."""
    parts = [run.busiest for run in runs if run.busiest is not UNSET]
    return parts if len(parts) == len(runs) else []


def bound_summary(
    bound: Bound, runs: Sequence[ComparedRun] | Sequence[PartSummary], varied: Varied
) -> BoundSummary:
    """How `runs`, which are repetitions of one thing, stand to a bound."""
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
    """Whether some bound is broken whatever the repetitions show that are still to come.

    Of recorded traffic the figure is that of the first; of generated traffic it is the mean, to
    which the others can add nothing better than the best. The interval ends on its wrong side.
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
