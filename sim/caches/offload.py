"""A KV cache that vLLM offloads to the host's memory, and to a store that all pods share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from epp.core.types import Seconds
from sim.caches.behaviour import (
    NOTHING,
    PCIE_5_X16_BYTES_PER_S,
    Bytes,
    BytesPerSecond,
    CacheBehaviour,
    Stores,
)
from sim.caches.lmcache_cpu import EvictedBlocks
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest

HOST: Final = "host"
SHARED: Final = "external_unspecified"
"""Tier name of the shared store on vLLM's metrics page
(`vllm:prompt_tokens_cached_by_source_total`); `HOST` is that of the host's memory.
"""


class Offload(CacheBehaviour, frozen=True):
    """The `OffloadingConnector` of vLLM: it copies computed blocks to the host's memory, and to a
    store that all pods share if there is one.

    Blocks of a prompt that vLLM's block pool on the GPU lacks are loaded from the host's memory, or
    else from the shared store. Loading takes bytes / speed, and the engine does nothing else
    meanwhile. This time of loading is an upper bound, because the real vLLM computes for other
    requests while it loads. Copies to memory and store take no time, and are complete when the
    prompt or the answer ends. The host's memory and the shared store each drop the least recently
    used blocks. The blocks in the host's memory are lost when the engine's process ends; those in
    the shared store outlive all pods.
    """

    type_name: ClassVar[str] = "offload"

    memory_bytes: Bytes = 64 * 2**30
    """Size in bytes of the host memory for each engine, `cpu_bytes_to_use` of vLLM, which has no
    default there.
    """
    bytes_per_s: BytesPerSecond = PCIE_5_X16_BYTES_PER_S
    """Speed of loading from the host's memory in bytes per second. The default is the peak of 16
    lanes of PCIe 5.0.
    """
    shared_bytes: Annotated[int, Meta(ge=0, le=10**18)] = 0
    """Size in bytes of the store that all pods of one model and block size share; 0 for no store.
    """
    shared_bytes_per_s: BytesPerSecond = 12.5e9
    """Speed of loading from the shared store to one pod in bytes per second, regardless of other
    pods that load. The default is 100 Gbit/s.
    """

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "OffloadedBlocks":
        """Return a cache whose host memory is empty, with a store that no other pod shares."""
        return self.open_in({}, profile, settings, before)

    def open_in(
        self, stores: Stores, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "OffloadedBlocks":
        """Return a cache whose host memory is empty. Its shared store is that of compatible caches
        in `stores`, and is created there if it is missing.
        """
        size_tokens = settings.block_size_tokens
        block_bytes = size_tokens * profile.kv_bytes_per_token
        tiers = {HOST: EvictedBlocks(self.memory_bytes // block_bytes)}
        speeds = {HOST: self.bytes_per_s}
        if self.shared_bytes:
            # Blocks of another model or size need a separate store.
            name = f"{self.shared_bytes} {profile.model} {block_bytes} {size_tokens}"
            blocks_max = self.shared_bytes // block_bytes
            tiers[SHARED] = stores.setdefault(name, EvictedBlocks(blocks_max))
            speeds[SHARED] = self.shared_bytes_per_s
        return OffloadedBlocks(
            tiers,
            {name: block_bytes / speed for name, speed in speeds.items()},
            block_size_tokens=size_tokens,
        )


class OffloadedBlocks:
    """The cache tiers outside the GPU of one engine, the nearest tier first."""

    def __init__(
        self,
        tiers: Mapping[str, EvictedBlocks],
        load_s_per_block: Mapping[str, Seconds],
        *,
        block_size_tokens: int,
    ) -> None:
        self.tiers = tiers
        self.hit_tokens = dict.fromkeys(tiers, 0)
        """Number of prompt tokens found in each tier, counted when requests are first admitted."""
        self._load_s_per_block = load_s_per_block
        self._block_size_tokens = block_size_tokens

    def pool(self, blocks_total: int) -> BlockPool:
        """Return vLLM's own block pool, which needs no connection to the tiers."""
        return BlockPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return how far the prompt is cached if the blocks that follow those in the pool are
        loaded, with the time to load them. Each block is loaded from the first tier that has it.
        """
        size = self._block_size_tokens
        # The last token is always computed, and so is its block.
        blocks_max = (request.known_tokens - 1) // size
        held = position = held_tokens // size
        found: dict[str, int] = {}
        went_on = True
        while went_on and position < blocks_max:
            went_on = False
            for name, tier in self.tiers.items():
                upto = tier.match(request.chain, request.chain_ends, position, blocks_max)
                if upto > position:
                    found[name] = found.get(name, 0) + upto - position
                    position, went_on = upto, True
        if position == held:
            return NOTHING
        if request.scheduled_at is None:
            for name, blocks in found.items():
                self.hit_tokens[name] += blocks * size
        load_s = sum(blocks * self._load_s_per_block[name] for name, blocks in found.items())
        return Found(position * size, load_s)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Copy all full blocks of the computed prompt, after a preemption also those of its answer
        so far, to every tier. Copying takes no time of the engine.
        """
        self._keep(request.chain, request.chain_ends, request.known_tokens)
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Copy the computed full blocks of prompt and answer to every tier. Copying takes no time
        of the engine.
        """
        self._keep(request.chain, request.chain_ends, request.computed_tokens)
        return 0.0

    def _keep(self, keys: Sequence[int], ends: Sequence[int], tokens: int) -> None:
        """Store the full blocks of the first `tokens` tokens of a chain in every tier, the last
        blocks first, so that the tail of a prompt is evicted first.
        """
        blocks = tokens // self._block_size_tokens
        pieces: list[tuple[int, int, int]] = []
        start = 0
        for key, end in zip(keys, ends, strict=False):
            if start >= blocks:
                break
            pieces.append((key, start, min(end, blocks)))
            start = end
        for tier in self.tiers.values():
            for key, first, end in reversed(pieces):
                tier.add(key, first, end)
