"""Blocks of prompts one by one, for indexes that keep them so, and who holds which, counted."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from epp.core.knowledge.candidates import Floats
from epp.core.prompt.blocks import HASH_BYTES

REQUEST_BLOCKS_MAX: Final = 16_384
"""Of all prompts of one request: a completion may have thousands. A million tokens in blocks of 64,
and some milliseconds."""


def block_lists(chains: Sequence[bytes], blocks_max: int) -> list[list[int]]:
    """64 bits a block, at most `blocks_max` of each chain and `REQUEST_BLOCKS_MAX` of all.

    Of what is too much the later chains keep nothing. The chains are those of `chains_of`.
    """
    left = REQUEST_BLOCKS_MAX
    lists: list[list[int]] = []
    for chain in chains:
        blocks = min(len(chain) // HASH_BYTES, blocks_max, left)
        left -= blocks
        lists.append(memoryview(chain)[: blocks * HASH_BYTES].cast("Q").tolist())
    return lists


class HeldBlocks:
    """By slot, block hashes and how many prompts hold each.

    A prompt is its chained hashes from the first on, so that who holds a block holds all before it.
    Unbounded: whoever puts prompts in takes them out or limits `blocks`.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}
        self._first: dict[int, dict[int, None]] = {}
        """First block of a prompt -> the slots that hold it: who else could hold more?"""
        self.blocks = 0
        """(block, slot) pairs."""

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """One more prompt at `slot`."""
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
        """Take out a prompt that was put in at `slot`."""
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
        """`slot` holds nothing."""
        gone = self._counts.pop(slot, {})
        self.blocks -= len(gone)
        for block in gone:
            if slot in self._first.get(block, ()):
                self._leave(slot, block)

    def held(self, slots: int) -> Floats:
        """float64[slots]: blocks that each holds, each once."""
        held = np.zeros(slots)
        for slot, counts in self._counts.items():
            if slot < slots:
                held[slot] = len(counts)
        return held

    def leading(self, prompt: Sequence[int]) -> dict[int, int]:
        """Slot -> leading blocks of `prompt` that it holds, of those that hold any."""
        found: dict[int, int] = {}
        for slot in self._first.get(prompt[0], ()) if prompt else ():
            counts = self._counts[slot]
            # Who holds a block holds all before it: halve what is left.
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
