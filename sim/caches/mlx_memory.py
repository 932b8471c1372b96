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
"""In this order, each as long as it has no fewer entries than the next."""


class MlxParameters(CacheBehaviour, frozen=True):
    """What the cache is told, with a disk or without."""

    entries_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Sequences in memory."""
    memory_bytes: Bytes | None = None
    """`max_bytes`; none: no limit. The memory is the machine's, not that of the pool."""
    trimmable: bool = True
    """Tokens can be taken off the end of a sequence. Not so for models with a sliding window or a
    recurrent state: then a longer sequence serves nobody, and its heads are kept beside it."""


class MlxMemory(MlxParameters, frozen=True):
    """`LRUPromptCache` of mlx-lm (its server, mid 2026): whole sequences, the answer included.

    A look-up takes a copy of: the sequence itself; else, if sequences can be trimmed, the shortest
    of those that share the longest head, if that is longer than any whole sequence that the prompt
    begins with; else the longest such sequence, of more than one token. The prompt is kept once it
    is computed, with the answer once that is there; what is kept replaces its own heads if sequences
    can be trimmed. Looking up refreshes nothing: of one kind the entry that was kept first goes
    first.
    """

    type_name: ClassVar[str] = "mlx-memory"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "Sequences":
        """With nothing in it."""
        return Sequences(self, profile.kv_bytes_per_token)


class _Entry(Struct, eq=False):
    stored: Stored
    kind: str


class Sequences:
    """At most so many, and in so many bytes."""

    def __init__(self, parameters: MlxParameters, bytes_per_token: int) -> None:
        self._parameters = parameters
        self._bytes_per_token = bytes_per_token
        self._entries: list[_Entry] = []
        """Kept first first."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept_bytes(self) -> int:
        """Of all sequences."""
        return sum(entry.stored.tokens for entry in self._entries) * self._bytes_per_token

    def pool(self, blocks_total: int) -> BlockPool:
        """A request works on a copy."""
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """The nearest sequence."""
        tokens = self.nearest_tokens(parts_of(request), request.prompt_tokens)
        return Found(tokens) if tokens else NOTHING

    def nearest_tokens(self, prompt: PromptParts, prompt_tokens: int) -> int:
        """How many tokens of the prompt the nearest sequence has."""
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
        """Keep the prompt; its system prompt too, which the prompt replaces if it can be trimmed."""
        prompt = parts_of(request)
        if prompt.messages > 1 and not self._parameters.trimmable:
            self.insert(Stored(prompt, 1), SYSTEM)
        self.insert(Stored(prompt, prompt.messages), USER)
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Keep prompt and answer, if that was finished."""
        if request.finished:
            prompt = parts_of(request)
            self.insert(Stored(prompt, len(prompt.keys)), ASSISTANT)
        return 0.0

    def insert(self, stored: Stored, kind: str) -> None:
        """Keep a sequence, and evict what is too much."""
        self._entries = [entry for entry in self._entries if not self._replaces(stored, entry)]
        self._entries.append(_Entry(stored, kind))
        if len(self._entries) > self._parameters.entries_max:
            self._evict()
        bytes_max = self._parameters.memory_bytes
        while bytes_max is not None and self.kept_bytes > bytes_max:
            self._evict()

    def _replaces(self, stored: Stored, entry: _Entry) -> bool:
        """Whether an entry is the sequence itself, or a head that it makes needless."""
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
