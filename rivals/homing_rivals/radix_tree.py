"""The tree of prompts of cache-aware routers: the endpoints to which each beginning of a prompt was
sent, and which was first.

SGLang's router, its successor smg, vllm-router, Ray Serve and production-stack each have such a
tree over characters or tokens. The copies use Homing's prefix index as this tree, with the
additional columns that their rules need.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Affinity, AffinityIndex, InferenceRequest, Seconds

FIRST_HOLDER: Final = "first_holder"
"""Name of the column that is 1 for the endpoint to which the prompt's deepest known block was first
routed, and 0 for the others.
"""
HELD_BLOCKS: Final = "held_blocks"
"""Name of the column with the number of blocks that the tree stores for each endpoint."""
DEEPEST_BLOCKS: Final = "deepest_blocks"
"""Name of the column with the number of the prompt's leading blocks that any endpoint has,
candidate or not; the same number for all.
"""

_FOR_EVER: Final = contract.Duration(1e9)


class RadixTreeSettings(contract.PrefixIndexSettings, frozen=True):
    """`radix-tree-producer`: a tree of the prompts that were sent to each endpoint, with the
    parameters of the prefix index.

    Different from the original trees: edges are blocks of tokens and not characters, so a prompt
    shorter than a block is unknown; this tree evicts as soon as it is full and not once a minute;
    it evicts the endpoint's oldest prompt, tails first, where smg evicts the least recently used
    leaf; a look-up refreshes nothing, because the choice is recorded anyway. Model, salt and API
    are part of the hash of a prompt's first block, so there is one tree for all models.
    """

    type_name: ClassVar[str] = "radix-tree-producer"

    auto_tune: bool = False
    block_size_tokens: Annotated[int, Meta(ge=1)] = 16
    """Number of tokens in a block of the tree."""
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 1_048_576
    """Maximum number of blocks of an endpoint.

    With 16 tokens each, they are about 2^26 characters, as in smg.
    """
    ttl: contract.Duration = _FOR_EVER

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            raise ValueError(f"blockSize {self.block_size} has no effect: give blockSizeTokens")

    @property
    def block_tokens(self) -> int:
        """Number of tokens in a block of the tree."""
        return self.block_size_tokens

    def open(self) -> AffinityIndex:
        """Return a new, empty tree of prompts, with these settings as its parameters."""
        return RadixTree(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply all parameters except the block size to the running tree `index`.

        Return False, and change nothing, if the block size differs, or if `index` has another type.
        """
        return isinstance(index, RadixTree) and index.configure(self)


class RadixTree(contract.PrefixIndex):
    """A tree of the prompts that were sent to each endpoint: the prefix index with three additional
    columns, `first_holder`, `held_blocks` and `deepest_blocks`.

    If a request has several prompts, the first determines the column `first_holder`.
    """

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the match of the prefix index (cached blocks at each slot), with the three
        additional columns of the tree.
        """
        known = super().match(request, slots, now)
        first = np.zeros(slots)
        holder = self.first_holder(request, now)
        if 0 <= holder < slots:
            first[holder] = 1.0
        columns = {
            FIRST_HOLDER: first,
            HELD_BLOCKS: np.array([self.blocks_held(slot) for slot in range(slots)], np.float64),
            DEEPEST_BLOCKS: np.full(slots, float(known.matched.max(initial=0))),
        }
        return Affinity(known.matched, known.total, columns)


INDEXES: Final = (RadixTreeSettings,)

STRATEGIES: Final = ()
"""Strategies of this module: none, because the strategies that read the tree are in modules of
their own.
"""
