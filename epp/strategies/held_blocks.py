"""Who holds which blocks, counted: for sets that prompts are put into and taken out of as a whole."""

from collections.abc import Sequence


class HeldBlocks:
    """By slot, block hashes and how many prompts hold each.

    A prompt is its chained hashes from the first on, so that who holds a block holds all before it.
    Unbounded: whoever puts prompts in takes them out or limits `blocks`.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}
        self.blocks = 0
        """(block, slot) pairs."""

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """One more prompt at `slot`."""
        counts = self._counts.setdefault(slot, {})
        before = len(counts)
        for block in prompt:
            counts[block] = counts.get(block, 0) + 1
        self.blocks += len(counts) - before

    def remove(self, slot: int, prompt: Sequence[int]) -> None:
        """Take out a prompt that was put in at `slot`."""
        counts = self._counts[slot]
        before = len(counts)
        for block in prompt:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        self.blocks -= before - len(counts)

    def forget(self, slot: int) -> None:
        """`slot` holds nothing."""
        self.blocks -= len(self._counts.pop(slot, ()))

    def held(self) -> dict[int, int]:
        """Slot -> blocks that it holds, each once."""
        return {slot: len(counts) for slot, counts in self._counts.items()}

    def leading(self, prompt: Sequence[int]) -> dict[int, int]:
        """Slot -> leading blocks of `prompt` that it holds, of those that hold any."""
        found: dict[int, int] = {}
        if not prompt:
            return found
        for slot, counts in self._counts.items():
            if prompt[0] not in counts:
                continue
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
