"""Token ids to chained block hashes: what a prompt is to the engine, under keys of our own.

As `core/prompt/blocks`, but over ids, 4 little-endian bytes each, and under the kind of API of
prompts that come as ids. The hashes of engines differ by release, algorithm, seed and block size;
these do not. The chain is made in steps of 16 tokens, so that blocks of engines can end inside one of
ours, and of each of ours the hash of its last step is its key.

Placeholder ids are the same for all images: what begins in a step is hashed into its seed.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from epp.core.moment import PlacedMedia
from epp.core.prompt.blocks import chain_seed, hash_blocks
from epp.core.types import ApiKind

TOKEN_BYTES: Final = 4
"""Of an id, little-endian."""
_STEP_TOKENS: Final = 16
"""The smallest block of an engine that is followed into the middle of one of ours."""


def step_tokens_of(block_tokens: int) -> int:
    """Tokens in a step of a chain of blocks of `block_tokens`."""
    return block_tokens if block_tokens % _STEP_TOKENS else _STEP_TOKENS


def token_seed(adapter: str, cache_salt: str) -> int:
    """The seed of the first step: of the adapter, "" for the model itself, and the salt."""
    return chain_seed(ApiKind.TOKENS, adapter, cache_salt)


def with_media(seed: int, identifiers: Iterable[str]) -> int:
    """The seed of a step in which the media `identifiers` begin, in their order."""
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
    """Keys of the first `blocks_max` full blocks of a prompt, 8 bytes each."""
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
