"""Kronk's incremental message cache of early 2026: one conversation in each slot."""

from typing import ClassVar

from msgspec import Struct

from epp.core.types import Seconds
from sim.caches.behaviour import CacheBehaviour, Slots, Stored, Tokens, UnhashedPool, parts_of
from sim.caches.kronk_spc import CACHE_TOKENS_MIN
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest


class KronkImcV1(CacheBehaviour, frozen=True):
    """The incremental message cache (IMC) of Kronk's manual, chapter 5.3: each request runs in a
    slot that stores its messages.

    A slot stores all messages of a prompt except the last, if they have at least `cache_min_tokens`
    tokens. A request gets the first available slot of this list:

    - the slot whose stored messages all begin the request's prompt; if there are several, the one
      with the most tokens;
    - the slot that shares the longest beginning with the prompt, of at least `cache_min_tokens`,
      and has at most as many messages as the prompt; the slot's other tokens are trimmed;
    - a slot that stores nothing;
    - the least recently used slot, which is emptied.

    A slot whose messages are being computed is pending and cannot be chosen. Each slot has an equal
    share of the KV cache.

    Kronk's manual leaves three rules of this cache open, which the simulator chooses. Unless
    `waits` is false, a request waits for the slot that has its messages while this slot generates,
    and no other request overtakes it. A prompt with too few tokens to store takes an empty slot or
    the least recently used one, like a prompt without a match. Tokenising prompts to compare them
    with the slots takes no time.
    """

    type_name: ClassVar[str] = "kronk-imc-v1"

    slots: Slots = 4
    """Number of slots, Kronk's `n_seq_max`; the default is from the manual's section on memory."""
    cache_min_tokens: Tokens = CACHE_TOKENS_MIN
    """Minimum number of tokens that a slot stores, and minimum length of a common head that is
    reused.
    """
    waits: bool = True
    """True if a request waits for the slot with its messages while that slot generates; False if it
    ignores all slots that generate.
    """

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "MessageSlots":
        """Return a message cache in which all slots are empty."""
        return MessageSlots(self.slots, self.cache_min_tokens, waits=self.waits)

    def request_tokens_max(self, settings: EngineSettings) -> int:
        """Return the number of tokens that one slot holds, which limits prompt and answer of a
        request.
        """
        return settings.kv_tokens // self.slots


class _Slot(Struct, eq=False):
    """One slot of the message cache: its stored messages, and the request that runs in it."""

    kept: Stored | None = None
    request: EngineRequest | None = None
    """Request that runs in the slot, or None if the slot is idle."""
    pending: bool = False
    """True while the messages that the slot will store are being computed."""
    used_s: Seconds = 0.0


class MessageSlots:
    """Kronk's message cache in one engine: slots, each of which stores the messages of one
    conversation or none.
    """

    def __init__(self, slots: int, cache_min_tokens: int, *, waits: bool) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._cache_min_tokens = cache_min_tokens
        self._waits = waits
        self._slot_of: dict[EngineRequest, _Slot] = {}
        self.salvages = 0
        """Number of requests so far that reused only a common head of a slot's messages."""
        self.rebuilds = 0
        """Number of requests so far for which a slot with other messages was emptied."""

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because the data of a slot is in the slot's
        own share of the KV cache.
        """
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Choose a slot for the request, and return the part of its prompt that the slot already
        has. None if the request must wait for a slot.
        """
        prompt = parts_of(request)
        best: _Slot | None = None
        best_tokens = 0
        idle = [slot for slot in self._slots if slot.request is None]
        for slot in self._slots if self._waits else idle:
            kept = slot.kept
            if kept is None or slot.pending or not kept.begins(prompt):
                continue
            if kept.tokens > best_tokens:
                best, best_tokens = slot, kept.tokens
        if best is not None:
            return self._occupy(best, request, best_tokens) if best.request is None else None
        for slot in idle:
            if slot.kept is not None and slot.kept.parts <= prompt.messages:
                shared = slot.kept.shared_tokens(prompt)
                if shared >= max(self._cache_min_tokens, best_tokens + 1):
                    best, best_tokens = slot, shared
        if best is not None:
            self.salvages += 1
            return self._occupy(best, request, best_tokens)
        empty = next((slot for slot in idle if slot.kept is None), None)
        if empty is not None:
            return self._occupy(empty, request, 0)
        oldest = min(idle, key=lambda slot: slot.used_s, default=None)
        if oldest is None:
            return None
        self.rebuilds += 1
        return self._occupy(oldest, request, 0)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the messages of the computed prompt, except the last one, in the request's slot.
        Empty the slot if they have less than `cache_min_tokens` tokens. Writing takes no time.
        """
        slot, prompt = self._slot_of[request], parts_of(request)
        kept = prompt.messages - 1
        slot.pending = False
        slot.kept = None
        if kept and prompt.ends[kept - 1] >= self._cache_min_tokens:
            slot.kept = Stored(prompt, kept)
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Free the request's slot, and trim the last message and the answer from it. The slot is
        emptied if the messages that it should store were not completely computed.
        """
        slot = self._slot_of.pop(request)
        if slot.pending:
            slot.pending = False
            slot.kept = None
        slot.request = None
        slot.used_s = now
        return 0.0

    def _occupy(self, slot: _Slot, request: EngineRequest, tokens: int) -> Found:
        """Assign the slot to the request, and return that the first `tokens` tokens of the slot's
        messages are reused for its prompt.
        """
        prompt = parts_of(request)
        slot.request = request
        slot.pending = prompt.messages < 2 or tokens < prompt.ends[prompt.messages - 2]
        self._slot_of[request] = slot
        return Found(tokens)
