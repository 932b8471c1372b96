"""The paged KV cache of one engine: which blocks are held, cached, free, and next to be evicted.

The order is vLLM's (`v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`), and the recorded run of
a real engine in the tests checks it:

- Block 0 is reserved; the others begin free, in order of their number.
- A block that leaves its last holder goes to the back of the free list if it carries a hash (it may
  be hit again), to the front if it does not. A request lets its blocks go tail first, so the tail
  of a prefix is evicted before its head.
- A hash is dropped only when the block itself is taken for something else.
- Nothing is deduplicated: two requests that miss together make two blocks with one hash.

A hash stands for everything up to and with its block (see `sim/tokens.py`); it is any integer here.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class BlockPool:
    """`blocks_total` blocks, one of them reserved. No time, no tokens: numbers and hashes."""

    __slots__ = ("_free", "_hash_of", "_holders", "_twins", "_with_hash", "blocks_total")

    def __init__(self, blocks_total: int) -> None:
        """At least 2 blocks, or ValueError."""
        if blocks_total < 2:
            raise ValueError(f"A block pool needs at least 2 blocks, got {blocks_total}.")
        self.blocks_total = blocks_total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks_total))
        """In the order in which blocks are taken."""
        self._holders = [0] * blocks_total
        self._hash_of: list[int | None] = [None] * blocks_total
        self._with_hash: dict[int, int] = {}
        """Hash -> the oldest block that carries it."""
        self._twins: dict[int, list[int]] = {}
        """Hash -> the younger blocks with the same hash."""

    @property
    def blocks_usable(self) -> int:
        """All but the reserved one."""
        return self.blocks_total - 1

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder, cached or not."""
        return len(self._free)

    @property
    def blocks_used(self) -> int:
        """Distinct blocks with a holder."""
        return self.blocks_total - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """`vllm:kv_cache_usage_perc`: the held share, 0 to 1; a warm idle cache reads 0."""
        return self.blocks_used / self.blocks_usable

    def match(self, chain: Sequence[int], blocks_max: int) -> list[int]:
        """The blocks that hold the longest cached head of `chain`, at most `blocks_max`."""
        with_hash = self._with_hash
        hit: list[int] = []
        for block_hash in islice(chain, blocks_max):
            block = with_hash.get(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    def free_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds: taking them leaves that many fewer free."""
        holders = self._holders
        return sum(1 for block in blocks if not holders[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each; what was free leaves the free list."""
        holders, free = self._holders, self._free
        for block in blocks:
            if not holders[block]:
                del free[block]
            holders[block] += 1

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, each with one holder; their hashes are forgotten."""
        assert count <= len(self._free), "the caller asks for no more than there is"
        pop, holders, hash_of = self._free.popitem, self._holders, self._hash_of
        taken: list[int] = []
        for _ in range(count):
            block = pop(last=False)[0]
            if hash_of[block] is not None:
                self._evict(block)
            holders[block] = 1
            taken.append(block)
        return taken

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """From now on `blocks` can be hit under `hashes`, one each. Done when they are scheduled."""
        with_hash, hash_of = self._with_hash, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            hash_of[block] = block_hash
            if with_hash.setdefault(block_hash, block) != block:
                self._twins.setdefault(block_hash, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each, last block first."""
        holders, hash_of, free = self._holders, self._hash_of, self._free
        unhashed: list[int] = []
        for block in reversed(blocks):
            holders[block] -= 1
            if holders[block]:
                continue
            if hash_of[block] is None:
                unhashed.append(block)
            else:
                free[block] = None
        for block in reversed(unhashed):
            free[block] = None
            free.move_to_end(block, last=False)

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._with_hash[block_hash]
            return
        if self._with_hash[block_hash] == block:
            self._with_hash[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]
