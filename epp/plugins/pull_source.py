"""From which other endpoint the head of a prompt can be pulled instead of being computed again.

Source: llm-d/llm-d-router, `requestcontrol/dataproducer/p2psource`. Engines that offload blocks to memory
of the host let others fetch them; the sidecar of a pod reads from whom in a header of the request.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import (
    EXACT,
    HOST_BLOCKS,
    Abilities,
    Affinity,
    Candidates,
    Endpoint,
    Floats,
    InferenceRequest,
    Parameters,
)

SOURCE_HEADER: Final = "x-kv-cache-source-host-port"
_PREFILL: Final = "prefill"


class PullSource(Parameters, frozen=True):
    """`p2p-source-producer`: the request says which endpoint has more of its prompt than the chosen one.

    Of all endpoints that are ready, whatever filters leave of them, those are meant that hold at most one
    block less than whoever holds most; one of them is drawn by the request's id, with a weight of
    1 / (1 + waiting requests). Its address is set as `x-kv-cache-source-host-port` if it holds at least
    `minCachedTokenDelta` tokens more than the endpoint that was chosen. What a client says there is
    removed.

    Where engines tell what they hold, a source has what is in the memory of its host, `cpu`, without a
    gap from the first block on, and one that is not heard has nothing. An index of decisions knows no
    tiers, and is believed as it is.

    It works by being declared; no profile names it.
    """

    type_name: ClassVar[str] = "p2p-source-producer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, marks_requests=True, warns=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    own_headers: ClassVar[tuple[str, ...]] = (SOURCE_HEADER,)

    prefix_match_info_producer_name: str = ""
    """Name of the prefix index; empty: the default one."""
    min_cached_token_delta: Annotated[int, Meta(ge=1)] = 1
    """Tokens, below which to compute them is not slower than to pull them."""
    prefill_profile_name: str = _PREFILL
    """No effect: who serves a request computes its prompt."""

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    def warnings(self) -> list[str]:
        """What has no effect, without the place."""
        if self.prefill_profile_name in {"", _PREFILL}:
            return []
        return ["prefillProfileName has no effect, prefill and decode are not disaggregated here"]

    def request_headers(
        self, request: InferenceRequest, candidates: Candidates, endpoint: Endpoint, /
    ) -> Mapping[str, str]:
        known = candidates.affinity(self.prefix_match_info_producer_name)
        held = _pullable(known)
        most = held.max(initial=0.0)
        if not most:
            return {}
        endpoints = candidates.endpoints
        near = np.flatnonzero((held > 0) & (held >= most - 1))
        source = near[_drawn(request.request_id, candidates.waiting_requests[near])]
        chosen = next(
            (at for at, one in enumerate(endpoints) if one.endpoint_id == endpoint.endpoint_id),
            None,
        )
        if chosen is None or chosen == source:
            return {}
        own = max(float(known.matched[chosen]), float(held[chosen]))
        ahead_tokens = (float(held[source]) - own) * candidates.block_tokens
        if ahead_tokens < self.min_cached_token_delta:
            return {}
        return {SOURCE_HEADER: endpoints[source].address}


def _pullable(known: Affinity) -> Floats:
    """float64[n], leading blocks of the prompt that others can fetch from each."""
    if EXACT not in known.columns:
        return known.matched.astype(np.float64)
    return known.columns.get(HOST_BLOCKS, np.zeros(len(known.matched)))


def _drawn(request_id: str, waiting: Floats) -> int:
    """One of them, always the same for one id; the longer the queue the less likely."""
    weights = 1.0 / (1.0 + np.nan_to_num(waiting))
    drawn = xxhash.xxh64_intdigest(request_id.encode("utf-8", "surrogatepass")) / 2.0**64
    return min(
        int(np.searchsorted(weights.cumsum(), drawn * weights.sum(), "right")), len(weights) - 1
    )
