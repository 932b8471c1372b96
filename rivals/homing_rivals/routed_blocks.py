"""What was routed where, block by block: the approximate prefix index as the field ships it.

For each endpoint a list of block hashes by recency, and for each hash who has it. Unlike
`core/knowledge/prefix` it knows no order of blocks: an endpoint may have lost the head of a prompt
and keep its tail, and is counted for it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    BYTES_PER_TOKEN,
    Abilities,
    Affinity,
    AffinityIndex,
    InferenceRequest,
    Ints,
    Origin,
    Parameters,
    Seconds,
    block_lists,
)

_CHAIN_BLOCKS_MAX: Final = 65_536


class RoutedBlocksSettings(Parameters, frozen=True):
    """`routed-blocks-producer`: what GIE v1 and llm-d-router believe that endpoints hold.

    matched(e) = blocks of the prompt that were routed to e, up to the first that nobody has.
    Sources: proposal 0602 of kubernetes-sigs/gateway-api-inference-extension; llm-d/llm-d-router,
    `requestcontrol/dataproducer/approximateprefix`.

    Known faults, kept unless told otherwise: blocks count behind a gap as long as somebody else has
    the block in it; of a prompt its head is pushed out before its tail; with `auto_tune` an
    engine's blocks count as blocks of this index, whatever their sizes.
    """

    type_name: ClassVar[str] = "routed-blocks-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1, le=4_096)] = 64
    """Tokens in a block, 4 bytes each."""
    blocks_per_request_max: Annotated[int, Meta(ge=1, le=_CHAIN_BLOCKS_MAX)] = 2_048
    """Of each prompt of a request."""
    blocks_per_endpoint_max: Annotated[int, Meta(ge=1)] = 31_250
    """500,000 tokens in blocks of 16: a model of 8B on an H100."""
    blocks_max: Annotated[int, Meta(ge=1)] = 1_500_000
    """Of all endpoints together, about 170 bytes each; above it who has most loses its oldest."""
    auto_tune: bool = False
    """What an endpoint holds at most is what its engine says, once it got its first request."""
    last_partial_block: bool = False
    """What is left behind the last full block counts as a block, where the text is known: not in a
    replayed trace, which has none."""
    contiguous: bool = False
    """An endpoint's blocks count up to the first that it has not: a repair."""
    tail_first: bool = False
    """Of a prompt its tail is pushed out before its head: a repair."""

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return RoutedBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running index all but the size of blocks; False if that differs."""
        # One that is built on it learns in another way.
        return type(index) is RoutedBlocks and index.configure(self)


class RoutedBlocks:
    """`AffinityIndex`; the unit is a block."""

    def __init__(self, settings: RoutedBlocksSettings) -> None:
        self._holders: dict[int, int] = {}
        """Hash -> the slots that have it, as bits; never 0."""
        self._recent: dict[int, OrderedDict[int, int]] = {}
        """Slot -> hash -> the record that told of it last; the oldest first."""
        self._capacity: dict[int, int] = {}
        """Slot -> blocks that it may have, fixed when it gets its first request."""
        self._told: dict[int, int] = {}
        """Slot -> blocks of its engine."""
        self._records = 0
        self.blocks = 0
        """(block, endpoint) pairs."""
        self._settings = settings

    def configure(self, settings: RoutedBlocksSettings) -> bool:
        """Adopt `settings`; False and no change if their blocks are of another size."""
        if settings.block_tokens != self._settings.block_tokens:
            return False
        self._settings = settings
        self._capacity.clear()
        for slot in self._recent:
            self._fit(slot)
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Blocks of each prompt that each slot has, up to the first that no slot has."""
        matched = np.zeros(slots, dtype=np.int64)
        total = 0
        for hashes in self._prompts(request):
            total += len(hashes)
            for mask, count in self._runs(hashes):
                _add(matched, mask, count)
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Note every block of `request`; what the slot has had for longest makes room."""
        recent = self._recent.setdefault(slot, OrderedDict())
        self._records += 1
        bit = 1 << slot
        added = []
        for hashes in self._prompts(request):
            for key in reversed(hashes) if self._settings.tail_first else hashes:
                if key not in recent:
                    added.append(key)
                    self._holders[key] = self._holders.get(key, 0) | bit
                recent[key] = self._records
                recent.move_to_end(key)
        self.blocks += len(added)
        noted = self._records, added
        self._fit(slot)
        return noted

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Take back what the last `record` of `request` added and no other has told since."""
        number, added = recorded
        recent: dict[int, int] = self._recent.get(slot, OrderedDict())
        for key in added:
            if recent.get(key) == number:
                self._drop(slot, key)

    def forget(self, slot: int) -> None:
        """The slot has nothing, and what it can hold is open again."""
        for key in tuple(self._recent.get(slot, ())):
            self._drop(slot, key)
        self._recent.pop(slot, None)
        self._capacity.pop(slot, None)
        self._told.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Nothing here grows old."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """With `auto_tune`: as many blocks as the engine has, taken for blocks of this index."""
        if blocks_total > 0:
            self._told[slot] = blocks_total

    def blocks_of(self, slot: int) -> int:
        """Blocks that the slot has."""
        return len(self._recent.get(slot, ()))

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(slots as bits, how many blocks in a row they have), up to a block that nobody has."""
        holders = self._holders
        contiguous = self._settings.contiguous
        mask = count = 0
        for key in hashes:
            found = holders.get(key, 0)
            if contiguous and count:
                found &= mask
            if found != mask:
                if count:
                    yield mask, count
                if not found:
                    return
                mask, count = found, 0
            elif not found:
                return
            count += 1
        if count:
            yield mask, count

    def _prompts(self, request: InferenceRequest) -> list[list[int]]:
        """The hashes of each prompt, one a block."""
        settings = self._settings
        block_bytes, most = settings.block_tokens * BYTES_PER_TOKEN, settings.blocks_per_request_max
        chains = request.chains_of(block_bytes, most)
        prompts = block_lists(chains, most)
        if settings.last_partial_block:
            for hashes, tail in zip(prompts, request.tails_of(block_bytes, most), strict=False):
                if tail is not None:
                    hashes.append(tail)
        return prompts

    def _fit(self, slot: int) -> None:
        settings = self._settings
        capacity = self._capacity.get(slot)
        if capacity is None:
            capacity = settings.blocks_per_endpoint_max
            if settings.auto_tune:
                capacity = self._told.get(slot, capacity)
            self._capacity[slot] = capacity
        recent = self._recent[slot]
        while len(recent) > capacity:
            self._drop(slot, next(iter(recent)))
        while self.blocks > settings.blocks_max:
            largest = max(self._recent, key=self.blocks_of)
            for key in tuple(islice(self._recent[largest], self.blocks - settings.blocks_max)):
                self._drop(largest, key)

    def _drop(self, slot: int, key: int) -> None:
        del self._recent[slot][key]
        self.blocks -= 1
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _add(matched: Ints, mask: int, count: int) -> None:
    """Add `count` for each slot of `mask` that there is."""
    while mask:
        lowest = mask & -mask
        slot = lowest.bit_length() - 1
        if slot < len(matched):
            matched[slot] += count
        mask ^= lowest
