"""Routed blocks: the approximate prefix index as other endpoint pickers ship it.

There is a list of block hashes by recency for each endpoint, and a set of endpoints for each hash.
Unlike `core/knowledge/prefix` it ignores the order of blocks: an endpoint may have lost the head of
a prompt and kept its tail, which still counts.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Affinity, AffinityIndex, InferenceRequest, Ints, Seconds

_CHAIN_BLOCKS_MAX: Final = 65_536


class RoutedBlocksSettings(contract.Parameters, frozen=True):
    """`routed-blocks-producer`: the estimated caches of GIE v1 and llm-d-router.

    matched(e) = blocks of the prompt that were routed to e, up to the first that no endpoint has.
    Sources: proposal 0602 of kubernetes-sigs/gateway-api-inference-extension; llm-d/llm-d-router,
    `requestcontrol/dataproducer/approximateprefix`.

    Known faults, kept by default: blocks after a gap count as long as another endpoint has the
    missing block; the head of a prompt is pushed out before its tail; an engine's blocks count as
    blocks of this index with `auto_tune`, whatever their sizes.
    """

    type_name: ClassVar[str] = "routed-blocks-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=contract.Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1, le=4_096)] = 64
    """Tokens in a block, 4 bytes each."""
    blocks_per_request_max: Annotated[int, Meta(ge=1, le=_CHAIN_BLOCKS_MAX)] = 2_048
    """Blocks of each prompt of a request."""
    blocks_per_endpoint_max: Annotated[int, Meta(ge=1)] = 31_250
    """Blocks of an endpoint. The default is 500,000 tokens in blocks of 16: an 8B model on an
    H100.
    """
    blocks_max: Annotated[int, Meta(ge=1)] = 1_500_000
    """Limit for all endpoints, about 170 bytes each; the endpoint with most loses its oldest above
    it.
    """
    auto_tune: bool = False
    """True if the engine reports the capacity of an endpoint, once it got its first request."""
    last_partial_block: bool = False
    """True if the rest after the last full block counts as a block. It needs the text, which a
    replayed trace lacks.
    """
    contiguous: bool = False
    """True if an endpoint's blocks count only up to the first missing one: a repair."""
    tail_first: bool = False
    """True if the tail of a prompt is pushed out before its head: a repair."""

    def open(self) -> AffinityIndex:
        """Return a new, empty index."""
        return RoutedBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply all parameters except the block size to a running index; return False if that
        differs.
        """
        # A subclass learns in another way.
        return type(index) is RoutedBlocks and index.configure(self)


class RoutedBlocks:
    """An `AffinityIndex`; the unit is a block."""

    def __init__(self, settings: RoutedBlocksSettings) -> None:
        self._holders: dict[int, int] = {}
        """Hash -> slots that have it, as bits; never 0."""
        self._recent: dict[int, OrderedDict[int, int]] = {}
        """Slot -> hash -> the latest record that contained it; the oldest first."""
        self._capacity: dict[int, int] = {}
        """Slot -> maximum number of its blocks, fixed at its first request."""
        self._told: dict[int, int] = {}
        """Slot -> blocks of its engine's cache."""
        self._records = 0
        self.blocks = 0
        """Number of (block, endpoint) pairs."""
        self._settings = settings

    def configure(self, settings: RoutedBlocksSettings) -> bool:
        """Adopt `settings`; return False without a change if their block size differs."""
        if settings.block_tokens != self._settings.block_tokens:
            return False
        self._settings = settings
        self._capacity.clear()
        for slot in self._recent:
            self._fit(slot)
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the blocks of each prompt that each slot has, up to the first that no slot has."""
        matched = np.zeros(slots, dtype=np.int64)
        total = 0
        for hashes in self._prompts(request):
            total += len(hashes)
            for mask, count in self._runs(hashes):
                _add(matched, mask, count)
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record every block of `request`; the slot's oldest blocks make room."""
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
        """Undo the additions of the last `record` of `request` that no later one contained."""
        number, added = recorded
        recent: dict[int, int] = self._recent.get(slot, OrderedDict())
        for key in added:
            if recent.get(key) == number:
                self._drop(slot, key)

    def forget(self, slot: int) -> None:
        """Forget the blocks and the capacity of the slot."""
        for key in tuple(self._recent.get(slot, ())):
            self._drop(slot, key)
        self._recent.pop(slot, None)
        self._capacity.pop(slot, None)
        self._told.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Do nothing, because entries do not age."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Set the capacity to the engine's blocks with `auto_tune`, counted as blocks of this
        index.
        """
        if blocks_total > 0:
            self._told[slot] = blocks_total

    def blocks_of(self, slot: int) -> int:
        """Return the number of blocks that the slot has."""
        return len(self._recent.get(slot, ()))

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (slots as bits, length of a run that they have), up to a block that no slot has."""
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
        block_bytes = settings.block_tokens * contract.BYTES_PER_TOKEN
        most = settings.blocks_per_request_max
        chains = request.chains_of(block_bytes, most)
        prompts = contract.block_lists(chains, most)
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
