"""A ring moves what it must and no more, and its bound is the one of the paper."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.ring import ring_of, within_bound
from tests.builders import candidates

KEYS = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(2_000)]


def owners(pool, points=64):
    ring = ring_of(pool, points)
    everybody = np.ones(len(pool), dtype=np.bool_)
    return [int(pool.slot[ring.first(key, everybody)]) for key in KEYS]


def test_every_endpoint_owns_its_share():
    """With 64 points each the arcs even out: nobody has twice the mean."""
    counts = np.bincount(owners(candidates(10)), minlength=10)
    assert counts.min() > 0
    assert counts.max() < 2 * len(KEYS) / 10


@given(gone=st.integers(0, 9))
def test_who_leaves_takes_along_only_its_own_keys(gone):
    """All others stay where they were; its own spread over several."""
    pool = candidates(10)
    before = owners(pool)
    after = owners(pool.take(np.arange(10) != gone))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {gone}
    assert len({new for _, new in moved}) > 3


def test_the_first_that_is_accepted_is_taken_round_the_ring():
    """Also from behind the last point; -1 if nobody is."""
    ring = ring_of(candidates(3), 4)
    everybody = np.ones(3, dtype=np.bool_)
    at = int(np.flatnonzero(np.diff(ring.owners))[0])
    assert ring.first(int(ring.points[at]), everybody) == ring.owners[at]
    assert ring.first(int(ring.points[at]) + 1, everybody) == ring.owners[at + 1]
    assert ring.first(2**64 - 1, everybody) == ring.owners[0]
    assert ring.first(2**64 - 1, np.array([False, True, False])) == 1
    assert ring.first(0, np.zeros(3, dtype=np.bool_)) == -1


def test_the_bound_is_inclusive_and_counts_the_request_in_the_mean_alone():
    """11 in flight at 4: 1.25 x 12 / 4 = 3.75; at 3 x 4 + 3 = 15 it is 5.0."""
    assert within_bound(np.array([0, 3, 4, 4]), 1.25).tolist() == [True, True, False, False]
    assert within_bound(np.array([5, 5, 5, 0]), 1.25).tolist() == [True] * 4
    assert within_bound(np.array([6, 5, 4, 0]), 1.25).tolist() == [False, True, True, True]
    assert within_bound(np.zeros(2, dtype=np.int64), 1.0).all()


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_somebody_is_always_within_the_bound(loads):
    """Who has the least is not above the mean."""
    assert within_bound(np.array(loads), 1.0)[np.argmin(loads)]
