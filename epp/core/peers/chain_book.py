"""Chains that were told before, so that only what is new of the next one needs to be.

A chain of hashes is known by the hash at its end and at every `STEP_BYTES`: prompts of many users
share a preamble and end apart. Sender and receivers keep a book each, of the same chains.
"""

from typing import Final

from epp.core.knowledge.index import CHAINED_KEY_BYTES
from epp.core.prompt.blocks import HASH_BYTES

STEP_BYTES: Final = CHAINED_KEY_BYTES
ENTRY_BYTES: Final = 160
"""What Python needs for an entry."""


class ChainBook:
    """The chains of the last while, in two generations: the older one goes when the newer is full."""

    __slots__ = ("_bytes", "_generation_bytes_max", "_old", "_young")

    def __init__(self, generation_bytes_max: int) -> None:
        """At most twice `generation_bytes_max` are kept, and what one chain takes."""
        self._generation_bytes_max = generation_bytes_max
        self._bytes = 0
        self._young: dict[bytes, tuple[bytes, int]] = {}
        """Hash -> (a chain, where in it the hash ends)."""
        self._old: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def known(self, chain: bytes) -> int:
        """How many bytes of the head of `chain` end where a chain in this book was cut, at most."""
        at = len(chain)
        while at >= STEP_BYTES:
            entry = self._find(chain[at - HASH_BYTES : at])
            if entry is not None and entry[1] == at and entry[0][:at] == chain[:at]:
                return at
            at = (at - 1) // STEP_BYTES * STEP_BYTES
        return 0

    def head(self, last: bytes) -> bytes | None:
        """The chain up to the hash `last`; it stays for another generation."""
        entry = self._find(last)
        if entry is None:
            return None
        if last not in self._young:
            self._young[last] = entry
            self._bytes += ENTRY_BYTES
        return entry[0][: entry[1]]

    def note(self, chain: bytes, known: int = 0) -> None:
        """`chain` was told, of which the first `known` bytes are in this book."""
        length = len(chain)
        if length > known:
            young = self._young
            entered = len(young)
            for at in range(known // STEP_BYTES * STEP_BYTES + STEP_BYTES, length, STEP_BYTES):
                young[chain[at - HASH_BYTES : at]] = chain, at
            young[chain[-HASH_BYTES:]] = chain, length
            self._bytes += length - known + ENTRY_BYTES * (len(young) - entered)
        if self._bytes > self._generation_bytes_max:
            self.age()

    def age(self) -> None:
        """What was told before the last time that this was called is not known any more."""
        self._old, self._young = self._young, {}
        self._bytes = 0

    def clear(self) -> None:
        """Nothing is known any more."""
        self.age()
        self.age()

    def _find(self, last: bytes) -> tuple[bytes, int] | None:
        return self._young.get(last) or self._old.get(last)
