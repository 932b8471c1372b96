"""LMCache's CPU memory, which stores blocks that vLLM's block pool evicts."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from epp.core.types import Seconds
from sim.caches import behaviour
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest


class LmcacheCpu(behaviour.CacheBehaviour, frozen=True):
    """LMCache's local CPU backend, behind vLLM's own cache.

    Blocks that vLLM's block pool on the GPU evicts go to CPU memory, which drops the least recently
    used ones. The chunks that follow the pool's part of a prompt, which may be empty or end within
    a chunk, are loaded from CPU memory, up to the first one that is not complete. Loading takes
    bytes / `bytes_per_s`, and the engine does nothing else meanwhile. The real LMCache copies
    blocks to CPU memory when they are computed and not when they are evicted. The simulated and the
    real LMCache have the same hits as long as the CPU memory is larger than the pool. If the CPU
    memory is smaller, fewer evicted blocks fit in the real LMCache, because its memory then also
    holds blocks that are still in the pool. Copies to CPU memory take no time here, because they
    can overlap with computation.
    """

    type_name: ClassVar[str] = "lmcache-cpu"

    memory_bytes: behaviour.Bytes = 5 * 2**30
    """Size of the CPU memory in bytes, `max_local_cpu_size` of LMCache, whose default is 5 GB."""
    chunk_tokens: behaviour.Tokens = 256
    """Number of tokens in a chunk, `chunk_size` of LMCache. It is rounded down to whole blocks of
    the engine, at least one.
    """
    bytes_per_s: behaviour.BytesPerSecond = behaviour.PCIE_5_X16_BYTES_PER_S
    """Speed of loading from CPU memory in bytes per second. The default is the peak of 16 lanes of
    PCIe 5.0.
    """

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "Tier":
        """Return a cache whose CPU memory is empty."""
        size_tokens = settings.block_size_tokens
        block_bytes = size_tokens * profile.kv_bytes_per_token
        return Tier(
            blocks_max=self.memory_bytes // block_bytes,
            block_size_tokens=size_tokens,
            chunk_blocks=max(1, self.chunk_tokens // size_tokens),
            load_s_per_token=profile.kv_bytes_per_token / self.bytes_per_s,
        )


class EvictedBlocks:
    """KV blocks in a memory outside the GPU, one stretch of blocks for each key of a chain. If
    there are too many, the least recently used are dropped.
    """

    def __init__(self, blocks_max: int) -> None:
        self.blocks = 0
        self._blocks_max = blocks_max
        self._stretches: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """First block, and block after the last, of each key's stretch in its chain, the least
        recently used first.
        """

    def add(self, key: int, start: int, end: int) -> None:
        """Store the blocks from `start` to `end` of a key, and drop others beyond the limit. If
        they do not touch the key's stored stretch, only the stretch nearer to the beginning of the
        chain is stored.
        """
        known = self._stretches.pop(key, None)
        if known is not None:
            self.blocks -= known[1] - known[0]
            if start <= known[1] and known[0] <= end:
                start, end = min(start, known[0]), max(end, known[1])
            elif known[0] < start:
                start, end = known
        self._stretches[key] = start, end
        self.blocks += end - start
        while self.blocks > self._blocks_max:
            self._drop()

    def match(
        self, keys: Sequence[int], ends: Sequence[int], position: int, blocks_max: int
    ) -> int:
        """Return the block up to which the chain's blocks from `position` on are stored here, at
        most `blocks_max`. These blocks count as used now.
        """
        piece = bisect_right(ends, position)
        used: list[int] = []
        while position < blocks_max:
            start, end = self._stretches.get(keys[piece], (0, 0))
            if not start <= position < end:
                break
            used.append(keys[piece])
            position = min(end, ends[piece], blocks_max)
            if position < ends[piece]:
                break
            piece += 1
        # The tail of a prompt is evicted first.
        for key in reversed(used):
            self._stretches.move_to_end(key)
        return position

    def _drop(self) -> None:
        """Drop the blocks beyond the limit, at most the whole least recently used stretch, from its
        end.
        """
        key = next(iter(self._stretches))
        start, end = self._stretches[key]
        dropped = min(self.blocks - self._blocks_max, end - start)
        self.blocks -= dropped
        if dropped == end - start:
            del self._stretches[key]
        else:
            self._stretches[key] = start, end - dropped


class TieredPool(BlockPool):
    """vLLM's block pool, which passes the blocks that it evicts to `evicted`."""

    def __init__(self, blocks_total: int, evicted: EvictedBlocks) -> None:
        super().__init__(blocks_total)
        self._evicted = evicted

    def take(self, count: int) -> None:
        """Reuse free blocks as `BlockPool.take` does. Before that, pass the evicted blocks that
        have a hash on, in the order of their eviction.
        """
        left = count - self._blank_blocks
        if left > 0:
            for run in self.free_runs():
                first = max(run.start, run.end - left)
                for piece in range(run.last, run.first - 1, -1):
                    start = max(first, run.ends[piece - 1] if piece else 0)
                    end = min(run.end, run.ends[piece])
                    if start >= end:
                        break
                    self._evicted.add(run.keys[piece], start, end)
                left -= run.end - first
                if left <= 0:
                    break
        super().take(count)


class Tier:
    """LMCache's CPU memory of one engine: the blocks that its pool has evicted, and the time to
    load them.
    """

    def __init__(
        self,
        *,
        blocks_max: int,
        block_size_tokens: int,
        chunk_blocks: int,
        load_s_per_token: Seconds,
    ) -> None:
        self.evicted = EvictedBlocks(blocks_max)
        self._block_size_tokens = block_size_tokens
        self._chunk_blocks = chunk_blocks
        self._load_s_per_token = load_s_per_token

    def pool(self, blocks_total: int) -> BlockPool:
        """Return vLLM's block pool, which passes the blocks that it evicts to this memory."""
        return TieredPool(blocks_total, self.evicted)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the part of the prompt up to the last complete chunk, of which the pool has the
        beginning and CPU memory the rest, with the time to load this rest.
        """
        size = self._block_size_tokens
        held = held_tokens // size
        # The last token is always computed, and so is its block.
        blocks_max = (request.known_tokens - 1) // size
        upto = self.evicted.match(request.chain, request.chain_ends, held, blocks_max)
        upto = upto // self._chunk_blocks * self._chunk_blocks
        if upto <= held:
            return behaviour.NOTHING
        return Found(upto * size, (upto - held) * size * self._load_s_per_token)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Return 0: a computed prompt is not written to CPU memory, because blocks are copied there
        when the pool evicts them.
        """
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Return 0: the end of a request writes nothing to CPU memory, because its blocks stay in
        the pool until the pool evicts them.
        """
        return 0.0
