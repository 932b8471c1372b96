"""The prompt cache of mlx-lm's server: a few whole sequences, found by a trie."""

from itertools import pairwise
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.caches.behaviour import NOTHING, Bytes, CacheBehaviour, Stored, UnhashedPool, parts_of
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
EVICTED: Final = (ASSISTANT, USER, SYSTEM)
"""Kinds of entries in the order of eviction. A kind is evicted if it has at least as many entries
as the next one."""


class MlxParameters(CacheBehaviour, frozen=True):
    """The parameters of the cache, with or without a disk."""

    entries_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Maximum number of sequences in memory."""
    memory_bytes: Bytes | None = None
    """`max_bytes`; None for no limit. It is memory of the host, separate from the pool."""
    trimmable: bool = True
    """True if tokens can be removed from the end of a sequence. Models with a sliding window or a
    recurrent state do not allow this. Then a longer sequence is of no use to shorter prompts, and
    its heads are kept beside it."""


class MlxMemory(MlxParameters, frozen=True):
    """`LRUPromptCache` of mlx-lm (its server in mid 2026): whole sequences including the answer.

    A look-up returns a copy of the first available sequence of this list:
    - the sequence itself;
    - if sequences can be trimmed, the shortest of those that share the longest head, if this head
      is longer than any whole sequence that the prompt begins with;
    - the longest whole sequence of more than one token that the prompt begins with.

    The prompt is stored when it is computed, and again with the answer. A stored sequence replaces
    its own heads if sequences can be trimmed. A look-up does not refresh an entry: within a kind,
    the entry that was stored first is evicted first.
    """

    type_name: ClassVar[str] = "mlx-memory"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "Sequences":
        """Return an empty cache."""
        return Sequences(self, profile.kv_bytes_per_token)


class _Entry(Struct, eq=False):
    stored: Stored
    kind: str


class Sequences:
    """A store of sequences with a maximum number and a maximum size in bytes."""

    def __init__(self, parameters: MlxParameters, bytes_per_token: int) -> None:
        self._parameters = parameters
        self._bytes_per_token = bytes_per_token
        self._entries: list[_Entry] = []
        """Entries in the order in which they were stored."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept_bytes(self) -> int:
        """Size of all sequences in bytes."""
        return sum(entry.stored.tokens for entry in self._entries) * self._bytes_per_token

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool without hits, because a request works on a copy."""
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the best matching sequence."""
        tokens = self.nearest_tokens(parts_of(request), request.prompt_tokens)
        return Found(tokens) if tokens else NOTHING

    def nearest_tokens(self, prompt: PromptParts, prompt_tokens: int) -> int:
        """Return how many tokens of the prompt the best matching sequence has."""
        shorter = common = 0
        longer = False
        for entry in self._entries:
            tokens, shared = entry.stored.tokens, entry.stored.shared_tokens(prompt)
            if shared == tokens == prompt_tokens:
                return tokens
            if shared == tokens and tokens > 1:
                shorter = max(shorter, tokens)
            if shared > common:
                common, longer = shared, False
            longer = longer or (shared == common and tokens > shared)
        if longer and common > shorter and self._parameters.trimmable:
            return min(prompt_tokens - 1, common)
        return shorter

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the prompt, and also its system prompt if sequences cannot be trimmed."""
        prompt = parts_of(request)
        if prompt.messages > 1 and not self._parameters.trimmable:
            self.insert(Stored(prompt, 1), SYSTEM)
        self.insert(Stored(prompt, prompt.messages), USER)
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the prompt with its answer, if the answer is complete."""
        if request.finished:
            prompt = parts_of(request)
            self.insert(Stored(prompt, len(prompt.keys)), ASSISTANT)
        return 0.0

    def insert(self, stored: Stored, kind: str) -> None:
        """Store a sequence, and evict entries beyond the limits."""
        self._entries = [entry for entry in self._entries if not self._replaces(stored, entry)]
        self._entries.append(_Entry(stored, kind))
        if len(self._entries) > self._parameters.entries_max:
            self._evict()
        bytes_max = self._parameters.memory_bytes
        while bytes_max is not None and self.kept_bytes > bytes_max:
            self._evict()

    def _replaces(self, stored: Stored, entry: _Entry) -> bool:
        """Return whether an entry is the sequence itself, or a head of it that is no longer
        needed.
        """
        old = entry.stored
        if old.parts > stored.parts:
            return False
        at = old.parts - 1
        head = stored.text.keys[at] == old.key and stored.text.ends[at] >= old.tokens
        return head and (old.tokens == stored.tokens or self._parameters.trimmable)

    def _evict(self) -> None:
        entries = {
            kind: [entry for entry in self._entries if entry.kind == kind] for kind in EVICTED
        }
        evicted = EVICTED[-1]
        for kind, following in pairwise(EVICTED):
            if entries[kind] and len(entries[kind]) >= len(entries[following]):
                evicted = kind
                break
        self._entries.remove(entries[evicted][0])
