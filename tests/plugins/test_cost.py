"""Costs become scores without losing their order."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.plugins.cost import scores_of_cost

COSTS = st.lists(
    st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.inf, math.nan])), min_size=1, max_size=8
)


@given(costs=COSTS)
def test_the_cheapest_has_1_and_what_is_no_number_comes_last(costs):
    """In [0, 1], and never better for a higher cost."""
    scores = scores_of_cost(np.array(costs))
    assert scores.shape == (len(costs),)
    assert np.all((scores >= 0) & (scores <= 1))
    assert scores.max() == 1
    finite = [math.isfinite(cost) for cost in costs]
    for one, cost in enumerate(costs):
        for other, dearer in enumerate(costs):
            if finite[one] and (not finite[other] or cost <= dearer):
                assert scores[one] >= scores[other]
            if finite[one] and not finite[other]:
                assert scores[one] > scores[other]


def test_equal_costs_tie():
    """So that a picker lets them take turns."""
    assert scores_of_cost(np.array([2.0, 1.0, 1.0])).tolist() == [0.0, 1.0, 1.0]
    assert scores_of_cost(np.array([math.inf, math.inf])).tolist() == [1.0, 1.0]
