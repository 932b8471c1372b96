"""Chained block hashes of prompts: each hash stands for the whole prompt up to the end of its
block.

The hash is 64-bit xxHash, `h[i] = XXH64(block i, seed = h[i-1])`. `h[-1]` comes from the API kind,
the model or adapter and the cache salt. Each of them is preceded by its length, so that no two
different seeds have the same text. Only full blocks count, so a growing conversation keeps all its
blocks (design D4).
"""

import sys
from array import array
from collections import OrderedDict
from functools import lru_cache
from struct import Struct
from typing import Final

import xxhash

HASH_BYTES: Final = 8
"""Size in bytes of one hash inside a chain, in native byte order."""
HASH_SCHEME: Final = f"xxh64-1-{sys.byteorder}"
"""Name of the hash scheme, with its version. Two processes compute equal chains if it and the block
size are equal. The version changes with the seed and with the canonical bytes.
"""

SEGMENT_BYTES: Final = 16_384
SEGMENTED_BYTES_MIN: Final = 2 * SEGMENT_BYTES
"""Size in bytes of a prompt below which hashing it takes less time than looking up its segments."""
SEGMENTS_MAX: Final = 8_192
"""Maximum number of segments whose hashes are cached: 128 MB of prompts in about 7 MB."""

SEEDS_MAX: Final = 256
"""Maximum number of seeds that are cached, by the texts from which they are computed."""
SEED_CHARACTERS_MAX: Final = 512
"""Number of characters of a model's name and a cache salt together up to which their seed is
cached, because a client may send any text.
"""

CUT_BLOCKS_MAX: Final = 128
"""Number of blocks of a prompt that are cut, and thus copied, at a time."""

_LENGTH: Final = Struct("<Q").pack


def chain_seed(api: str, model: str, cache_salt: str) -> int:
    """Return the 64-bit seed with which the first block of a prompt is hashed."""
    if len(model) + len(cache_salt) > SEED_CHARACTERS_MAX:
        return _seed(api, model, cache_salt)
    return _kept_seed(api, model, cache_salt)


def _seed(api: str, model: str, cache_salt: str) -> int:
    parts: list[bytes] = []
    for part in (api, model, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        parts += (_LENGTH(len(encoded)), encoded)
    return xxhash.xxh64_intdigest(b"".join(parts))


_kept_seed: Final = lru_cache(maxsize=SEEDS_MAX)(_seed)


def hash_blocks(
    prompt: bytes | memoryview, *, seed: int, block_bytes: int, blocks_max: int
) -> bytes:
    """Return chained hashes of the first `blocks_max` full blocks of `prompt`, 8 bytes each."""
    blocks = len(prompt) // block_bytes
    if blocks > blocks_max:  # noqa: PLR1730  a call takes longer
        blocks = blocks_max
    return array("Q", _hashes(prompt, blocks, seed, block_bytes)).tobytes()


def chained(blocks: bytes | memoryview, seed: int, block_bytes: int) -> list[int]:
    """Return the chained hashes of the blocks in `blocks`, each of `block_bytes` bytes; an
    incomplete last block is ignored.
    """
    return _hashes(blocks, len(blocks) // block_bytes, seed, block_bytes)


def _hashes(data: bytes | memoryview, blocks: int, seed: int, block_bytes: int) -> list[int]:
    """Return the chained hashes of the first `blocks` blocks of `data`."""
    xxh64 = xxhash.xxh64_intdigest
    if blocks <= CUT_BLOCKS_MAX:
        cut = _cutting(blocks, block_bytes).unpack_from(data)
        return [seed := xxh64(block, seed) for block in cut]
    rest = blocks % CUT_BLOCKS_MAX
    whole_bytes = (blocks - rest) * block_bytes
    cuts = _cutting(CUT_BLOCKS_MAX, block_bytes).iter_unpack(memoryview(data)[:whole_bytes])
    hashes = [seed := xxh64(block, seed) for cut in cuts for block in cut]
    last = _cutting(rest, block_bytes).unpack_from(data, whole_bytes)
    hashes += [seed := xxh64(block, seed) for block in last]
    return hashes


@lru_cache(maxsize=2 * CUT_BLOCKS_MAX)
def _cutting(blocks: int, block_bytes: int) -> Struct:
    """Return the structure of `blocks` blocks, which cuts them all in one call of C. That takes
    half as long as slicing them.
    """
    return Struct(f"{block_bytes}s" * blocks)


class KnownSegments:
    """A cache of the hashes of long prompts, by segments of `SEGMENT_BYTES`.

    A conversation repeats all earlier turns, and recognising a segment takes a tenth of the time of
    hashing its blocks. A segment is identified by the hash before it and by 128 bits of its own,
    computed with a seed that no client knows. A client that could make two segments alike could
    only route one prompt to the endpoint of another. The hashes of a prompt are the same with and
    without this cache.

    At most `segments_max` segments are cached; the least recently used are dropped first.
    """

    __slots__ = ("_chains", "_secret", "_segments_max", "known", "new")

    def __init__(self, *, secret: int, segments_max: int = SEGMENTS_MAX) -> None:
        """Create an empty cache; `secret` is a number of 64 bits that seeds the digests of
        segments.
        """
        self._secret = secret
        self._segments_max = segments_max
        self._chains: OrderedDict[tuple[int, int, bytes], bytes] = OrderedDict()
        self.known = 0
        """Number of segments found in the cache, over all prompts so far."""
        self.new = 0

    def hash_blocks(self, prompt: bytes, *, seed: int, block_bytes: int, blocks_max: int) -> bytes:
        """Return the same hashes as the function `hash_blocks` of this module, taking those of
        known segments from the cache and adding those of new ones. A prompt below
        `SEGMENTED_BYTES_MIN` does not use the cache.
        """
        if len(prompt) < SEGMENTED_BYTES_MIN:
            return hash_blocks(prompt, seed=seed, block_bytes=block_bytes, blocks_max=blocks_max)
        blocks = min(len(prompt) // block_bytes, blocks_max)
        segment_blocks = max(1, SEGMENT_BYTES // block_bytes)
        segment_bytes = segment_blocks * block_bytes
        segments = blocks // segment_blocks
        view = memoryview(prompt)
        digests = (
            xxhash.xxh3_128_digest(view[start : start + segment_bytes], self._secret)
            for start in range(0, segments * segment_bytes, segment_bytes)
        )
        found: list[bytes] = []
        digest = b""
        for digest in digests:
            key = block_bytes, seed, digest
            chain = self._chains.get(key)
            if chain is None:
                break
            self._chains.move_to_end(key)
            found.append(chain)
            seed = _last(chain)
        known = len(found)
        # The segments after an unknown one are unknown too, because their hashes depend on it.
        rest = hash_blocks(
            view[known * segment_bytes :],
            seed=seed,
            block_bytes=block_bytes,
            blocks_max=blocks - known * segment_blocks,
        )
        length = segment_blocks * HASH_BYTES
        for number in range(segments - known):
            chain = rest[number * length : (number + 1) * length]
            self._chains[block_bytes, seed, digest] = chain
            seed = _last(chain)
            digest = next(digests, b"")
        while len(self._chains) > self._segments_max:
            self._chains.popitem(last=False)
        self.known += known
        self.new += segments - known
        return b"".join((*found, rest))


def _last(chain: bytes) -> int:
    return int.from_bytes(chain[-HASH_BYTES:], sys.byteorder)
