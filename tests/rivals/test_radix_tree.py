"""What the tree tells beside what each endpoint holds."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.plugins.strategy import config_of, producer, step
from homing_rivals.radix_tree import (
    DEEPEST_BLOCKS,
    FIRST_HOLDER,
    HELD_BLOCKS,
    RadixTreeSettings,
)
from tests.builders import request
from tests.rivals.driven import text

BLOCK_BYTES = 64
A, B, C = (text(name, 64) for name in "abc")


def said(*texts):
    return request(prompts=tuple(one.encode() for one in texts))


def tree(*routed, **parameters):
    """`routed`: (text, slot), in this order, a second apart."""
    made = RadixTreeSettings(**parameters).open()
    for at, (what, slot) in enumerate(routed):
        made.record(said(what), slot, float(at))
    return made


def columns(made, what, slots=3, now=100.0):
    known = made.match(said(what), slots, now)
    return {name: column.tolist() for name, column in known.columns.items()}


def test_whoever_was_first_sent_the_deepest_block_is_told():
    """Where edges are left in their midst the node below decides, as in the original."""
    made = tree((A, 2), (A + B, 1), (A + B, 0), (A + C, 0))
    assert columns(made, A)[FIRST_HOLDER] == [0, 0, 1]
    assert columns(made, A + B)[FIRST_HOLDER] == [0, 1, 0]
    assert columns(made, A + B[:96] + C)[FIRST_HOLDER] == [0, 1, 0]
    assert columns(made, A + C)[FIRST_HOLDER] == [1, 0, 0]
    assert columns(made, C)[FIRST_HOLDER] == [0, 0, 0]


def test_blocks_are_counted_by_endpoint():
    """64 tokens are 4 blocks; what is shared is held by both."""
    made = tree((A + B, 0), (A + C, 0), (A, 1))
    told = columns(made, A + B)
    assert told[HELD_BLOCKS] == [12, 4, 0]
    assert told[DEEPEST_BLOCKS] == [8, 8, 8]


def test_who_leaves_is_forgotten():
    """The next in its slot begins anew."""
    made = tree((A, 0), (A, 1))
    made.forget(1)
    told = columns(made, A)
    assert told[HELD_BLOCKS] == [4, 0, 0]
    assert told[FIRST_HOLDER] == [1, 0, 0]


def test_what_went_elsewhere_is_taken_back():
    """What was there before stays."""
    made = tree((A, 0))
    asked = said(A + B)
    made.retract(asked, 0, made.record(asked, 0, 5.0), 6.0)
    told = columns(made, A + B)
    assert told[HELD_BLOCKS] == [4, 0, 0]


def test_what_a_peer_routed_counts_as_held():
    """As if it had been sent there from here."""
    made, peer = tree((A, 0)), tree((A + B, 1))
    assert made.signature == peer.signature
    for slot, stamp, keys in peer.shared_entries():
        made.learn(keys, slot, stamp + 5.0, 6.0)
    told = columns(made, A + B)
    assert told[HELD_BLOCKS] == [4, 8, 0]
    assert told[FIRST_HOLDER] == [0, 1, 0]


@given(
    routed=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)), max_size=30),
    capacity=st.integers(1, 9),
)
def test_no_endpoint_has_more_than_its_limit(routed, capacity):
    """Whatever is routed; and what is left of a prompt is its head."""
    made = RadixTreeSettings(lru_capacity_per_server=capacity).open()
    for at, (name, slot) in enumerate(routed):
        made.record(said(text(name, 64) + text("tail", 32)), slot, float(at))
        told = columns(made, A)
        assert max(told[HELD_BLOCKS]) <= capacity
    if routed:
        name, slot = routed[-1]
        known = made.match(said(text(name, 64) + text("tail", 32)), 3, 100.0)
        assert known.matched[slot] == min(capacity, 6)


def test_settings_are_adopted_while_blocks_stay():
    """Another size of blocks is another tree; a plain prefix index has no columns."""
    made = tree((A, 0))
    assert RadixTreeSettings(lru_capacity_per_server=2).adopt(made)
    assert not RadixTreeSettings(block_size_tokens=32).adopt(made)
    assert columns(made, A)[HELD_BLOCKS] == [4, 0, 0]
    with pytest.raises(msgspec.ValidationError, match="blockSizeTokens"):
        msgspec.convert({"blockSizeTokens": 0}, RadixTreeSettings)
    with pytest.raises(ValueError, match="give blockSizeTokens"):
        RadixTreeSettings(block_size=64)


def test_more_endpoints_than_were_ever_routed_to():
    """Columns are as long as is asked for."""
    made = tree((A, 2))
    assert made.match(said(A), 1, 9.0).columns[HELD_BLOCKS].shape == (1,)
    assert made.match(said(A), 9, 9.0).columns[HELD_BLOCKS].dtype == np.float64


def test_small_blocks_are_kept_and_nobody_is_warned_of_another_size():
    """The prefix index makes 64 of them, and says so; the tree does not."""
    for type_name, block_tokens in (
        ("radix-tree-producer", 16), ("approx-prefix-cache-producer", 64),
    ):  # fmt: skip
        text_of = config_of(producer(type_name, blockSizeTokens=16), step("prefix-cache-scorer"))
        config = load_config(text_of, "made", plugin_tables())
        assert config.indexes[type_name].block_tokens == block_tokens
        assert ["is below the minimum" in warning for warning in config.warnings] == (
            [True] if block_tokens == 64 else []
        )


def test_an_oversized_prompt_costs_what_the_limit_allows():
    """131,072 tokens of two million are looked at, and as many blocks kept."""
    made = tree()
    huge = request(prompts=(bytes(8_000_000),))
    made.record(huge, 0, 0.0)
    assert made.match(huge, 1, 0.0).total == 8_192
    assert made.blocks_held(0) == 8_192
