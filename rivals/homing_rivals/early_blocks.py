"""Prefix-affinity consistent hashing with weighted early blocks: an alternative in GIE's proposal
0602.

GIE's proposal asks for a hash whose values for two prompts are closer the longer their common
beginning is, so that the two reach the same server, and names no formula. The formula of
`early-blocks-hash-scorer` is ours.
"""

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.prompt_blocks import PromptBlocksSettings
from homing_rivals.ring import ring_of, within_bound

_BITS: Final = 64
_WORD: Final = 2**_BITS - 1


class EarlyBlocksHash(Parameters, frozen=True):
    """Prefer the first endpoint clockwise from the prompt's position on a ring, the sum over blocks
    i of top bits(h_i) x 2^-(bits x (i + 1)).

    h_i is the chained hash of block i of the prompt, and the positions on the ring are [0, 1).
    Block i thus weighs 2^-bits times as much as the previous one, and two prompts that share their
    first k blocks are closer on the ring than 2^-(bits x k). Source:
    kubernetes-sigs/gateway-api-inference-extension, proposal 0602, "alternative approach".

    `load_factor` makes the rule skip endpoints with more requests in flight than this factor times
    the mean, which includes this request. The rule without `load_factor` has the fault of which the
    proposal itself warns: prompts with a common beginning stay together whatever the load.

    A prompt without a full block is placed by a hash of the request's id. If each endpoint has few
    points on the ring, an endpoint gets longer arcs of similar prompts, but arcs differ more in
    length; 16 points for each endpoint keep prompts with 8 common blocks together in pools of some
    tens of endpoints.
    """

    type_name: ClassVar[str] = "early-blocks-hash-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, configures_index=True)
    producer_type: ClassVar[str] = PromptBlocksSettings.type_name
    producer: ClassVar[str] = producer_type

    block_tokens: Annotated[int, Meta(ge=1)] = 64
    bits_per_block: Annotated[int, Meta(ge=1, le=16)] = 1
    points: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Number of points of each endpoint on the hash ring."""
    load_factor: Annotated[float, Meta(ge=1)] | None = None

    @property
    def producer_parameters(self) -> Mapping[str, int]:
        """Return the parameters with which the index `prompt-blocks-producer` is created if none is
        declared.
        """
        return {"blockTokens": self.block_tokens, "blocksMax": _BITS // self.bits_per_block}

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        accepted = np.ones(len(candidates), dtype=np.bool_)
        if self.load_factor is not None:
            accepted = within_bound(candidates.inflight_requests, self.load_factor)
        scores = np.zeros(len(candidates))
        scores[ring_of(candidates, self.points).first(self.place(request), accepted)] = 1.0
        return scores

    def place(self, request: InferenceRequest) -> int:
        """Return the position of `request` on the hash ring as a number of 64 bits."""
        block_bytes = self.block_tokens * contract.BYTES_PER_TOKEN
        chain = next(iter(request.chains.get(block_bytes, ())), b"")
        if len(chain) < contract.HASH_BYTES:
            return xxhash.xxh64_intdigest(request.request_id.encode("utf-8", "surrogatepass"))
        blocks = min(len(chain) // contract.HASH_BYTES, _BITS // self.bits_per_block)
        place = left = 0
        for at in range(0, blocks * contract.HASH_BYTES, contract.HASH_BYTES):
            block = int.from_bytes(chain[at : at + contract.HASH_BYTES], sys.byteorder)
            place = place << self.bits_per_block | block >> _BITS - self.bits_per_block
            left = block
        # The rest comes from the last block, so equal prompts stay equal.
        used = blocks * self.bits_per_block
        rest = _BITS - used
        return (place << rest | (left << self.bits_per_block & _WORD) >> used) if rest else place


SCORERS: Final = (EarlyBlocksHash,)

STRATEGIES: Final = (
    contract.Strategy(
        name="early-blocks-hash",
        idea=(
            "GIE's proposal 0602, the alternative: a hash ring on which prompts with a common "
            "beginning are close."
        ),
        omissions=(
            "the formula, which the proposal does not name: this one is ours, and ignores adapters"
        ),
        config=contract.config_of(contract.step(EarlyBlocksHash.type_name)),
    ),
    contract.Strategy(
        name="early-blocks-hash-fixed",
        idea="GIE's alternative with the bound that it asks for: endpoints 25 % above the mean are skipped.",
        omissions="as `early-blocks-hash`",
        config=contract.config_of(contract.step(EarlyBlocksHash.type_name, loadFactor=1.25)),
    ),
)
