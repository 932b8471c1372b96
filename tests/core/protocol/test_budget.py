import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.protocol.budget import SMALL_BYTES, BodyBudget


@given(st.lists(st.integers(0, 60), max_size=40))
def test_never_more_is_held_than_may_be(wanted):
    """What is not granted is not counted, and what is given back can be taken again."""
    budget = BodyBudget(100)
    taken = [count for count in wanted if budget.take(count)]
    assert budget.held_bytes == sum(taken) <= 100
    for count in taken:
        budget.give_back(count)
    assert budget.held_bytes == 0
    assert budget.take(100)
    assert not budget.take(1)


def test_who_holds_much_leaves_room_for_who_holds_little():
    """An eighth, by what each of them holds in all."""
    budget = BodyBudget(8 * SMALL_BYTES)
    assert not budget.take(8 * SMALL_BYTES)
    assert budget.take(6 * SMALL_BYTES)
    assert not budget.take(SMALL_BYTES + 1, 6 * SMALL_BYTES)
    assert budget.take(SMALL_BYTES)
    assert not budget.take(1, SMALL_BYTES)
    assert budget.take(SMALL_BYTES)
    assert not budget.take(1)


def test_nothing_is_given_back_twice():
    """That would let others hold more than there is room for."""
    budget = BodyBudget(10)
    assert budget.take(4)
    budget.give_back(4)
    with pytest.raises(AssertionError):
        budget.give_back(4)
    assert repr(budget) == "<BodyBudget [0 of 10 bytes held]>"
