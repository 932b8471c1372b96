"""Ray Serve LLM's prefix cache affinity router."""

import math
from random import Random
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Ints, Parameters
from homing_rivals.narrowing import least_of, most_of, only
from homing_rivals.radix_tree import HELD_BLOCKS, RadixTreeSettings


class RayPrefixAffinity(Parameters, frozen=True):
    """Prefer the endpoint with the longest match if it is at least 10 % of the prompt, else the one
    with the fewest blocks in the tree; the shortest queue among equals.

    If max R - min R > `imbalanced_threshold`, any endpoint may win: two are drawn at random, and
    the one with the shorter queue wins (`two-of-best-picker`). R is the number of an endpoint's
    requests in flight. The default of `imbalanced_threshold` is None (infinity) since
    ray-project/ray #59390; it was 10 before. Source: ray 2.60, `PrefixCacheAffinityRouter`.

    Different from Ray: blocks have 16 tokens instead of characters; queue lengths are the pickers'
    own count, where Ray asks replicas; the tree is always bounded, where Ray's can be configured
    otherwise. Kept from Ray: without a threshold, the endpoint that has a popular prefix gets all
    of its requests, however long its queue is.
    """

    type_name: ClassVar[str] = "ray-prefix-affinity-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = RadixTreeSettings.type_name
    producer: ClassVar[str] = producer_type

    match_rate_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.1
    imbalanced_threshold: Annotated[float, Meta(ge=0)] | None = None

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        apart = float(inflight.max() - inflight.min())
        if apart > (math.inf if self.imbalanced_threshold is None else self.imbalanced_threshold):
            return np.ones(len(inflight))
        tree = candidates.affinity(self.producer_type)
        share = tree.matched / (tree.total or 1)
        if share.max() >= self.match_rate_threshold:
            chosen = most_of(tree.matched)
        else:
            chosen = least_of(tree.columns.get(HELD_BLOCKS, inflight))
        return only(least_of(inflight, chosen))


class TwoOfBest(Parameters, frozen=True):
    """Draw two endpoints among those with the highest total score, and pick the one with fewer
    requests in flight.

    This picker uses the rule of the power of two choices (Mitzenmacher, 2001). If both drawn
    endpoints have equally many requests in flight, the one that was drawn first wins.
    """

    type_name: ClassVar[str] = "two-of-best-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=("inflight_requests",))

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        tied = contract.highest(scores)
        drawn = random.sample(range(len(tied)), min(2, len(tied)))
        inflight = candidates.inflight_requests
        winner = min(drawn, key=lambda at: int(inflight[tied[at]]))
        return tied[winner : winner + 1]


SCORERS: Final = (RayPrefixAffinity,)

PICKERS: Final = (TwoOfBest,)

STRATEGIES: Final = (
    contract.Strategy(
        name="ray-prefix-affinity",
        idea=(
            "Ray Serve 2.60: the longest match if it is at least 10 % of the prompt, else the "
            "endpoint with the fewest blocks in the tree."
        ),
        omissions=(
            "characters, here blocks of 16 tokens; queue lengths that replicas report on "
            "request; its multiplexing of adapters"
        ),
        config=contract.config_of(
            contract.producer(RadixTreeSettings.type_name, blockSizeTokens=16),
            contract.step(RayPrefixAffinity.type_name),
            picker=contract.step(TwoOfBest.type_name),
        ),
    ),
)
