"""A table from block hashes to endpoints with one limit for all: AIBrix's prefix table.

Unlike the prefix index of the core it has one order of all blocks, whoever holds them, and puts the
head of a prompt in before its tail. So under pressure heads go first, and what follows a lost head
is there and never found: the fault that it is shipped with.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct

from epp.core.duration import check_above_zero
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Duration,
    InferenceRequest,
    Origin,
    Parameters,
    Seconds,
)
from epp.strategies.holder_bits import slots_of

_EXPIRED_PER_CALL_MAX: Final = 4_096


class BlockTableSettings(Parameters, frozen=True):
    """AIBrix's constants, but for the size of a block and the longest prompt.

    Its code has blocks of 4 bytes, one token here, of which a prompt has tens of thousands; its
    documentation says 128. Prompts have no limit there.
    """

    type_name: ClassVar[str] = "block-table-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens in a block."""
    prompt_blocks_max: Annotated[int, Meta(ge=1, le=65_536)] = 8_192
    """Blocks of a prompt that are looked at."""
    blocks_max: Annotated[int, Meta(ge=1)] = 200_000
    """Blocks in the table, about 200 bytes each."""
    ttl: Duration = Duration(1_200.0)
    """A block is forgotten this long after it was last routed anywhere."""
    tails_first: bool = False
    """Under pressure lose the tail of a prompt before its head."""

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)

    def open(self) -> AffinityIndex:
        """A new, empty table."""
        return BlockTable(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running table all but the size of a block; False if that differs."""
        return isinstance(index, BlockTable) and index.configure(self)


class _Block(Struct, gc=False, eq=False):
    at_s: Seconds
    """When it was last routed somewhere."""
    holders: int
    """Slots as bits."""


class BlockTable:
    """The unit is one leading full block that a slot holds without a gap, summed over the prompts.

    To forget an endpoint takes a look at every block, about 20 ms when it is full.
    """

    def __init__(self, settings: BlockTableSettings) -> None:
        self.block_tokens: Final = settings.block_tokens
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        """Chained hash -> who holds it; the longest unused first."""
        self.configure(settings)

    def configure(self, settings: BlockTableSettings) -> bool:
        """Adopt `settings`; what is too much for them goes at once."""
        if settings.block_tokens != self.block_tokens:
            return False
        self._prompt_blocks_max = settings.prompt_blocks_max
        self._blocks_max = settings.blocks_max
        self._ttl_s = float(settings.ttl)
        self._tails_first = settings.tails_first
        self._fit()
        return True

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Leading blocks that each slot holds."""
        matched = np.zeros(slots, dtype=np.int64)
        total = 0
        for chain in self._chains(request):
            total += len(chain)
            for slot, blocks in self._held(chain, now):
                if slot < slots:
                    matched[slot] += blocks
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> list[int]:
        """`slot` holds every block from now on."""
        chains = self._chains(request)
        held = [self._record(chain, 1 << slot, now) for chain in chains]
        self._fit()
        return held

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` holds no more of the prompts than it did when they were recorded."""
        for chain, before in zip(self._chains(request), recorded, strict=True):
            for block in chain[before:]:
                known = self._blocks.get(block)
                if known is not None:
                    self._release(block, known, 1 << slot)

    def forget(self, slot: int) -> None:
        """Nobody is in `slot` any more."""
        bit = 1 << slot
        # In no order: that of use costs ten times as much.
        blocks = dict.items(self._blocks)
        mine = [(block, known) for block, known in blocks if known.holders & bit]
        for block, known in mine:
            self._release(block, known, bit)

    def expire(self, now: Seconds) -> None:
        """Drop blocks that were not routed for the TTL, a bounded number a call."""
        for _ in range(_EXPIRED_PER_CALL_MAX):
            oldest = next(iter(self._blocks.values()), None)
            if oldest is None or oldest.at_s >= now - self._ttl_s:
                return
            self._blocks.popitem(last=False)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The table does not know how large caches are."""

    def _chains(self, request: InferenceRequest) -> list[list[int]]:
        chains = request.chains_of(self.block_tokens * BYTES_PER_TOKEN, self._prompt_blocks_max)
        length = self._prompt_blocks_max * HASH_BYTES
        return [memoryview(chain[:length]).cast("Q").tolist() for chain in chains]

    def _record(self, chain: list[int], bit: int, now: Seconds) -> int:
        """Let the slot `bit` hold `chain`; how many leading blocks of it it held before."""
        blocks = self._blocks
        cutoff = now - self._ttl_s
        held = 0
        for depth, block in enumerate(chain):
            known = blocks.get(block)
            if known is None:
                blocks[block] = _Block(now, bit)
                continue
            # What has expired and was not swept yet is no more held by who held it.
            holders = known.holders if known.at_s >= cutoff else 0
            if held == depth and holders & bit:
                held += 1
            known.holders = holders | bit
            known.at_s = now
            blocks.move_to_end(block)
        if self._tails_first:
            for block in reversed(chain):
                blocks.move_to_end(block)
        return held

    def _held(self, chain: list[int], now: Seconds) -> Iterator[tuple[int, int]]:
        """(slot, leading blocks) of each slot that holds at least one."""
        cutoff = now - self._ttl_s
        holders = -1
        depth = 0
        for known in map(self._blocks.get, chain):
            left = holders & known.holders if known and known.at_s >= cutoff else 0
            if left != holders:
                if depth:
                    yield from ((slot, depth) for slot in slots_of(holders & ~left))
                holders = left
            if not holders:
                return
            depth += 1
        if depth:
            yield from ((slot, depth) for slot in slots_of(holders))

    def _release(self, block: int, known: _Block, bit: int) -> None:
        if known.holders & bit:
            known.holders ^= bit
            if not known.holders:
                del self._blocks[block]

    def _fit(self) -> None:
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
