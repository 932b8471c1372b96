import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt.blocks import HASH_BYTES, chain_seed, hash_blocks

GOLDEN_SEED = 0x6E600C8FC3920FF5
GOLDEN_CHAIN = [0xF85B235B1798ED7E, 0x8A5EC3E5519463B7]

short_text = st.text("abé\ud800", max_size=3)
parts = st.tuples(short_text, short_text, short_text)


def hashes(chain: bytes) -> list[int]:
    return list(struct.unpack(f"={len(chain) // HASH_BYTES}Q", chain))


def chain(prompt: bytes, *, seed: int = 7, block_bytes: int = 4, blocks_max: int = 99) -> list[int]:
    return hashes(hash_blocks(prompt, seed=seed, block_bytes=block_bytes, blocks_max=blocks_max))


def test_the_hash_is_xxh64():
    """Public vectors of XXH64 with seed 0, so that the golden ones below rest on the standard."""
    assert chain(b"a", seed=0, block_bytes=1) == [0xD24EC4F1A98C6E5B]
    assert chain(b"abc", seed=0, block_bytes=3) == [0x44BC2CF5AD770999]


def test_golden_chain():
    """Seed and chain stay what they are: a change here makes every index in the field cold."""
    assert chain_seed("chat", "llama", "") == GOLDEN_SEED
    prompt = bytes(range(256)) * 2 + b"tail"
    assert chain(prompt, seed=GOLDEN_SEED, block_bytes=256) == GOLDEN_CHAIN


def test_each_block_is_hashed_under_the_one_before():
    """h[i] = XXH64(block i, seed = h[i-1])."""
    first = xxhash.xxh64_intdigest(b"abcd", 7)
    assert chain(b"abcdabcd") == [first, xxhash.xxh64_intdigest(b"abcd", first)]


@given(st.binary(max_size=40), st.integers(1, 9), st.integers(0, 9))
def test_only_full_blocks_count_up_to_the_limit(prompt, block_bytes, blocks_max):
    """The rest of the prompt below a block, and all beyond the limit, has no hash."""
    found = chain(prompt, block_bytes=block_bytes, blocks_max=blocks_max)
    assert len(found) == min(len(prompt) // block_bytes, blocks_max)


@given(st.binary(max_size=40), st.binary(max_size=20), st.binary(max_size=20), st.integers(1, 9))
def test_prompts_share_exactly_the_blocks_before_their_first_difference(
    head, tail, other, block_bytes
):
    """Every full block before byte n is shared, and none after it."""
    one, two = head + tail, head + other
    same = next(
        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    first, second = chain(one, block_bytes=block_bytes), chain(two, block_bytes=block_bytes)
    shared = same // block_bytes
    assert first[:shared] == second[:shared]
    assert len(first[:shared]) == shared
    assert not set(first[shared:]) & set(second[shared:])


@given(parts, parts)
def test_seeds_differ_wherever_a_part_differs(one, two):
    """API kind, model and salt cannot be shifted into each other, whatever they contain."""
    assert (chain_seed(*one) == chain_seed(*two)) == (one == two)


@pytest.mark.parametrize("prompt", [b"", b"abc"])
def test_a_prompt_below_one_block_has_an_empty_chain(prompt):
    """Not an error: there is just nothing to match."""
    assert chain(prompt) == []
