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
    """The part of a prompt that a `PromptCache` has found."""

    tokens: int = 0
    """Number of cached tokens from the beginning of the prompt, possibly all of them. The engine
    nevertheless computes at least the last token.
    """
    restore_s: Seconds = 0.0
    """Time in seconds to restore the cached tokens to the engine's memory. The engine computes
    nothing meanwhile.
    """


class PromptCache(Protocol):
    """A prompt cache besides the block pool. The engine calls `fetch`, `computed` and `left` for
    each request in this order.

    `computed` is left out if the prompt was not completely computed. A preempted request leaves,
    and `fetch` is called again when it returns. It is also called again if it returned None.
    """

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool of `blocks_total` KV blocks for the engine's running requests."""
        ...

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the cached part of the request's prompt. The block pool already has its first
        `held_tokens` tokens.

        None if the request must wait, with all requests behind it, until a running request leaves.
        """
        ...

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store what this cache keeps of a prompt that has just been computed. Return the seconds
        that the engine needs for writing it, in which it computes nothing.
        """
        ...

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Process the end of a request, `finished` or not. Return the seconds that the engine needs
        for writing what this cache keeps of it, in which it computes nothing.
        """
        ...
