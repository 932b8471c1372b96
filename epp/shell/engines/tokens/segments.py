"""Cache the token ids of parts of earlier prompts.

This module is used only in the worker process. A conversation returns repeatedly, each time one
message longer. Its text is rendered completely each time, because templates change earlier output.
If the text is split at special tokens, which changes no token id, only its new parts need to be
encoded.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Protocol

import xxhash

CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size in bytes of the cache of token ids, including its overhead; 16 million ids of 4
bytes would fit without overhead.
"""
ENTRY_BYTES: Final = 200
"""Size in bytes of an entry of the cache of token ids, without the ids."""
PART_CHARACTERS_MIN: Final = 64
"""Minimum number of characters of a part whose token ids are cached; encoding a shorter part is as
fast as looking it up.
"""


class Encodes(Protocol):
    def parts_of(self, text: str) -> list[str]: ...
    def encode(self, part: str) -> bytes: ...


class SegmentCache:
    """A cache of the token ids of text parts, for all models. Its keys are 128-bit hashes of model
    and part.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._ids)

    def ids_of(self, model: str, encoder: Encodes, text: str) -> bytes:
        """Return the packed token ids of `text`, encoding only those parts that are not cached."""
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
