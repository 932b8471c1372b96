"""Steps that leave some."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.narrowing import first_of, least_of, most_of, only, with_room

VALUES = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(values=VALUES, data=st.data())
def test_each_step_leaves_a_part_of_what_was_left(values, data):
    """Never somebody that was out, and somebody as long as anybody was in."""
    among = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    column = np.array(values)
    for step in (least_of(column, among), most_of(column, among), first_of(among)):
        assert not np.any(step & ~among)
        assert step.any() == among.any()
    if among.any():
        assert set(column[least_of(column, among)].tolist()) == {column[among].min()}
        assert set(column[most_of(column, among)].tolist()) == {column[among].max()}
        assert first_of(among).nonzero()[0].tolist() == [among.nonzero()[0][0]]


def test_who_is_left_scores_1():
    """As float64, which a scorer returns."""
    scores = only(least_of(np.array([2, 1, 1])))
    assert scores.tolist() == [0.0, 1.0, 1.0]
    assert scores.dtype == np.float64


@given(
    inflight=st.lists(st.integers(0, 50), min_size=1, max_size=8), load_factor=st.floats(1.0, 3.0)
)
def test_somebody_has_room_and_nobody_above_the_bound(inflight, load_factor):
    """Whoever is the least loaded can always take one more."""
    column = np.array(inflight)
    room = with_room(column, load_factor)
    assert room[column.argmin()]
    assert np.all(column[room] + 1 <= load_factor * (sum(inflight) + 1) / len(inflight) + 1)


def test_the_bound_counts_the_request_itself():
    """ceil(1.25 * (3 + 1) / 2) = 3."""
    assert with_room(np.array([2, 1]), 1.25).tolist() == [True, True]
    assert with_room(np.array([3, 0]), 1.25).tolist() == [False, True]
