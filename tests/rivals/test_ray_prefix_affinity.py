"""Ray Serve's prefix cache affinity router."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from epp.core.knowledge.candidates import Affinity
from epp.plugins.contract import config_of, step
from homing_rivals.radix_tree import HELD_BLOCKS, RadixTreeSettings
from homing_rivals.ray_prefix_affinity import RayPrefixAffinity, TwoOfBest
from tests.builders import candidates, request
from tests.rivals.driven import Driven, text


def best(matched, held=None, *, threshold=None, **columns):
    known = Affinity(np.array(matched), 10, {HELD_BLOCKS: np.array(held or [0.0] * len(matched))})
    some = candidates(affinities={RadixTreeSettings.type_name: known}, **columns)
    scores = RayPrefixAffinity(imbalanced_threshold=threshold).score(request(), some)
    return np.flatnonzero(scores == 1.0).tolist()


def test_a_tenth_of_the_prompt_is_a_match():
    """Not strictly; below it the smallest trees."""
    idle = {"inflight_requests": [0, 0, 0]}
    assert best([1, 0, 0], [9.0, 2.0, 2.0], **idle) == [0]
    assert best([0, 0, 0], [9.0, 2.0, 2.0], **idle) == [1, 2]


def test_of_those_chosen_the_shortest_queue():
    """Whether they hold the prompt or have small trees."""
    assert best([5, 5, 4], inflight_requests=[3, 2, 0]) == [1]
    assert best([0, 0, 0], [1.0, 1.0, 2.0], inflight_requests=[3, 2, 0]) == [1]


@pytest.mark.parametrize(
    ("threshold", "apart", "expected"),
    [(None, 10_000, [0]), (10, 10, [0]), (10, 11, [0, 1]), (0, 1, [0, 1])],
)
def test_the_guard_is_strict_and_off_by_default(threshold, apart, expected):
    """Then all are alike to the picker."""
    assert best([9, 0], threshold=threshold, inflight_requests=[apart, 0]) == expected


def test_two_of_the_best_are_drawn_and_the_shorter_queue_wins():
    """Never one that is not among the best, however idle; never the longest queue of three."""
    some = candidates(inflight_requests=[3, 1, 2, 0])
    scores = np.array([1.0, 1.0, 1.0, 0.0])
    dice = Random(1)
    drawn = Counter(int(TwoOfBest().pick(scores, some, dice, 0)[0]) for _ in range(300))
    assert set(drawn) == {1, 2}
    assert drawn[1] > drawn[2] > 0, "two of the three pairs have the shortest"
    assert TwoOfBest().pick(np.array([0.0, 1.0, 0.0, 0.0]), some, dice, 0).tolist() == [1]


def test_a_hot_prefix_fills_one_replica_without_a_bound():
    """Since ray-project/ray #59390 the guard is infinite by default; at 10 it holds."""
    went = {}
    bounded = config_of(
        step("ray-prefix-affinity-scorer", imbalancedThreshold=10),
        picker=step("two-of-best-picker"),
    )
    for name in ("ray-prefix-affinity", bounded):
        pods = Driven(name, pods=4)
        preamble = text("system", 256)
        went[name] = Counter(pods.send(preamble + text(f"u{at}", 64)) for at in range(200))
    assert list(went["ray-prefix-affinity"].values()) == [200]
    spread = went[bounded]
    assert len(spread) == 4
    assert max(spread.values()) - min(spread.values()) <= 11


def test_cold_prompts_go_to_the_smallest_tree():
    """One long prompt is worth many short ones."""
    pods = Driven("ray-prefix-affinity", pods=2)
    long = pods.ask(text("long", 2_000))
    assert [pods.ask(text(f"short{at}", 64)) for at in range(8)] == [1 - long] * 8
