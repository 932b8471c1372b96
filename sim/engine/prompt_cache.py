"""What an engine keeps of prompts, where that is not vLLM's block pool alone.

vLLM finds prompts in the blocks of its pool (`sim/engine/blocks.py`), and that is what an engine
does that has no `PromptCache`. Other engines keep whole prompts, one system prompt, a conversation
in each slot, or more of the pool's blocks in another memory: `sim/caches` has them.
"""

from typing import Protocol

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import BlockPool
from sim.engine.request import EngineRequest


class Found(Struct, frozen=True):
    """What a cache has of a prompt."""

    tokens: int = 0
    """From its beginning; the engine computes the last token of a prompt in any case."""
    restore_s: Seconds = 0.0
    """To bring them to where the engine computes, which does nothing else meanwhile."""


class PromptCache(Protocol):
    """Told of every request by one engine, in this order: `fetch`, `computed`, `left`.

    A request that is preempted has left, and is fetched for again.
    """

    def pool(self, blocks_total: int) -> BlockPool:
        """The memory of the requests that run."""
        ...

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """What there is of the prompt; `held_tokens` of it the pool has found.

        None: it waits, and all behind it, for a request that runs to leave.
        """
        ...

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """The whole prompt is computed: keep what is to be kept. How long the engine saves it."""
        ...

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """The request is `finished`, or has gone before. How long the engine saves it."""
        ...
