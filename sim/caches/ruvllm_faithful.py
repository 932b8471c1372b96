"""RuvLLM's prefix cache as its proposal writes it down: whole prompts in a radix tree."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.caches.behaviour import (
    NOTHING,
    CacheBehaviour,
    Tokens,
    UnhashedPool,
    parts_of,
)
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts


class RuvllmParameters(CacheBehaviour, frozen=True):
    """What both readings of the proposal are told."""

    memory_share: Annotated[float, Meta(gt=0.0, le=0.9)] = 0.5
    """`max_memory_bytes`, as a share of the KV cache: it is taken from the requests that run. The
    proposal has no default."""
    min_cache_tokens: Tokens = 50
    """Shorter prompts are not kept. The proposal: 50 for chat, 100 for RAG, 20 for batches."""

    def bytes_max(self, profile: Profile) -> int:
        """The budget of one engine."""
        tokens = profile.kv_tokens - self.kv_tokens(profile)
        return tokens * profile.kv_bytes_per_token

    def kv_tokens(self, profile: Profile) -> int:
        """What the budget leaves."""
        return int(profile.kv_tokens * (1.0 - self.memory_share))


class RuvllmFaithful(RuvllmParameters, frozen=True):
    """RuvLLM ADR-011 (2026-01-20, a proposal), what it writes: only whole stored prompts are found.

    A prompt that is computed is kept with its whole KV cache. A look-up descends whole edges and
    takes the deepest node at which a prompt was kept, so a prompt that only shares a head with
    another finds nothing: the node at which an edge was split has no KV cache. One entry is evicted
    for a prompt that would exceed the budget, the one with the fewest hits, of those the one that
    was used longest ago, and never two: the budget does not hold, and what exceeds it costs
    nothing here. A prompt that is kept again begins with no hits.

    Read into it: what is kept is counted (the listing never adds to `memory_usage_bytes`); an entry
    in use is not evicted (`ref_count`); the loop of the listing compares every edge behind the first
    with the wrong tokens, which is not repeated. `max_entries` is never looked at.
    """

    type_name: ClassVar[str] = "ruvllm-faithful"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "StoredPrompts":
        """With nothing in it."""
        return StoredPrompts(
            bytes_max=self.bytes_max(profile),
            bytes_per_token=profile.kv_bytes_per_token,
            min_cache_tokens=self.min_cache_tokens,
        )


class Statistics(Struct):
    """`CacheStats` of the proposal. Each look-up is a hit, a partial hit or a miss."""

    lookups: int = 0
    hits: int = 0
    """The whole prompt was found."""
    partial_hits: int = 0
    misses: int = 0
    evictions: int = 0
    memory_bytes: int = 0

    def count(self, found_tokens: int, prompt_tokens: int) -> None:
        """One look-up."""
        self.lookups += 1
        self.hits += found_tokens >= prompt_tokens
        self.partial_hits += 0 < found_tokens < prompt_tokens
        self.misses += not found_tokens


class _Entry(Struct, eq=False):
    key: int
    """Of the last part of the prompt."""
    tokens: int
    last_access_s: Seconds
    hits: int = 0
    users: int = 0


class StoredPrompts:
    """Whole prompts by their last part and their length."""

    def __init__(self, *, bytes_max: int, bytes_per_token: int, min_cache_tokens: int) -> None:
        self.statistics = Statistics()
        self._bytes_max = bytes_max
        self._bytes_per_token = bytes_per_token
        self._min_cache_tokens = min_cache_tokens
        self._entries: dict[int, dict[int, _Entry]] = {}
        self._using: dict[EngineRequest, _Entry] = {}

    def pool(self, blocks_total: int) -> BlockPool:
        """Prompts are copied on write."""
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """The longest kept prompt that the request's begins with."""
        entry = self._longest(parts_of(request))
        self.statistics.count(entry.tokens if entry else 0, request.prompt_tokens)
        if entry is None:
            return NOTHING
        entry.hits += 1
        entry.last_access_s = now
        entry.users += 1
        self._using[request] = entry
        return Found(entry.tokens)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Keep the prompt."""
        tokens = request.prompt_tokens
        if tokens < self._min_cache_tokens:
            return 0.0
        parts, statistics = parts_of(request), self.statistics
        size = tokens * self._bytes_per_token
        if statistics.memory_bytes + size > self._bytes_max:
            self._evict()
        key = parts.keys[parts.messages - 1]
        kept = self._entries.setdefault(key, {})
        replaced = kept.pop(tokens, None)
        if replaced is not None:
            statistics.memory_bytes -= size
        kept[tokens] = _Entry(key, tokens, now)
        statistics.memory_bytes += size
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """It uses its entry no more."""
        entry = self._using.pop(request, None)
        if entry is not None:
            entry.users -= 1
        return 0.0

    def _longest(self, prompt: PromptParts) -> _Entry | None:
        longest = None
        for key, end in zip(prompt.keys[: prompt.messages], prompt.ends, strict=False):
            kept = self._entries.get(key)
            if kept:
                fitting = [tokens for tokens in kept if tokens <= end]
                if fitting:
                    longest = kept[max(fitting)]
        return longest

    def _evict(self) -> None:
        entries = (entry for kept in self._entries.values() for entry in kept.values())
        idle = (entry for entry in entries if not entry.users)
        entry = min(idle, key=lambda entry: (entry.hits, entry.last_access_s), default=None)
        if entry is None:
            return
        kept = self._entries[entry.key]
        del kept[entry.tokens]
        if not kept:
            del self._entries[entry.key]
        self.statistics.evictions += 1
        self.statistics.memory_bytes -= entry.tokens * self._bytes_per_token
