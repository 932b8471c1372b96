"""One table for all endpoints: contiguous matches, one limit, heads lost first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.duration import Duration
from epp.strategies.block_table import BlockTableSettings
from tests.builders import request

SLOTS = 3
BLOCK_TOKENS = 4
LIMIT = 12


def opened(**settings):
    return BlockTableSettings(block_tokens=BLOCK_TOKENS, **settings).open()


def said(*blocks, model="m"):
    """Blocks by letter: 16 bytes each."""
    return request(prompts=(b"".join(block.encode() * 16 for block in blocks),), model=model)


def matched(index, asked, now=0.0):
    return index.match(asked, SLOTS, now).matched.tolist()


def test_a_match_has_no_gaps():
    """What is held behind a block that is not is not counted; models do not mix."""
    index = opened()
    index.record(said("a", "b", "c"), 0, 0.0)
    index.record(said("a", "b"), 1, 0.0)
    known = index.match(said("a", "b", "c", "d"), SLOTS, 0.0)
    assert known.matched.tolist() == [3, 2, 0]
    assert known.total == 4
    assert matched(index, said("x", "b", "c")) == [0, 0, 0]
    assert matched(index, said("a", "b", "c", model="other")) == [0, 0, 0]


def test_prompts_of_one_request_are_added_up():
    """Each from its own beginning."""
    index = opened()
    index.record(said("a", "b"), 0, 0.0)
    twice = request(model="m", prompts=(b"a" * 32, b"a" * 16 + b"b" * 16))
    known = index.match(twice, SLOTS, 0.0)
    assert known.matched.tolist() == [1 + 2, 0, 0]
    assert known.total == 4


def test_a_prompt_longer_than_the_table_matches_nothing():
    """Its head went in first and goes first: the fault of an order by insertion."""
    index = opened(blocks_max=3)
    long = said("a", "b", "c", "d")
    index.record(long, 0, 0.0)
    assert len(index) == 3
    assert matched(index, long) == [0, 0, 0]
    short = said("x", "y")
    index.record(short, 0, 0.0)
    assert matched(index, short) == [2, 0, 0]


def test_mended_it_loses_tails_first():
    """The longest prompt keeps its head, and so does the older of two."""
    index = opened(blocks_max=3, tails_first=True)
    index.record(said("a", "b", "c", "d"), 0, 0.0)
    assert matched(index, said("a", "b", "c", "d")) == [3, 0, 0]
    index.record(said("x", "y"), 0, 0.0)
    assert matched(index, said("a", "b", "c")) == [1, 0, 0]
    assert matched(index, said("x", "y")) == [2, 0, 0]


def test_a_block_expires_when_it_was_not_routed_for_the_ttl():
    """A look-up refreshes nothing; another endpoint's prompt does, for what it shares."""
    index = opened(ttl=Duration(10.0))
    index.record(said("a", "b"), 0, 0.0)
    index.match(said("a", "b"), SLOTS, 9.0)
    index.record(said("a"), 1, 5.0)
    assert matched(index, said("a", "b"), 10.0) == [2, 1, 0]
    assert matched(index, said("a", "b"), 11.0) == [1, 1, 0]
    index.expire(11.0)
    assert len(index) == 1
    assert matched(index, said("a", "b"), 16.0) == [0, 0, 0]
    index.record(said("a"), 2, 16.0)
    assert matched(index, said("a"), 16.0) == [0, 0, 1], "old holders do not come back"


def test_what_went_elsewhere_is_taken_back_and_no_more():
    """What it held before stays, and so do others."""
    index = opened()
    index.record(said("a"), 0, 0.0)
    index.record(said("a", "b"), 1, 0.0)
    asked = said("a", "b", "c")
    index.retract(asked, 0, index.record(asked, 0, 1.0), 1.0)
    assert matched(index, asked) == [1, 2, 0]


def test_a_block_behind_a_lost_head_was_not_held():
    """So it is taken back too."""
    index = opened(blocks_max=2)
    index.record(said("a", "b"), 0, 0.0)
    index.record(said("x"), 1, 0.0)
    asked = said("a", "b")
    recorded = index.record(asked, 0, 0.0)
    assert matched(index, asked) == [2, 0, 0]
    index.retract(asked, 0, recorded, 0.0)
    assert matched(index, asked) == [0, 0, 0]


@pytest.mark.parametrize(("block_tokens", "kept"), [(BLOCK_TOKENS, True), (8, False)])
def test_settings_are_adopted_unless_blocks_have_another_size(block_tokens, kept):
    """A smaller table drops the oldest."""
    index = opened()
    index.record(said("a", "b", "c"), 0, 0.0)
    assert BlockTableSettings(block_tokens=block_tokens, blocks_max=2).adopt(index) is kept
    assert len(index) == (2 if kept else 3)


PROMPTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6)
VERBS = st.lists(
    st.tuples(
        st.sampled_from(["record", "retract", "forget", "expire"]),
        PROMPTS,
        st.integers(0, SLOTS - 1),
    ),
    max_size=30,
)


@given(verbs=VERBS, mended=st.booleans())
def test_it_is_never_larger_than_its_limit_and_never_believes_too_much(verbs, mended):
    """Whatever is done to it: a match is at most what was ever recorded there and not forgotten."""
    index = opened(blocks_max=LIMIT, ttl=Duration(8.0), tails_first=mended)
    recorded = {slot: [] for slot in range(SLOTS)}
    last = {}
    for step, (verb, blocks, slot) in enumerate(verbs):
        now = float(step)
        if verb == "record":
            asked = said(*blocks)
            last = {slot: (asked, index.record(asked, slot, now))}
            recorded[slot].append((blocks, now))
        elif verb == "retract" and slot in last:
            asked, noted = last.pop(slot)
            index.retract(asked, slot, noted, now)
        elif verb == "forget":
            index.forget(slot)
            recorded[slot] = []
            last = {}
        elif verb == "expire":
            index.expire(now)
        assert len(index) <= LIMIT
        assert all(block.holders for block in index._blocks.values())
        known = matched(index, said(*blocks), now)
        for one in range(SLOTS):
            best = 0
            for other, _ in recorded[one]:
                pairs = zip(other, blocks, strict=False)
                same = next((n for n, (x, y) in enumerate(pairs) if x != y), None)
                best = max(best, min(len(other), len(blocks)) if same is None else same)
            assert known[one] <= best
