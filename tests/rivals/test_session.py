"""Session affinity, plain and bounded."""

from collections import Counter

import pytest

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from homing_rivals.session import BoundedSession
from tests.builders import affinity, candidates, endpoint, request
from tests.rivals.driven import scheduler_of

INDEX = "session-id-producer"


def scores(home, loads, **parameters):
    pool = candidates(inflight_requests=loads, affinities={INDEX: affinity(home)})
    return BoundedSession(**parameters).score(request(), pool).tolist()


def test_a_session_stays_up_to_the_bound_and_not_beyond():
    """Mean 4, skew 1.5: six are within, seven with the mean of 4.25 are not."""
    assert scores([1, 0, 0, 0], [6, 5, 4, 1]) == [1, 0, 0, 0]
    assert scores([1, 0, 0, 0], [7, 5, 4, 1])[3] == 1


def test_a_pool_with_little_to_do_moves_nobody():
    """The mean counts as one at least: one in flight is no reason to leave."""
    assert scores([1, 0, 0, 0], [1, 0, 0, 0]) == [1, 0, 0, 0]
    assert scores([1, 0, 0, 0], [2, 0, 0, 0])[0] == 0


def test_without_a_session_the_fewest_are_taken():
    """Graded, so that the rest is in order too."""
    assert scores([0, 0, 0], [2, 0, 1]) == [0, 1, 0.5]


def flooded(name, turns=60):
    """One session that sends without waiting for answers, among others that do."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    counts = Counter()
    for turn in range(turns):
        lease = scheduler.schedule(request(request_id=f"h{turn}", session_id="hot"), 0.0).lease
        counts[lease.slot] += 1
        other = scheduler.schedule(
            request(request_id=f"o{turn}", session_id=f"{turn % 7}"), 0.0
        ).lease
        scheduler.take(RequestEnded(other, Outcome(status=200)), 0.0)
    return counts


def test_a_hot_session_stays_on_a_saturated_endpoint_unless_it_is_bounded():
    """The common failure that users report, and the spill that they ask for."""
    assert len(flooded("session-sticky")) == 1
    bounded = flooded("session-bounded")
    assert len(bounded) == 4
    assert max(bounded.values()) <= 1.5 * 60 / 4 + 1


@pytest.mark.parametrize("name", ["session-sticky", "session-bounded"])
def test_a_session_that_moved_stays_where_it_went(name):
    """Its endpoint leaves, it finds another, and does not go back when the first returns."""
    scheduler = scheduler_of(name)
    pool = [endpoint(number) for number in range(3)]
    scheduler.take(PoolReplaced(pool), 0.0)

    def turn(now):
        lease = scheduler.schedule(request(session_id="s"), now).lease
        name = scheduler.pool.columns.endpoints[lease.slot].name
        scheduler.take(RequestEnded(lease, Outcome(status=200)), now)
        return name

    home = turn(0.0)
    assert {turn(1.0) for _ in range(5)} == {home}
    scheduler.take(PoolReplaced([at for at in pool if at.name != home]), 2.0)
    second = turn(2.0)
    scheduler.take(PoolReplaced(pool), 3.0)
    assert {turn(3.0) for _ in range(5)} == {second}


def test_pickers_that_know_the_same_endpoints_agree_on_a_session():
    """Without a word and without a memory; without a session anybody gets it."""
    pool = [endpoint(number) for number in range(5)]

    def homes(seed):
        scheduler = scheduler_of("session-rendezvous", seed)
        scheduler.take(PoolReplaced(pool), 0.0)
        asked = [request(session_id=f"{number}") for number in range(40)]
        return [scheduler.schedule(one, 0.0).endpoint.name for one in asked]

    assert homes(1) == homes(2)
    assert len(set(homes(1))) == 5
    scheduler = scheduler_of("session-rendezvous")
    scheduler.take(PoolReplaced(pool), 0.0)
    one = {scheduler.schedule(request(request_id=f"{n}"), 0.0).endpoint.name for n in range(60)}
    assert len(one) == 5
