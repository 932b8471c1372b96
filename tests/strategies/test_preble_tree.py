"""The tree against brute force: its limits, its order and its sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.duration import Duration
from epp.strategies.preble_prefill import Gpu, prefill_s
from epp.strategies.preble_tree import COST_S, REQUESTS, TREE_BLOCKS, PrebleTreeSettings
from tests.builders import request

SLOTS = 3
BLOCK_TOKENS = 4


def opened(**parameters):
    return PrebleTreeSettings(block_tokens=BLOCK_TOKENS, **parameters).open()


def said(blocks):
    """Blocks by letter: 16 bytes each."""
    return request(prompts=(b"".join(block.encode() * 16 for block in blocks),))


def matched(index, blocks, now=0.0):
    return index.match(said(blocks), SLOTS, now).matched.tolist()


def column(index, name, now=0.0):
    return index.match(said("z"), SLOTS, now).columns[name].tolist()


def test_a_prompt_that_turns_off_splits_a_node_and_its_holders_keep_both_halves():
    """The second has only what they share and its own."""
    index = opened()
    index.record(said("abcd"), 0, 0.0)
    index.record(said("abx"), 1, 0.0)
    assert matched(index, "abcd") == [4, 2, 0]
    assert matched(index, "abx") == [2, 3, 0]
    assert index.match(said("abcz"), SLOTS, 0.0).columns[TREE_BLOCKS].tolist() == [3, 3, 3]
    assert len(index) == 5


def test_the_end_of_a_prompt_counts_it_and_costs_what_was_missed():
    """Two blocks behind two: half is missed; a second time costs the double in prefill alone."""
    index = opened()
    index.record(said("ab"), 0, 0.0)
    index.record(said("abcd"), 1, 0.0)
    decode = 45 * 0.15
    whole = prefill_s(Gpu.V100, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    half = 0.5 * prefill_s(Gpu.V100, 2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    # Slot 1 is on the way of "ab" too, and so has its cost.
    assert column(index, REQUESTS) == [1, 2, 0]
    assert column(index, COST_S) == pytest.approx([whole + decode, whole + half + 2 * decode, 0])
    index.record(said("abcd"), 1, 1.0)
    assert column(index, COST_S) == pytest.approx(
        [whole + decode, whole + 2 * half + 2 * decode, 0]
    )


def test_the_window_forgets_after_three_minutes_and_the_tree_after_five():
    """First the cost, then the node."""
    index = opened()
    index.record(said("ab"), 0, 0.0)
    index.expire(179.0)
    assert column(index, REQUESTS) == [1, 0, 0]
    index.expire(180.0)
    assert column(index, REQUESTS) == [0, 0, 0]
    assert column(index, COST_S) == [0, 0, 0]
    assert matched(index, "ab", 300.0) == [2, 0, 0]
    assert matched(index, "ab", 301.0) == [0, 0, 0]
    index.expire(301.0)
    assert len(index) == 0
    index.record(said("ab"), 0, 301.0)
    index.record(said("ab"), 1, 700.0)
    assert matched(index, "ab", 700.0) == [0, 2, 0], "old holders do not come back"


@pytest.mark.parametrize(("mended", "left"), [(False, [0, 1, 0]), (True, [1, 1, 0])])
def test_an_evicted_leaf_takes_its_endpoints_off_all_nodes_above_it(mended, left):
    """The fault: a shared head is in use and its first holder is forgotten there."""
    index = opened(evicts_from_parents=not mended)
    index.record(said("ab"), 0, 0.0)
    index.record(said("ac"), 1, 200.0)
    index.expire(301.0)
    assert matched(index, "ab", 301.0) == left


def test_endpoints_share_the_cost_of_a_node_if_told_so():
    """Two on one node: half of the prefill each."""
    index = opened(shares_cost=True, decode_tokens=0)
    index.record(said("ab"), 0, 0.0)
    index.record(said("ab"), 1, 0.0)
    prefill = 2 * prefill_s(Gpu.V100, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert column(index, COST_S) == pytest.approx([prefill / 2, prefill / 2, 0])


def test_what_went_elsewhere_is_taken_back():
    """Nodes that it came to and the request, nothing from before."""
    index = opened()
    index.record(said("ab"), 0, 0.0)
    asked = said("abcd")
    index.retract(asked, 0, index.record(asked, 0, 0.0), 0.0)
    assert matched(index, "abcd") == [2, 0, 0]
    assert column(index, REQUESTS) == [1, 0, 0]


def test_other_settings_start_anew():
    """Sums would be of two kinds."""
    assert PrebleTreeSettings().adopt(PrebleTreeSettings().open())
    assert not PrebleTreeSettings(gpu=Gpu.A6000).adopt(PrebleTreeSettings().open())


VERBS = st.lists(
    st.tuples(
        st.sampled_from(["record", "record", "record", "retract", "forget", "expire"]),
        st.text("ab", max_size=7),
        st.integers(0, SLOTS - 1),
        st.floats(0.0, 3.0),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(verbs=VERBS, mended=st.booleans())
def test_it_stays_within_its_limits_and_its_sums_are_those_of_its_nodes(verbs, mended):
    """Whatever is done to it; and a node is never older than what is below it."""
    index = opened(
        blocks_max=10, ttl=Duration(8.0), window=Duration(5.0),
        shares_cost=mended, evicts_from_parents=not mended,
    )  # fmt: skip
    last = {}
    now = 0.0
    for verb, blocks, slot, waited in verbs:
        now += waited
        asked = said(blocks)
        if verb == "record":
            last[slot] = asked, slot, index.record(asked, slot, now)
        elif verb == "retract" and slot in last:
            index.retract(*last.pop(slot), now)
        elif verb == "forget":
            index.forget(slot)
            last.pop(slot, None)
            assert matched(index, blocks, now)[slot] == 0
        elif verb == "expire":
            index.expire(now)
        nodes = list(index._nodes.values())
        assert len(index) == sum(node.blocks for node in nodes) <= 10
        places = {id(node): place for place, node in enumerate(nodes)}
        for node in nodes:
            assert node.requests >= 0
            assert node.children == sum(other.parent is node for other in nodes)
            if node.parent is not None:
                assert places[id(node.parent)] > places[id(node)]
                assert node.start == node.parent.start + node.parent.blocks
        for one in range(SLOTS):
            held = [node for node in nodes if node.holders >> one & 1]
            assert column(index, REQUESTS, now)[one] == sum(node.requests for node in held)
            costs = sum(index._cost_of(node) for node in held)
            assert column(index, COST_S, now)[one] == pytest.approx(costs)
        known = index.match(asked, SLOTS, now)
        assert known.matched.max() <= known.columns[TREE_BLOCKS][0] <= len(blocks)
        assert np.isfinite(known.columns[COST_S]).all()
