"""RuvLLM's prefix cache exactly as its proposal (ADR-011) specifies it: whole prompts in a radix
tree.
"""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.caches.behaviour import NOTHING, CacheBehaviour, Tokens, UnhashedPool, parts_of
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts


class RuvllmParameters(CacheBehaviour, frozen=True):
    """The parameters that both interpretations of RuvLLM's proposal share."""

    memory_share: Annotated[float, Meta(gt=0.0, le=0.9)] = 0.5
    """Memory budget of the cache, `max_memory_bytes` of the proposal, as a share of the KV cache.
    It reduces the room for running requests. The proposal has no default.
    """
    min_cache_tokens: Tokens = 50
    """Minimum length in tokens of a prompt that is cached. The proposal says 50 for chat, 100 for
    RAG and 20 for batches.
    """

    def bytes_max(self, profile: Profile) -> int:
        """Return the memory budget of the cache in one engine, in bytes."""
        tokens = profile.kv_tokens - self.kv_tokens(profile)
        return tokens * profile.kv_bytes_per_token

    def kv_tokens(self, profile: Profile) -> int:
        """Return the number of KV-cache tokens that remain for running requests beside the cache's
        memory budget.
        """
        return int(profile.kv_tokens * (1.0 - self.memory_share))


class RuvllmFaithful(RuvllmParameters, frozen=True):
    """RuvLLM ADR-011 (2026-01-20, a proposal) as written: only whole stored prompts are found.

    This cache stores a computed prompt with its whole KV cache, in a radix tree. A look-up of a
    prompt follows whole edges of the tree and takes the deepest node at which a prompt was stored.
    A prompt that only shares its beginning with a stored one therefore finds nothing, because the
    node of a split edge has no KV cache. If a new prompt would exceed the memory budget, at most
    one stored prompt is evicted: that with the fewest hits, and among these the least recently
    used. The memory of this cache may therefore exceed its budget, which has no effect in the
    simulation. The number of hits of a prompt that is stored again restarts at 0.

    The proposal's program listing is corrected here in two points: stored data counts towards the
    memory in use, to which the listing never adds it (`memory_usage_bytes`), and the listing's
    loop, which compares every edge after the first with the wrong tokens, is not reproduced. A
    stored prompt is not evicted while a request uses it, as `ref_count` in the listing ensures,
    unless it has been stored again since. The proposal's parameter `max_entries` has no effect,
    because its listing never uses it.
    """

    type_name: ClassVar[str] = "ruvllm-faithful"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "StoredPrompts":
        """Return a cache without stored prompts."""
        return StoredPrompts(
            bytes_max=self.bytes_max(profile),
            bytes_per_token=profile.kv_bytes_per_token,
            min_cache_tokens=self.min_cache_tokens,
        )


class Statistics(Struct):
    """Counters of RuvLLM's prefix cache, `CacheStats` of the proposal. Each look-up is a hit, a
    partial hit or a miss.
    """

    lookups: int = 0
    hits: int = 0
    """Number of look-ups that found the whole prompt in the cache."""
    partial_hits: int = 0
    misses: int = 0
    evictions: int = 0
    memory_bytes: int = 0

    def count(self, found_tokens: int, prompt_tokens: int) -> None:
        """Count one look-up of a prompt of which `found_tokens` tokens were cached."""
        self.lookups += 1
        self.hits += found_tokens >= prompt_tokens
        self.partial_hits += 0 < found_tokens < prompt_tokens
        self.misses += not found_tokens


class _Entry(Struct, eq=False):
    """A stored prompt, with the counts that decide its eviction."""

    key: int
    """Key of the last part of the stored prompt."""
    tokens: int
    last_access_s: Seconds
    hits: int = 0
    users: int = 0


class StoredPrompts:
    """RuvLLM's prefix cache in one engine, as proposed: whole prompts by the key of their last part
    and their length.
    """

    def __init__(self, *, bytes_max: int, bytes_per_token: int, min_cache_tokens: int) -> None:
        self.statistics = Statistics()
        self._bytes_max = bytes_max
        self._bytes_per_token = bytes_per_token
        self._min_cache_tokens = min_cache_tokens
        self._entries: dict[int, dict[int, _Entry]] = {}
        self._using: dict[EngineRequest, _Entry] = {}

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because stored prompts are copied on
        write.
        """
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the longest stored prompt with which the request's prompt begins; restoring it
        takes no time. That entry counts as in use until the request leaves or the prompt is stored
        again. The look-up is counted in `statistics`.
        """
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
        """Store the computed prompt if it is long enough, and evict at most one entry for it.
        Writing takes no time.
        """
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
        """Release the stored prompt that the request used. It may be evicted if no other request
        uses it.
        """
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
