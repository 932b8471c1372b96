"""A conversion of prompts to lists of block hashes for plugins that keep an index of their own, and
a class that counts the blocks of the prompts that a plugin added at each slot.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from epp.core.knowledge.candidates import Floats
from epp.core.prompt.blocks import HASH_BYTES

REQUEST_BLOCKS_MAX: Final = 16_384
"""Maximum number of blocks of all prompts of one request, because a completion may have thousands
of prompts.

It corresponds to a million tokens in blocks of 64, and limits the time to some milliseconds.
"""


def block_lists(chains: Sequence[bytes], blocks_max: int) -> list[list[int]]:
    """Return the block hashes of each prompt as 64-bit numbers.

    `chains` are the prompts' hashes as from `InferenceRequest.chains_of`. At most `blocks_max`
    blocks of each prompt and `REQUEST_BLOCKS_MAX` of all are returned; blocks of the last prompts
    are dropped first.
    """
    left = REQUEST_BLOCKS_MAX
    lists: list[list[int]] = []
    for chain in chains:
        blocks = min(len(chain) // HASH_BYTES, blocks_max, left)
        left -= blocks
        lists.append(memoryview(chain)[: blocks * HASH_BYTES].cast("Q").tolist())
    return lists


class HeldBlocks:
    """An index of the block hashes of the prompts that were added at each slot, with the number of
    prompts at the slot that contain each block.

    A prompt is the sequence of its chained hashes, so a slot that has a block has all blocks before
    it. The size is unbounded: the caller must remove prompts or limit `blocks`.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}
        self._first: dict[int, dict[int, None]] = {}
        """Slots at which a prompt that begins with each block was added, by the hash of that block.
        No other slot can have any block of such a prompt.
        """
        self.blocks = 0
        """Number of (block, slot) pairs in this index."""

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """Add the blocks of `prompt` to those at `slot`."""
        if not prompt:
            return
        counts = self._counts.setdefault(slot, {})
        before = len(counts)
        known = counts.get
        for block in prompt:
            counts[block] = known(block, 0) + 1
        self.blocks += len(counts) - before
        self._first.setdefault(prompt[0], {})[slot] = None

    def remove(self, slot: int, prompt: Sequence[int]) -> None:
        """Remove the blocks of `prompt` at `slot` once. The prompt must have been added there
        before.
        """
        if not prompt:
            return
        counts = self._counts[slot]
        before = len(counts)
        for block in prompt:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        self.blocks -= before - len(counts)
        if prompt[0] not in counts:
            self._leave(slot, prompt[0])

    def forget(self, slot: int) -> None:
        """Remove the blocks of all prompts at `slot`."""
        gone = self._counts.pop(slot, {})
        self.blocks -= len(gone)
        for block in gone:
            if slot in self._first.get(block, ()):
                self._leave(slot, block)

    def held(self, slots: int) -> Floats:
        """Return float64[slots]: the number of distinct blocks at each of the slots below
        `slots`.
        """
        held = np.zeros(slots)
        for slot, counts in self._counts.items():
            if slot < slots:
                held[slot] = len(counts)
        return held

    def leading(self, prompt: Sequence[int]) -> dict[int, int]:
        """Return the number of leading blocks of `prompt` at each slot that has at least one of
        them, by slot.
        """
        found: dict[int, int] = {}
        for slot in self._first.get(prompt[0], ()) if prompt else ():
            counts = self._counts[slot]
            # A slot that holds a block holds all before it, so a binary search finds the last one.
            held, missing = 1, len(prompt) + 1
            while missing - held > 1:
                middle = (held + missing) // 2
                if prompt[middle - 1] in counts:
                    held = middle
                else:
                    missing = middle
            found[slot] = held
        return found

    def _leave(self, slot: int, block: int) -> None:
        holders = self._first[block]
        del holders[slot]
        if not holders:
            del self._first[block]
