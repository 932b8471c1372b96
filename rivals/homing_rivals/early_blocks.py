"""Prefix-affinity consistent hashing with early blocks weighted: the alternative of GIE's proposal 0602.

The proposal asks for a hash that is closer for two prompts the longer they begin alike, so that
they end up at one server, and names no formula. This is ours.
"""

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import (
    BYTES_PER_TOKEN,
    HASH_BYTES,
    Abilities,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
    Strategy,
    config_of,
    step,
)
from homing_rivals.prompt_blocks import PromptBlocksSettings
from homing_rivals.ring import ring_of, within_bound

_BITS: Final = 64
_WORD: Final = 2**_BITS - 1


class EarlyBlocksHash(Parameters, frozen=True):
    """The first endpoint clockwise from sum over blocks i of top bits(h_i) x 2^-(bits x (i + 1)).

    h_i is the chained hash of block i and the ring is [0, 1), so block i weighs 2^-bits times what
    the one before it does, and two prompts that share k blocks are closer than 2^-(bits x k). Source:
    kubernetes-sigs/gateway-api-inference-extension, proposal 0602, "alternative approach".

    With a `load_factor` endpoints with more requests in flight than so many times the mean are
    passed over. Without one it has the fault that the proposal itself warns of: what begins alike
    stays together whatever the load.

    A prompt without a full block goes by its id. With few points an endpoint keeps longer arcs of
    neighbours and the arcs differ more; 16 keep together what shares 8 blocks in pools of tens.
    """

    type_name: ClassVar[str] = "early-blocks-hash-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, configures_index=True)
    producer_type: ClassVar[str] = PromptBlocksSettings.type_name

    block_tokens: Annotated[int, Meta(ge=1)] = 64
    bits_per_block: Annotated[int, Meta(ge=1, le=16)] = 1
    points: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Of each endpoint on the ring."""
    load_factor: Annotated[float, Meta(ge=1)] | None = None

    @property
    def producer(self) -> str | None:
        return self.producer_type

    @property
    def producer_parameters(self) -> Mapping[str, int]:
        """Of the index, should it have to be made."""
        return {"blockTokens": self.block_tokens, "blocksMax": _BITS // self.bits_per_block}

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        accepted = np.ones(len(candidates), dtype=np.bool_)
        if self.load_factor is not None:
            accepted = within_bound(candidates.inflight_requests, self.load_factor)
        scores = np.zeros(len(candidates))
        scores[ring_of(candidates, self.points).first(self.place(request), accepted)] = 1.0
        return scores

    def place(self, request: InferenceRequest) -> int:
        """Where `request` is on the ring, 64 bits."""
        chain = next(iter(request.chains.get(self.block_tokens * BYTES_PER_TOKEN, ())), b"")
        if len(chain) < HASH_BYTES:
            return xxhash.xxh64_intdigest(request.request_id.encode("utf-8", "surrogatepass"))
        place = left = 0
        for at in range(0, min(len(chain), _BITS // self.bits_per_block * HASH_BYTES), HASH_BYTES):
            block = int.from_bytes(chain[at : at + HASH_BYTES], sys.byteorder)
            place = place << self.bits_per_block | block >> _BITS - self.bits_per_block
            left = block
        # The rest is what the last block has besides: prompts that are equal stay equal.
        used = min(len(chain) // HASH_BYTES, _BITS // self.bits_per_block) * self.bits_per_block
        rest = _BITS - used
        return (place << rest | (left << self.bits_per_block & _WORD) >> used) if rest else place


SCORERS: Final = (EarlyBlocksHash,)

STRATEGIES: Final = (
    Strategy(
        name="early-blocks-hash",
        idea="GIE's proposal 0602, the alternative: a ring on which prompts that begin alike are close.",
        omissions="the proposal names no formula: this one is ours, and knows no adapters",
        config=config_of(step(EarlyBlocksHash.type_name)),
    ),
    Strategy(
        name="early-blocks-hash-fixed",
        idea="GIE's alternative with the bound that it asks for: 25 % above the mean is passed over.",
        omissions="as `early-blocks-hash`",
        config=config_of(step(EarlyBlocksHash.type_name, loadFactor=1.25)),
    ),
)
