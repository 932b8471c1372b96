"""A book of the hash chains that were sent to peers, so that only the new end of a chain must be
sent.

A chain of hashes is found by the hash at its end and at every `STEP_BYTES`. Prompts of many users
share a preamble and differ at the end. Sender and receivers each keep a book of the same chains.
"""

from typing import Final

from epp.core.knowledge.index import CHAINED_KEY_BYTES
from epp.core.prompt.blocks import HASH_BYTES

STEP_BYTES: Final = CHAINED_KEY_BYTES
ENTRY_BYTES: Final = 160
"""Memory in bytes of one entry of the book of hash chains in Python, without the chain itself."""


class ChainBook:
    """The hash chains that were recently exchanged with peers, in two generations. The older
    generation is dropped when the newer one is full.
    """

    __slots__ = ("_bytes", "_generation_bytes_max", "_old", "_young")

    def __init__(self, generation_bytes_max: int) -> None:
        """Create an empty book of hash chains. Its size is at most twice `generation_bytes_max`,
        plus the size of one chain.
        """
        self._generation_bytes_max = generation_bytes_max
        self._bytes = 0
        self._young: dict[bytes, tuple[bytes, int]] = {}
        """Chain that contains a hash, and the position in bytes at which the hash ends in it, by
        the hash.
        """
        self._old: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def known(self, chain: bytes) -> int:
        """Return the length in bytes of the longest beginning of `chain` that this book contains:
        all of `chain`, or a multiple of `STEP_BYTES`.
        """
        at = len(chain)
        while at >= STEP_BYTES:
            entry = self._find(chain[at - HASH_BYTES : at])
            if entry is not None and entry[1] == at and entry[0][:at] == chain[:at]:
                return at
            at = (at - 1) // STEP_BYTES * STEP_BYTES
        return 0

    def head(self, last: bytes) -> bytes | None:
        """Return the chain up to the hash `last`, or None if the book does not contain it. A chain
        that is found stays for another generation.
        """
        entry = self._find(last)
        if entry is None:
            return None
        if last not in self._young:
            self._young[last] = entry
            self._bytes += ENTRY_BYTES
        return entry[0][: entry[1]]

    def note(self, chain: bytes, known: int = 0) -> None:
        """Add `chain` to the book, and begin a new generation if this one is then full. The book
        already contains the first `known` bytes of the chain.
        """
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
        """Begin a new generation: drop the chains that were neither added nor found by `head` since
        the previous call.
        """
        self._old, self._young = self._young, {}
        self._bytes = 0

    def clear(self) -> None:
        """Drop all chains of hashes from the book."""
        self.age()
        self.age()

    def _find(self, last: bytes) -> tuple[bytes, int] | None:
        return self._young.get(last) or self._old.get(last)
