"""NVIDIA Dynamo's KV router: blocks to prefill plus running blocks, or two tiers of rules.

Sources: ai-dynamo/dynamo 1.6, `lib/kv-router` and `lib/router-plugins`.

The strategy `dynamo-queue` has Dynamo's queue of requests. Requests of `dynamo-queue` wait in the
picker, first come, first served, while every worker has more than `router_queue_threshold` (16)
times its `max_num_batched_tokens` (8,192) uncached tokens to prefill. A new request also waits
while other requests wait. The cached prefix of a queued request is looked up when it leaves the
queue. `dynamo-queue` omits priorities, other orders of the queue (last come first served, shortest
prefill first), classes with queues and limits of their own, and workers that differ in
`max_num_batched_tokens`. The queue is off by default in Dynamo, and in the other strategies of this
family.

The strategy `dynamo-threshold` refuses requests while every worker is busy, with the thresholds of
the examples in Dynamo's documentation. The thresholds are off by default in Dynamo.

All strategies of this family omit Dynamo's filter by adapter, which uses a table of Dynamo's
frontend that assigns adapters to workers.
"""

import math
from random import Random
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Bools, Candidates, Floats, InferenceRequest, Ints, Parameters
from homing_rivals.block_load import BlockLoadSettings

_INDEX: Final = BlockLoadSettings.type_name
_APPROXIMATE: Final = "approx-prefix-cache-producer"
_UNTIL_FIRST_TOKEN: Final = contract.producer("inflight-load-producer", peakPrefillThroughput=1)
"""Producer with a prefill speed so low that tokens in flight do not drain with time.

They count until a first token is seen or counted, as in Dynamo without a
`router_prefill_load_model`.
"""
_TTL: Final = "120s"
"""Time for which Dynamo's approximate mode assumes that a routed block is cached."""


class DynamoCost(Parameters, frozen=True):
    """NVIDIA Dynamo: prefer the endpoint with the fewest blocks to prefill and to decode.

    The endpoint e with the lowest cost(e) = s * max(0, (P(e) + T) / B - c * decay(e) * m(e)) + D(e)
    + w * R(e) wins. P(e) is the number of uncached tokens that e still has to prefill; T the number
    of tokens of the prompt; B the number of tokens in a block; m(e) the number of leading blocks
    that e is estimated to have cached. D(e) is the number of blocks of this request and of the
    requests in flight at e, where a block that several share counts once; R(e) is the number of
    requests in flight at e. s is `prefill_load_scale`, c is `overlap_credit`, and w is
    `active_request_weight`. decay(e) = 1 / (1 + d * (P(e) - min P) / T), with d = `overlap_decay`.

    Different from Dynamo: cached blocks are those that were routed to an endpoint, never those of
    an engine's event, and of one cache tier only; blocks have 64 tokens; blocks that an answer will
    need are not counted. Running requests of other pickers are not counted either, except the
    tokens that they still have to prefill. A known fault of Dynamo is kept: a prompt that all
    requests begin with attracts all of them to its endpoint, because shared blocks count once
    (dynamo #737). `block-load-producer` must be the first declared index that counts blocks.
    """

    type_name: ClassVar[str] = "dynamo-cost-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads_index=True)
    producer_type: ClassVar[str] = _INDEX
    producer: ClassVar[str] = producer_type

    prefill_load_scale: Annotated[float, Meta(ge=0)] = 1.0
    overlap_credit: Annotated[float, Meta(ge=0)] = 1.0
    overlap_decay: Annotated[float, Meta(ge=0)] = 0.0
    active_request_weight: Annotated[float, Meta(ge=0)] = 0.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        known = candidates.affinity(self.producer_type)
        if not known.columns:
            return None
        ahead = candidates.inflight_prefill_tokens
        prompt_tokens = candidates.prompt_tokens
        decay = 1.0 + self.overlap_decay * (ahead - ahead.min()) / max(prompt_tokens, 1)
        credit = self.overlap_credit * known.matched / decay
        prefill = np.maximum((ahead + prompt_tokens) / candidates.block_tokens - credit, 0.0)
        decode = known.columns["active_blocks"] + known.columns["new_blocks"]
        requests = self.active_request_weight * candidates.inflight_requests
        return contract.scores_of_cost(self.prefill_load_scale * prefill + decode + requests)


class TwoTier(Parameters, frozen=True):
    """`dynamo-two-tier-cost-fn`: prefer the least loaded endpoint if load is uneven, else the one
    with the longest cached prefix, else the least loaded.

    If load is uneven (max R - min R > a and max R > r * min R), the endpoint with the fewest
    requests in flight wins. R is the number of an endpoint's requests in flight, a is
    `balance_absolute`, r is `balance_relative`, and c is `cache_threshold`. If load is even and the
    longest cached prefix has more than the share c of the prompt's blocks, including a last one
    that is not full, the endpoint with the fewest requests among those with this longest prefix
    wins. The endpoint with the fewest requests wins in all other cases. All comparisons are strict.

    Different from Dynamo: cached blocks are those that were routed to an endpoint; Dynamo knows
    them from the engines' events.
    """

    type_name: ClassVar[str] = "dynamo-two-tier-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads_index=True)
    producer_type: ClassVar[str] = _APPROXIMATE
    producer: ClassVar[str] = ""

    balance_absolute: Annotated[float, Meta(ge=0)] = 32.0
    balance_relative: Annotated[float, Meta(ge=0)] = 1.1
    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        requests = candidates.inflight_requests.astype(np.float64)
        least, most = float(requests.min()), float(requests.max())
        uneven = most - least > self.balance_absolute and most > self.balance_relative * least
        known = candidates.affinity("")
        best = int(known.matched.max())
        blocks = max(known.total, math.ceil(candidates.prompt_tokens / candidates.block_tokens))
        if not uneven and best > self.cache_threshold * blocks:
            requests[known.matched < best] = math.inf
        return contract.scores_of_cost(requests)


class Queue(Parameters, frozen=True):
    """Hold requests in the picker's queue while every endpoint has more than t * b tokens to
    prefill; drop no candidate.

    t is `queue_threshold`, and b is `max_num_batched_tokens` of every engine. An endpoint with
    exactly t * b tokens lets requests continue.
    """

    type_name: ClassVar[str] = "dynamo-queue-filter"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        reads=("inflight_prefill_tokens",),
        holds_requests=True,
    )

    queue_threshold: Annotated[float, Meta(ge=0)] = 16.0
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] = 8_192

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return np.ones(len(candidates), dtype=np.bool_)

    def holds(self, request: InferenceRequest, candidates: Candidates, /) -> bool:
        busy_above = self.queue_threshold * self.max_num_batched_tokens
        return float(candidates.inflight_prefill_tokens.min()) > busy_above


class Busy(Parameters, frozen=True):
    """Drop endpoints that are busy; if all are, the request is refused.

    An endpoint is busy if its used share of the KV cache exceeds `active_decode_blocks_threshold`,
    or if it has more than `active_prefill_tokens_threshold` uncached tokens to prefill. Dynamo
    counts the blocks of its own requests; here the share is that of the last metrics page.
    """

    type_name: ClassVar[str] = "dynamo-busy-filter"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        reads=("inflight_prefill_tokens", "kv_cache_usage"), sheds_load=True
    )

    active_decode_blocks_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.85
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] = 10_000

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        blocks = candidates.kv_cache_usage > self.active_decode_blocks_threshold
        tokens = candidates.inflight_prefill_tokens > self.active_prefill_tokens_threshold
        kept: Bools = ~(blocks | tokens)
        return kept


class Softmax(Parameters, frozen=True):
    """Draw an endpoint at random with weights exp(score / t), for total scores stretched to [0, 1];
    t is `temperature`.

    If t is 0, the picker draws among the endpoints with the highest score. These weights equal
    Dynamo's exp(-cost / ((max - min) * t)) (`router_temperature`), if a scorer turned the costs
    into scores by their range. If several endpoints are needed, the picker draws them without
    replacement (the largest keys by Gumbel's method); if t is 0, all after the first follow by
    score.
    """

    type_name: ClassVar[str] = "softmax-picker"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads=(), picks_several=True)

    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    max_num_of_endpoints: Annotated[int, Meta(ge=1)] = 1

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        least, most = float(scores.min()), float(scores.max())
        stretched = (most - least) * self.temperature
        if stretched > 0:
            # 1 - U is in (0, 1]; the key for 1 exceeds all others, as it should.
            draws = np.array([1.0 - random.random() for _ in range(len(scores))])
            with np.errstate(divide="ignore"):
                keys = (scores - least) / stretched - np.log(-np.log(draws))
            order: Ints = np.argsort(-keys, kind="stable")
            return order[: self.max_num_of_endpoints]
        best = contract.highest(scores)
        first = best[random.randrange(len(best))]
        if self.max_num_of_endpoints == 1:
            return np.array([first], dtype=np.int64)
        rest = np.argsort(-scores, kind="stable")
        order = np.concatenate(([first], rest[rest != first]))
        return order[: self.max_num_of_endpoints]


INDEXES: Final = (BlockLoadSettings,)
FILTERS: Final = (Queue, Busy)
SCORERS: Final = (DynamoCost, TwoTier)
PICKERS: Final = (Softmax,)

STRATEGIES: Final = (
    contract.Strategy(
        name="dynamo",
        idea=(
            "NVIDIA Dynamo without events: the fewest blocks to prefill and to decode; a block "
            "counts as cached for 120 s where it was sent."
        ),
        omissions=(
            "engines' events; its queue, which `dynamo-queue` has; blocks that answers will "
            "need; its filter by adapter; tokens in flight until the first chunk: here metrics "
            "pages and time reduce them"
        ),
        config=contract.config_of(
            contract.producer(_INDEX, ttl=_TTL),
            contract.step(DynamoCost.type_name),
            picker=contract.step(Softmax.type_name),
        ),
    ),
    contract.Strategy(
        name="dynamo-first-token",
        idea="NVIDIA Dynamo with tokens in flight until a first token is seen or counted.",
        omissions=(
            "as `dynamo`, except for tokens in flight: Dynamo sees first tokens, here metrics "
            "pages count them"
        ),
        config=contract.config_of(
            contract.producer(_INDEX, ttl=_TTL),
            _UNTIL_FIRST_TOKEN,
            contract.step(DynamoCost.type_name),
            picker=contract.step(Softmax.type_name),
        ),
    ),
    contract.Strategy(
        name="dynamo-queue",
        idea=(
            "NVIDIA Dynamo with its queue, above 16 times 8,192 tokens, and tokens in flight "
            "until a first token is seen or counted."
        ),
        omissions=(
            "as `dynamo-first-token`, except for the queue; the queue's priorities, orders other "
            "than first come first served, classes and limits"
        ),
        config=contract.config_of(
            contract.producer(_INDEX, ttl=_TTL),
            _UNTIL_FIRST_TOKEN,
            contract.step(Queue.type_name),
            contract.step(DynamoCost.type_name),
            picker=contract.step(Softmax.type_name),
        ),
    ),
    contract.Strategy(
        name="dynamo-threshold",
        idea=(
            "NVIDIA Dynamo that refuses requests while every endpoint uses more than 85 % of its "
            "KV cache or has more than 10,000 tokens to prefill."
        ),
        omissions=(
            "as `dynamo-first-token`; a refusal has status 429 instead of 529; blocks in use are "
            "those of the last metrics page"
        ),
        config=contract.config_of(
            contract.producer(_INDEX, ttl=_TTL),
            _UNTIL_FIRST_TOKEN,
            contract.step(Busy.type_name),
            contract.step(DynamoCost.type_name),
            picker=contract.step(Softmax.type_name),
        ),
    ),
    contract.Strategy(
        name="dynamo-temperature",
        idea="NVIDIA Dynamo with temperature 0.5: its cost, drawn by softmax.",
        omissions="as `dynamo`",
        config=contract.config_of(
            contract.producer(_INDEX, ttl=_TTL),
            contract.step(DynamoCost.type_name),
            picker=contract.step(Softmax.type_name, temperature=0.5),
        ),
    ),
    contract.Strategy(
        name="dynamo-two-tier",
        idea=(
            "NVIDIA Dynamo's two tiers: the least loaded endpoint if load is uneven by 32, else "
            "the one with most of the prompt cached, else the least loaded."
        ),
        omissions="engines' events; its queue, which `dynamo-queue` has; its filter by adapter",
        config=contract.config_of(
            contract.producer(_APPROXIMATE, ttl=_TTL),
            contract.step(TwoTier.type_name),
            picker=contract.step(Softmax.type_name),
        ),
    ),
)
