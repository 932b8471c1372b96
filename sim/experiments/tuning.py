"""The steps of a tuning: costs of tried configurations, choice of the best one, and its judgement.

Trials run on the first half of the trace. The best few run there with every seed. Among those that
are significantly worse than the present configuration in neither objective, the one with the
greatest gain is chosen. A configuration that loses too many more requests is never chosen. The
second half, which had no part in the choice, judges the chosen one alone: at the load of the trace,
below it and above it. At the trace's load it must be better in an objective, and at no load worse in
one. A loss within the tolerance does not count as worse. Otherwise a gain of a third in one
objective would be rejected for a loss of a hundredth in the other.

Guards cover figures that are not objectives. A gain that makes a guarded figure significantly
worse, on either half and at any load, does not count, and the report names that guard.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.compare import difference_summary
from sim.experiments.measured_runs import Half, MeasuredRuns, Sample
from sim.experiments.power import power_of
from sim.experiments.repetitions import ended_of, varied_between
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
"""Factors on the trace's request rate at which the chosen configuration is judged."""
LOST_MORE_MAX: Final = 0.001
"""Maximum number of requests that a configuration may refuse or fail in addition to those of the
present configuration, as a share of the sent requests. Beyond it, a gain does not count.
"""
LOST: Final = math.log(10.0)
"""Cost that is added to each objective of a run that loses too many requests, and cost of an
objective without a figure above 0. It equals that of a figure ten times worse than the present one.
"""


class Objective(StrEnum):
    """The second objective of a tuning; TTFT p90 is always the first."""

    THROUGHPUT = "throughput"
    ITL = "itl"

    @property
    def measures(self) -> tuple[str, str]:
        """Names of the two objectives' measures in `figures_of`: TTFT p90, then the one chosen."""
        other = "output_tokens_per_s" if self is Objective.THROUGHPUT else "itl_mean_s"
        return "ttft_p90_s", other


class Guard(Struct, frozen=True, kw_only=True):
    """A measure that is not an objective of the tuning but may not become worse."""

    measure: str
    """Name of the guarded measure, a key of `figures_of`."""
    allowed: float = 0.0
    """Share of the present figure by which the measure may become worse, even if the loss is
    significant.
    """


GUARDS: Final = (Guard(measure="e2e_mean_s"), Guard(measure="itl_mean_s"))


class Comparison(Struct, frozen=True, kw_only=True):
    """A comparison of another configuration with the present one, under every seed, on the same
    requests.
    """

    present: Sequence[KeptRun]
    other: Sequence[KeptRun]
    differences: dict[str, DifferenceSummary]
    """Difference of the other configuration from the present one by measure of the objectives, as
    in summary.json, with the present configuration's figure.
    """
    guards: dict[str, DifferenceSummary]
    """Difference of the other configuration from the present one by measure of the guards, in the
    same form as `differences`.
    """

    @property
    def loses_more(self) -> bool:
        """True if the other configuration refuses or fails too many more requests than the present
        one.
        """
        return _lost_more(ended_of(self.other), ended_of(self.present))

    @property
    def better(self) -> bool:
        """True if the other configuration is significantly better in at least one objective."""
        return any(one.verdict == BETTER for one in self.differences.values())

    def worse(self, tolerance: float) -> list[str]:
        """Return the measures of the objectives in which the other configuration is significantly
        worse, by more than the share `tolerance`.
        """
        return [measure for measure, one in self.differences.items() if _is_worse(one, tolerance)]

    def stopped_by(self, guards: Sequence[Guard]) -> list[str]:
        """Return the measures of the guards that are significantly worse than with the present
        configuration, beyond their allowed share.

        A measure without figures, or with too few runs for an interval, does not count as worse.
        """
        return [one.measure for one in guards if _is_worse(self.guards[one.measure], one.allowed)]

    @property
    def gain(self) -> float:
        """Gain of the other configuration over all seeds: minus the sum of its costs in both
        objectives. It is positive if the other configuration is better in sum. An objective whose
        difference is unknown adds nothing.
        """
        return -sum(
            _cost(measure, (one.known_reference or 0.0) + one.value, one.known_reference or 0.0)
            for measure, one in self.differences.items()
            if one.value is not None
        )

    def summary(self, tolerance: float, guards: Sequence[Guard]) -> JudgedSummary:
        """Return the comparison in the form of summary.json; the caller adds which trial or load it
        is about.
        """
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
    """A tuning with its results so far; `run` computes the missing ones."""

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
        """Create the tuning. `measures` are the objectives, and `guards` have other measures;
        `requests` is the number of requests in both halves of the trace.
        """
        self.search = search
        self.present = present
        self.measures = measures
        self.tolerance = tolerance
        self.guards = guards
        self.power: PowerSummary | None = None
        self.complete = False
        self.finals: list[tuple[Trial, Comparison]] = []
        self.chosen: Trial | None = None
        self.held_out: dict[float, Comparison] = {}
        """Comparison of the chosen configuration on the hold-out half, by load, in the order of
        `LOADS`.
        """
        self._runs = runs
        self._seeds = seeds
        self._requests = requests

    def estimate_power(self) -> None:
        """Estimate the statistical power of the tuning and store it in `power`; `power` stays None
        if no valid random configuration differs from the present one. Raises `StoppedError` if it
        is interrupted.
        """
        pilots = [self._against(one, Half.TUNING) for one in self.search.pilots(self.present.hash)]
        if pilots:
            varied = varied_between(pilots[0].present)
            differences = [one.differences for one in pilots]
            self.power = power_of(differences, varied, requests=self._requests)

    def run(self) -> None:
        """Search, choose a configuration and judge it, and set `complete` at the end. Raises
        `StoppedError` if it is interrupted; the results so far remain available.
        """
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
        """The chosen trial or, before the choice, the best trial of the search so far. None if the
        tuning ended without a choice, or if no trial has run yet.
        """
        return self.chosen or (None if self.complete else self.search.best())

    @property
    def beats(self) -> bool:
        """True if the tuning is complete, the chosen configuration is better in an objective at the
        trace's load, and at no load it is worse in an objective or a guard or loses too many more
        requests.
        """
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
        """Return the cost of `run` in each objective, compared with `present`, the run of the
        present configuration. Lost requests or a broken guard cancel gains and add to each cost.
        """
        after, before = figures_of(run), figures_of(present)
        costs = [_cost(measure, after[measure], before[measure]) for measure in self.measures]
        paid = LOST if _lost_more(run.requests, present.requests) else 0.0
        for guard in self.guards:
            lost = _guard_cost(guard.measure, after, before)
            # One run has no confidence interval, so the tolerance of objectives applies too.
            if lost > math.log1p(max(guard.allowed, self.tolerance)):
                paid += lost
        return tuple(max(cost, 0.0) + paid for cost in costs) if paid else tuple(costs)

    def _against(self, policy: PolicySource, half: Half, load: float = 1.0) -> Comparison:
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
        return Comparison(
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

    def _bad(self, against: Comparison) -> bool:
        return (
            against.loses_more
            or bool(against.worse(self.tolerance))
            or bool(against.stopped_by(self.guards))
        )


def _is_worse(found: DifferenceSummary, allowed: float) -> bool:
    """Return whether a figure is significantly worse than that of the present configuration, by
    more than the share `allowed`. A loss whose share is unknown counts as larger.
    """
    return found.verdict == WORSE and (found.relative is None or abs(found.relative) > allowed)


def _guard_cost(measure: str, after: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Return the cost of a guarded measure by the figures of the new configuration (`after`) and
    the present one (`before`).

    0 if the present configuration has no figure above 0, or if the new figure is 0 where lower is
    better.
    """
    if not before[measure] > 0 or (after[measure] == 0 and measure not in HIGHER_IS_BETTER):
        return 0.0
    return _cost(measure, after[measure], before[measure])


def _cost(measure: str, value: float, reference: float) -> float:
    """Return the cost of `value` against `reference`: the logarithm of their ratio, positive if
    `value` is worse. `LOST` if one of them is not positive.
    """
    if not (value > 0 and reference > 0):
        return LOST
    cost = math.log(value / reference)
    return -cost if measure in HIGHER_IS_BETTER else cost


def _lost_more(requests: Requests, present: Requests) -> bool:
    """Return whether a run refused or failed more requests than the present configuration, by more
    than `LOST_MORE_MAX` of those sent. Requests that clients abort by themselves do not count.
    """
    lost, lost_before = (one.refused + one.failed for one in (requests, present))
    return lost - lost_before > LOST_MORE_MAX * requests.sent
