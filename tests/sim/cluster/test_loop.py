"""Simulated time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.loop import Loop


@given(st.lists(st.floats(0, 10), max_size=30))
def test_callbacks_run_in_order_of_time_and_ties_in_order_of_scheduling(instants):
    """The order is that of a stable sort by instant."""
    loop, seen = Loop(), []
    for number, instant in enumerate(instants):
        loop.at(instant, lambda number=number: seen.append((loop.now, number)))
    while loop.step():
        pass
    assert seen == sorted((instant, number) for number, instant in enumerate(instants))
    assert loop.events == len(instants)


def test_a_callback_may_schedule_another_at_its_own_instant():
    """It runs after what was scheduled for that instant before."""
    loop, seen = Loop(), []
    loop.at(1.0, lambda: loop.after(0.0, seen.append, "third"))
    loop.at(1.0, seen.append, "second")
    while loop.step():
        pass
    assert seen == ["second", "third"]
    assert loop.now == 1.0


def test_nothing_is_scheduled_in_the_past():
    """Time would run back."""
    loop = Loop()
    loop.at(1.0, lambda: None)
    loop.step()
    with pytest.raises(AssertionError, match="is before"):
        loop.at(0.5, lambda: None)
