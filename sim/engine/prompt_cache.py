"""The interface of an engine's prompt cache, for engines that use more than vLLM's block pool.

vLLM finds prompts in the blocks of its pool (`sim/engine/blocks.py`); an engine without a
`PromptCache` does so too. Other engines cache whole prompts, one system prompt, a conversation in
each slot, or further blocks in another memory. `sim/caches` contains them.
"""

from typing import Protocol

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import BlockPool
from sim.engine.request import EngineRequest


class Found(Struct, frozen=True):
    """The cached part of a prompt."""

    tokens: int = 0
    """Cached tokens from the beginning. The engine computes the last token of a prompt in
    any case."""
    restore_s: Seconds = 0.0
    """Time to restore them to the engine's memory. The engine computes nothing meanwhile."""


class PromptCache(Protocol):
    """A prompt cache of one engine, which calls `fetch`, `computed` and `left` for each request in
    this order.

    A preempted request leaves, and `fetch` is called again when it returns.
    """

    def pool(self, blocks_total: int) -> BlockPool:
        """Return the memory for the running requests."""
        ...

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the cached part of the prompt; the pool already has `held_tokens` of it.

        None makes this request and all behind it wait until a running request leaves.
        """
        ...

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store what should be cached of the computed prompt, and return the time that the engine
        saves it.
        """
        ...

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Process the end of a request, `finished` or not, and return the time that the engine
        saves it.
        """
        ...
