"""Which configurations are tried, and which of them are looked at more closely.

Trials come in batches. Each of a batch runs on the first rung, a quarter of the traffic that tuning
may see; the best third of them on the next, all of it (successive halving: Jamieson and Talwalkar,
AISTATS 2016). What a trial costs is the logarithm of its figure over that of the present
configuration on the very same requests, so that rungs can be compared with each other. Where one number is
needed it is the sum of both costs: a gain of one per cent in either counts alike. What is given up of
one beyond the tolerance counts `GIVEN_UP` times besides, for nobody is chosen who gives up more, and
a search is to end among those who can be. By that number Optuna's tree-structured Parzen estimator
proposes the next batch, from all that was told so far.

A batch is as large whatever the machine, its sampler is seeded by its place, and results are told
in the order of trials: the search depends on seed and measurements, and on nothing else.
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
"""Trials that are proposed together; the first batch is drawn at random."""
RUNGS: Final = (0.25, 1.0)
"""Share of the traffic for tuning, from its beginning."""
KEPT: Final = 1 / 3
"""Of a batch, from one rung to the next."""
GIVEN_UP: Final = 10.0
"""Found on made-up landscapes, with what else may propose: docs/simulator.md has the table."""
FINALISTS: Final = 4
"""Of all trials that reached the last rung: these are given every seed."""

Costs = tuple[float, ...]
"""Of each objective: below 0 is better than the present configuration."""
Measured = Callable[[int, Sequence[PolicySource]], Sequence[Costs]]
"""(number of a rung, configurations) -> what each costs there."""


class Trial(Struct, kw_only=True):
    """One configuration that was proposed."""

    number: int
    values: dict[str, Value]
    policy: PolicySource
    hash: str = ""
    """Of the configuration; "": it is none."""
    refused: str = ""
    """Why it is none."""
    costs: list[Costs] = []
    """Of each rung that it reached."""
    cost: float = math.inf
    """As one number, on the highest rung that it reached."""

    @property
    def finished(self) -> bool:
        """It reached the last rung."""
        return len(self.costs) == len(RUNGS)


class Search:
    """Goes through the batches; `trials` has what is known at any moment."""

    def __init__(self, space: Space, *, trials: int, seed: int, tolerance: float) -> None:
        """`tolerance`: share of an objective that may be given up for the other."""
        # Half a second, which no other command of `sim` needs to wait for.
        from sim.experiments.proposals import Proposals  # noqa: PLC0415

        self.trials: list[Trial] = []
        self._space = space
        self._trials_max = trials
        self._tolerance = tolerance
        self._proposals = Proposals(space.dimensions, seed=seed, random=BATCH)
        # Asked for the first batch before it is due: what that shows need not be run again.
        self._pilots = Proposals(space.dimensions, seed=seed, random=BATCH)

    def run(self, measured: Measured) -> None:
        """All batches. What `measured` raises ends it."""
        while len(self.trials) < self._trials_max:
            self._batch(measured)

    def pilots(self, present_hash: str | None) -> list[PolicySource]:
        """A few of the first batch, other than the present configuration and each other.

        To be asked for once.
        """
        found: dict[str, PolicySource] = {}
        asked = self._pilots.ask(min(BATCH, self._trials_max))
        for at, values in enumerate(asked):
            one = self._proposed(at, values)
            if not one.refused and one.hash != present_hash:
                found.setdefault(one.hash, one.policy)
        return list(found.values())[:PILOTS]

    def best(self) -> Trial | None:
        """By their cost, of those that got furthest; None: none was measured."""
        ranked = sorted(
            (one for one in self.trials if one.costs), key=lambda one: (-len(one.costs), one.cost)
        )
        return ranked[0] if ranked else None

    def finalists(self, present_hash: str | None) -> list[Trial]:
        """The best of those that finished, other than the present configuration and each other."""
        found: dict[str, Trial] = {}
        for one in sorted((one for one in self.trials if one.finished), key=lambda one: one.cost):
            if one.hash != present_hash:
                found.setdefault(one.hash, one)
        return list(found.values())[:FINALISTS]

    def front(self) -> list[Trial]:
        """Those that finished and of which none other is better in one objective and no worse in
        the other.
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
            left = left[: math.ceil(len(left) * KEPT)]
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
    """Both objectives as one number: what a search makes small."""
    allowed = math.log1p(tolerance)
    return sum(costs) + GIVEN_UP * sum(max(0.0, cost - allowed) for cost in costs)


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those that none dominates, by the first objective."""
    ordered = sorted(trials, key=lambda one: (one.costs[-1], one.number))
    front: list[Trial] = []
    for one in ordered:
        if not any(_dominates(other.costs[-1], one.costs[-1]) for other in front):
            front.append(one)
    return front


def runs_expected(trials: int) -> int:
    """Of all batches, at most, if on each rung the present configuration comes along."""
    runs = 0
    for first in range(0, trials, BATCH):
        left = min(BATCH, trials - first)
        for _ in RUNGS:
            runs += left + 1
            left = math.ceil(left * KEPT)
    return runs


def _dominates(one: Costs, other: Costs) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
