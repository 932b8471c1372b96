"""The index of llm-d's endpoint picker and of its predecessor, as they ship it.

Sources: llm-d/llm-d-router v0.10; kubernetes-sigs/gateway-api-inference-extension v1 and its
proposal 0602. The scorers of these strategies are Homing's own; their prefix index,
`routed-blocks-producer`, and the filter of `llm-d-gate` are copies. The documentation of
llm-d-router's `lora-affinity-scorer` gives adapters a weight of 1. The sample configuration of both
projects, `test/integration/epp/testdata/default-config.yaml` (GIE v1.5.0), has this scorer beside
the other three, each with a weight of 1.

Different from llm-d-router: an adapter with only waiting requests counts as running, as in vLLM's
lists; llm-d-router scores it 0.6.

The strategy `llm-d-gate` has the queue of llm-d-router with its defaults: one flow, first come,
first served, a wait of at most 60 s, and a gate that compares the mean utilization of the pool with
1.0. The utilization of an endpoint is the one of its last metrics page. llm-d-router reads pages
each 50 ms and places at most one request per millisecond. The copy places at most 50 requests
between two pages.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    InferenceRequest,
    Parameters,
    Step,
    Strategy,
    config_of,
    producer,
    step,
)
from homing_rivals.routed_blocks import RoutedBlocksSettings

_ROUTED: Final = RoutedBlocksSettings.type_name


class Gate(Parameters, frozen=True):
    """Hold requests in the picker's queue while the mean utilization of the pool is 1 or more; drop
    no candidate.

    The utilization of an endpoint is max(W / q, KV / k). W are the requests that wait in the engine
    and KV is the used share of its KV cache, both by its last metrics page; q is
    `queue_depth_threshold` and k is `kv_cache_util_threshold`. An endpoint whose page is older than
    `staleness_s`, or shows neither W nor KV, has utilization 1. Requests also wait while
    `placed_max` or more requests of all endpoints together were placed after the last page of their
    endpoint.
    """

    type_name: ClassVar[str] = "llm-d-gate-filter"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("waiting_requests", "kv_cache_usage", "metrics_age_s", "unreported_requests"),
        holds_requests=True,
    )

    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    staleness_s: Annotated[float, Meta(gt=0)] = 1.0
    placed_max: Annotated[int, Meta(ge=1)] = 50

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return np.ones(len(candidates), dtype=np.bool_)

    def holds(self, request: InferenceRequest, candidates: Candidates, /) -> bool:
        if candidates.unreported_requests.sum() >= self.placed_max:
            return True
        queue = candidates.waiting_requests / self.queue_depth_threshold
        used = np.fmax(queue, candidates.kv_cache_usage / self.kv_cache_util_threshold)
        blind = np.isnan(used) | (candidates.metrics_age_s > self.staleness_s)
        return float(np.where(blind, 1.0, used).mean()) >= 1.0


_NEVER_FULL: Final = producer("concurrency-detector", maxConcurrency=1_000_000_000)
_QUEUE: Final = f"""\
featureGates: [flowControl]
flowControl:
  defaultRequestTTL: 60s
  saturationDetector: {{pluginRef: {_NEVER_FULL.type_name}}}
"""
"""Head of the configuration of `llm-d-gate`. Requests wait for 60 s at most, as in llm-d-router. The
gate alone makes requests wait, because Homing's own detector never finds an endpoint full.
"""


def _weighted(
    index: Step,
    prefix: float,
    queue: float,
    kv_cache: float,
    adapters: float,
    *before: Step,
) -> str:
    """Return the configuration of the weighted scorers with the prefix index `index` and the steps
    `before` them.

    The scorer of adapters is left out if its weight is 0.
    """
    return config_of(
        index,
        *before,
        # The original has no keys on which replicas agree.
        step(
            "prefix-cache-scorer",
            prefix,
            prefixMatchInfoProducerName=index.type_name,
            agreement="none",
        ),
        step("queue-scorer", queue),
        step("kv-cache-utilization-scorer", kv_cache),
        *([step("lora-affinity-scorer", adapters)] if adapters else []),
    )


def _three_two_two(index: Step, adapters: float = 0) -> str:
    return _weighted(index, 3, 2, 2, adapters)


_LLM_D: Final = producer(_ROUTED, blockTokens=64, autoTune=True, lastPartialBlock=True)
_V1: Final = {
    "blockTokens": 16,
    "blocksPerRequestMax": 256,
    "blocksPerEndpointMax": 31_250,
}

INDEXES: Final = (RoutedBlocksSettings,)
FILTERS: Final = (Gate,)

STRATEGIES: Final = (
    Strategy(
        name="llm-d-approximate",
        idea=(
            "llm-d's approximate index as shipped: blocks of 64 tokens and the last partial one, "
            "heads dropped first, blocks after gaps count; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `llm-d-approximate-lora`",
        config=_three_two_two(_LLM_D),
    ),
    Strategy(
        name="llm-d-approximate-lora",
        idea="llm-d's approximate index as shipped, and its scorer of adapters: 3, 2, 2 and 1.",
        omissions="its score of 0.6 for an adapter that waits",
        config=_three_two_two(_LLM_D, adapters=1),
    ),
    Strategy(
        name="llm-d-gate",
        idea=(
            "llm-d's approximate index and its queue: requests wait while the mean utilization "
            "by the last metrics pages is 1 or more."
        ),
        omissions="priorities, flows and limits of the queue",
        config=_QUEUE + _weighted(_LLM_D, 3, 2, 2, 0, step(Gate.type_name), _NEVER_FULL),
    ),
    Strategy(
        name="gie-v1",
        idea=(
            "GIE v1 as shipped: 256 blocks of 64 characters at most, heads dropped first, blocks "
            "after gaps count; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `gie-v1-lora`",
        config=_three_two_two(producer(_ROUTED, **_V1)),
    ),
    Strategy(
        name="gie-v1-lora",
        idea="GIE v1 by its sample configuration with adapters: prefix, queue, KV cache, LoRA, 1 each.",
        omissions="its score of 0.6 for an adapter that waits",
        config=_weighted(producer(_ROUTED, **_V1), 1, 1, 1, 1),
    ),
    Strategy(
        name="gie-v1-fixed",
        idea="GIE v1, except that tails are dropped first and no block after a gap counts.",
        omissions="as `gie-v1`",
        config=_three_two_two(producer(_ROUTED, **_V1, contiguous=True, tailFirst=True)),
    ),
)
