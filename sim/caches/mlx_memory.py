"""The prompt cache of mlx-lm's server: a limited number of whole token sequences."""

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
"""Kinds of stored sequences in the order of eviction. The evicted sequence is the oldest one of the
first kind that has any, and at least as many as the next kind; else the oldest one of the last
kind.
"""


class MlxParameters(CacheBehaviour, frozen=True):
    """The parameters of mlx-lm's prompt cache, with or without a disk."""

    entries_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Maximum number of token sequences in memory."""
    memory_bytes: Bytes | None = None
    """Maximum size in bytes of the sequences in memory, mlx-lm's `max_bytes`; None for no limit. It
    is memory of the host, separate from the KV block pool.
    """
    trimmable: bool = True
    """True if tokens can be removed from the end of a sequence. Models with a sliding window or a
    recurrent state do not allow this. A longer sequence is then of no use to shorter prompts, and
    the beginnings of a sequence stay stored beside it.
    """


class MlxMemory(MlxParameters, frozen=True):
    """mlx-lm's `LRUPromptCache` (its server in mid 2026): whole sequences including the answer.

    A look-up of a prompt returns a copy of the first available sequence of this list:

    - the stored sequence that equals the prompt;
    - if sequences can be trimmed, the shortest of the stored sequences that share the longest
      beginning with the prompt, if this beginning is longer than any whole sequence with which the
      prompt begins;
    - the longest whole sequence of more than one token with which the prompt begins.

    This cache stores a prompt when it is computed, and again with its answer when the answer is
    complete. If sequences cannot be trimmed, it also stores the system prompt (the first of several
    messages). A newly stored sequence replaces an equal one and, if sequences can be trimmed, the
    stored sequences with which it begins. A look-up does not make a sequence younger: among
    sequences of one kind (system prompt, prompt, prompt with answer), the one that was stored first
    is evicted first.
    """

    type_name: ClassVar[str] = "mlx-memory"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "Sequences":
        """Return a cache without stored sequences."""
        return Sequences(self, profile.kv_bytes_per_token)


class _Entry(Struct, eq=False):
    """A token sequence in memory, with its kind."""

    stored: Stored
    kind: str


class Sequences:
    """mlx-lm's prompt cache in one engine: token sequences, limited by their number and their size
    in bytes.
    """

    def __init__(self, parameters: MlxParameters, bytes_per_token: int) -> None:
        self._parameters = parameters
        self._bytes_per_token = bytes_per_token
        self._entries: list[_Entry] = []
        """Stored sequences in the order in which they were stored."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept_bytes(self) -> int:
        """Total size in bytes of all stored sequences."""
        return sum(entry.stored.tokens for entry in self._entries) * self._bytes_per_token

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because a request works on a copy of a
        sequence.
        """
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the part of the request's prompt that the best matching stored sequence has;
        restoring it takes no time.
        """
        tokens = self.nearest_tokens(parts_of(request), request.prompt_tokens)
        return Found(tokens) if tokens else NOTHING

    def nearest_tokens(self, prompt: PromptParts, prompt_tokens: int) -> int:
        """Return the number of tokens at the beginning of the prompt that a stored sequence can
        provide, or 0 if none can.

        A sequence that is not a beginning of the prompt counts only if sequences can be trimmed, and
        then never for the last token of the prompt.
        """
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
        """Store the computed prompt. If sequences cannot be trimmed, also store its first message
        of several, the system prompt. Writing takes no time.
        """
        prompt = parts_of(request)
        if prompt.messages > 1 and not self._parameters.trimmable:
            self.insert(Stored(prompt, 1), SYSTEM)
        self.insert(Stored(prompt, prompt.messages), USER)
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the prompt with its answer, if the answer is complete. Writing takes no time."""
        if request.finished:
            prompt = parts_of(request)
            self.insert(Stored(prompt, len(prompt.keys)), ASSISTANT)
        return 0.0

    def insert(self, stored: Stored, kind: str) -> None:
        """Store a sequence of a kind in `EVICTED` in place of those that it makes superfluous, and
        evict sequences beyond the limits.
        """
        self._entries = [entry for entry in self._entries if not self._replaces(stored, entry)]
        self._entries.append(_Entry(stored, kind))
        if len(self._entries) > self._parameters.entries_max:
            self._evict()
        bytes_max = self._parameters.memory_bytes
        while bytes_max is not None and self.kept_bytes > bytes_max:
            self._evict()

    def _replaces(self, stored: Stored, entry: _Entry) -> bool:
        """Return whether the entry has the same text as `stored`, or is a beginning of it that is
        no longer needed.
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
