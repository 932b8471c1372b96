"""The steps of a tuning: what tries cost, who is chosen of the best, and how the chosen one is judged.

The first half of the trace is for trying. The best few are given every seed there, and of those
that are significantly worse than the present configuration in neither objective the one with the
greatest gain is chosen. The second half, which no choice has seen, judges the chosen one alone: at
the load of the trace, below it and above. At the first it must be better in an objective, at none
worse in one. Worse by no more than a tolerance is not worse: else a gain of a third in one objective
would count for nothing beside a loss of a hundredth in the other.

Neither objective says what becomes of the rest. Guards do: a gain that makes one of them
significantly worse, on either half and at any load, is none, and it is told which one stopped it.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.compare import difference_summary
from sim.experiments.jobs import ended_of, varied_between
from sim.experiments.measured_runs import Half, MeasuredRuns, Sample
from sim.experiments.power import power_of
from sim.experiments.search import RUNGS, Costs, Search, Trial
from sim.measurement.intervals import compare_runs
from sim.measurement.measures import figures_of, rounded
from sim.measurement.summaries import (
    DifferenceSummary,
    JudgedSummary,
    KeptRun,
    PowerSummary,
    Requests,
)
from sim.reports.compare_report import BETTER, HIGHER_IS_BETTER, WORSE

LOADS: Final = (1.0, 0.7, 1.3)
"""Times the load of the trace."""
LOST_MORE_MAX: Final = 0.001
"""Of the requests sent: so many more may be refused or fail than with the present configuration,
before a gain counts as bought with them."""
LOST: Final = math.log(10.0)
"""What it costs in each objective to lose more, or to have no figure: as being ten times worse."""


class Objective(StrEnum):
    """What TTFT p90 is weighed against."""

    THROUGHPUT = "throughput"
    ITL = "itl"

    @property
    def measures(self) -> tuple[str, str]:
        """The two, as `figures_of` names them."""
        other = "output_tokens_per_s" if self is Objective.THROUGHPUT else "itl_mean_s"
        return "ttft_p90_s", other


class Guard(Struct, frozen=True, kw_only=True):
    """A figure that nobody asked to be better and that may not become worse."""

    measure: str
    """As `figures_of` names it."""
    allowed: float = 0.0
    """Share of the figure that may be lost, however sure the loss is."""


GUARDS: Final = (Guard(measure="e2e_mean_s"), Guard(measure="itl_mean_s"))


class Against(Struct, frozen=True, kw_only=True):
    """A configuration against the present one, under every seed, on the same requests."""

    present: Sequence[KeptRun]
    other: Sequence[KeptRun]
    differences: dict[str, DifferenceSummary]
    """Of each objective, as summary.json has it, with the figure of the present one."""
    guards: dict[str, DifferenceSummary]
    """Of each guard, alike."""

    @property
    def loses_more(self) -> bool:
        """More requests are refused or fail."""
        return _lost_more(ended_of(self.other), ended_of(self.present))

    @property
    def better(self) -> bool:
        """In one objective at least, significantly."""
        return any(one.verdict == BETTER for one in self.differences.values())

    def worse(self, tolerance: float) -> list[str]:
        """The objectives in which it is, significantly and by more than that share."""
        return [measure for measure, one in self.differences.items() if _is_worse(one, tolerance)]

    def stopped_by(self, guards: Sequence[Guard]) -> list[str]:
        """Those of the guards that it breaks: it is worse there, significantly and beyond what is
        allowed. One that runs do not have, or too few of them to tell from, stops nobody.
        """
        return [one.measure for one in guards if _is_worse(self.guards[one.measure], one.allowed)]

    @property
    def gain(self) -> float:
        """Over all seeds, as costs are: the logarithms of both objectives, added."""
        return -sum(
            _cost(measure, (one.known_reference or 0.0) + one.value, one.known_reference or 0.0)
            for measure, one in self.differences.items()
            if one.value is not None
        )

    def summary(self, tolerance: float, guards: Sequence[Guard]) -> JudgedSummary:
        """As summary.json has it, without what it is of."""
        return JudgedSummary(
            differences=self.differences,
            guards=self.guards,
            present_requests=ended_of(self.present),
            requests=ended_of(self.other),
            loses_more=self.loses_more,
            worse=self.worse(tolerance),
            stopped_by=self.stopped_by(guards),
        )


class Tuning:
    """What is known at any moment, and `run`, which finds out the rest."""

    def __init__(
        self,
        search: Search,
        runs: MeasuredRuns,
        present: PolicySource,
        *,
        measures: Sequence[str],
        tolerance: float,
        seeds: int,
        requests: int,
        guards: Sequence[Guard] = (),
    ) -> None:
        """`guards` are of other measures than `measures`; `requests`: of both halves together."""
        self.search = search
        self.present = present
        self.measures = measures
        self.tolerance = tolerance
        self.guards = guards
        self.power: PowerSummary | None = None
        self.complete = False
        self.finals: list[tuple[Trial, Against]] = []
        self.chosen: Trial | None = None
        self.held_out: dict[float, Against] = {}
        """By load, in the order of `LOADS`."""
        self._runs = runs
        self._seeds = seeds
        self._requests = requests

    def foresee(self) -> None:
        """Find out `power`, unless `StoppedError` ends it."""
        pilots = [self._against(one, Half.TUNING) for one in self.search.pilots(self.present.hash)]
        if pilots:
            varied = varied_between(pilots[0].present)
            differences = [one.differences for one in pilots]
            self.power = power_of(differences, varied, requests=self._requests)

    def run(self) -> None:
        """All of it, unless `StoppedError` ends it."""
        self.search.run(self._costs)
        for trial in self.search.finalists(self.present.hash):
            self.finals.append((trial, self._against(trial.policy, Half.TUNING)))
        self.chosen = self._choose()
        if self.chosen is not None:
            for load in LOADS:
                self.held_out[load] = self._against(self.chosen.policy, Half.HOLD_OUT, load)
        self.complete = True

    @property
    def best(self) -> Trial | None:
        """The chosen one; before somebody is chosen, who leads the search."""
        return self.chosen or (None if self.complete else self.search.best())

    @property
    def beats(self) -> bool:
        """The chosen one: better in an objective, worse in none and in no guard at any load."""
        return (
            self.complete
            and self.chosen is not None
            and self.held_out[LOADS[0]].better
            and not any(self._bad(one) for one in self.held_out.values())
        )

    def _costs(self, rung: int, policies: Sequence[PolicySource]) -> list[Costs]:
        sample = Sample(half=Half.TUNING, share=RUNGS[rung])
        present, *others = self._runs.of([(one, sample) for one in (self.present, *policies)])
        return [self._cost_of(one, present) for one in others]

    def _cost_of(self, run: KeptRun, present: KeptRun) -> Costs:
        """In each objective; what is bought with lost requests or a guard is no gain in either."""
        after, before = figures_of(run), figures_of(present)
        costs = [_cost(measure, after[measure], before[measure]) for measure in self.measures]
        paid = LOST if _lost_more(run.requests, present.requests) else 0.0
        for guard in self.guards:
            lost = _guard_cost(guard.measure, after, before)
            # One run has no interval: what may be given up of an objective is not sure either.
            if lost > math.log1p(max(guard.allowed, self.tolerance)):
                paid += lost
        return tuple(max(cost, 0.0) + paid for cost in costs) if paid else tuple(costs)

    def _against(self, policy: PolicySource, half: Half, load: float = 1.0) -> Against:
        samples = [
            Sample(half=half, load=load, repetition=repetition) for repetition in range(self._seeds)
        ]
        found = self._runs.of(
            [(one, sample) for sample in samples for one in (self.present, policy)]
        )
        present, other = found[::2], found[1::2]
        differences = compare_runs(
            [figures_of(one) for one in present],
            [figures_of(one) for one in other],
            varied_between(present),
        )
        told = {
            measure: replace(
                difference_summary(measure, differences[measure]),
                reference=rounded(differences[measure].reference),
            )
            for measure in (*self.measures, *(guard.measure for guard in self.guards))
        }
        return Against(
            present=present,
            other=other,
            differences={measure: told[measure] for measure in self.measures},
            guards={guard.measure: told[guard.measure] for guard in self.guards},
        )

    def _choose(self) -> Trial | None:
        good = [
            (against.gain, -trial.number, trial)
            for trial, against in self.finals
            if against.gain > 0 and not self._bad(against)
        ]
        return max(good)[-1] if good else None

    def _bad(self, against: Against) -> bool:
        return (
            against.loses_more
            or bool(against.worse(self.tolerance))
            or bool(against.stopped_by(self.guards))
        )


def _is_worse(found: DifferenceSummary, allowed: float) -> bool:
    """Significantly, and by more than `allowed` of the figure."""
    return found.verdict == WORSE and (found.relative is None or abs(found.relative) > allowed)


def _guard_cost(measure: str, after: Mapping[str, float], before: Mapping[str, float]) -> float:
    """As `_cost`; 0 for a figure that the present one does not have, or of which none is left."""
    if not before[measure] > 0 or (after[measure] == 0 and measure not in HIGHER_IS_BETTER):
        return 0.0
    return _cost(measure, after[measure], before[measure])


def _cost(measure: str, value: float, reference: float) -> float:
    """Logarithm of the ratio, positive for worse."""
    if not (value > 0 and reference > 0):
        return LOST
    cost = math.log(value / reference)
    return -cost if measure in HIGHER_IS_BETTER else cost


def _lost_more(requests: Requests, present: Requests) -> bool:
    """Clients who leave of themselves are no fault of a configuration."""
    lost, lost_before = (one.refused + one.failed for one in (requests, present))
    return lost - lost_before > LOST_MORE_MAX * requests.sent
