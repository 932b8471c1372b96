"""Costs in order of importance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homing_rivals.lexicographic import scores_by_rank


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_first_decides_and_the_second_breaks_its_ties(costs):
    """As tuples compare; equal ones score the same."""
    scores = scores_by_rank(
        *(np.array(column, dtype=np.float64) for column in zip(*costs, strict=True))
    )
    assert scores.max() == 1.0
    for one, cost in zip(scores, costs, strict=True):
        for other, dearer in zip(scores, costs, strict=True):
            assert (one > other) == (cost < dearer)


def test_a_tie_is_broken_however_large_what_ties():
    """No sum of weighted costs could."""
    huge = np.array([1e15, 1e15, 1e15 + 1e3])
    assert scores_by_rank(huge, np.array([2.0, 1.0, 0.0])).tolist() == [0.5, 1.0, 0.0]
