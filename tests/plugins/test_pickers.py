from collections import Counter
from random import Random

import numpy as np
import pytest
from msgspec import ValidationError, convert

from epp.plugins import PICKERS, pickers
from tests.builders import candidates


def picked(picker, scores, *, rotation=0, random=None):
    scores = np.array(scores, dtype=np.float64)
    pool = candidates(len(scores))
    return picker.pick(scores, pool, random or Random("test:picker"), rotation).tolist()


def test_the_highest_sum_is_picked():
    """Whatever the rotation."""
    for rotation in range(5):
        assert picked(pickers.MaxScore(), [1.0, 3.0, 2.0], rotation=rotation) == [1]


def test_ties_for_the_top_take_turns_evenly():
    """Over k decisions each of k gets one."""
    scores = [2.0, 1.0, 2.0, 2.0]
    turns = [picked(pickers.MaxScore(), scores, rotation=rotation)[0] for rotation in range(300)]
    assert turns[:4] == [0, 2, 3, 0]
    assert Counter(turns) == {0: 100, 2: 100, 3: 100}


def test_sums_that_differ_by_rounding_tie():
    """0.1 + 0.2 is as good as 0.3; a difference that a score can make is none of that."""
    scores = [0.1 + 0.2, 0.3, 0.3 - 1e-6]
    assert {picked(pickers.MaxScore(), scores, rotation=i)[0] for i in range(6)} == {0, 1}


def test_all_scores_0_is_a_tie_of_all():
    """Nobody is preferred, so all take turns."""
    turns = [picked(pickers.MaxScore(), [0.0] * 3, rotation=rotation) for rotation in range(3)]
    assert turns == [[0], [1], [2]]


def test_fallbacks_follow_in_order_of_preference():
    """First the other tied ones, then down the sums, equal ones in their order."""
    picker = pickers.MaxScore(max_num_of_endpoints=5)
    scores = [1.0, 3.0, 2.0, 3.0, 2.0, 0.5]
    assert picked(picker, scores, rotation=0) == [1, 3, 2, 4, 0]
    assert picked(picker, scores, rotation=1) == [3, 1, 2, 4, 0]


@pytest.mark.parametrize("picker", PICKERS.values())
def test_at_most_as_many_as_there_are_are_picked(picker):
    """Each once."""
    order = picked(picker(max_num_of_endpoints=8), [0.0, 1.0, 0.5])
    assert sorted(order) == [0, 1, 2]


def test_a_weighted_draw_follows_the_sums():
    """Three times the sum is drawn three times as often; 0 never while others are above."""
    random = Random("test:weighted")
    drawn = Counter(
        picked(pickers.WeightedRandom(), [3.0, 1.0, 0.0], random=random)[0] for _ in range(4000)
    )
    assert drawn[2] == 0
    assert 0.72 < drawn[0] / 4000 < 0.78


def test_a_weighted_draw_without_any_preference_is_even():
    """All 0: as `random-picker`."""
    random = Random("test:zero")
    drawn = Counter(
        picked(pickers.WeightedRandom(), [0.0] * 4, random=random)[0] for _ in range(4000)
    )
    assert all(850 < drawn[position] < 1150 for position in range(4))


def test_what_scores_0_comes_last_in_a_weighted_draw():
    """It is a fallback only."""
    picker = pickers.WeightedRandom(max_num_of_endpoints=4)
    random = Random("test:last")
    orders = [picked(picker, [0.0, 1e-12, 0.0, 7.0], random=random) for _ in range(200)]
    assert all(set(order[:2]) == {1, 3} for order in orders)
    assert {order[2] for order in orders} == {0, 2}


def test_a_uniform_draw_ignores_the_sums():
    """Each about as often."""
    random = Random("test:uniform")
    drawn = Counter(
        picked(pickers.UniformRandom(), [9.0, 0.0, 0.0, 0.0], random=random)[0] for _ in range(4000)
    )
    assert all(850 < drawn[position] < 1150 for position in range(4))


@pytest.mark.parametrize("picker", PICKERS.values())
def test_the_same_dice_give_the_same_pick(picker):
    """A recorded run replays."""
    scores = [0.3, 0.2, 0.3, 0.9]
    plugin = picker(max_num_of_endpoints=3)
    first = picked(plugin, scores, random=Random("7:picker"), rotation=5)
    assert picked(plugin, scores, random=Random("7:picker"), rotation=5) == first


@pytest.mark.parametrize("picker", PICKERS.values())
def test_at_least_one_endpoint_has_to_be_asked_for(picker):
    """And the parameter has the field's name."""
    assert convert({"maxNumOfEndpoints": 2}, picker).max_num_of_endpoints == 2
    with pytest.raises(ValidationError, match="maxNumOfEndpoints"):
        convert({"maxNumOfEndpoints": 0}, picker)
