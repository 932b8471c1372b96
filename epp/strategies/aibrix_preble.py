"""AIBrix's variant of Preble: exploit a long match, else the least cost by fitted prefill times.

Source: `prefix_cache_preble.go` of vllm-project/aibrix (2026-08), after Preble (arXiv 2407.00023).
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.cost import scores_of_cost
from epp.strategies.preble_tree import COST_S, REQUESTS, TREE_BLOCKS, PrebleTreeSettings
from epp.strategies.strategy import Strategy, config_of, producer, step


class AibrixPreble(Parameters, frozen=True):
    """Who has most of a prompt that is known by half, else argmin of prefill and decode cost.

    If the tree knows more than `match_share` of the prompt: of those on its deepest node that
    anybody has, the fewest requests in 3 minutes. Else argmin of the sum, over the nodes that the
    endpoint has and in which prompts of the last 3 minutes end, of

        missed share x requests x prefill(tokens, context) / 0.9 + 45 tokens x 0.15 s

    Where max R - min R > `imbalance_requests`, R in flight, only those with min R are looked at
    (PR #2382).

    Kept: prefill times are those of a 7B model on one of two cards; time per token of answers is a
    constant; the cost of a node is divided by its models, not by its endpoints; with an evicted
    leaf its endpoints leave all nodes above it. The last two are mended in `aibrix-preble-fixed`.

    Differs: blocks of 16 tokens where AIBrix compares token by token, the first prompt of several,
    equals in turn.
    """

    type_name: ClassVar[str] = "aibrix-preble-scorer"
    producer_type: ClassVar[str] = PrebleTreeSettings.type_name

    match_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    imbalance_requests: Annotated[int, Meta(ge=0)] = 8

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        n = len(candidates)
        known = candidates.affinity(self.producer_type)
        if not known.columns:
            return np.ones(n)
        inflight = candidates.inflight_requests
        least = int(inflight.min())
        eligible = np.ones(n, dtype=np.bool_)
        if int(inflight.max()) - least > self.imbalance_requests:
            eligible = inflight == least
        cost = known.columns[COST_S]
        depth = known.matched[eligible].max()
        if depth > 0 and known.columns[TREE_BLOCKS][0] > self.match_share * known.total:
            eligible &= known.matched == depth
            cost = known.columns[REQUESTS]
        return scores_of_cost(np.where(eligible, cost, np.inf))


SCORERS: Final = (AibrixPreble,)
INDEXES: Final = (PrebleTreeSettings,)

STRATEGIES: Final = (
    Strategy(
        name="aibrix-preble",
        idea="AIBrix, prefix-cache-preble: holders of half the prompt, else the least fitted cost.",
        config=config_of(step(AibrixPreble.type_name)),
    ),
    Strategy(
        name="aibrix-preble-fixed",
        idea="AIBrix's Preble where endpoints share a node's cost and a lost leaf loses no parent.",
        config=config_of(
            producer(PrebleTreeSettings.type_name, sharesCost=True, evictsFromParents=False),
            step(AibrixPreble.type_name),
        ),
    ),
)
