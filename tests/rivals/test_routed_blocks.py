"""The approximate index as the field ships it, with its faults and without."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.routed_blocks import RoutedBlocksSettings
from tests.builders import request

BLOCK_BYTES = 64


def opened(**parameters):
    return RoutedBlocksSettings(**({"block_tokens": 16} | parameters)).open()


def said(*blocks, tail=b""):
    """A prompt of one letter a block."""
    return request(prompts=(b"".join(letter.encode() * BLOCK_BYTES for letter in blocks) + tail,))


def matched(index, *blocks, slots=3, tail=b""):
    known = index.match(said(*blocks, tail=tail), slots, 0.0)
    return known.matched.tolist(), known.total


def test_leading_blocks_count_up_to_the_first_that_nobody_has():
    """Full blocks only."""
    index = opened()
    index.record(said("a", "b", "c"), 0, 0.0)
    index.record(said("a", "x"), 1, 0.0)
    assert matched(index, "a", "b", "z", "c") == ([2, 1, 0], 4)
    assert matched(index, "a", "b", "c", tail=b"more") == ([3, 1, 0], 3)
    assert matched(index, "b") == ([0, 0, 0], 1)


@pytest.mark.parametrize(("contiguous", "counted"), [(False, 2), (True, 0)])
def test_a_pod_without_the_head_is_counted_while_another_has_it(contiguous, counted):
    """As shipped: no test of contiguity by pod."""
    index = opened(blocks_per_endpoint_max=2, contiguous=contiguous)
    index.record(said("a"), 1, 0.0)
    index.record(said("a", "b", "c"), 0, 0.0)
    assert matched(index, "a", "b", "c")[0] == [counted, 1, 0]


@pytest.mark.parametrize(("tail_first", "left"), [(False, 0), (True, 2)])
def test_a_head_that_was_pushed_out_leaves_nothing_to_match(tail_first, left):
    """The engine frees tails first; an index that frees heads believes nothing and keeps two blocks."""
    index = opened(blocks_per_endpoint_max=2, tail_first=tail_first)
    index.record(said("a", "b", "c"), 0, 0.0)
    assert index.blocks_of(0) == 2
    assert matched(index, "a", "b", "c")[0] == [left, 0, 0]


def test_an_engine_s_blocks_are_taken_for_the_index_s_own():
    """As shipped: blocks of 16 tokens count as blocks of 64; and what is fixed once stays."""
    index = opened(block_tokens=64, auto_tune=True)
    long = request(prompts=(Random(1).randbytes(256 * 3_000),))
    index.resize(0, 1_000, 16)
    index.record(long, 0, 0.0)
    assert index.blocks_of(0) == 1_000
    index.resize(0, 50, 16)
    index.record(long, 0, 1.0)
    assert index.blocks_of(0) == 1_000
    index.record(long, 1, 1.0)
    assert index.blocks_of(1) == 2_048, "of an engine that says nothing: the default of 31,250"


def test_the_last_partial_block_matches_only_what_ends_alike():
    """And is a block of its own, also of a prompt that has no other."""
    index = opened(last_partial_block=True)
    one = said("a", tail=b"rest")
    index.match(one, 3, 0.0)
    index.record(one, 0, 0.0)
    assert matched(index, "a", tail=b"rest") == ([2, 0, 0], 2)
    assert matched(index, "a", tail=b"rest ") == ([1, 0, 0], 2)
    assert matched(index, "a") == ([1, 0, 0], 1)
    index.record(said(tail=b"short"), 1, 0.0)
    assert matched(index, tail=b"short") == ([0, 1, 0], 1)
    assert index.match(request(chains={BLOCK_BYTES: (bytes(8),)}), 3, 0.0).total == 1


def test_a_request_that_moved_leaves_what_others_told_since():
    """The scheduler lets the text go before it says where the request went."""
    index = opened(last_partial_block=True)
    index.record(said("a"), 0, 0.0)
    moved = said("a", "b", "c", tail=b"rest")
    index.match(moved, 3, 0.0)
    recorded = index.record(moved, 0, 1.0)
    moved = moved.without_prompts()
    index.record(said("a", "b"), 0, 2.0)
    index.retract(moved, 0, recorded, 3.0)
    index.record(moved, 1, 3.0)
    assert matched(index, "a", "b", "c", tail=b"rest") == ([2, 4, 0], 4)


def test_several_prompts_are_counted_one_by_one_and_added_up():
    """As in the reference."""
    index = opened()
    index.record(said("a", "b"), 0, 0.0)
    both = request(prompts=(b"a" * 64 + b"b" * 64, b"a" * 64 + b"c" * 64))
    known = index.match(both, 1, 0.0)
    assert (known.matched.tolist(), known.total) == ([3], 4)


def test_new_settings_keep_what_is_known_unless_blocks_change():
    """A smaller capacity takes effect at once."""
    index = opened()
    index.record(said("a", "b", "c"), 0, 0.0)
    assert RoutedBlocksSettings(block_tokens=16, blocks_per_endpoint_max=1).adopt(index)
    assert index.blocks_of(0) == 1
    assert not RoutedBlocksSettings(block_tokens=32).adopt(index)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["record", "moved", "forget"]),
        st.integers(0, 3),
        st.lists(st.sampled_from("abcd"), max_size=6),
    ),
    max_size=40,
)


@given(actions=ACTIONS, tail_first=st.booleans(), contiguous=st.booleans())
def test_it_never_holds_more_than_it_may_and_counts_what_it_holds(actions, tail_first, contiguous):
    """By endpoint and in all; who holds all of a prompt matches all of it."""
    index = opened(
        blocks_per_endpoint_max=5, blocks_max=12, tail_first=tail_first, contiguous=contiguous
    )
    for verb, slot, blocks in actions:
        asked = said(*blocks)
        if verb == "forget":
            index.forget(slot)
            assert index.blocks_of(slot) == 0
        else:
            recorded = index.record(asked, slot, 0.0)
            if verb == "moved":
                index.retract(asked, slot, recorded, 0.0)
        held = [index.blocks_of(each) for each in range(4)]
        assert max(held) <= 5
        assert sum(held) == index.blocks <= 12
        known = index.match(asked, 4, 0.0)
        assert all(0 <= found <= known.total for found in known.matched.tolist())
    for slot in range(4):
        index.forget(slot)
    assert index.blocks == 0
    assert not index.match(said("a"), 4, 0.0).matched.any()
