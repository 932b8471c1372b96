"""Picker plugins, which choose the destination of a request by the candidates' total scores and
order the fallback endpoints.
"""

from random import Random
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.decision.profile import highest
from epp.plugins.contract import (
    Abilities,
    Candidates,
    Floats,
    Ints,
    Parameters,
)

_SCORE_MIN: Final = 1e-300
"""Replacement for a total score of 0 in a division: smaller than any other score, and equal for all
zeros.
"""


class MaxScore(Parameters, frozen=True):
    """Pick the endpoint with the highest total score.

    Equal scores are picked round robin by `rotation`, so that a burst spreads.
    """

    type_name: ClassVar[str] = "max-score-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=(), picks_several=True)

    max_num_of_endpoints: Annotated[int, Meta(ge=1)] = 1

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        tied = highest(scores)
        first = rotation % len(tied)
        if self.max_num_of_endpoints == 1:
            return tied[first : first + 1]
        rest = np.argsort(-scores, kind="stable")[len(tied) :]
        order: Ints = np.concatenate((tied[first:], tied[:first], rest))
        return order[: self.max_num_of_endpoints]


class WeightedRandom(Parameters, frozen=True):
    """Draw endpoints at random in proportion to their total scores, without replacement; uniformly
    if all scores are 0.

    Algorithm A-Res by Efraimidis and Spirakis: the largest keys U^(1/score) win; here their
    logarithms.
    """

    type_name: ClassVar[str] = "weighted-random-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=(), picks_several=True)

    max_num_of_endpoints: Annotated[int, Meta(ge=1)] = 1

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        # 1 - U is in (0, 1], where the logarithm is finite.
        draws = np.array([1.0 - random.random() for _ in range(len(scores))])
        keys = np.log(draws) / np.maximum(scores, _SCORE_MIN)
        order: Ints = np.argsort(-keys, kind="stable")
        return order[: self.max_num_of_endpoints]


class UniformRandom(Parameters, frozen=True):
    """Draw endpoints at random with equal probability, regardless of their scores."""

    type_name: ClassVar[str] = "random-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=(), picks_several=True)

    max_num_of_endpoints: Annotated[int, Meta(ge=1)] = 1

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        count = min(self.max_num_of_endpoints, len(scores))
        return np.array(random.sample(range(len(scores)), count), dtype=np.int64)
