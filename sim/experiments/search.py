"""The search of a tuning: it selects the configurations that are tried, and those that are measured
with more requests.

One tried configuration is a trial. Trials come in batches. All trials of a batch with a valid
configuration run on the first rung, a quarter of the tuning traffic. The best third of them run on
the next rung, all of it (successive halving: Jamieson and Talwalkar, AISTATS 2016). The cost of a
trial is the logarithm of its figure over that of the present configuration on exactly the same
requests, so that rungs are comparable. Where one number is needed, it is the sum of the costs of
both objectives: a gain of one per cent in either counts the same. A loss in one objective beyond
the tolerance counts `EXCESS_LOSS_WEIGHT` times in addition. No configuration with a greater loss is
chosen, so the search should end among the others. Optuna's tree-structured Parzen estimator
proposes the next batch from all costs so far.

The size of a batch does not depend on the machine, its sampler is seeded by its position, and
results are reported in the order of trials. The search therefore depends only on seed and
measurements.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.configuration.config import ConfigError
from epp.configuration.describing import config_hash
from sim.cluster.policies import PolicySource
from sim.experiments.power import PILOTS
from sim.experiments.space import Space, Value

BATCH: Final = 12
"""Number of configurations that are proposed together. Those of the first batch are random, except
that the first one has the present values if they are in range.
"""
RUNGS: Final = (0.25, 1.0)
"""Share of the tuning traffic, from its beginning, that each rung of successive halving replays."""
PROMOTED_SHARE: Final = 1 / 3
"""Share of the configurations on one rung that reach the next rung; their number is rounded up."""
EXCESS_LOSS_WEIGHT: Final = 10.0
"""Weight of a loss in one objective beyond the tolerance, in the cost that the search minimises.
The value was determined on synthetic landscapes, together with the choice of the sampler:
docs/simulator.md has the table.
"""
FINALISTS: Final = 4
"""Maximum number of trials, those with the lowest costs on the last rung, that are run again with
every seed.
"""

Costs = tuple[float, ...]
"""Cost of a tried configuration in each objective: logarithm of its figure over that of the present
configuration, negated if higher is better. Too many lost requests, or a broken guard, cancel gains
and add to it. A cost below 0 is better than the present configuration.
"""
Measured = Callable[[int, Sequence[PolicySource]], Sequence[Costs]]
"""Function (number of a rung, configurations) -> costs of each configuration on that rung."""


class Trial(Struct, kw_only=True):
    """One configuration that the search proposed, with its costs so far."""

    number: int
    values: dict[str, Value]
    policy: PolicySource
    hash: str = ""
    """Hash of the trial's configuration, or "" if the configuration is invalid."""
    refused: str = ""
    """Reason why the trial's configuration is invalid, or "" if it is valid."""
    costs: list[Costs] = []
    """Costs in each objective, on each rung that the trial reached."""
    cost: float = math.inf
    """Cost that the search minimises, from the highest rung that the trial reached; infinity if it
    was not measured.
    """

    @property
    def finished(self) -> bool:
        """True if the trial ran on the last rung, which is all of the tuning traffic."""
        return len(self.costs) == len(RUNGS)


class Search:
    """A search for configurations with low costs, batch by batch; `trials` has the results so
    far.
    """

    def __init__(self, space: Space, *, trials: int, seed: int, tolerance: float) -> None:
        """Create the search. `trials` is the number of configurations to try; `tolerance` is the
        share of one objective that may be lost to improve the other.
        """
        # The import takes half a second, which no other command of `sim` needs.
        from sim.experiments.proposals import Proposals  # noqa: PLC0415

        self.trials: list[Trial] = []
        self._space = space
        self._trials_max = trials
        self._tolerance = tolerance
        self._proposals = Proposals(space.dimensions, seed=seed, random=BATCH)
        # These proposals equal the first batch, so that the runs of pilots are used again.
        self._pilots = Proposals(space.dimensions, seed=seed, random=BATCH)

    def run(self, measured: Measured) -> None:
        """Try all configurations, batch by batch. Raises what `measured` raises; the trials so far
        remain available.
        """
        while len(self.trials) < self._trials_max:
            self._batch(measured)

    def pilots(self, present_hash: str | None) -> list[PolicySource]:
        """Return at most `PILOTS` valid configurations of the first batch that differ from each
        other and from the configuration with hash `present_hash`.

        The method must be called once only.
        """
        found: dict[str, PolicySource] = {}
        asked = self._pilots.ask(min(BATCH, self._trials_max))
        for at, values in enumerate(asked):
            one = self._proposed(at, values)
            if not one.refused and one.hash != present_hash:
                found.setdefault(one.hash, one.policy)
        return list(found.values())[:PILOTS]

    def best(self) -> Trial | None:
        """Return the trial with the lowest cost among those that reached the highest rung so far,
        or None if no trial was measured.
        """
        ranked = sorted(
            (one for one in self.trials if one.costs), key=lambda one: (-len(one.costs), one.cost)
        )
        return ranked[0] if ranked else None

    def finalists(self, present_hash: str | None) -> list[Trial]:
        """Return the trials with the lowest costs on the last rung, at most `FINALISTS`. Their
        configurations differ from each other and from the one with hash `present_hash`.
        """
        found: dict[str, Trial] = {}
        for one in sorted((one for one in self.trials if one.finished), key=lambda one: one.cost):
            if one.hash != present_hash:
                found.setdefault(one.hash, one)
        return list(found.values())[:FINALISTS]

    def front(self) -> list[Trial]:
        """Return the Pareto front of the trials that ran on the last rung: no other such trial is
        better in one objective and no worse in the other.
        """
        return pareto([one for one in self.trials if one.finished])

    def _batch(self, measured: Measured) -> None:
        first = len(self.trials)
        asked = self._proposals.ask(min(BATCH, self._trials_max - first))
        batch = [self._proposed(first + at, values) for at, values in enumerate(asked)]
        self.trials += batch
        left = [one for one in batch if not one.refused]
        for rung in range(len(RUNGS)):
            costs = measured(rung, [one.policy for one in left])
            for one, cost in zip(left, costs, strict=True):
                one.costs.append(cost)
                one.cost = one_cost(cost, self._tolerance)
            left.sort(key=lambda one: (one.cost, one.number))
            left = left[: math.ceil(len(left) * PROMOTED_SHARE)]
        self._proposals.tell([None if one.refused else one.cost for one in batch])

    def _proposed(self, number: int, values: Mapping[str, Value]) -> Trial:
        policy = self._space.source(values, f"trial-{number}")
        trial = Trial(number=number, values=dict(values), policy=policy)
        try:
            trial.hash = config_hash(policy.load())
        except ConfigError as problem:
            trial.refused = problem.problems[0]
        return trial


def one_cost(costs: Costs, tolerance: float) -> float:
    """Return the costs in both objectives as one number, which the search minimises. A loss in one
    objective beyond the share `tolerance` counts more.
    """
    allowed = math.log1p(tolerance)
    return sum(costs) + EXCESS_LOSS_WEIGHT * sum(max(0.0, cost - allowed) for cost in costs)


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials on the Pareto front, ordered by the cost in the first objective. A trial is
    on the front if no other trial is better in one objective and no worse in the other.
    """
    ordered = sorted(trials, key=lambda one: (one.costs[-1], one.number))
    front: list[Trial] = []
    for one in ordered:
        if not any(_dominates(other.costs[-1], one.costs[-1]) for other in front):
            front.append(one)
    return front


def runs_expected(trials: int) -> int:
    """Return the maximum number of runs of a search with `trials` trials. It includes a run of the
    present configuration for each batch and rung.
    """
    runs = 0
    for first in range(0, trials, BATCH):
        left = min(BATCH, trials - first)
        for _ in RUNGS:
            runs += left + 1
            left = math.ceil(left * PROMOTED_SHARE)
    return runs


def _dominates(one: Costs, other: Costs) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
