"""An index that only hashes the blocks of prompts, for plugins that need these hashes and no stored
prompts.
"""

from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Affinity, AffinityIndex, InferenceRequest, Parameters, Seconds


class PromptBlocksSettings(Parameters, frozen=True):
    """`prompt-blocks-producer`: an index that stores nothing and only hashes the blocks of prompts
    for other plugins, so that replayed traces have blocks of this size too.
    """

    type_name: ClassVar[str] = "prompt-blocks-producer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        origin=contract.Origin.DECIDED, counts_blocks=True
    )

    block_tokens: Annotated[int, Meta(ge=1)] = 64
    """Number of tokens in a block of the hashed prompts."""
    blocks_max: Annotated[int, Meta(ge=1)] = 64
    """Maximum number of blocks of a prompt that are hashed."""

    def open(self) -> AffinityIndex:
        """Return a new index that hashes the blocks of prompts, with these settings as its
        parameters.
        """
        return PromptBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to the running index `index`, and return True. Return False if
        `index` has another type.
        """
        return isinstance(index, PromptBlocks) and index.configure(self)


class PromptBlocks:
    """An `AffinityIndex` that hashes the blocks of each prompt, and matches none of them at any
    endpoint.
    """

    def __init__(self, settings: PromptBlocksSettings) -> None:
        self.configure(settings)

    def configure(self, settings: PromptBlocksSettings) -> bool:
        """Apply `settings` to later prompts, and return True."""
        self._block_bytes = settings.block_tokens * contract.BYTES_PER_TOKEN
        self._blocks_max = settings.blocks_max
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Hash the prompts of `request`, and return a match of 0 blocks at every slot."""
        request.chains_of(self._block_bytes, self._blocks_max)
        return Affinity(np.zeros(slots, dtype=np.int64), 0)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """Record nothing, because this index stores no prompts."""

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo nothing, because this index stores no prompts."""

    def forget(self, slot: int) -> None:
        """Drop nothing for an endpoint that left, because this index stores no prompts."""

    def expire(self, now: Seconds) -> None:
        """Drop nothing with time, because this index stores no prompts."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Ignore the size of an engine's cache, because this index stores no prompts."""


INDEXES: Final = (PromptBlocksSettings,)
STRATEGIES: Final[tuple[contract.Strategy, ...]] = ()
"""Strategies of this module: none, because other modules only use its index."""
