"""What runs where and what missed, beside what is held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.prefix import PrefixIndexSettings
from homing_rivals.block_load import BlockLoadSettings
from tests.builders import request


def opened(**parameters):
    return BlockLoadSettings(**parameters).open()


def said(*letters):
    return request(prompts=(b"".join(letter.encode() * 256 for letter in letters),))


def columns(index, *letters, slots=3):
    known = index.match(said(*letters), slots, 0.0)
    return [column.tolist() for column in known.columns.values()]


def test_what_several_share_counts_once_until_the_last_has_ended():
    """Four blocks in flight, of which three are of both."""
    index = opened()
    one, other = said("a", "b", "c"), said("a", "b", "c", "d")
    of_one = index.record(one, 1, 0.0)
    of_other = index.record(other, 1, 0.0)
    active, added, _ = columns(index, "a", "b", "x")
    assert active == [0, 4, 0]
    assert added == [3, 1, 3]
    index.release(one, 1, of_one, 1.0)
    assert columns(index, "a")[0] == [0, 4, 0]
    index.release(other, 1, of_other, 1.0)
    assert columns(index, "a")[0] == [0, 0, 0]
    assert index.match(said("a"), 3, 1.0).matched.tolist() == [0, 1, 0], "it is still cached"


def test_misses_fade_with_every_pick():
    """0.97 a request, whoever gets it; what is held misses nothing."""
    index = opened()
    index.record(said("a", "b"), 0, 0.0)
    index.record(said("a", "b", "c"), 0, 0.0)
    assert columns(index, "a")[2][0] == pytest.approx(2 * 0.97 + 1)
    index.record(said("x"), 1, 0.0)
    assert columns(index, "a")[2] == pytest.approx([(2 * 0.97 + 1) * 0.97, 1.0, 0.0])


def test_a_request_that_moved_ran_and_missed_nowhere_else():
    """Retracted after another was sent."""
    index = opened()
    index.record(said("a"), 0, 0.0)
    moved = said("x", "y")
    recorded = index.record(moved, 0, 0.0)
    index.record(said("b"), 1, 0.0)
    index.retract(moved, 0, recorded, 1.0)
    recorded = index.record(moved, 2, 1.0)
    index.release(moved, 2, recorded, 2.0)
    active, _, missed = columns(index, "a")
    assert active == [1, 1, 0]
    assert missed == pytest.approx([0.97**3, 0.97, 2.0])


def test_what_was_in_flight_before_a_restart_counts_nowhere():
    """The slot has a new tenant when the old request ends."""
    index = opened()
    old = said("a", "b")
    recorded = index.record(old, 0, 0.0)
    index.forget(0)
    index.record(said("a", "b"), 0, 1.0)
    index.retract(old, 0, recorded, 2.0)
    assert columns(index, "a", "b")[:2] == [[2, 0, 0], [0, 2, 2]]


def test_above_its_limit_requests_are_not_counted():
    """And are not uncounted either."""
    index = opened(active_blocks_max=2)
    first, second = said("a", "b"), said("c", "d")
    index.record(first, 0, 0.0)
    recorded = index.record(second, 0, 0.0)
    assert index.active.blocks == 2
    index.release(second, 0, recorded, 1.0)
    assert columns(index, "a")[0] == [2, 0, 0]


def test_new_settings_are_adopted_while_requests_are_in_flight():
    """A shorter look at prompts takes out what a longer one put in."""
    index = opened()
    one = said("a", "b", "c")
    recorded = index.record(one, 0, 0.0)
    assert BlockLoadSettings(max_prefix_tokens_to_match=64).adopt(index)
    assert columns(index, "a", "b")[1] == [0, 1, 1]
    index.release(one, 0, recorded, 1.0)
    assert index.active.blocks == 0
    assert not BlockLoadSettings(block_size_tokens=128).adopt(index)
    assert not BlockLoadSettings().adopt(PrefixIndexSettings().open())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["release", "retract", "leave"]),
            st.integers(0, 2),
            st.lists(st.sampled_from("ab"), max_size=4),
        ),
        max_size=20,
    )
)
def test_nothing_stays_when_all_has_ended(endings):
    """However it ended."""
    index = opened()
    open_requests = []
    for ending, slot, letters in endings:
        asked = said(*letters)
        recorded = index.record(asked, slot, 0.0)
        if ending == "release":
            index.release(asked, slot, recorded, 0.0)
        elif ending == "retract":
            index.retract(asked, slot, recorded, 0.0)
        else:
            open_requests.append((asked, slot, recorded))
    for asked, slot, recorded in open_requests:
        index.release(asked, slot, recorded, 0.0)
    assert index.active.blocks == 0
    assert all(missed >= 0 for missed in columns(index, "a")[2])
