"""The choice of another endpoint from which cached blocks of a prompt can be pulled.

Source: llm-d/llm-d-router, `requestcontrol/dataproducer/p2psource`. Engines that offload blocks to
host memory let others fetch them. The sidecar of a pod reads the address of the source from a
request header.
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
    """`p2p-source-producer`: name, in each request, an endpoint from which the chosen endpoint can
    pull cached blocks.

    The possible sources are the ready endpoints, before filters, that are neither ejected nor full.
    A possible source has at most one cached block of the prompt less than the endpoint with the
    most among them. A hash of the request's id selects one of these sources, each with the weight 1
    / (1 + its waiting requests). The request header `x-kv-cache-source-host-port` contains the
    address of the selected source if it has at least `minCachedTokenDelta` tokens of the prompt
    more than the chosen endpoint. The picker removes a header of that name that a client sends.

    If the index receives KV-cache events, a source counts with the prompt's blocks that it has in
    host memory (`cpu`), from the first block up to the first missing one. An endpoint that sends no
    events is then no source. An index that estimates caches from the picker's own decisions knows
    no cache tiers, so a source counts with all blocks that this index estimates.

    Declaring `p2p-source-producer` in the document enables it; no scheduling profile needs to name
    it.
    """

    type_name: ClassVar[str] = "p2p-source-producer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, marks_requests=True, warns=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    own_headers: ClassVar[tuple[str, ...]] = (SOURCE_HEADER,)

    prefix_match_info_producer_name: str = ""
    """Name of the prefix index to read; empty for the default prefix index."""
    min_cached_token_delta: Annotated[int, Meta(ge=1)] = 1
    """Minimum number of cached tokens that the source must have beyond those of the chosen
    endpoint.

    With fewer, the request names no source.
    """
    prefill_profile_name: str = _PREFILL
    """No effect, because the source is always that of the endpoint to which the gateway sends the
    request.
    """

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    def warnings(self) -> list[str]:
        """Return a sentence about a parameter set without effect, if any; the caller adds the
        plugin's place in the document.
        """
        if self.prefill_profile_name in {"", _PREFILL}:
            return []
        return [
            "prefillProfileName has no effect, because the source is that of the decode endpoint"
        ]

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
    """Return float64[n]: the number of leading blocks of the prompt that other endpoints can pull
    from each candidate.
    """
    if EXACT not in known.columns:
        return known.matched.astype(np.float64)
    return known.columns.get(HOST_BLOCKS, np.zeros(len(known.matched)))


def _drawn(request_id: str, waiting: Floats) -> int:
    """Return a position in `waiting` that a hash of `request_id` selects; positions with more
    waiting requests are less likely.
    """
    weights = 1.0 / (1.0 + np.nan_to_num(waiting))
    drawn = xxhash.xxh64_intdigest(request_id.encode("utf-8", "surrogatepass")) / 2.0**64
    return min(
        int(np.searchsorted(weights.cumsum(), drawn * weights.sum(), "right")), len(weights) - 1
    )
