"""Random distributions of lengths, counts and pauses: the types that inference-perf supports."""

import math
from random import Random
from typing import Literal, TypeAlias

from msgspec import Struct

from sim.traces.arrival import FieldError

Kind: TypeAlias = Literal["normal", "lognormal", "uniform", "fixed", "poisson"]
_KNUTH_MEAN_MAX = 30.0


class Spread(Struct, frozen=True, kw_only=True):
    """A random distribution whose values below `min` or above `max` are set to that limit. Its
    constructor raises `FieldError` for contradicting values.

    `mean` and `std_dev` are those of the values before they are limited, also for a lognormal
    distribution (not those of the logarithms). A uniform distribution uses neither; fixed values and
    a Poisson distribution use only `mean`.
    """

    type: Kind = "normal"
    mean: float
    std_dev: float = 0.0
    min: float = 0.0
    max: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.min <= self.max and self.mean >= 0 and self.std_dev >= 0):
            raise FieldError("", "Expected 0 <= min <= max, mean >= 0 and std_dev >= 0")
        if self.type == "uniform" and self.max == math.inf:
            raise FieldError("max", "Expected an upper end of a uniform distribution, found none")
        if self.type == "lognormal" and self.std_dev and not self.mean:
            raise FieldError("mean", "Expected above 0 for a lognormal, got 0")

    def draw(self, random: Random) -> float:
        """Return one random value of the distribution, clipped at `min` and `max`."""
        return min(max(self._draw(random), self.min), self.max)

    def count(self, random: Random) -> int:
        """Return one random value of the distribution, rounded to an integer of at least 1."""
        return max(1, round(self.draw(random)))

    def _draw(self, random: Random) -> float:
        if self.type == "uniform":
            return random.uniform(self.min, self.max)
        if self.type == "poisson" and self.mean < _KNUTH_MEAN_MAX:
            return _small_poisson(random, self.mean)
        if self.type == "poisson":
            return round(random.gauss(self.mean, math.sqrt(self.mean)))
        if self.type == "fixed" or not self.std_dev:
            return self.mean
        if self.type == "normal":
            return random.gauss(self.mean, self.std_dev)
        variance = math.log1p((self.std_dev / self.mean) ** 2)
        return random.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))


def fixed(value: float) -> Spread:
    """Return a distribution that always gives `value`."""
    return Spread(type="fixed", mean=value)


def around(mean: float, share: float = 0.3) -> Spread:
    """Return a uniform distribution from `mean * (1 - share)` to `mean * (1 + share)`."""
    return Spread(type="uniform", mean=mean, min=mean * (1 - share), max=mean * (1 + share))


def lognormal(mean: float, std_dev: float, lowest: float, highest: float) -> Spread:
    """Return a lognormal distribution that is clipped at `lowest` and `highest`."""
    return Spread(type="lognormal", mean=mean, std_dev=std_dev, min=lowest, max=highest)


def _small_poisson(random: Random, mean: float) -> int:
    """Return a random number with a Poisson distribution of mean `mean`, by Knuth's method: count
    random factors until their product is at most exp(-mean).
    """
    limit, product, count = math.exp(-mean), random.random(), 0
    while product > limit:
        product *= random.random()
        count += 1
    return count
