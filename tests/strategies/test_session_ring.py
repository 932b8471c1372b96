"""production-stack's ring of sessions and what it does without one."""

from collections import Counter

import numpy as np
import pytest

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from epp.strategies.arrival_rate import ARRIVALS, SEEN, ArrivalsSettings
from epp.strategies.session_ring import SessionRing
from tests.builders import candidates, endpoint, request
from tests.strategies.driven import scheduler_of

NAME = "production-stack-session"


def fallback(used, arrivals):
    columns = {ARRIVALS: np.array(arrivals, dtype=float), SEEN: np.array(used, dtype=float)}
    known = Affinity(np.zeros(len(used), dtype=np.int64), 0, columns)
    pool = candidates(len(used), affinities={ArrivalsSettings.type_name: known})
    return int(SessionRing().score(request(), pool).argmax())


def test_without_a_session_the_first_unused_then_the_least_used():
    """Unused beats zero arrivals; the list's order decides among the unused."""
    assert fallback([1, 0, 0], [0, 0, 0]) == 1
    assert fallback([1, 1, 1], [3, 1, 2]) == 1


def test_the_first_requests_visit_everybody_once():
    """As in its code: whoever has no statistics yet, in order."""
    scheduler = scheduler_of(NAME)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    went = [scheduler.schedule(request(request_id=f"{n}"), 0.0).endpoint.name for n in range(8)]
    assert went[:4] == ["pod-0", "pod-1", "pod-2", "pod-3"]
    assert set(Counter(went).values()) == {2}


def homes(scheduler, sessions, now):
    found = {}
    for session in sessions:
        decision = scheduler.schedule(request(session_id=session), now)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), now)
        found[session] = decision.endpoint.name
    return found


def test_scaling_moves_only_the_sessions_of_who_left():
    """And all come home when it returns: nothing is remembered."""
    pool = [endpoint(number) for number in range(5)]
    scheduler = scheduler_of(NAME)
    scheduler.take(PoolReplaced(pool), 0.0)
    sessions = [f"session-{number}" for number in range(200)]
    before = homes(scheduler, sessions, 0.0)
    assert set(before.values()) == {at.name for at in pool}
    scheduler.take(PoolReplaced(pool[1:]), 1.0)
    after = homes(scheduler, sessions, 1.0)
    moved = [one for one in sessions if before[one] != after[one]]
    assert {before[one] for one in moved} == {"pod-0"}
    assert len(moved) == Counter(before.values())["pod-0"]
    scheduler.take(PoolReplaced(pool), 2.0)
    assert homes(scheduler, sessions, 2.0) == before


@pytest.mark.parametrize(
    ("name", "most"), [(NAME, 50), ("production-stack-session-fixed", 1.25 * 50 / 4 + 1)]
)
def test_a_hot_session_stays_whatever_the_load_unless_it_is_bounded(name, most):
    """The weakness that is reported of it, and what mends it."""
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    by_header = [request(request_id=f"{n}", headers={"x-session-id": "hot"}) for n in range(50)]
    counts = Counter(scheduler.schedule(one, 0.0).endpoint.name for one in by_header)
    assert most / 2 < max(counts.values()) <= most
