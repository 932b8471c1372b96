"""Kronk's system prompt cache: one buffer for one system prompt."""

from typing import ClassVar, Final

from epp.core.types import Seconds
from sim.caches import behaviour
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest

CACHE_TOKENS_MIN: Final = 100
"""Minimum number of tokens that Kronk caches; `cache_min_tokens` of its manual, chapter 5."""


class KronkSpc(behaviour.CacheBehaviour, frozen=True):
    """Kronk's system prompt cache (SPC) with the KV cache of one system prompt, by its manual,
    chapter 5.2; removed in April 2026.

    The cache copies the first message of a prompt with several messages (its system prompt) to
    memory once it is computed, if it has at least `cache_min_tokens`. The cached system prompt is
    copied into the sequence of every request with several messages of which the first is the same.
    Another system prompt of at least `cache_min_tokens` replaces the cached one once it is
    computed. A copy of a system prompt takes its bytes / `bytes_per_s`, in which the engine
    computes nothing; storing a system prompt takes two copies. Kronk's manual only says 10 to 30 ms
    per copy. Requests with the same system prompt that start before it is computed compute their
    whole prompts.
    """

    type_name: ClassVar[str] = "kronk-spc"

    cache_min_tokens: behaviour.Tokens = CACHE_TOKENS_MIN
    """Minimum length in tokens of a system prompt that is cached."""
    bytes_per_s: behaviour.BytesPerSecond = behaviour.PCIE_5_X16_BYTES_PER_S
    """Speed of copying the system prompt in bytes per second. The default is the peak of 16 lanes
    of PCIe 5.0.
    """

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "SystemPromptBuffer":
        """Return a system prompt cache whose buffer is empty."""
        copy_s_per_token = profile.kv_bytes_per_token / self.bytes_per_s
        return SystemPromptBuffer(self.cache_min_tokens, copy_s_per_token)


class SystemPromptBuffer:
    """Kronk's system prompt cache in one engine: a buffer for one system prompt of any length."""

    def __init__(self, cache_min_tokens: int, copy_s_per_token: Seconds) -> None:
        self._cache_min_tokens = cache_min_tokens
        self._copy_s_per_token = copy_s_per_token
        self._held: tuple[int, int] | None = None
        """Key and number of tokens of the cached system prompt, or None if the buffer is empty."""

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because the buffer is copied into each
        request's sequence.
        """
        return behaviour.UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the cached system prompt, with the time to copy it, if the request begins with it;
        otherwise nothing.
        """
        system = self._system_prompt(request)
        if system is None or system != self._held:
            return behaviour.NOTHING
        return Found(system[1], system[1] * self._copy_s_per_token)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the request's system prompt in the buffer, in place of the one that it has. Return
        the time in seconds to copy it out and in again; 0 if the request has no system prompt that
        is long enough, or if the buffer already has it.
        """
        system = self._system_prompt(request)
        if system is None or system == self._held:
            return 0.0
        self._held = system
        return 2 * system[1] * self._copy_s_per_token

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Return 0: the end of a request changes nothing here, because the buffer does not depend
        on running requests.
        """
        return 0.0

    def _system_prompt(self, request: EngineRequest) -> tuple[int, int] | None:
        parts = behaviour.parts_of(request)
        if parts.messages < 2 or parts.ends[0] < self._cache_min_tokens:
            return None
        return parts.keys[0], parts.ends[0]
