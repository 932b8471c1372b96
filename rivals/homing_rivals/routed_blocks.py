"""Routed blocks: the approximate prefix index as other endpoint pickers ship it.

There is a list of block hashes by recency for each endpoint, and a set of endpoints for each hash.
Unlike `core/knowledge/prefix` it ignores the order of blocks, unless `contiguous` is set: an
endpoint may have lost the head of a prompt and kept its tail, which still counts while another
endpoint has the head.
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
    """`routed-blocks-producer`: an index of the blocks that were routed to each endpoint, as GIE v1
    and llm-d-router estimate caches.

    matched(e) = number of blocks of the prompt that were routed to e, counted up to the first block
    that no endpoint has (with `contiguous`: that e does not have). Sources: proposal 0602 of
    kubernetes-sigs/gateway-api-inference-extension; llm-d/llm-d-router,
    `requestcontrol/dataproducer/approximateprefix`.

    Three known faults of the originals are kept by default: blocks after a gap count as long as
    another endpoint has the missing block; the head of a prompt is pushed out before its tail; with
    `auto_tune`, an engine's number of blocks is used for this index, whatever the sizes of both
    kinds of blocks.
    """

    type_name: ClassVar[str] = "routed-blocks-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=contract.Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1, le=4_096)] = 64
    """Number of tokens in a block; a token counts as 4 bytes of the prompt."""
    blocks_per_request_max: Annotated[int, Meta(ge=1, le=_CHAIN_BLOCKS_MAX)] = 2_048
    """Maximum number of full blocks of each prompt that are recorded and matched."""
    blocks_per_endpoint_max: Annotated[int, Meta(ge=1)] = 31_250
    """Maximum number of blocks of an endpoint.

    The default is 500,000 tokens in blocks of 16: an 8B model on an H100.
    """
    blocks_max: Annotated[int, Meta(ge=1)] = 1_500_000
    """Maximum number of blocks of all endpoints together, about 170 bytes each.

    Beyond it, the endpoint with the most blocks loses its oldest.
    """
    auto_tune: bool = False
    """True if the number of blocks that an engine reports replaces `blocks_per_endpoint_max`. A
    report counts if it came before the first request to the endpoint, or before the parameters were
    last changed.
    """
    last_partial_block: bool = False
    """True if the rest of a prompt after its last full block counts as a block.

    The rest is hashed from the text, which a replayed trace lacks.
    """
    contiguous: bool = False
    """True if an endpoint's blocks count only up to the first one that this endpoint lacks: a
    repair of the original.
    """
    tail_first: bool = False
    """True if the tail of a prompt is dropped before its head: a repair of the original."""

    def open(self) -> AffinityIndex:
        """Return a new, empty index of routed blocks, with these settings as its parameters."""
        return RoutedBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply all parameters except the block size to the running index `index`.

        Return False, and change nothing, if the block size differs, or if `index` has another type.
        """
        # A subclass learns in another way.
        return type(index) is RoutedBlocks and index.configure(self)


class RoutedBlocks:
    """An `AffinityIndex` of the blocks that were routed to each endpoint, without regard to their
    order.
    """

    def __init__(self, settings: RoutedBlocksSettings) -> None:
        self._holders: dict[int, int] = {}
        """Slots to which each block was routed, as bits of a number that is never 0, by the hash of
        the block.
        """
        self._recent: dict[int, OrderedDict[int, int]] = {}
        """Blocks of each slot, least recent first: slot -> hash of the block -> number of the
        latest record that contained it.
        """
        self._capacity: dict[int, int] = {}
        """Maximum number of blocks of each slot, determined at its first request and again when the
        settings change.
        """
        self._told: dict[int, int] = {}
        """Number of blocks of each slot's cache that its engine reported."""
        self._records = 0
        self.blocks = 0
        """Number of (block, endpoint) pairs in the index."""
        self._settings = settings

    def configure(self, settings: RoutedBlocksSettings) -> bool:
        """Apply `settings` to this index; return False without a change if their block size
        differs.
        """
        if settings.block_tokens != self._settings.block_tokens:
            return False
        self._settings = settings
        self._capacity.clear()
        for slot in self._recent:
            self._fit(slot)
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return, for each slot, how many blocks of the prompts were routed to it. Each prompt
        counts up to the first block that was routed to no slot; with `contiguous`, to the slot's
        own first missing block.
        """
        matched = np.zeros(slots, dtype=np.int64)
        total = 0
        for hashes in self._prompts(request):
            total += len(hashes)
            for mask, count in self._runs(hashes):
                _add(matched, mask, count)
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record that every block of `request` was routed to `slot`, and drop the oldest blocks
        beyond the limits: those of the slot, then those of the endpoint with the most blocks.
        """
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
        """Undo `record` of `request` at `slot`: drop the blocks that it added, except those that a
        later request contained.
        """
        number, added = recorded
        recent: dict[int, int] = self._recent.get(slot, OrderedDict())
        for key in added:
            if recent.get(key) == number:
                self._drop(slot, key)

    def forget(self, slot: int) -> None:
        """Drop all blocks of `slot`, with its limit and the cache size that its engine reported."""
        for key in tuple(self._recent.get(slot, ())):
            self._drop(slot, key)
        self._recent.pop(slot, None)
        self._capacity.pop(slot, None)
        self._told.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Drop nothing with time, because blocks do not expire in this index."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Store the number of blocks that the engine of `slot` reports, which limits the slot's
        blocks with `auto_tune`.

        An engine's block counts as a block of this index, whatever its size.
        """
        if blocks_total > 0:
            self._told[slot] = blocks_total

    def blocks_of(self, slot: int) -> int:
        """Return the number of blocks that are stored for `slot`."""
        return len(self._recent.get(slot, ()))

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the runs of `hashes` that the same slots have, as (slots as bits, number of
        blocks), up to a block that no slot has. With `contiguous`, a slot that lacks a block does
        not have the later ones.
        """
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
        """Return the block hashes of each prompt of `request`."""
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
    """Add `count` to `matched` at each slot whose bit is set in `mask`, as far as `matched` has
    that slot.
    """
    while mask:
        lowest = mask & -mask
        slot = lowest.bit_length() - 1
        if slot < len(matched):
            matched[slot] += count
        mask ^= lowest
