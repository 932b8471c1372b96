"""Counted sets of blocks, against a list that is searched."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from epp.plugins.burst import BurstSettings
from epp.plugins.held_blocks import REQUEST_BLOCKS_MAX, HeldBlocks, block_lists
from homing_rivals.block_load import BlockLoadSettings
from homing_rivals.routed_blocks import RoutedBlocksSettings
from tests.builders import request

# Chained: the n-th block of a prompt is known by all before it.
WORDS = st.lists(st.sampled_from("ab"), max_size=5).map("".join)


def prompt(word):
    return [hash_of(word[: end + 1]) for end in range(len(word))]


def hash_of(head):
    return int.from_bytes(head.encode(), "big")


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), st.integers(0, 2), WORDS)),
    WORDS,
)
def test_it_counts_each_block_once_and_finds_the_longest_head(actions, asked):
    """Whatever is put in, taken out and forgotten."""
    held = HeldBlocks()
    model = {slot: Counter() for slot in range(3)}
    for verb, slot, word in actions:
        if verb == "add":
            held.add(slot, prompt(word))
            model[slot][word] += 1
        elif verb == "forget":
            held.forget(slot)
            model[slot].clear()
        elif model[slot][word]:
            held.remove(slot, prompt(word))
            model[slot][word] -= 1
    blocks = {
        slot: {block for word, count in words.items() if count for block in prompt(word)}
        for slot, words in model.items()
    }
    assert held.held(4).tolist() == [*(len(blocks[slot]) for slot in range(3)), 0]
    assert held.held(1).tolist() == [len(blocks[0])]
    assert held.blocks == sum(map(len, blocks.values()))
    assert held.leading(prompt(asked)) == {
        slot: count
        for slot, found in blocks.items()
        if (count := sum(block in found for block in prompt(asked)))
    }


def chain(start, blocks):
    return b"".join((start + at).to_bytes(8, "little") for at in range(blocks))


def test_each_chain_has_its_limit_and_all_have_one():
    """Later ones keep nothing."""
    assert block_lists([chain(1, 3), chain(9, 1), b""], 2) == [[1, 2], [9], []]
    many = block_lists([chain(10_000 * at, 2_048) for at in range(20)], 2_048)
    assert sum(map(len, many)) == REQUEST_BLOCKS_MAX
    assert [len(blocks) for blocks in many] == [2_048] * 8 + [0] * 12


def test_a_completion_of_thousands_of_prompts_costs_no_more_than_that():
    """In every index that keeps blocks one by one; it can be taken back and released."""
    for settings, held in (
        (RoutedBlocksSettings(), lambda index: index.blocks),
        (BlockLoadSettings(), lambda index: index.active.blocks),
        (BurstSettings(min_colocate_blocks=1), lambda index: index.placed_blocks),
    ):
        index = settings.open()
        chains = tuple(chain(1 + 10_000 * at, 100) for at in range(1_000))
        hostile = request(chains={256: chains})
        index.match(hostile, 2, 0.0)
        recorded = index.record(hostile, 0, 0.0)
        assert 0 < held(index) <= REQUEST_BLOCKS_MAX
        index.retract(hostile, 0, recorded, 0.0)
        assert held(index) == 0
