"""Prompt to chained block hashes: each hash stands for all the prompt up to and with its block.

64-bit xxHash, `h[i] = XXH64(block i, seed = h[i-1])`; `h[-1]` comes from the API kind, the model or
adapter and the cache salt, each preceded by its length, so that no two seeds can be spelt alike.
Only full blocks count: a growing conversation keeps all its blocks (design D4).
"""

from array import array
from struct import iter_unpack
from typing import Final

import xxhash

HASH_BYTES: Final = 8
"""Length of one hash inside a chain; native byte order, chains never leave the process."""


def chain_seed(api: str, model: str, cache_salt: str) -> int:
    """The seed under which the first block is hashed: 64 bits."""
    digest = xxhash.xxh64()
    for part in (api, model, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.intdigest()


def hash_blocks(prompt: bytes, *, seed: int, block_bytes: int, blocks_max: int) -> bytes:
    """Chained hashes of the first `blocks_max` full blocks of `prompt`, 8 bytes each."""
    xxh64 = xxhash.xxh64_intdigest
    full = min(len(prompt) // block_bytes, blocks_max) * block_bytes
    # iter_unpack cuts the blocks in C: a third faster than slicing them here.
    blocks = iter_unpack(f"{block_bytes}s", memoryview(prompt)[:full])
    return array("Q", [seed := xxh64(block, seed) for (block,) in blocks]).tobytes()
