import struct

import pytest

from epp.core.moment import PlacedMedia
from epp.core.prompt.blocks import hash_blocks
from epp.core.prompt.token_blocks import hash_tokens, step_tokens_of, token_seed

TOKENS = [*range(1_000, 1_200)]


def chain(tokens, block_tokens=64, *, media=(), seed=1, blocks_max=100):
    ids = struct.pack(f"<{len(tokens)}I", *tokens)
    hashed = hash_tokens(
        ids, media=media, seed=seed, block_tokens=block_tokens, blocks_max=blocks_max
    )
    return [hashed[at : at + 8] for at in range(0, len(hashed), 8)]


def test_only_full_blocks_have_a_key_and_longer_prompts_keep_those_of_shorter():
    """Whatever the size of a block."""
    for size in (16, 17, 64, 100):
        assert len(chain(TOKENS, size)) == 200 // size
        assert chain(TOKENS[:150], size) == chain(TOKENS, size)[: 150 // size]
        assert chain(TOKENS, size, blocks_max=1) == chain(TOKENS, size)[:1]


def test_keys_of_longer_blocks_are_among_those_of_shorter_ones():
    """A chain is made in steps, so that blocks of engines may end inside one of ours."""
    assert chain(TOKENS, 64) == chain(TOKENS, 16)[3::4]
    assert [step_tokens_of(size) for size in (16, 64, 100)] == [16, 16, 100]


def test_ids_are_hashed_as_prompts_of_ids_are():
    """Where a block is a step."""
    packed = struct.pack("<200I", *TOKENS)
    expected = hash_blocks(packed, seed=1, block_bytes=64, blocks_max=100)
    assert b"".join(chain(TOKENS, 16)) == expected


def test_model_adapter_and_salt_have_seeds_of_their_own():
    seeds = {token_seed(*given) for given in [("", ""), ("sql", ""), ("", "sql"), ("sq", "l")]}
    assert len(seeds) == 4


@pytest.mark.parametrize(
    ("offset", "same"), [(0, 0), (63, 0), (64, 1), (130, 2), (199, 3), (500, 3)]
)
def test_an_image_changes_the_block_in_which_it_begins_and_all_that_follow(offset, same):
    cat, dog = (chain(TOKENS, media=(PlacedMedia(name, offset, 10),)) for name in ("cat", "dog"))
    plain = chain(TOKENS)
    assert cat[:same] == dog[:same] == plain[:same]
    for at in range(same, 3):
        assert len({cat[at], dog[at], plain[at]}) == 3


def test_images_that_begin_together_count_in_their_order():
    one, other = PlacedMedia("cat", 0, 1), PlacedMedia("dog", 1, 1)
    assert chain(TOKENS, media=(one, other)) != chain(TOKENS, media=(one,))
    swapped = (PlacedMedia("dog", 0, 1), PlacedMedia("cat", 1, 1))
    assert chain(TOKENS, media=(one, other)) != chain(TOKENS, media=swapped)
