"""Prefill stages that neither end nor fail."""

from msgspec import structs

from epp.core.decision.inputs import PoolReplaced, RequestEnded, ResponseStarted, Tick
from epp.core.knowledge import overdue_prefills
from epp.core.knowledge.inflight import Outcome
from tests.core.decision.staged import BOTH, chat, of_role, pool_of

POOL = ["prefill", "decode"]
STAGES = structs.replace(BOTH, prefill_deadline_s=30.0)


def tick(made, now):
    made.take(Tick(), now)
    return made.state.overdue_prefills.by_pair


def test_a_prefill_that_hangs_is_counted_once_by_its_pair():
    made = pool_of(POOL, STAGES)
    made.schedule(chat(), 1.0)
    assert tick(made, 30.9) == {}
    assert tick(made, 31.0) == {(0, 1): 1}
    assert tick(made, 99.0) == {(0, 1): 1}
    assert made.state.overdue_prefills.total == 1


def test_a_prefill_that_ended_or_failed_in_time_is_not_counted():
    made = pool_of(POOL, STAGES)
    answered, failed, slow = (made.schedule(chat(), 1.0) for _ in range(3))
    made.take(ResponseStarted(answered.lease), 5.0)
    made.take(RequestEnded(failed.lease, Outcome(status=502)), 5.0)
    assert tick(made, 31.0) == {(0, 1): 1}
    made.take(ResponseStarted(slow.lease), 32.0)
    assert made.state.overdue_prefills.of(0) == {(0, 1): 1}


def test_what_left_is_forgotten_and_stays_in_the_total():
    made = pool_of(["prefill", "decode", "decode"], STAGES)
    made.schedule(chat(), 1.0)
    made.schedule(chat(text=b"b"), 2.0)
    made.take(PoolReplaced([of_role(1, "decode"), of_role(2, "decode")]), 10.0)
    assert tick(made, 40.0) == {}
    assert made.state.overdue_prefills.total == 0
    other = pool_of(POOL, STAGES)
    other.schedule(chat(), 1.0)
    assert tick(other, 31.0)
    other.take(PoolReplaced([of_role(1, "decode")]), 32.0)
    assert other.state.overdue_prefills.by_pair == {}
    assert other.state.overdue_prefills.total == 1


def test_the_number_of_watched_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(overdue_prefills, "WATCHED_MAX", 3)
    made = pool_of(POOL, STAGES)
    for _ in range(5):
        made.schedule(chat(), 1.0)
    assert tick(made, 31.0) == {(0, 1): 3}


def test_a_decision_without_a_prefill_elsewhere_is_not_watched():
    made = pool_of(["prefill-decode"], STAGES)
    made.schedule(chat(), 1.0)
    assert tick(made, 31.0) == {}


def test_prefills_in_flight_are_counted_by_pair_until_they_end(monkeypatch):
    made = pool_of(POOL, STAGES)
    first, second, third = (made.schedule(chat(), 1.0) for _ in range(3))

    def in_flight():
        return made.state.overdue_prefills.in_flight(made.ledger)

    assert in_flight() == {(0, 1): 3}
    made.take(ResponseStarted(second.lease), 1.5)
    assert in_flight() == {(0, 1): 2}
    made.take(RequestEnded(first.lease, Outcome(status=503)), 1.6)
    assert in_flight() == {(0, 1): 1}
    monkeypatch.setattr(overdue_prefills, "COUNTED_MAX", 0)
    assert in_flight() == {}
    made.take(RequestEnded(third.lease, Outcome(status=200)), 1.7)
    tick(made, 2.0)
    assert not made.state.overdue_prefills._watched
