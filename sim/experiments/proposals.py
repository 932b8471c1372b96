"""Proposals of configurations to try in a tuning, by Optuna's tree-structured Parzen estimator,
which treats each dimension separately.

Only this module uses Optuna, which takes half a second to import. The Optuna study is in memory.
Proposals follow from the seed and the reported costs, so that a restarted command proposes the same
configurations.
"""

import math
import warnings
from collections.abc import Sequence

import optuna
import xxhash
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from sim.experiments.space import Choice, Dimension, Value


class Proposals:
    """Batches of configurations to try: `ask` for a batch, measure its costs, and `tell` them."""

    def __init__(self, dimensions: Sequence[Dimension], *, seed: int, random: int) -> None:
        """Create the Optuna study. Proposals are random until the costs of `random` of them are
        reported, except that the first one has the present values if all of them are in range.
        """
        self._distributions = {one.name: _distribution(one) for one in dimensions}
        self._seed = seed
        self._random = random
        self._batches = 0
        self._asked: list[optuna.Trial] = []
        # Optuna would log each trial and warn about experimental features.
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            self._study = optuna.create_study(direction="minimize")
        present = {one.name: one.present for one in dimensions}
        if None not in present.values():
            self._study.enqueue_trial(present)

    def ask(self, count: int) -> list[dict[str, Value]]:
        """Return `count` proposed configurations, each as a value by name of the dimension. The
        caller must report their costs with `tell` before it requests the next ones.
        """
        # The seed depends on the batch number, so that earlier random draws have no influence.
        seed = xxhash.xxh32_intdigest(f"{self._seed}:tune:{self._batches}".encode())
        self._batches += 1
        with warnings.catch_warnings(action="ignore"):
            self._study.sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=self._random, multivariate=False
            )
            self._asked = [self._study.ask(self._distributions) for _ in range(count)]
        return [dict(one.params) for one in self._asked]

    def tell(self, costs: Sequence[float | None]) -> None:
        """Report the cost of each proposal of the last `ask`, in the same order; None for a
        configuration that could not be tried.
        """
        for one, found in zip(self._asked, costs, strict=True):
            if found is None:
                self._study.tell(one, state=TrialState.FAIL)
            else:
                self._study.tell(one, found)


def _distribution(dimension: Dimension) -> BaseDistribution:
    span = dimension.span
    if isinstance(span, Choice):
        return CategoricalDistribution(list(span.values))
    if span.integer:
        return IntDistribution(math.ceil(span.low), math.floor(span.high), log=span.logarithmic)
    return FloatDistribution(span.low, span.high, log=span.logarithmic)
