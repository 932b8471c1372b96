"""vLLM production-stack: its prefix-aware policy, which ignores load, and its load-aware one."""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.narrowing import least_of, most_of, only, with_room
from homing_rivals.radix_tree import RadixTreeSettings


class LongestPrefix(Parameters, frozen=True):
    """`prefixaware`: prefer the endpoint e with the longest match, matched(e), at random among
    equals; any endpoint if nothing matches.

    production-stack has a trie of hashes of 128 characters each; the copy has the tree of
    `radix-tree-producer` with blocks of 32 tokens. production-stack descends in its trie while an
    available endpoint is left, which gives the same result as the longest match of any endpoint.
    Sources: `routing_logic.py`, `prefix/hashtrie.py`.

    `load_factor` c, off by default, repairs the missing term for load: only endpoints that would
    have at most ceil(c * (total R + 1) / n) requests with this one are considered, and the one with
    the fewest requests among the longest matches wins. R is the number of an endpoint's requests in
    flight.

    Different from production-stack: only full blocks count, where production-stack counts the last
    part of a prompt as 128 characters; the model is in the hash; an endpoint that leaves is
    forgotten; the tree is bounded by memory, where production-stack's trie grows until its process
    is killed (#711 proposes a limit). Kept from production-stack: there is no term for load, so a
    shared system prompt sends all requests to one endpoint (#957, #959).
    """

    type_name: ClassVar[str] = "longest-prefix-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = RadixTreeSettings.type_name
    producer: ClassVar[str] = producer_type

    load_factor: Annotated[float, Meta(ge=1)] | None = None

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        matched = candidates.affinity(self.producer_type).matched
        if self.load_factor is None:
            return only(most_of(matched))
        inflight = candidates.inflight_requests
        return only(least_of(inflight, most_of(matched, with_room(inflight, self.load_factor))))


class RelativeLoad(Parameters, frozen=True):
    """`loadaware` (#1035): prefer the endpoint e with the highest matched(e) / T - beta * (R(e) -
    mean R) / max(1, mean R).

    matched(e) is the number of the prompt's tokens that e has cached, T the number of tokens of the
    prompt, and R(e) the number of requests in flight at e. Both terms of the formula have no unit:
    with beta = 1, an endpoint with twice the mean load needs the whole prompt cached to equal an
    endpoint with the mean load and nothing cached.

    Different from production-stack: the prefix index estimates cached prefixes, where LMCache's
    controller reports them; equal endpoints alternate.
    """

    type_name: ClassVar[str] = "relative-load-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    producer: ClassVar[str] = ""

    beta: Annotated[float, Meta(ge=0)] = 1.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        cached = candidates.matched_blocks * candidates.block_tokens / max(1, request.prompt_tokens)
        inflight = candidates.inflight_requests.astype(np.float64)
        mean = float(inflight.mean())
        return contract.scores_of_cost(self.beta * (inflight - mean) / max(1.0, mean) - cached)


SCORERS: Final = (LongestPrefix, RelativeLoad)

STRATEGIES: Final = (
    contract.Strategy(
        name="production-stack-prefix-aware",
        idea=(
            "production-stack prefixaware: a random endpoint among those with the longest cached "
            "prefix."
        ),
        omissions="the end of a prompt that fills no block; its formula ignores adapters",
        config=contract.config_of(
            contract.producer(
                RadixTreeSettings.type_name,
                blockSizeTokens=32,
                lruCapacityPerServer=67_108_864,
                memoryMaxBytes=1_073_741_824,
            ),
            contract.step(LongestPrefix.type_name),
            picker=contract.step("weighted-random-picker"),
        ),
    ),
    contract.Strategy(
        name="production-stack-prefix-aware-fixed",
        idea="production-stack prefixaware within 1.25 times the mean load, with a bounded tree.",
        omissions="as `production-stack-prefix-aware`",
        config=contract.config_of(
            contract.producer(RadixTreeSettings.type_name, blockSizeTokens=32),
            contract.step(LongestPrefix.type_name, loadFactor=1.25),
            picker=contract.step("weighted-random-picker"),
        ),
    ),
    contract.Strategy(
        name="production-stack-load-aware",
        idea=(
            "production-stack loadaware: the share of the prompt that is cached, minus the "
            "relative load."
        ),
        omissions="LMCache's reports of cached prefixes; its formula ignores adapters",
        config=contract.config_of(contract.step(RelativeLoad.type_name)),
    ),
)
