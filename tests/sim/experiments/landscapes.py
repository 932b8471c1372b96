"""Synthetic landscapes, and a table of what each way to search finds there.

The command is `python -m tests.sim.experiments.landscapes`.

A landscape has ten dimensions like those of weights. A configuration has a cost in each of two
objectives: the logarithm of its figure divided by that of the present configuration. Most
dimensions matter little, and the others interact. In some dimensions one objective pays for the
other. Measurements are noisy, more so on the first rung than on the second.

A search proceeds as `sim tune` does, with batches, rungs and finalists. Its result is the true gain
of the best finalist. Finalists that truly lose more of an objective than the tolerance do not
count, as all seeds would show the loss. The result is 0 if no finalist is left.

There are three shapes. The shipped way was chosen on the seeds `LOOKED_AT`; the table shows the
seeds `HELD_OUT`.
"""

import math
import warnings
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import NamedTuple

import optuna
import xxhash

from sim.experiments.proposals import Proposals
from sim.experiments.search import BATCH, FINALISTS, PROMOTED_SHARE, RUNGS, one_cost
from sim.experiments.space import WEIGHT_MAX, WEIGHT_MIN, Dimension, DimensionKind, Range

DIMENSIONS = 10
TRIALS = 60
TOLERANCE = 0.02
"""Share of an objective that may be lost, as in `sim tune`."""
NOISE = (0.05, 0.02)
"""Standard deviation of the noise by rung in the first objective; a fifth of it in the second."""
SPAN = Range(low=WEIGHT_MIN, high=WEIGHT_MAX, logarithmic=True)
SPACE = tuple(
    Dimension(plugin=f"scorer-{at}", what=DimensionKind.WEIGHT, span=SPAN, present=1.0)
    for at in range(DIMENSIONS)
)


class Landscape:
    """True costs of every configuration; the same shape and seed give the same landscape."""

    def __init__(self, shape, seed):
        self.shape = SHAPES[shape]
        random = Random(f"{shape}:{seed}")
        self.best = [random.uniform(-1.8, 1.8) for _ in range(DIMENSIONS)]
        self.matters = [random.choice([0.02, 0.05, 0.25, 0.5]) for _ in range(DIMENSIONS)]
        self.pairs = [
            (*random.sample(range(DIMENSIONS), 2), random.uniform(-0.2, 0.2)) for _ in range(6)
        ]
        self.pays = [
            (random.randrange(DIMENSIONS), random.choice([-1, 1]), random.uniform(0.02, 0.1))
            for _ in range(2)
        ]
        self.present = self._raw([0.0] * DIMENSIONS)

    def costs(self, values):
        """Return the costs in both objectives; below 0 is better than the present configuration."""
        place = [math.log(values[one.name]) for one in SPACE]
        return tuple(a - b for a, b in zip(self._raw(place), self.present, strict=True))

    def _raw(self, place):
        first = self.shape(self, place)
        second = sum(share * max(0.0, sign * place[at]) for at, sign, share in self.pays)
        return first, second

    def valley(self, place):
        """Return a cost with a sharp edge at the best place, and joint effects of two dimensions.

        A place slightly beside the best one is already expensive.
        """
        away = [a - b for a, b in zip(place, self.best, strict=True)]
        alone = sum(weight * abs(z) for weight, z in zip(self.matters, away, strict=True))
        return alone + sum(c * math.tanh(away[a] * away[b]) for a, b, c in self.pairs)

    def ratios(self, place):
        """Return a cost like that of weights in one sum: it stays the same if all are doubled."""
        mean = fmean(place)
        away = [a - mean - b for a, b in zip(place, self.best, strict=True)]
        return sum(
            weight * z * z / (1 + abs(z)) for weight, z in zip(self.matters, away, strict=True)
        )

    def steps(self, place):
        """Return a cost like that of thresholds: almost flat, with sudden steps."""
        alone = sum(
            weight * (z > b) - 0.02 * z
            for weight, z, b in zip(self.matters, place, self.best, strict=True)
        )
        return alone + sum(
            2 * c * (place[a] > self.best[a]) * (place[b] < self.best[b]) for a, b, c in self.pairs
        )


SHAPES = {"valley": Landscape.valley, "ratios": Landscape.ratios, "steps": Landscape.steps}


class Optuna:
    """Substitute for `Proposals` with another sampler of Optuna.

    It is told one number per configuration, or the costs in both objectives.
    """

    def __init__(self, sampler, seed, *, objectives=1):
        self._sampler, self._seed, self._batches = sampler, seed, 0
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        self._study = optuna.create_study(directions=["minimize"] * objectives)
        self._study.enqueue_trial({one.name: one.present for one in SPACE})
        self._span = optuna.distributions.FloatDistribution(SPAN.low, SPAN.high, log=True)

    def ask(self, count):
        seed = xxhash.xxh32_intdigest(f"{self._seed}:tune:{self._batches}".encode())
        self._batches += 1
        with warnings.catch_warnings(action="ignore"):
            self._study.sampler = self._sampler(seed)
            spans = {one.name: self._span for one in SPACE}
            self._asked = [self._study.ask(spans) for _ in range(count)]
        return [dict(one.params) for one in self._asked]

    def tell(self, costs):
        for one, found in zip(self._asked, costs, strict=True):
            self._study.tell(one, found)


def parzen(*, jointly):
    """Return a function that creates the Parzen sampler of one batch from the seed of the batch."""
    return lambda seed: optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=BATCH, multivariate=jointly
    )


def nsga(seed):
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=BATCH)


def chance(seed):
    return optuna.samplers.RandomSampler(seed=seed)


def told(costs):
    """Return both costs as one number, as the shipped search does."""
    return one_cost(costs, TOLERANCE)


class Way(NamedTuple):
    """One way to search."""

    proposals: Callable
    """Function that creates the proposals from a seed."""
    ranked: Callable = sum
    """Function of the costs whose lowest results are kept."""
    told: Callable = sum
    """Function of the costs whose result is reported to the proposals."""


WAYS = {
    "as shipped": Way(lambda seed: Proposals(SPACE, seed=seed, random=BATCH), told, told),
    "all dimensions jointly": Way(lambda seed: Optuna(parzen(jointly=True), seed), told, told),
    "by the sum": Way(lambda seed: Optuna(parzen(jointly=False), seed)),
    "both objectives": Way(
        lambda seed: Optuna(parzen(jointly=False), seed, objectives=2), told, tuple
    ),
    "both objectives, ranked by the sum": Way(
        lambda seed: Optuna(parzen(jointly=False), seed, objectives=2), sum, tuple
    ),
    "NSGA-II": Way(lambda seed: Optuna(nsga, seed, objectives=2), told, tuple),
    "chance": Way(lambda seed: Optuna(chance, seed), told, told),
}
"""Ways to search, by name in the table."""


def found(way, shape, seed, trials=TRIALS):
    """Return the true gain of a search, as the logarithm of both objectives together."""
    landscape, noise = Landscape(shape, seed), Random(f"noise:{seed}")
    proposals = way.proposals(seed)
    finished = []
    for first in range(0, trials, BATCH):
        asked = proposals.ask(min(BATCH, trials - first))
        costs = {at: landscape.costs(values) for at, values in enumerate(asked)}
        left, seen = list(costs), {}
        for rung in range(len(RUNGS)):
            for at in left:
                drawn = noise.gauss(0, NOISE[rung]), noise.gauss(0, NOISE[rung] / 5)
                seen[at] = tuple(a + b for a, b in zip(costs[at], drawn, strict=True))
            left.sort(key=lambda at: way.ranked(seen[at]))
            if rung + 1 < len(RUNGS):
                left = left[: math.ceil(len(left) * PROMOTED_SHARE)]
        finished += [(way.ranked(seen[at]), costs[at]) for at in left]
        proposals.tell([way.told(seen[at]) for at in range(len(asked))])
    best = [costs for _, costs in sorted(finished)[:FINALISTS]]
    allowed = math.log1p(TOLERANCE)
    return max([0.0, *(-sum(costs) for costs in best if max(costs) <= allowed)])


LOOKED_AT = (*range(8), *range(100, 108))
HELD_OUT = (*range(200, 208), *range(300, 320))


def main():
    """Print the table of docs/simulator.md: the mean gain by shape, on the seeds `HELD_OUT`."""
    print(f"{'':36}" + "".join(f"{shape:>9}" for shape in SHAPES) + f"{'all':>9}{'better':>9}")
    shipped = {}
    for name, way in WAYS.items():
        gained = {shape: [found(way, shape, seed) for seed in HELD_OUT] for shape in SHAPES}
        shipped = shipped or gained
        means = [fmean(one) for one in gained.values()]
        better = sum(
            one > other + 1e-9
            for shape in SHAPES
            for one, other in zip(gained[shape], shipped[shape], strict=True)
        )
        shown = "".join(f"{mean:9.3f}" for mean in [*means, fmean(means)])
        print(f"{name:36}{shown}{better:9}", flush=True)


if __name__ == "__main__":
    main()
