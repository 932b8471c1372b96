"""KubeAI: consistent hashing with bounded loads over the head of a prompt.

Source: `internal/loadbalancer` of substratusai/kubeai (2025-07).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Bools, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.prompt_blocks import PromptBlocksSettings
from homing_rivals.ring import ring_of, within_bound

_BLOCK_TOKENS: Final = 25
"""Number of tokens of a prompt without text that stand for its first 100 characters."""
_BLOCK_BYTES: Final = _BLOCK_TOKENS * contract.BYTES_PER_TOKEN


class BoundedPrefixHash(Parameters, frozen=True):
    """CHWBL: prefer the first endpoint clockwise from h(key) on a ring with R <= `load_factor` x
    (sum R + 1) / n.

    The key of a request is its adapter and the first `prefix_chars` characters of the user's first
    message, or of a completion's prompt if there are no messages. R is the number of requests in
    flight at an endpoint without this request, sum R that of all n endpoints; if nothing is in
    flight, any endpoint is within the bound. Only endpoints that have the adapter are considered.
    If none of these is within the bound, the first of them clockwise wins.

    Kept from KubeAI: the system prompt is not part of the key, and conversations whose first
    message begins with the same template share one place on the ring for ever.

    Different from KubeAI: requests to endpoints that left are not counted in the sum; the key of a
    prompt without text, from a replayed trace, is its first blocks of 25 tokens; if there is no
    endpoint, a request is refused and does not wait. All endpoints are assumed to have the
    request's adapter if none reports it.
    """

    type_name: ClassVar[str] = "bounded-prefix-hash-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, configures_index=True)
    producer_type: ClassVar[str] = PromptBlocksSettings.type_name
    producer: ClassVar[str] = producer_type

    load_factor: Annotated[float, Meta(ge=1)] = 1.25
    replication: Annotated[int, Meta(ge=1, le=1024)] = 256
    """Number of points of each endpoint on the hash ring."""
    prefix_chars: Annotated[int, Meta(ge=1, le=65_536)] = 100

    @property
    def producer_parameters(self) -> Mapping[str, int]:
        """Return the parameters with which the index `prompt-blocks-producer` is created if none is
        declared.
        """
        return {"blockTokens": _BLOCK_TOKENS, "blocksMax": self._blocks}

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        ring = ring_of(candidates, self.replication)
        key = self._key(request)
        holders = _holders(request, candidates)
        chosen = ring.first(
            key, holders & within_bound(candidates.inflight_requests, self.load_factor)
        )
        if chosen < 0:
            chosen = ring.first(key, holders)
        scores = np.zeros(len(candidates))
        scores[chosen] = 1.0
        return scores

    @property
    def _blocks(self) -> int:
        return max(1, self.prefix_chars // _BLOCK_BYTES)

    def _key(self, request: InferenceRequest) -> int:
        """Return the key of `request` on the hash ring as a number of 64 bits."""
        head = request.first_text(self.prefix_chars)
        if head is None:
            known = request.block_hash(_BLOCK_BYTES, self._blocks)
            if known is not None:
                return known
        adapter = request.model.encode("utf-8", "surrogatepass")
        return xxhash.xxh64_intdigest(adapter + b"\0" + (head or "").encode())


def _holders(request: InferenceRequest, candidates: Candidates) -> Bools:
    """Return bool[n]: True for candidates that have the request's adapter; all True if none reports
    it, as for a base model.
    """
    adapters = candidates.adapter_state
    everybody = np.ones(len(candidates), dtype=np.bool_)
    if not adapters.generation.any():
        return everybody
    model = request.model
    holders: Bools = adapters.active(model) | adapters.on_gpu(model) | adapters.on_cpu(model)
    return holders if holders.any() else everybody


SCORERS: Final = (BoundedPrefixHash,)

STRATEGIES: Final = (
    contract.Strategy(
        name="kubeai-chwbl",
        idea="KubeAI: hash 100 characters to a ring, skip endpoints 25 % above the mean.",
        omissions="the wait of a request while there is no endpoint: here it is refused",
        config=contract.config_of(contract.step(BoundedPrefixHash.type_name)),
    ),
)
