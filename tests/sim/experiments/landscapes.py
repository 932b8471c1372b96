"""Landscapes to search on, made up: what each way to search finds there, `python -m tests.sim.experiments.landscapes`.

Ten dimensions as of weights, and what a configuration costs in two objectives, as logarithms of its
figures over those of the present one. Most dimensions matter little, the others not each by itself;
one objective pays for the other in some; and what is measured is not what is true, on the first rung
less than on the second. A search goes through them as `sim tune` does: batches, rungs, finalists.
What it has found is what the best of its finalists truly gains, of those that are truly worse in no
objective, which all seeds would show; and nothing, if there is none.

Three shapes; a way was chosen on `LOOKED_AT`, and the table is of `HELD_OUT`.
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
from sim.experiments.search import BATCH, FINALISTS, KEPT, RUNGS, one_cost
from sim.experiments.space import WEIGHT_MAX, WEIGHT_MIN, Dimension, Range, What

DIMENSIONS = 10
TRIALS = 60
TOLERANCE = 0.02
"""That may be given up of an objective, as `sim tune` has it."""
NOISE = (0.05, 0.02)
"""By rung, of the first objective; of the second a fifth."""
SPAN = Range(low=WEIGHT_MIN, high=WEIGHT_MAX, logarithmic=True)
SPACE = tuple(
    Dimension(plugin=f"scorer-{at}", what=What.WEIGHT, span=SPAN, present=1.0)
    for at in range(DIMENSIONS)
)


class Landscape:
    """What each place truly costs; the same seed makes the same one."""

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
        """Of both objectives, below 0 being better than the present configuration."""
        place = [math.log(values[one.name]) for one in SPACE]
        return tuple(a - b for a, b in zip(self._raw(place), self.present, strict=True))

    def _raw(self, place):
        first = self.shape(self, place)
        second = sum(share * max(0.0, sign * place[at]) for at, sign, share in self.pays)
        return first, second

    def valley(self, place):
        """Edges, so that a little beside the best is dear already, and what two do together."""
        away = [a - b for a, b in zip(place, self.best, strict=True)]
        alone = sum(weight * abs(z) for weight, z in zip(self.matters, away, strict=True))
        return alone + sum(c * math.tanh(away[a] * away[b]) for a, b, c in self.pairs)

    def ratios(self, place):
        """As of weights of one sum: all of them twice as large is the same."""
        mean = fmean(place)
        away = [a - mean - b for a, b in zip(place, self.best, strict=True)]
        return sum(
            weight * z * z / (1 + abs(z)) for weight, z in zip(self.matters, away, strict=True)
        )

    def steps(self, place):
        """As of thresholds: flat, and elsewhere at once."""
        alone = sum(
            weight * (z > b) - 0.02 * z
            for weight, z, b in zip(self.matters, place, self.best, strict=True)
        )
        return alone + sum(
            2 * c * (place[a] > self.best[a]) * (place[b] < self.best[b]) for a, b, c in self.pairs
        )


SHAPES = {"valley": Landscape.valley, "ratios": Landscape.ratios, "steps": Landscape.steps}


class Optuna:
    """Another of Optuna's samplers in the place of that of `Proposals`, told one number or both."""

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
    """Of one batch; `seed` is its own."""
    return lambda seed: optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=BATCH, multivariate=jointly
    )


def nsga(seed):
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=BATCH)


def chance(seed):
    return optuna.samplers.RandomSampler(seed=seed)


def told(costs):
    """As shipped."""
    return one_cost(costs, TOLERANCE)


class Way(NamedTuple):
    """How to search."""

    proposals: Callable
    """Of a seed."""
    ranked: Callable = sum
    """By which number of costs the best are kept."""
    told: Callable = sum
    """What is told of costs to who proposes."""


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
"""What may search, by what it is called in the table."""


def found(way, shape, seed, trials=TRIALS):
    """What a search gains truly, as the logarithm of both objectives together."""
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
                left = left[: math.ceil(len(left) * KEPT)]
        finished += [(way.ranked(seen[at]), costs[at]) for at in left]
        proposals.tell([way.told(seen[at]) for at in range(len(asked))])
    best = [costs for _, costs in sorted(finished)[:FINALISTS]]
    allowed = math.log1p(TOLERANCE)
    return max([0.0, *(-sum(costs) for costs in best if max(costs) <= allowed)])


LOOKED_AT = (*range(8), *range(100, 108))
HELD_OUT = (*range(200, 208), *range(300, 320))


def main():
    """The table of docs/simulator.md: mean of what was found, by shape, on the seeds held out."""
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
