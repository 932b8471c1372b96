"""Endpoints that refuse requests for want of room: how much they get, and when they are back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import RequestEnded, Tick
from epp.core.knowledge.fullness import (
    PAUSE_S_MAX,
    RETRY_AFTER_S_MAX,
    STEP_S,
    STEPS,
    FullEndpoints,
)
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.types import Refusal
from tests.builders import request
from tests.test_hermetic import pods

SERVED = Outcome(status=200)
TOO_MANY = Outcome(status=429)
ASKED_TO_WAIT = Outcome(status=429, retry_after_s=5.0)
UNAVAILABLE = Outcome(status=503, retry_after_s=5.0)
FAILED = Outcome(status=500)


class Pool:
    """Five endpoints of which nothing speaks for one or another; one answers as it is told."""

    def __init__(self, count=5):
        self.scheduler = pods(*((0, 0.1) for _ in range(count)))
        self.now = 10.0
        self.counts = [0] * count

    def send(self, answers):
        """Send one request and end it at once; `answers` maps a slot to its outcome."""
        decision = self.scheduler.schedule(request(), self.now)
        assert not isinstance(decision, Refusal)
        slot = decision.lease.slot
        self.counts[slot] += 1
        outcome = answers.get(slot, SERVED)
        self.scheduler.take(RequestEnded(decision.lease, outcome), self.now + 0.001)
        return decision

    def send_for(self, seconds, answers, per_s=20):
        """Send `per_s` requests a second for `seconds`; return how many each endpoint got."""
        self.counts = [0] * len(self.counts)
        for number in range(int(seconds * per_s)):
            if number % per_s == 0:
                self.scheduler.take(Tick(), self.now)
            self.send(answers)
            self.now += 1.0 / per_s
        return self.counts


@pytest.mark.parametrize("refusal", [TOO_MANY, ASKED_TO_WAIT, UNAVAILABLE])
def test_who_refuses_everything_gets_single_requests_and_is_not_ejected(refusal):
    """Each of the others gets about a quarter. Before, the first kept its share, a fifth."""
    pool = Pool()
    counts = pool.send_for(60.0, {2: refusal})
    assert counts[2] <= 15
    assert min(counts[:2] + counts[3:]) >= 200
    assert dict(pool.scheduler.outliers.detected(pool.now)) == {}
    assert pool.scheduler.pool.set_aside_count() == 0
    assert 2 in pool.scheduler.full.by_slot


@pytest.mark.parametrize("refusal", [TOO_MANY, ASKED_TO_WAIT, UNAVAILABLE])
def test_who_serves_again_has_its_share_again(refusal):
    """At the latest after the longest pause, without anybody's doing."""
    pool = Pool()
    pool.send_for(20.0, {2: refusal})
    pool.send_for(PAUSE_S_MAX + 1.0, {})
    assert pool.scheduler.full.by_slot == {}
    counts = pool.send_for(20.0, {})
    assert counts[2] >= 60


def test_retry_after_says_how_long_nothing_is_sent():
    """Not a request before it, and one within a second after it."""
    pool = Pool()
    while pool.send({2: ASKED_TO_WAIT}).lease.request and not pool.counts[2]:
        pass
    assert pool.send_for(4.9, {2: ASKED_TO_WAIT})[2] == 0
    assert pool.send_for(1.0, {2: ASKED_TO_WAIT})[2] == 1


def test_an_engine_cannot_take_itself_out_of_service():
    """A `retry-after` of a year counts as a minute."""
    full = FullEndpoints()
    full.refused(0, 0.0, 365.0 * 86_400.0, 10.0)
    assert not full.by_slot[0].has_room(10.0 + RETRY_AFTER_S_MAX - 0.1)
    assert full.by_slot[0].has_room(10.0 + RETRY_AFTER_S_MAX)


def test_a_burst_of_refusals_counts_once():
    """A hundred requests were on their way; the pause is that of one refusal."""
    full = FullEndpoints()
    for _ in range(100):
        full.refused(0, 9.0, None, 10.0)
    assert full.by_slot[0].until_s == 11.0


def test_pauses_double_while_each_attempt_is_refused():
    """From one second up to half a minute."""
    full, now, pauses = FullEndpoints(), 10.0, []
    for _ in range(8):
        full.refused(0, now, None, now)
        pauses.append(full.by_slot[0].until_s - now)
        now = full.by_slot[0].until_s + 0.5
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_room_doubles_each_second_while_nothing_is_heard():
    """Long answers say nothing for minutes."""
    full = FullEndpoints()
    full.refused(0, 0.0, None, 10.0)
    sent = []
    for step in range(STEPS):
        now = 11.0 + step * STEP_S
        count = 0
        while full.by_slot[0].has_room(now):
            full.sent(0, now)
            count += 1
        sent.append(count)
    assert sent == [1, 2, 4, 8, 16, 32, 64]
    full.tick(11.0 + STEPS * STEP_S)
    assert full.by_slot == {}


def test_an_answer_to_an_older_request_does_not_end_it():
    """It was sent before the endpoint refused."""
    full = FullEndpoints()
    full.refused(0, 9.0, None, 10.0)
    full.served(0, 9.5)
    assert 0 in full.by_slot
    full.served(0, 10.5)
    assert full.by_slot == {}


def test_where_all_are_full_all_are_used():
    """A refusal of the engine is better than one of the picker."""
    pool = Pool(3)
    counts = pool.send_for(20.0, dict.fromkeys(range(3), TOO_MANY))
    assert min(counts) >= 100


def test_the_only_one_that_the_gateway_allows_is_used():
    """Though it is full."""
    pool = Pool()
    pool.send_for(5.0, {2: ASKED_TO_WAIT})
    address = pool.scheduler.pool.columns.endpoints[2].address
    decision = pool.scheduler.schedule(request(subset=frozenset({address})), pool.now)
    assert decision.lease.slot == 2


def test_a_decision_names_who_was_full():
    """As it names those that filters dropped."""
    pool = Pool()
    pool.send_for(3.0, {2: ASKED_TO_WAIT})
    decision = pool.scheduler.schedule(request(), pool.now)
    assert {name: slots.tolist() for name, slots in decision.leg.dropped.items()} == {"full": [2]}


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(status=429, by_gateway=True),
        Outcome(status=503),
        Outcome(status=503, retry_after_s=1.0, by_gateway=True),
        Outcome(status=502, retry_after_s=1.0),
        Outcome(status=400),
        Outcome(ending=Ending.CLIENT_LEFT),
    ],
)
def test_other_answers_do_not_say_that_it_is_full(outcome):
    """The gateway's own limits, failures, and clients that left."""
    pool = Pool()
    pool.send_for(1.0, {2: outcome})
    assert pool.scheduler.full.by_slot == {}


def test_who_is_full_and_then_fails_is_ejected():
    """One state does not hide the other."""
    pool = Pool()
    pool.send_for(5.0, {2: TOO_MANY})
    pool.send_for(60.0, {2: FAILED})
    assert dict(pool.scheduler.outliers.detected(pool.now))[2].ejected


def test_an_endpoint_that_left_is_forgotten():
    """The next one in its slot begins anew."""
    pool = Pool()
    pool.send_for(5.0, {2: ASKED_TO_WAIT})
    pool.scheduler.state._forget(2)
    assert pool.scheduler.full.by_slot == {}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["refused", "served", "sent", "tick", "forget"]),
        st.integers(0, 3),
        st.floats(0.0, 20.0),
        st.none() | st.floats(0.0, 1e64),
        st.floats(0.0, 30.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_nobody_is_full_for_longer_than_the_longest_pause_and_the_steps(events):
    """Whatever happened before, if nothing more is refused."""
    full, now = FullEndpoints(), 100.0
    slots = np.arange(4)
    for event, slot, elapsed_s, retry_after_s, age_s in events:
        now += elapsed_s
        if event == "refused":
            full.refused(slot, now - age_s, retry_after_s, now)
        elif event == "served":
            full.served(slot, now - age_s)
        elif event == "sent":
            full.sent(slot, now)
        elif event == "tick":
            full.tick(now)
        else:
            full.forget(slot)
        assert len(full.by_slot) <= 4
        assert set(full.without_room(slots, now)) <= full.by_slot.keys()
    after_s = now + max(PAUSE_S_MAX, RETRY_AFTER_S_MAX) + STEPS * STEP_S
    assert not len(full.without_room(slots, after_s))
    full.tick(after_s)
    assert full.by_slot == {}
