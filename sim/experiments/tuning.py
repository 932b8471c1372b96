"""The steps of a tuning: what tries cost, who is chosen of the best, and how the chosen one is judged.

The first half of the trace is for trying. The best few are given every seed there, and of those
that are significantly worse than the present configuration in neither objective the one with the
greatest gain is chosen. The second half, which no choice has seen, judges the chosen one alone: at
the load of the trace, below it and above. At the first it must be better in an objective, at none
worse in one. Worse by no more than a tolerance is not worse: else a gain of a third in one objective
would count for nothing beside a loss of a hundredth in the other.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.compare import difference_summary
from sim.experiments.jobs import ended_of, varied_between
from sim.experiments.measured_runs import Half, MeasuredRuns, Sample
from sim.experiments.search import RUNGS, Costs, Search, Trial
from sim.measurement.intervals import compare_runs
from sim.measurement.measures import figures_of, rounded
from sim.measurement.summaries import DifferenceSummary, JudgedSummary, KeptRun, Requests
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


class Against(Struct, frozen=True, kw_only=True):
    """A configuration against the present one, under every seed, on the same requests."""

    present: Sequence[KeptRun]
    other: Sequence[KeptRun]
    differences: dict[str, DifferenceSummary]
    """Of each objective, as summary.json has it, with the figure of the present one."""

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
        return [
            measure
            for measure, one in self.differences.items()
            if one.verdict == WORSE and (one.relative is None or abs(one.relative) > tolerance)
        ]

    @property
    def gain(self) -> float:
        """Over all seeds, as costs are: the logarithms of both objectives, added."""
        return -sum(
            _cost(measure, (one.known_reference or 0.0) + one.value, one.known_reference or 0.0)
            for measure, one in self.differences.items()
            if one.value is not None
        )

    def summary(self, tolerance: float) -> JudgedSummary:
        """As summary.json has it, without what it is of."""
        return JudgedSummary(
            differences=self.differences,
            present_requests=ended_of(self.present),
            requests=ended_of(self.other),
            loses_more=self.loses_more,
            worse=self.worse(tolerance),
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
    ) -> None:
        self.search = search
        self.present = present
        self.measures = measures
        self.tolerance = tolerance
        self.complete = False
        self.finals: list[tuple[Trial, Against]] = []
        self.chosen: Trial | None = None
        self.held_out: dict[float, Against] = {}
        """By load, in the order of `LOADS`."""
        self._runs = runs
        self._seeds = seeds

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
        """The chosen one: better in an objective, and worse in none at any load."""
        return (
            self.complete
            and self.chosen is not None
            and self.held_out[LOADS[0]].better
            and not any(self._bad(one) for one in self.held_out.values())
        )

    def _costs(self, rung: int, policies: Sequence[PolicySource]) -> list[Costs]:
        sample = Sample(half=Half.TUNING, share=RUNGS[rung])
        present, *others = self._runs.of([(one, sample) for one in (self.present, *policies)])
        return [_costs(one, present, self.measures) for one in others]

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
        return Against(
            present=present,
            other=other,
            differences={
                measure: replace(
                    difference_summary(measure, differences[measure]),
                    reference=rounded(differences[measure].reference),
                )
                for measure in self.measures
            },
        )

    def _choose(self) -> Trial | None:
        good = [
            (against.gain, -trial.number, trial)
            for trial, against in self.finals
            if against.gain > 0 and not self._bad(against)
        ]
        return max(good)[-1] if good else None

    def _bad(self, against: Against) -> bool:
        return against.loses_more or bool(against.worse(self.tolerance))


def _costs(run: KeptRun, present: KeptRun, measures: Sequence[str]) -> Costs:
    after, before = figures_of(run), figures_of(present)
    costs = [_cost(measure, after[measure], before[measure]) for measure in measures]
    if _lost_more(run.requests, present.requests):
        costs = [max(cost, 0.0) + LOST for cost in costs]
    return tuple(costs)


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
