"""AIBrix's Preble: when it exploits, when it explores, and how its faults show."""

from collections import Counter

import numpy as np
import pytest

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from epp.strategies.aibrix_preble import AibrixPreble
from epp.strategies.preble_tree import COST_S, REQUESTS, TREE_BLOCKS
from tests.builders import candidates, endpoint, request
from tests.sim.made import arrivals
from tests.strategies.driven import scheduler_of
from tests.strategies.simulated import hit_rate, simulated


def chosen(matched, *, tree, cost, requests, loads=None, total=10):
    n = len(matched)
    columns = {
        TREE_BLOCKS: np.full(n, float(tree)),
        REQUESTS: np.array(requests, dtype=float),
        COST_S: np.array(cost, dtype=float),
    }
    pool = candidates(
        inflight_requests=loads or [0] * n,
        affinities={"preble-tree-producer": Affinity(np.array(matched), total, columns)},
    )
    scores = AibrixPreble().score(request(), pool)
    return np.flatnonzero(scores == 1.0).tolist()


def test_more_than_half_known_goes_to_the_least_used_holder():
    """Half is not enough; of the deepest holders the one with fewer requests."""
    known = {"cost": [9, 8, 0], "requests": [5, 4, 0]}
    assert chosen([6, 6, 0], tree=6, **known) == [1]
    assert chosen([6, 3, 0], tree=6, **known) == [0]
    assert chosen([5, 5, 0], tree=5, **known) == [2]


def test_what_the_tree_knows_but_nobody_has_goes_by_cost():
    """And what only shallow nodes have goes to their holders: the nearest ancestor that has one."""
    assert chosen([0, 0], tree=8, cost=[2, 1], requests=[0, 9]) == [1]
    assert chosen([1, 0], tree=8, cost=[2, 1], requests=[9, 0]) == [0]


@pytest.mark.parametrize(("load", "home"), [(8, 0), (9, 1)])
def test_the_guard_is_strict(load, home):
    """Beyond a spread of 8 only who has the fewest is looked at."""
    assert chosen([10, 0], tree=10, cost=[0, 5], requests=[0, 5], loads=[load, 0]) == [home]


def test_families_settle_on_endpoints_and_new_ones_go_where_the_cost_is_least():
    """Four prompts of one family each, then their followers stay with them."""
    scheduler = scheduler_of("aibrix-preble")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)

    def went(family, number):
        prompt = f"family {family} ".encode() * 100 + f"question {number}".encode()
        asked = request(request_id=f"{family}-{number}", prompts=(prompt,))
        decision = scheduler.schedule(asked, 0.0)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.0)
        return decision.endpoint.name

    homes = {family: went(family, 0) for family in range(4)}
    assert len(set(homes.values())) == 4
    for number in range(1, 6):
        assert {family: went(family, number) for family in range(4)} == homes


@pytest.mark.parametrize("name", ["aibrix-preble", "aibrix-preble-fixed"])
def test_it_finds_more_in_caches_than_load_alone(name):
    """In the simulator."""

    def hits(policy):
        return hit_rate(simulated(arrivals(150, rate=10.0, groups=12), policy))

    assert hits(name) > 1.1 * hits("aibrix-least-request")


def test_a_burst_of_one_prompt_is_spread_by_the_guard():
    """Nobody has more than nine above who has the fewest."""
    scheduler = scheduler_of("aibrix-preble")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    counts = Counter(dict.fromkeys(range(4), 0))
    for number in range(80):
        asked = request(request_id=f"{number}", prompts=(b"the same " * 100,))
        counts[scheduler.schedule(asked, 0.0).lease.slot] += 1
        assert max(counts.values()) - min(counts.values()) <= 9
