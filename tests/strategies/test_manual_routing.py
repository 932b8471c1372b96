"""smg's manual routing: who has a key, who gets it next, and what is forgotten."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.duration import Duration
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from epp.strategies.manual_routing import KEYS, Assignment, ManualRouting, RoutingKeysSettings
from tests.builders import candidates, endpoint, request
from tests.strategies.driven import scheduler_of

SLOTS = 4


def keyed(key):
    return request(headers={"x-smg-routing-key": key})


def matched(index, key, now=0.0):
    return index.match(keyed(key), SLOTS, now).matched.tolist()


def keys_of(index, now=0.0):
    return index.match(request(), SLOTS, now).columns[KEYS].tolist()


def test_a_key_has_a_first_and_a_second_and_a_third_takes_the_firsts_place():
    """At most two; using one of them changes nothing."""
    index = RoutingKeysSettings().open()
    index.record(keyed("a"), 0, 0.0)
    assert matched(index, "a") == [2, 0, 0, 0]
    index.record(keyed("a"), 1, 0.0)
    index.record(keyed("a"), 1, 0.0)
    assert matched(index, "a") == [2, 1, 0, 0]
    index.record(keyed("a"), 2, 0.0)
    assert matched(index, "a") == [0, 2, 1, 0]


def test_a_key_counts_while_it_has_requests_in_flight():
    """Once, however many; when the last has ended it stays where it is, and counts no more."""
    index = RoutingKeysSettings().open()
    asked = [keyed(key) for key in "aab"]
    recorded = [index.record(one, 0, 0.0) for one in asked]
    assert keys_of(index) == [2, 0, 0, 0]
    for one, noted, left in zip(asked, recorded, (2, 1, 0), strict=True):
        index.release(one, 0, noted, 1.0)
        assert keys_of(index) == [left, 0, 0, 0]
    assert matched(index, "a") == [2, 0, 0, 0]


def test_an_idle_key_is_forgotten_after_four_hours():
    """Not at the hour itself; use keeps it."""
    index = RoutingKeysSettings().open()
    index.record(keyed("a"), 0, 0.0)
    index.record(keyed("b"), 0, 100.0)
    limit = 4 * 3_600.0
    index.expire(limit)
    assert len(index) == 2
    index.expire(limit + 1.0)
    assert len(index) == 1
    assert matched(index, "a", limit + 1.0) == [0] * SLOTS
    assert matched(index, "b", limit + 100.0) == [2, 0, 0, 0]
    assert matched(index, "b", limit + 101.0) == [0] * SLOTS, "also before it is swept"
    index.record(keyed("b"), 1, limit + 101.0)
    assert matched(index, "b", limit + 101.0) == [0, 2, 0, 0]


def test_whoever_was_idle_longest_goes_when_it_is_full():
    """Use makes a key younger."""
    index = RoutingKeysSettings(keys_max=2).open()
    for key in ("a", "b", "a", "c"):
        index.record(keyed(key), 0, 0.0)
    assert [sum(matched(index, key)) for key in "abc"] == [2, 0, 2]


VERBS = st.lists(
    st.tuples(
        st.sampled_from(["record", "retract", "release", "forget", "expire", "shrink"]),
        st.sampled_from("abcdef"),
        st.integers(0, SLOTS - 1),
    ),
    max_size=60,
)


@given(verbs=VERBS)
def test_it_stays_within_its_limit_and_its_counts_add_up(verbs):
    """Whatever is done to it: at most so many keys, each with one or two slots, active while used."""
    settings = RoutingKeysSettings(keys_max=4, idle=Duration(10.0))
    index = settings.open()
    inflight = {}
    for step, (verb, key, slot) in enumerate(verbs):
        now = float(step)
        if verb == "record":
            asked = keyed(key)
            noted = asked, slot, index.record(asked, slot, now)
            inflight.setdefault((key, slot), []).append(noted)
        elif verb == "retract" and inflight.get((key, slot)):
            index.retract(*inflight[key, slot].pop(), now)
        elif verb == "release" and inflight.get((key, slot)):
            index.release(*inflight[key, slot].pop(), now)
        elif verb == "forget":
            index.forget(slot)
            inflight = {(k, s): some for (k, s), some in inflight.items() if s != slot}
            assert all(matched(index, k, now)[slot] == 0 for k in "abcdef")
        elif verb == "expire":
            index.expire(now)
        elif verb == "shrink":
            assert RoutingKeysSettings(keys_max=2, idle=Duration(10.0)).adopt(index)
            assert len(index) <= 2
            settings.adopt(index)
        assert len(index) <= 4
        assert all(1 <= len(slots) <= 2 for slots, _ in index._keys.values())
        active = Counter(at for (_, at), some in inflight.items() if some)
        assert keys_of(index, now) == [active[one] for one in range(SLOTS)]


def test_a_new_key_goes_where_the_assignment_says():
    """And so does what has no key."""

    def scores(assignment):
        known = Affinity(np.zeros(3, dtype=np.int64), 2, {KEYS: np.array([0.0, 2.0, 1.0])})
        pool = candidates(inflight_requests=[2, 1, 0], affinities={"routing-keys-producer": known})
        return ManualRouting(assignment=Assignment(assignment)).score(request(), pool).tolist()

    assert scores("random") == [1, 1, 1]
    assert scores("min_load") == [0, 0.5, 1]
    assert scores("min_group") == [1, 0, 0.5]


def pool_of(name, pods=SLOTS):
    scheduler = scheduler_of(name)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(pods)]), 0.0)
    return scheduler


def turn(scheduler, key, now=0.0, subset=None):
    asked = structs.replace(keyed(key), subset=subset)
    decision = scheduler.schedule(asked, now)
    scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), now)
    return decision.endpoint.name


def test_a_key_returns_to_its_first_endpoint_when_that_is_back():
    """As in its tests: away, the second serves; back, the first does again."""
    scheduler = pool_of("smg-manual")
    first = turn(scheduler, "k")
    others = tuple(at.address for _, at in scheduler.pool.endpoints() if at.name != first)
    second = turn(scheduler, "k", subset=others)
    assert second != first
    assert {turn(scheduler, "k", subset=others) for _ in range(5)} == {second}
    assert {turn(scheduler, "k") for _ in range(5)} == {first}


@pytest.mark.parametrize(
    ("name", "even"),
    [("smg-manual", False), ("smg-manual-min-load", True), ("smg-manual-min-group", True)],
)
def test_keys_are_spread(name, even):
    """By chance, or as evenly as it goes."""
    scheduler = pool_of(name)
    counts = Counter()
    for number in range(40):
        decision = scheduler.schedule(keyed(f"{number}"), 0.0)
        counts[decision.endpoint.name] += 1
    assert len(counts) == SLOTS
    assert (set(counts.values()) == {10}) is even
