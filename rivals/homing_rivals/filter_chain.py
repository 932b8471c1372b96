"""GIE's original chain of filters, and the position in it that its proposal gave to prefixes.

Sources: proposal 0602 of kubernetes-sigs/gateway-api-inference-extension, and the scheduler of its
v0. The chain filters by adapter, prefix, queue and KV cache, in this order, and then takes any of
the remaining endpoints.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Bools, Candidates, Floats, InferenceRequest, Parameters

_APPROXIMATE: Final = "approx-prefix-cache-producer"


class AdapterFirst(Parameters, frozen=True):
    """Keep endpoints that run the request's adapter, else those with a free adapter slot, else all.

    Different from GIE: for one request in a thousand, the original keeps the endpoints with a free
    adapter slot although others run the adapter.
    """

    type_name: ClassVar[str] = "adapter-first-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("adapter_state", "model"))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        adapters = candidates.adapter_state
        running = adapters.active(request.model)
        if running.any():
            return running
        free: Bools = adapters.active_count < adapters.slots_max
        return free if free.any() else np.ones(len(candidates), dtype=np.bool_)


class LoadAwarePrefix(Parameters, frozen=True):
    """GIE's proposal 0602: keep the endpoints that are not busy and have the most of the prompt
    cached.

    An endpoint is not busy if waiting <= q and KV usage <= k; q is `queue_threshold`, k
    `kv_cache_threshold`. If all endpoints are busy, all count as not busy. The longest match of the
    prompt decides only if it has at least `match_tokens_min` tokens and the share `match_ratio_min`
    of the prompt's full blocks; otherwise all endpoints that are not busy stay. An endpoint whose
    load is unknown counts as busy.

    The proposal requires that a match is long enough but names no threshold; "only 10 tokens match"
    is its example of a match that is too short. The default of one block of 64 tokens for
    `match_tokens_min` is our choice.
    """

    type_name: ClassVar[str] = "load-aware-prefix-filter"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = _APPROXIMATE
    producer: ClassVar[str] = ""

    queue_threshold: Annotated[float, Meta(ge=0)] = 5.0
    kv_cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.8
    match_tokens_min: Annotated[float, Meta(ge=0)] = 64.0
    match_ratio_min: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        below: Bools = (candidates.waiting_requests <= self.queue_threshold) & (
            candidates.kv_cache_usage <= self.kv_cache_threshold
        )
        if not below.any():
            below[:] = True
        known = candidates.affinity("")
        matched = np.where(below, known.matched, 0)
        best = int(matched.max())
        gains = (
            best > 0
            and best * candidates.block_tokens >= self.match_tokens_min
            and best >= self.match_ratio_min * known.total
        )
        if gains:
            below &= matched == best
        return below


class LeastQueue(Parameters, frozen=True):
    """Keep the endpoints whose number of waiting requests is among the lowest: at most min + (max -
    min) / n, for n candidates.

    An unknown number of waiting requests counts as the median of the known ones.
    """

    type_name: ClassVar[str] = "least-queue-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("waiting_requests",))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return _near_the_least(candidates.waiting_requests)


class LeastKVCache(Parameters, frozen=True):
    """Keep the endpoints whose KV-cache usage is among the lowest: at most min + (max - min) / n,
    for n candidates.

    An unknown KV-cache usage counts as the median of the known ones.
    """

    type_name: ClassVar[str] = "least-kv-cache-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("kv_cache_usage",))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return _near_the_least(candidates.kv_cache_usage)


def _near_the_least(load: Floats) -> Bools:
    known = np.isfinite(load)
    if not known.any():
        return np.ones(len(load), dtype=np.bool_)
    if not known.all():
        load[~known] = float(np.median(load[known]))
    least, most = float(load.min()), float(load.max())
    near: Bools = load <= least + (most - least) / len(load)
    return near


FILTERS: Final = (AdapterFirst, LoadAwarePrefix, LeastQueue, LeastKVCache)

STRATEGIES: Final = (
    contract.Strategy(
        name="gie-filter-chain",
        idea=(
            "GIE's first proposal for prefixes: adapter, then the longest match where the queue is at "
            "most 5 and the KV cache at most 0.8 full, then the least queue and KV cache."
        ),
        omissions=(
            "one request in a thousand, which the original sends to a free adapter slot in any case"
        ),
        config=contract.config_of(
            contract.producer(_APPROXIMATE),
            contract.step(AdapterFirst.type_name),
            contract.step(LoadAwarePrefix.type_name),
            contract.step(LeastQueue.type_name),
            contract.step(LeastKVCache.type_name),
            picker=contract.step("random-picker"),
        ),
    ),
)
