"""Chained block hashes over a prompt's token ids, which engines cache by, under the picker's own
keys.

The scheme is that of `core/prompt/blocks`, but over ids of 4 little-endian bytes, and with the API
kind of prompts that come as ids. Engines' hashes differ by release, algorithm, seed and block size;
these do not. If 16 divides the length of our blocks, the chain is computed in steps of 16 tokens,
so that an engine's block can end inside one of ours. The hash of the last step of one of our blocks
is its key.

Placeholder ids are the same for all images, so the media that begin in a step are hashed into its
seed.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from epp.core.moment import PlacedMedia
from epp.core.prompt.blocks import chain_seed, hash_blocks
from epp.core.types import ApiKind

TOKEN_BYTES: Final = 4
"""Size in bytes of a token id, which is little-endian."""
_STEP_TOKENS: Final = 16
"""Number of tokens in a step of a chain, if it divides the number of tokens in a block."""


def step_tokens_of(block_tokens: int) -> int:
    """Return the number of tokens in a step of a chain whose blocks have `block_tokens` tokens."""
    return block_tokens if block_tokens % _STEP_TOKENS else _STEP_TOKENS


def token_seed(adapter: str, cache_salt: str) -> int:
    """Return the seed with which the first step of a prompt is hashed. `adapter` is "" for the base
    model.
    """
    return chain_seed(ApiKind.TOKENS, adapter, cache_salt)


def with_media(seed: int, identifiers: Iterable[str]) -> int:
    """Return the seed with which a step is hashed in which the media `identifiers` begin, in order."""
    for identifier in identifiers:
        seed = xxhash.xxh64_intdigest(identifier.encode("utf-8", "surrogatepass"), seed)
    return seed


def hash_tokens(
    ids: bytes,
    *,
    media: Sequence[PlacedMedia] = (),
    seed: int,
    block_tokens: int,
    blocks_max: int,
) -> bytes:
    """Return the keys of the first `blocks_max` full blocks of a prompt, 8 bytes each. `ids` are
    its token ids as bytes.
    """
    step_tokens = step_tokens_of(block_tokens)
    steps_per_block = block_tokens // step_tokens
    step_bytes = step_tokens * TOKEN_BYTES
    steps = min(len(ids) // step_bytes // steps_per_block, blocks_max) * steps_per_block
    if media:
        chain = _with_media(ids, media, seed, step_tokens, steps)
    else:
        hashed = hash_blocks(ids, seed=seed, block_bytes=step_bytes, blocks_max=steps)
        if steps_per_block == 1:
            return hashed
        chain = array("Q", hashed)
    return chain[steps_per_block - 1 :: steps_per_block].tobytes()


def _with_media(
    ids: bytes, media: Sequence[PlacedMedia], seed: int, step_tokens: int, steps: int
) -> "array[int]":
    begins: dict[int, list[str]] = {}
    for item in media:
        begins.setdefault(item.offset // step_tokens, []).append(item.identifier)
    step_bytes = step_tokens * TOKEN_BYTES
    view = memoryview(ids)
    chain = array("Q")
    for step in range(steps):
        seed = with_media(seed, begins.get(step, ()))
        seed = xxhash.xxh64_intdigest(view[step * step_bytes : (step + 1) * step_bytes], seed)
        chain.append(seed)
    return chain
