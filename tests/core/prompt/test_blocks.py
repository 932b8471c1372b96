import struct
from random import Random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt import blocks
from epp.core.prompt.blocks import (
    HASH_BYTES,
    SEED_CHARACTERS_MAX,
    SEGMENT_BYTES,
    SEGMENTED_BYTES_MIN,
    KnownSegments,
    chain_seed,
    hash_blocks,
)

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


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 256, 300])
def test_a_prompt_of_any_length_has_the_hashes_of_its_blocks_one_by_one(count):
    """Also where the blocks are cut in several steps."""
    prompt = Random(count).randbytes(4 * count + 3)
    seed, expected = 7, []
    for at in range(0, 4 * count, 4):
        seed = xxhash.xxh64_intdigest(prompt[at : at + 4], seed)
        expected.append(seed)
    assert chain(prompt, blocks_max=9_999) == expected


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


@pytest.mark.parametrize("length", [SEED_CHARACTERS_MAX, SEED_CHARACTERS_MAX + 1])
def test_a_seed_is_the_same_whether_it_is_kept_or_not(length):
    salt = "s" * length
    first = chain_seed("chat", "", salt)
    assert chain_seed("chat", "", salt) == first
    texts = (b"chat", b"", salt.encode())
    joined = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    assert first == xxhash.xxh64_intdigest(joined)


@pytest.mark.parametrize("prompt", [b"", b"abc"])
def test_a_prompt_below_one_block_has_an_empty_chain(prompt):
    """Not an error: there is just nothing to match."""
    assert chain(prompt) == []


# Long prompts.

PIECES = [Random(number).randbytes(SEGMENT_BYTES) for number in range(3)]
"""Of which conversations are put together that have some segments in common."""
conversations = st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join),
    st.binary(max_size=600),
    st.lists(st.sampled_from(PIECES), max_size=2).map(b"".join),
).map(b"".join)


def whole(prompt, **given):
    return hash_blocks(prompt, **{"seed": 7, "block_bytes": 256, "blocks_max": 9_999} | given)


def through(segments, prompt, **given):
    return segments.hash_blocks(
        prompt, **{"seed": 7, "block_bytes": 256, "blocks_max": 9_999} | given
    )


@given(
    st.lists(
        st.tuples(
            conversations,
            st.integers(7, 8),
            st.sampled_from([64, 256, 300, 4_096, 2 * SEGMENT_BYTES + 1]),
            st.sampled_from([0, 64, 150, 9_999]),
        ),
        max_size=6,
    ),
    st.sampled_from([0, 1, 3, 100]),
)
def test_chains_are_the_same_through_known_segments(requests, segments_max):
    """Whatever came before, whatever was forgotten, of any block size, seed and limit."""
    segments = KnownSegments(secret=5, segments_max=segments_max)
    for prompt, seed, block_bytes, blocks_max in requests:
        asked = {"seed": seed, "block_bytes": block_bytes, "blocks_max": blocks_max}
        assert through(segments, prompt, **asked) == whole(prompt, **asked)


def hashed_bytes(monkeypatch):
    """How many bytes each call of the function hashed."""
    sizes = []

    def counted(prompt, *, seed, block_bytes, blocks_max):
        sizes.append(min(len(prompt) // block_bytes, blocks_max) * block_bytes)
        return hash_blocks(prompt, seed=seed, block_bytes=block_bytes, blocks_max=blocks_max)

    monkeypatch.setattr(blocks, "hash_blocks", counted)
    return sizes


def test_only_what_is_new_of_a_long_conversation_is_hashed(monkeypatch):
    """Its next turn repeats it: known are the segments before the one in which it differs."""
    sizes = hashed_bytes(monkeypatch)
    segments = KnownSegments(secret=5)
    turn = Random(1).randbytes(10 * SEGMENT_BYTES + 512)
    through(segments, turn)
    through(segments, turn)
    through(segments, turn + b"x" * SEGMENT_BYTES)
    through(segments, turn[: 3 * SEGMENT_BYTES] + b"y" * 2 * SEGMENT_BYTES)
    assert sizes == [len(turn), 512, SEGMENT_BYTES + 512, 2 * SEGMENT_BYTES]
    assert (segments.known, segments.new) == (23, 13)


def test_the_same_text_under_another_model_is_not_known(monkeypatch):
    """Nor behind another beginning, nor in blocks of another size."""
    sizes = hashed_bytes(monkeypatch)
    segments = KnownSegments(secret=5)
    prompt = Random(1).randbytes(2 * SEGMENT_BYTES)
    through(segments, prompt)
    through(segments, prompt, seed=8)
    through(segments, prompt, block_bytes=512)
    through(segments, PIECES[0] + prompt)
    assert sizes == [len(prompt), len(prompt), len(prompt), 3 * SEGMENT_BYTES]
    assert segments.known == 0


def test_short_prompts_are_not_looked_up():
    """It would take longer than to hash them."""
    segments = KnownSegments(secret=5)
    for _ in range(2):
        through(segments, b"x" * (SEGMENTED_BYTES_MIN - 1))
    assert (segments.known, segments.new) == (0, 0)
    through(segments, b"x" * SEGMENTED_BYTES_MIN)
    assert (segments.known, segments.new) == (0, 2)


def test_the_segments_that_were_not_seen_for_longest_are_forgotten():
    """However many prompts come, no more are kept than there is room for."""
    segments = KnownSegments(secret=5, segments_max=4)
    first, second, third = (Random(n).randbytes(2 * SEGMENT_BYTES) for n in range(3))
    for prompt in (first, second, first, third, first):
        through(segments, prompt)
    assert (segments.known, segments.new) == (4, 6)
    through(segments, second)
    assert segments.known == 4
    for number in range(50):
        through(segments, Random(number).randbytes(5 * SEGMENT_BYTES))
        assert len(segments._chains) <= 4


def test_a_segment_is_recognised_under_a_seed_of_its_own():
    """Two pickers do not recognise one by the same bits, so that no client can prepare a pair."""
    keys = []
    for secret in (5, 6):
        segments = KnownSegments(secret=secret)
        through(segments, PIECES[0] + PIECES[1])
        keys.append({digest for _, _, digest in segments._chains})
    assert len(keys[0]) == 2
    assert not keys[0] & keys[1]
