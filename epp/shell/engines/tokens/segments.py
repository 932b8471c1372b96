"""Ids of the parts of prompts that came before. Used in the worker process alone.

A conversation comes again and again, each time a message longer. Its text is rendered in whole each
time, because templates change what they wrote before; but cut at special tokens, where a cut changes
no id, only the parts that are new have to be encoded.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Protocol

import xxhash

CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
"""16 million ids and what else is kept of them."""
ENTRY_BYTES: Final = 200
"""What one takes besides its ids."""
PART_CHARACTERS_MIN: Final = 64
"""To encode a shorter one takes no longer than to look it up."""


class Encodes(Protocol):
    def parts_of(self, text: str) -> list[str]: ...
    def encode(self, part: str) -> bytes: ...


class SegmentCache:
    """Of all models together. Parts are known by 128 bits of a hash with the model."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._ids)

    def ids_of(self, model: str, encoder: Encodes, text: str) -> bytes:
        """The ids of `text`, packed."""
        return b"".join(self._each(model, encoder, encoder.parts_of(text)))

    def _each(self, model: str, encoder: Encodes, parts: Iterable[str]) -> Iterable[bytes]:
        seed = xxhash.xxh64_intdigest(model.encode())
        for part in parts:
            if len(part) < PART_CHARACTERS_MIN:
                yield encoder.encode(part)
                continue
            key = xxhash.xxh3_128_digest(part.encode(), seed)
            known = self._ids.get(key)
            if known is None:
                self.misses += 1
                known = encoder.encode(part)
                self._keep(key, known)
            else:
                self.hits += 1
                self._ids.move_to_end(key)
            yield known

    def _keep(self, key: bytes, ids: bytes) -> None:
        size = len(ids) + ENTRY_BYTES
        if size > self._bytes_max:
            return
        self._ids[key] = ids
        self.held_bytes += size
        while self.held_bytes > self._bytes_max:
            _, gone = self._ids.popitem(last=False)
            self.held_bytes -= len(gone) + ENTRY_BYTES
