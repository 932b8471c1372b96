"""Kronk's incremental message cache of August 2026: snapshots of sessions in memory, each of which
is restored as a whole.
"""

from collections.abc import Iterable
from typing import ClassVar, Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.caches.behaviour import (
    NOTHING,
    PCIE_5_X16_BYTES_PER_S,
    BytesPerSecond,
    CacheBehaviour,
    Slots,
    Stored,
    Tokens,
    UnhashedPool,
    parts_of,
)
from sim.caches.kronk_spc import CACHE_TOKENS_MIN
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

_SESSIONS_PER_SLOT_MIN: Final = 3


class KronkImcV2(CacheBehaviour, frozen=True):
    """Kronk's incremental message cache with snapshots of whole prompts, by its manual, chapter 5,
    as of August 2026.

    The engine runs as many requests as there are `slots`. Each request whose prompt has at least
    `cache_min_tokens` reserves a session, which stores the snapshot of one prompt: the session with
    the longest snapshot that is a complete beginning of its prompt, or else an empty session, or
    else the least recently used one. Reserved sessions cannot be chosen. If no session has such a
    snapshot, the request may begin with the snapshot of its system prompt; there are as many
    snapshots of system prompts as sessions. A beginning that a prompt shares with only a part of a
    snapshot is never used. There are max(1, slots) * max(3, queue_depth) sessions. A prompt's
    snapshot is stored when the prompt is computed, which frees its session for other requests. If
    the session already has the whole prompt, it is freed when the request is answered. Snapshots
    are in memory; saving or restoring one takes its bytes / `bytes_per_s`, for which Kronk's manual
    has no value.

    The model omits the alternate snapshot of a session, and media. A request that Kronk would
    refuse because it is busy waits in the simulation.
    """

    type_name: ClassVar[str] = "kronk-imc-v2"

    slots: Slots = 2
    """Number of requests that run at the same time, Kronk's `nseq-max`; the default is from the
    manual's example.
    """
    queue_depth: Slots = 2
    """Kronk's queue depth, which here only affects the number of sessions."""
    cache_min_tokens: Tokens = CACHE_TOKENS_MIN
    """Minimum length in tokens of a prompt that is stored."""
    bytes_per_s: BytesPerSecond = PCIE_5_X16_BYTES_PER_S
    """Speed of copying snapshots in bytes per second. The default is the peak of 16 lanes of PCIe
    5.0.
    """

    @property
    def sessions(self) -> int:
        """Number of sessions, each with a snapshot of a prompt. There are as many snapshots of
        system prompts.
        """
        return self.slots * max(_SESSIONS_PER_SLOT_MIN, self.queue_depth)

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "Sessions":
        """Return a snapshot cache in which all sessions are empty."""
        return Sessions(
            slots=self.slots,
            sessions=self.sessions,
            cache_min_tokens=self.cache_min_tokens,
            copy_s_per_token=profile.kv_bytes_per_token / self.bytes_per_s,
        )

    def request_tokens_max(self, settings: EngineSettings) -> int:
        """Return the number of tokens that one slot holds, which limits prompt and answer of a
        request.
        """
        return settings.kv_tokens // self.slots


class _Snapshot(Struct, eq=False):
    """A place for the snapshot of one prompt, or of one system prompt."""

    kept: Stored | None = None
    used_s: Seconds = 0.0


class Sessions:
    """Kronk's snapshot cache in one engine: snapshots of prompts, and as many of system prompts."""

    def __init__(
        self, *, slots: int, sessions: int, cache_min_tokens: int, copy_s_per_token: Seconds
    ) -> None:
        self._slots = slots
        self._cache_min_tokens = cache_min_tokens
        self._copy_s_per_token = copy_s_per_token
        self._sessions = [_Snapshot() for _ in range(sessions)]
        self._system_prompts = [_Snapshot() for _ in range(sessions)]
        self._reserved: dict[_Snapshot, EngineRequest] = {}
        self._session_of: dict[EngineRequest, _Snapshot | None] = {}
        """Session that each running request has chosen; None if its prompt is too short for one."""
        self.rebuilds = 0
        """Number of requests so far, without those whose prompt is too short, that found no
        snapshot of a head of their prompt.
        """

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because a snapshot is restored into the
        blocks of a slot.
        """
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Reserve a session for the request, and return the part of its prompt that is restored
        from a snapshot. None if the request must wait for a slot or a session.
        """
        if len(self._session_of) == self._slots:
            return None
        if request.prompt_tokens < self._cache_min_tokens:
            self._session_of[request] = None
            return NOTHING
        prompt = parts_of(request)
        free = [session for session in self._sessions if session not in self._reserved]
        if not free:
            return None
        session = _longest(free, prompt)
        restored = session or _longest(self._system_prompts, prompt)
        if session is None:
            session = min(free, key=lambda one: (one.kept is not None, one.used_s))
            session.kept = None
            self.rebuilds += restored is None
        self._reserved[session] = request
        self._session_of[request] = session
        if restored is None or restored.kept is None:
            return NOTHING
        restored.used_s = now
        tokens = restored.kept.tokens
        return Found(tokens, tokens * self._copy_s_per_token)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store a snapshot of the computed prompt if the request has a session whose snapshot is
        shorter, and one of its system prompt if that is new and long enough. A stored snapshot
        frees the session for other requests. Return the time in seconds for copying them.
        """
        session, prompt = self._session_of[request], parts_of(request)
        if session is None or session not in self._reserved:
            return 0.0
        save_s = 0.0
        system = Stored(prompt, 1)
        if prompt.messages > 1 and system.tokens >= self._cache_min_tokens:
            known = any(one.kept and one.kept.begins(prompt) for one in self._system_prompts)
            if not known:
                oldest = min(
                    self._system_prompts, key=lambda one: (one.kept is not None, one.used_s)
                )
                oldest.kept, oldest.used_s = system, now
                save_s += system.tokens * self._copy_s_per_token
        if session.kept is None or session.kept.tokens < request.prompt_tokens:
            session.kept = Stored(prompt, prompt.messages)
            save_s += request.prompt_tokens * self._copy_s_per_token
            del self._reserved[session]
        session.used_s = now
        return save_s

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Free the slot of the request, and its session if that is still reserved. Nothing is
        written.
        """
        session = self._session_of.pop(request)
        if session is not None and self._reserved.get(session) is request:
            del self._reserved[session]
            session.used_s = now
        return 0.0


def _longest(snapshots: Iterable[_Snapshot], prompt: PromptParts) -> _Snapshot | None:
    """Return the snapshot with the longest text with which the prompt begins, or None if there is
    none.
    """
    longest: _Snapshot | None = None
    tokens = 0
    for snapshot in snapshots:
        kept = snapshot.kept
        if kept is not None and kept.tokens > tokens and kept.begins(prompt):
            longest, tokens = snapshot, kept.tokens
    return longest
