"""Block hashes of prompts, for plugins that hash a prompt and remember nothing of it."""

from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    BYTES_PER_TOKEN,
    Abilities,
    Affinity,
    AffinityIndex,
    InferenceRequest,
    Origin,
    Parameters,
    Seconds,
    Strategy,
)


class PromptBlocksSettings(Parameters, frozen=True):
    """Says of what size blocks are to be, so that replayed traces have them too."""

    type_name: ClassVar[str] = "prompt-blocks-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1)] = 64
    """Tokens in a block."""
    blocks_max: Annotated[int, Meta(ge=1)] = 64
    """Blocks of a prompt that are hashed."""

    def open(self) -> AffinityIndex:
        """Ready to hash."""
        return PromptBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Hash as these say from now on."""
        return isinstance(index, PromptBlocks) and index.configure(self)


class PromptBlocks:
    """Hashes each prompt before plugins ask for its blocks; every endpoint holds none of them."""

    def __init__(self, settings: PromptBlocksSettings) -> None:
        self.configure(settings)

    def configure(self, settings: PromptBlocksSettings) -> bool:
        """Adopt `settings`."""
        self._block_bytes = settings.block_tokens * BYTES_PER_TOKEN
        self._blocks_max = settings.blocks_max
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Nothing is known of anybody."""
        request.chains_of(self._block_bytes, self._blocks_max)
        return Affinity(np.zeros(slots, dtype=np.int64), 0)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """Nothing is remembered."""

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Nothing is remembered."""

    def forget(self, slot: int) -> None:
        """Nothing is remembered."""

    def expire(self, now: Seconds) -> None:
        """Nothing is remembered."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Nothing is remembered."""


INDEXES: Final = (PromptBlocksSettings,)
STRATEGIES: Final[tuple[Strategy, ...]] = ()
"""None of its own."""
