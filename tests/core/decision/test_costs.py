"""Costs in their unit, of two that are told and of any other by its score."""

import numpy as np
import pytest

from epp.core.decision.costs import Cost, CostError, cost_by_score, cost_of
from epp.plugins.cost import scores_of_cost
from tests.builders import request as make_request


def test_the_fewest_parts_that_make_the_difference_decided():
    """Of costs the lower is ahead."""
    cost = Cost("a", "s", ({"queue": 0.1, "prefill": 0.3}, {"queue": 0.9, "prefill": 0.2}))
    assert cost.totals == [pytest.approx(0.4), pytest.approx(1.1)]
    assert cost.decided_by == ["queue"]
    assert Cost("a", "s", ({"queue": 0.1},)).decided_by == []


def test_what_any_candidate_cost_follows_from_its_score():
    """However far away the worst is."""
    costs = np.array([0.2, 0.5, 3.0, 10_000.0])
    scores = scores_of_cost(costs)
    known = (scores[0], costs[0]), (scores[1], costs[1])
    found = [cost_by_score(score, *known) for score in scores.tolist()]
    assert found == pytest.approx(costs.tolist(), rel=1e-6)


def test_of_two_that_score_the_same_nothing_follows():
    """But for who scores as they do."""
    assert cost_by_score(0.5, (1.0, 2.0), (1.0, 2.0)) is None
    assert cost_by_score(1.0, (1.0, 2.0), (1.0, 2.0)) == 2.0


def test_parts_that_are_none_are_refused():
    """An array of another length or type is a defect of the plugin."""

    class Broken:
        cost_unit = "s"

        def cost_parts(self, request, candidates, /):
            return {"all": np.zeros(3)}

    with pytest.raises(CostError, match="float64"):
        cost_of("a", Broken(), make_request(), [None, None], (0, 1))
