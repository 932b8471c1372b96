"""Counted sets of blocks, against a list that is searched."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from epp.strategies.held_blocks import HeldBlocks

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
