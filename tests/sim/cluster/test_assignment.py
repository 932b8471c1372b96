"""Who reaches which picker."""

from collections import Counter

import pytest

from sim.cluster.assignment import Assigner, Assignment

REQUESTS = 3_000


def chosen(assigner, sessions):
    return [assigner.choose(session) for session in sessions]


@pytest.mark.parametrize("assignment", Assignment)
def test_the_seed_decides_and_one_picker_gets_all(assignment):
    sessions = [f"session-{at % 70}" for at in range(200)]
    first, again = (chosen(Assigner(assignment, 4, 1), sessions) for _ in range(2))
    assert first == again
    assert first != chosen(Assigner(assignment, 4, 2), sessions)
    assert set(chosen(Assigner(assignment, 1, 1), sessions)) == {0}


def test_at_random_pickers_get_the_same_and_skewed_they_do_not():
    """The n-th a share of 1/n of what the first gets."""
    even = Counter(chosen(Assigner(Assignment.RANDOM, 4, 1), ["s"] * REQUESTS))
    assert max(even.values()) < 1.2 * min(even.values())
    skewed = Counter(chosen(Assigner(Assignment.SKEWED, 4, 1), ["s"] * REQUESTS))
    for replica in range(1, 4):
        assert 0.8 < skewed[replica] * (replica + 1) / skewed[0] < 1.2


def test_a_session_stays_and_only_those_of_a_picker_that_goes_move():
    assigner = Assigner(Assignment.STICKY, 4, 1)
    sessions = [f"session-{at}" for at in range(400)]
    before = chosen(assigner, sessions)
    assert chosen(assigner, sessions) == before
    assert min(Counter(before).values()) > 60
    assigner.leave(2)
    assert not assigner.is_running(2)
    for old, new in zip(before, chosen(assigner, sessions), strict=True):
        assert new == old if old != 2 else new != 2
    assigner.join(2)
    assigner.join(2)
    assert chosen(assigner, sessions) == before


def test_a_request_without_a_session_goes_anywhere():
    assert len(set(chosen(Assigner(Assignment.STICKY, 4, 1), [""] * 50))) == 4


@pytest.mark.parametrize("assignment", Assignment)
def test_nobody_is_sent_to_who_is_away(assignment):
    assigner = Assigner(assignment, 3, 1)
    assigner.leave(0)
    assert set(chosen(assigner, [f"s{at}" for at in range(100)])) == {1, 2}
    assigner.leave(1)
    assert set(chosen(assigner, [f"s{at}" for at in range(100)])) == {2}


@pytest.mark.parametrize("assignment", list(Assignment))
def test_nobody_is_chosen_where_nobody_is(assignment):
    """Until one is there again."""
    assigner = Assigner(assignment, 2, seed=1)
    for replica in (0, 1):
        assigner.leave(replica)
    assert assigner.choose("session") is None
    assert not assigner.is_running(None)
    assigner.join(1)
    assert assigner.choose("session") == 1
