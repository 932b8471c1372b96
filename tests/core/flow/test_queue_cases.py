"""Cases that the queues of other routers got wrong or test: limits, empty pools, ends of waits."""

import pytest

from epp.core.flow.bands import FLOWS_MAX, SHARED_FLOWS, Band, State, Ticket
from epp.core.flow.control import FlowControl
from epp.core.flow.detectors import ConcurrencyDetector, MaxSaturation, Utilization
from epp.core.flow.rooms import Rooms
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.knowledge.candidates import Columns
from epp.core.types import RefusalReason, Stage
from tests.builders import candidates, request
from tests.core.flow.test_control import FAIR, Endpoints, full, names, serve, ticket


def test_the_whole_queue_takes_exactly_its_limits():
    control, _ = full(settings=FlowSettings(requests_max=2, bytes_max=25))
    assert control.enqueue(ticket("a", body_bytes=20), 0.1) == []
    assert names(control.enqueue(ticket("b", body_bytes=6), 0.1)) == ["b"]
    assert control.enqueue(ticket("c", body_bytes=5), 0.1) == []
    assert names(control.enqueue(ticket("d", body_bytes=0), 0.1)) == ["d"]
    assert (control.requests, control.bytes) == (2, 25)


def test_a_full_queue_before_an_empty_pool_is_a_503():
    """There is nothing that a client may wait for to be less busy."""
    control = FlowControl(FlowSettings(requests_max=1), Endpoints(), 0.0)
    control.enqueue(ticket("a"), 0.0)
    (refused,) = control.enqueue(ticket("b"), 0.0)
    assert (refused.result.reason, refused.result.status) == (RefusalReason.NO_ENDPOINTS, 503)


def test_a_request_that_comes_after_the_pool_became_empty_waits_from_its_arrival():
    settings = FlowSettings(wait_s_max=60.0, empty_pool_wait_s_max=5.0)
    control = FlowControl(settings, Endpoints(), 0.0)
    control.enqueue(ticket("a"), 100.0)
    assert control.next_wake(100.0) == 105.0
    assert control.expire(104.9) == []
    assert names(control.expire(105.0)) == ["a"]


def test_a_client_that_leaves_makes_room_for_the_next_at_once():
    control, _ = full(settings=FlowSettings(requests_max=1, bytes_max=10))
    waiting = ticket("a")
    control.enqueue(waiting, 0.1)
    control.cancel(waiting)
    assert control.enqueue(ticket("b"), 0.1) == []


def test_a_client_that_leaves_after_a_drain_has_one_verdict():
    control, _ = full()
    waiting = ticket("a")
    control.enqueue(waiting, 0.1)
    assert names(control.drain()) == ["a"]
    assert control.cancel(waiting) == []
    assert waiting.state is State.DRAINED
    assert (control.requests, control.bytes) == (0, 0)


def test_no_flow_with_a_waiting_request_is_forgotten():
    """Of those that wait no more, the least charged one is."""
    band = Band(BandSettings(fairness=Fairness.DECAYING_TOKENS))
    waiting = Ticket(request=request(), flow="waiting", number=1)
    band.add(waiting, 60.0, 0.0)
    for number in range(2, 2 * (FLOWS_MAX + SHARED_FLOWS)):
        idle = Ticket(request=request(), flow=f"{number}", number=number)
        band.add(idle, 60.0, 0.0)
        band.remove(idle)
        band.charge(idle, 1.0, 0.0)
    assert list(band.tickets()) == [waiting]
    assert list(band.heads(8, 0.0, lambda heads: [0] * len(heads))) == [waiting]


def test_low_priorities_are_served_once_no_higher_one_waits():
    """A higher band always goes first, so a low one has only its longest wait as a bound."""
    control, endpoints = full(settings=FlowSettings(wait_s_max=10.0))
    control.enqueue(ticket("low", priority=-1), 0.0)
    for at in range(8):
        control.enqueue(ticket(f"{at}", priority=1), float(at))
        assert serve(control, endpoints, float(at)) == [f"{at}"]
    assert serve(control, endpoints, 9.0) == ["low"]


def test_invented_flows_delay_a_known_one_by_a_bounded_number_of_requests():
    """Each invented flow has one turn, the shared ones have two, and there is a limit of flows."""
    control, endpoints = full(settings=FlowSettings(default_band=FAIR, wait_s_max=0.0))
    control.enqueue(ticket("first", flow="mine"), 0.0)
    for number in range(2 * FLOWS_MAX):
        control.enqueue(ticket(f"{number}", flow=f"{number}"), 0.1)
    assert serve(control, endpoints) == ["first"]
    control.enqueue(ticket("second", flow="mine"), 0.2)
    placed = [serve(control, endpoints)[0] for _ in range(FLOWS_MAX + 2 * SHARED_FLOWS)]
    assert "second" in placed


@pytest.mark.parametrize("now", [0.1, 1e3, 1e9])
def test_a_clock_that_stands_or_jumps_ends_each_wait_once(now):
    control, _ = full(settings=FlowSettings(wait_s_max=10.0))
    for name in "abc":
        control.enqueue(ticket(name), 0.1)
    ended = [*control.expire(now), *control.expire(now), *control.expire(now)]
    assert names(ended) == ([] if now == 0.1 else ["a", "b", "c"])
    assert control.requests == (3 if now == 0.1 else 0)


@pytest.mark.parametrize(
    ("stage", "load"), [(Stage.PREFILL, 0.2), (Stage.DECODE, 0.5), (None, 0.5)]
)
def test_the_largest_load_counts_the_detectors_of_the_stage(stage, load):
    detector = MaxSaturation(
        detectors=(Utilization(), ConcurrencyDetector(max_concurrency=8)),
        stages={1: frozenset({Stage.DECODE})},
    )
    one = candidates(1, waiting_requests=[1.0], inflight_requests=[4.0], metrics_age_s=[0.0])
    assert detector.load(one, Rooms(Columns()), stage).tolist() == [load]
