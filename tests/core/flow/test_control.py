"""Invariants of flow control with random arrivals, ends, cancellations and reloads."""

import gc

import pytest
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.core.flow.band_selection import (
    StrictBandSelection,
    WeightDistribution,
    WeightedBandSelection,
)
from epp.core.flow.bands import FLOWS_MAX, SHARED_FLOWS, Band, State, Ticket
from epp.core.flow.control import HEADS_MAX, PLACED_MAX, FlowControl
from epp.core.flow.eviction import EVICT_AFTER_S, PAUSE_S, Evictions, Running
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings, Ordering
from epp.core.knowledge.inflight import Lease
from epp.core.types import Refusal, RefusalReason
from tests.builders import request

WAIT_S = 60.0
FAIR = BandSettings(fairness=Fairness.TOKENS)
FINAL = {
    State.PLACED,
    State.REFUSED,
    State.EXPIRED,
    State.CANCELLED,
    State.DISPLACED,
    State.DRAINED,
}


class Endpoints:
    """Endpoints with a number of slots each; a request with a subset may use only those."""

    def __init__(self, *slots):
        self.slots = list(slots)
        self.used = [0] * len(slots)
        self.placed = []
        self.hold_s_of = {}

    def is_empty(self, now):
        return not self.slots

    def _allowed(self, asked):
        every = range(len(self.slots))
        return [at for at in every if asked.subset is None or str(at) in asked.subset]

    def has_room(self, asked, now):
        return any(self.used[at] < self.slots[at] for at in self._allowed(asked))

    def hold_s(self, asked, now):
        return self.hold_s_of.get(asked.request_id, 0.0)

    def saturation(self, asked, now):
        return sum(self.used) / sum(self.slots)

    def slots_for(self, asked, now):
        return self._allowed(asked)

    def cost_tokens(self, asked, decision):
        return max(1, asked.prompt_tokens)

    def why_full(self, asked, now):
        return "all slots are used"

    def place(self, asked, now):
        at = min(self._allowed(asked), key=lambda at: self.used[at] / self.slots[at])
        assert self.used[at] < self.slots[at], "placed where there is no room"
        self.used[at] += 1
        self.placed.append(asked)
        return at


def ticket(name="r", *, priority=0, flow="", cost=1, body_bytes=10, subset=None, **limits):
    asked = request(request_id=name, priority=priority, subset=subset, prompt_tokens=cost)
    return Ticket(request=asked, flow=flow, body_bytes=body_bytes, **limits)


def running(endpoints, at, priority=-1, refusals=None):
    """A request that runs at endpoint `at`; its eviction frees a slot there."""

    def evict(refusal):
        endpoints.used[at] -= 1
        if refusals is not None:
            refusals.append(refusal)

    lease = Lease(request(), at, generation=0, matched_blocks=0, opened_at_s=0.0)
    return Running(priority, lease, evict)


def come(control, one, now):
    """Enqueue a ticket, and look at once whether anything has room."""
    return control.enqueue(one, now) + control.pump(now)


def names(verdicts):
    return [verdict.ticket.request.request_id for verdict in verdicts]


class AnyTraffic(RuleBasedStateMachine):
    """Random calls of all verbs."""

    selection = StrictBandSelection()
    holds = False

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.endpoints = Endpoints(2, 1)
        self.settings = FlowSettings(
            selection=self.selection,
            evicts=True,
            requests_max=12,
            bytes_max=400,
            wait_s_max=WAIT_S,
            empty_pool_wait_s_max=WAIT_S / 2,
            bands={
                5: BandSettings(requests_max=6, fairness=Fairness.TOKENS),
                -1: BandSettings(ordering=Ordering.FIRST_OUTPUT, wait_s_max=WAIT_S / 4),
            },
            default_band=BandSettings(fairness=Fairness.DECAYING_TOKENS),
        )
        self.control = FlowControl(self.settings, self.endpoints, 0.0)
        self.tickets = []
        self.ended = []
        self.sheddable = []
        """Running requests of negative priority whose response has not begun."""

    def took(self, verdicts):
        for verdict in verdicts:
            assert verdict.ticket not in self.ended, "a second verdict"
            self.ended.append(verdict.ticket)
            if verdict.ticket.state is State.PLACED and verdict.ticket.request.priority < 0:
                self.run(verdict.result)

    def run(self, at):
        def evict(refusal):
            assert any(map(self.may_evict, self.tickets)), "evicted without need"
            self.sheddable.remove(one)
            self.endpoints.used[at] -= 1

        lease = Lease(request(), at, generation=0, matched_blocks=0, opened_at_s=self.now)
        one = Running(-1, lease, evict)
        self.sheddable.append(one)
        self.control.evictions.add(one)

    def may_evict(self, one):
        if one.state is not State.WAITING or one.request.priority < 0:
            return False
        limits_s = [one.wait_s_max or WAIT_S, one.answer_within_s or WAIT_S, WAIT_S]
        enough_s = min(EVICT_AFTER_S, min(limits_s) / 2)
        control, band = self.control, dict(self.control.bands())[one.request.priority]
        no_space = control.requests >= 12 or control.bytes >= 400 or band.is_full(0)
        return no_space or self.now >= one.enqueued_at_s + enough_s

    @rule(
        priority=st.sampled_from([5, 0, -1]),
        flow=st.sampled_from("abc"),
        cost=st.integers(1, 100),
        size=st.integers(0, 90),
        subset=st.sampled_from([None, ("0",), ("1",)]),
        limit_s=st.none() | st.floats(1, 100),
        gateway_s=st.none() | st.floats(1, 100),
        hold_s=st.floats(0, 30),
    )
    def arrive(self, priority, flow, cost, size, subset, limit_s, gateway_s, hold_s):
        one = ticket(
            str(len(self.tickets)),
            priority=priority,
            flow=flow,
            cost=cost,
            body_bytes=size,
            subset=subset,
            wait_s_max=limit_s,
            answer_within_s=gateway_s,
            first_token_within_s=limit_s,
        )
        if self.holds:
            self.endpoints.hold_s_of[one.request.request_id] = hold_s
        self.tickets.append(one)
        self.took(come(self.control, one, self.now))

    @precondition(lambda self: any(self.endpoints.used))
    @rule(data=st.data())
    def end(self, data):
        busy = [at for at, used in enumerate(self.endpoints.used) if used]
        at = data.draw(st.sampled_from(busy))
        self.endpoints.used[at] -= 1
        here = [one for one in self.sheddable if one.lease.slot == at]
        if len(here) > self.endpoints.used[at]:
            self.respond_to(here[0])
        self.took(self.control.pump(self.now))

    def respond_to(self, one):
        self.control.evictions.remove(one)
        self.sheddable.remove(one)

    @precondition(lambda self: self.sheddable)
    @rule(data=st.data())
    def begin_a_response(self, data):
        self.respond_to(data.draw(st.sampled_from(self.sheddable)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data):
        self.took(self.control.cancel(data.draw(st.sampled_from(self.tickets))))
        self.took(self.control.pump(self.now))

    @rule(after_s=st.floats(0, 100))
    def time_passes(self, after_s):
        wake = self.control.next_wake(self.now)
        self.now += after_s
        verdicts = self.control.expire(self.now)
        self.took(verdicts)
        if any(verdict.ticket.state is State.EXPIRED for verdict in verdicts):
            assert wake is not None
            assert wake <= self.now

    @rule(requests_max=st.integers(0, 12))
    def configure(self, requests_max):
        before = self.control.requests
        settings = FlowSettings(requests_max=requests_max, bands=self.settings.bands)
        self.control.configure(settings, self.now)
        assert self.control.requests == before
        self.took(self.control.pump(self.now))
        self.control.configure(self.settings, self.now)

    @rule()
    def all_endpoints_leave_and_return(self):
        slots, used = self.endpoints.slots, self.endpoints.used
        self.endpoints.slots, self.endpoints.used = [], []
        self.took(self.control.pump(self.now))
        self.endpoints.slots, self.endpoints.used = slots, used
        self.took(self.control.pump(self.now))

    @invariant()
    def every_ticket_waits_or_has_its_verdict(self):
        waiting = [one for one in self.tickets if one.state is State.WAITING]
        assert len(waiting) + len(self.ended) == len(self.tickets)
        assert self.control.requests == len(waiting)
        assert self.control.bytes == sum(one.body_bytes for one in waiting)
        assert all(one.state in FINAL for one in self.ended)

    @invariant()
    def nothing_waits_that_has_room(self):
        heads = {}
        for one in self.tickets:
            if one.state is State.WAITING:
                heads.setdefault((one.request.priority, one.queue), []).append(one)
        for (priority, _), waiting in heads.items():
            # Requests of a band that orders by targets have no target later than the first.
            first = min(waiting, key=self._order) if priority == -1 else waiting[0]
            if self.endpoints.has_room(first.request, self.now):
                self.is_held(first)

    def is_held(self, first):
        hold_s = self.endpoints.hold_s(first.request, self.now)
        assert hold_s
        assert self.now < first.held_since_s + hold_s
        assert self.control.next_wake(self.now) <= first.held_since_s + hold_s

    @staticmethod
    def _order(one):
        within_s = WAIT_S / 4 if one.first_token_within_s is None else one.first_token_within_s
        return one.enqueued_at_s + within_s, one.number

    @invariant()
    def those_that_may_be_evicted_run(self):
        assert len(self.control.evictions) == len(self.sheddable)
        for at, used in enumerate(self.endpoints.used):
            assert sum(one.lease.slot == at for one in self.sheddable) <= used

    @invariant()
    def nothing_waits_too_long(self):
        for one in self.tickets:
            if one.state is State.WAITING:
                wake = self.control.next_wake(self.now)
                assert wake is not None
                assert wake <= max(one.enqueued_at_s, self.control._since_s) + WAIT_S
                if one.answer_within_s is not None:
                    assert wake <= max(self.now, one.enqueued_at_s + one.answer_within_s)


class SharingBands(AnyTraffic):
    selection = WeightedBandSelection(saturation_threshold=0.5)


class HeldTraffic(AnyTraffic):
    """Requests leave the room to others for a time, and no longer."""

    holds = True


TestAnyTraffic = AnyTraffic.TestCase
TestSharingBands = SharingBands.TestCase
TestHeldTraffic = HeldTraffic.TestCase
for each in (TestAnyTraffic, TestSharingBands, TestHeldTraffic):
    each.settings = limits(max_examples=60, stateful_step_count=30, deadline=None)


def full(*, settings=None, slots=1):
    endpoints = Endpoints(slots)
    control = FlowControl(settings or FlowSettings(default_band=FAIR), endpoints, 0.0)
    for _ in range(slots):
        control.enqueue(ticket("first"), 0.0)
    endpoints.placed.clear()
    return control, endpoints


def serve(control, endpoints, now=1.0):
    """End one request and return the names of those that are placed then."""
    endpoints.used[0] -= 1
    return names(control.pump(now))


def test_an_idle_pool_places_at_once():
    control = FlowControl(FlowSettings(), Endpoints(1), 0.0)
    (verdict,) = control.enqueue(ticket(), 0.0)
    assert verdict.ticket.state is State.PLACED
    assert verdict.result == 0
    assert control.requests == 0


def test_a_band_serves_requests_without_a_flow_in_their_order():
    control, endpoints = full()
    for name in "abc":
        assert control.enqueue(ticket(name), 0.5) == []
    assert [serve(control, endpoints) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_higher_bands_go_first_and_lower_ones_wait():
    control, endpoints = full()
    control.enqueue(ticket("low", priority=-1), 0.1)
    control.enqueue(ticket("high", priority=1), 0.2)
    assert serve(control, endpoints) == ["high"]
    assert serve(control, endpoints) == ["low"]


@pytest.mark.parametrize(
    ("distribution", "shares"), [("proportional", (0.75, 0.25)), ("linear", (2 / 3, 1 / 3))]
)
def test_waiting_bands_may_share_the_room_by_weight(distribution, shares):
    """Of tokens: a request of the lower band has twice as many."""
    selection = WeightedBandSelection(
        distribution=WeightDistribution(distribution), saturation_threshold=0.0
    )
    control, endpoints = full(settings=FlowSettings(selection=selection))
    for number in range(600):
        control.enqueue(ticket(f"high-{number}", priority=2, cost=5), 0.1)
        control.enqueue(ticket(f"low-{number}", priority=0, cost=10), 0.1)
    tokens = {"high": 0.0, "low": 0.0}
    for _ in range(300):
        (name,) = serve(control, endpoints)
        band = name.split("-")[0]
        tokens[band] += 5.0 if band == "high" else 10.0
    total = sum(tokens.values())
    assert (tokens["high"] / total, tokens["low"] / total) == pytest.approx(shares, abs=0.02)


def test_bands_share_only_while_the_pool_is_saturated():
    selection = WeightedBandSelection(saturation_threshold=0.9)
    control, endpoints = full(settings=FlowSettings(selection=selection), slots=2)
    for number in range(4):
        control.enqueue(ticket(f"low-{number}", priority=0), 0.1)
        control.enqueue(ticket(f"high-{number}", priority=1), 0.2)
    # One of two slots is free, which is a saturation of 0.5.
    assert [serve(control, endpoints)[0][:4] for _ in range(4)] == ["high"] * 4


def test_a_band_that_was_idle_saves_no_credit():
    control, endpoints = full(
        settings=FlowSettings(selection=WeightedBandSelection(saturation_threshold=0.0))
    )
    for number in range(20):
        control.enqueue(ticket(f"a{number}", priority=0), 0.1)
    for _ in range(10):
        serve(control, endpoints)
    for number in range(20):
        control.enqueue(ticket(f"b{number}", priority=1), 0.2)
    order = [serve(control, endpoints)[0][0] for _ in range(9)]
    assert order.count("a") == 3


def test_a_new_request_does_not_pass_a_band_whose_turn_it_is():
    """Where bands share, even one of a higher band waits for the next turn."""
    selection = WeightedBandSelection(saturation_threshold=0.0)
    control, endpoints = full(settings=FlowSettings(selection=selection))
    control.enqueue(ticket("high-1", priority=1), 0.1)
    control.enqueue(ticket("low", priority=0), 0.1)
    assert serve(control, endpoints) == ["high-1"]
    endpoints.used[0] = 0
    assert control.enqueue(ticket("high-2", priority=1), 0.2) == []
    assert names(control.pump(0.2)) == ["low"]


def test_a_request_whose_endpoints_are_full_blocks_no_other():
    endpoints = Endpoints(1, 1)
    control = FlowControl(FlowSettings(), endpoints, 0.0)
    control.enqueue(ticket("first", subset=("0",)), 0.0)
    control.enqueue(ticket("stuck", flow="a", subset=("0",), priority=1), 0.1)
    (verdict,) = come(control, ticket("other", subset=("1",)), 0.2)
    assert verdict.ticket.request.request_id == "other"


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_flows_share_by_tokens_and_weight(weight, share):
    """One tenant sends ten times as much as the other; both always wait."""
    bands = {0: BandSettings(fairness=Fairness.TOKENS, weights={"small": weight})}
    control, endpoints = full(settings=FlowSettings(bands=bands))
    for number in range(400):
        control.enqueue(ticket(f"big-{number}", flow="big", cost=10), 0.1)
        control.enqueue(ticket(f"small-{number}", flow="small", cost=5), 0.1)
    tokens = {"big": 0.0, "small": 0.0}
    for _ in range(200):
        (name,) = serve(control, endpoints)
        flow = name.split("-")[0]
        tokens[flow] += 10.0 if flow == "big" else 5.0
    assert tokens["small"] / sum(tokens.values()) == pytest.approx(share, abs=0.02)


def test_an_idle_flow_saves_no_credit():
    control, endpoints = full()
    for number in range(20):
        control.enqueue(ticket(f"a{number}", flow="a"), 0.1)
    for _ in range(10):
        serve(control, endpoints)
    for number in range(5):
        control.enqueue(ticket(f"b{number}", flow="b"), 0.2)
    order = [serve(control, endpoints)[0][0] for _ in range(6)]
    assert order.count("a") == 3


def test_a_flow_pays_for_what_it_really_used():
    control, endpoints = full()
    first = ticket("a0", flow="a", cost=1)
    control.enqueue(first, 0.1)
    for name in ("a1", "a2", "b0", "b1"):
        control.enqueue(ticket(name, flow=name[0]), 0.1)
    assert serve(control, endpoints) == ["a0"]
    control.settled(first, 100.0, 1.0)
    assert [serve(control, endpoints)[0] for _ in range(3)] == ["b0", "b1", "a1"]


def test_a_full_queue_displaces_the_newest_of_the_lowest_band():
    control, _ = full(settings=FlowSettings(requests_max=3))
    for name, priority in (("low-1", -2), ("low-2", -2), ("middle", -1)):
        control.enqueue(ticket(name, priority=priority), 0.1)
    (displaced,) = control.enqueue(ticket("high", priority=1), 0.2)
    assert displaced.ticket.request.request_id == "low-2"
    assert displaced.ticket.state is State.DISPLACED
    assert isinstance(displaced.result, Refusal)
    assert displaced.result.status == 429
    (refused,) = control.enqueue(ticket("lowest", priority=-3), 0.3)
    assert refused.ticket.state is State.REFUSED


def test_a_refused_request_may_come_back_when_those_before_it_are_placed():
    """Two requests are placed each second. Those of lower bands are served later, and do not count."""
    control, endpoints = full(settings=FlowSettings(requests_max=12, wait_s_max=10.0))
    for number in range(12):
        control.enqueue(ticket(f"{number}"), 0.0)
    for now in (0.5, 1.0):
        serve(control, endpoints, now)
    for number in range(2):
        control.enqueue(ticket(f"low-{number}", priority=-1), 1.0)
    (lowest,) = control.enqueue(ticket("lowest", priority=-1), 1.0)
    assert lowest.result.retry_after_s == 6
    displaced, *_ = control.enqueue(ticket("new"), 1.0)
    assert displaced.result.retry_after_s == 6
    expired = control.expire(10.0)
    assert {verdict.result.retry_after_s for verdict in expired} == {55}


def test_a_band_takes_exactly_its_limits():
    bands = {0: BandSettings(requests_max=2, bytes_max=25)}
    control, _ = full(settings=FlowSettings(bands=bands))
    assert control.enqueue(ticket("a", body_bytes=20), 0.1) == []
    assert names(control.enqueue(ticket("b", body_bytes=6), 0.1)) == ["b"]
    assert control.enqueue(ticket("c", body_bytes=5), 0.1) == []
    assert names(control.enqueue(ticket("d", body_bytes=0), 0.1)) == ["d"]


def test_an_empty_pool_has_a_wait_of_its_own():
    """The wait starts anew when the last endpoint leaves, and no endpoint is a 503."""
    settings = FlowSettings(wait_s_max=60.0, empty_pool_wait_s_max=5.0)
    control, endpoints = full(settings=settings)
    waiting = ticket("a")
    control.enqueue(waiting, 1.0)
    endpoints.slots, endpoints.used = [], []
    control.pump(30.0)
    assert control.next_wake(30.0) == 35.0
    assert control.expire(34.9) == []
    (verdict,) = control.expire(35.0)
    assert verdict.result.reason is RefusalReason.NO_ENDPOINTS
    assert verdict.result.status == 503


def test_a_band_may_have_a_longest_wait_of_its_own():
    """Shorter or longer than that of the queue, or none at all."""
    waits = {2: BandSettings(wait_s_max=5.0), 1: BandSettings(wait_s_max=90.0)}
    bands = waits | {-1: BandSettings(wait_s_max=0.0)}
    control, _ = full(settings=FlowSettings(wait_s_max=60.0, bands=bands))
    for priority in (2, 1, 0, -1):
        control.enqueue(ticket(str(priority), priority=priority), 1.0)
    for wake_s, name in ((6.0, "2"), (61.0, "0"), (91.0, "1")):
        assert control.next_wake(1.0) == wake_s
        assert control.expire(wake_s - 0.1) == []
        assert names(control.expire(wake_s)) == [name]
    assert control.next_wake(91.0) is None
    assert control.expire(1e6) == []


def test_a_client_limits_a_wait_that_its_band_does_not():
    control, endpoints = full(settings=FlowSettings(bands={0: BandSettings(wait_s_max=0.0)}))
    control.enqueue(ticket("a", wait_s_max=7.0), 1.0)
    assert control.next_wake(1.0) == 8.0
    endpoints.slots, endpoints.used = [], []
    control.pump(2.0)
    assert control.next_wake(2.0) == 62.0, "the client's limit says nothing about an empty pool"


def test_a_scale_from_zero_serves_those_that_waited():
    endpoints = Endpoints()
    control = FlowControl(FlowSettings(), endpoints, 0.0)
    assert control.enqueue(ticket("a"), 1.0) == []
    endpoints.slots, endpoints.used = [1], [0]
    assert names(control.pump(2.0)) == ["a"]


def test_a_wait_that_could_end_is_placed_rather_than_refused():
    control, endpoints = full(settings=FlowSettings(wait_s_max=10.0))
    control.enqueue(ticket("a"), 0.0)
    endpoints.used[0] = 0
    (verdict,) = control.expire(10.0)
    assert verdict.ticket.state is State.PLACED


def test_a_burst_is_placed_in_portions():
    control, endpoints = full()
    for number in range(2 * PLACED_MAX):
        control.enqueue(ticket(f"{number}"), 0.1)
    endpoints.slots[0] = 1000
    assert len(control.pump(1.0)) == PLACED_MAX
    assert control.next_wake(1.0) == 1.0
    assert len(control.pump(1.0)) == PLACED_MAX
    assert control.next_wake(1.0) is None


def test_lower_bands_wait_if_a_band_has_flows_that_were_not_looked_at():
    endpoints = Endpoints(1, 1)
    control = FlowControl(FlowSettings(default_band=FAIR), endpoints, 0.0)
    control.enqueue(ticket("first", subset=("0",)), 0.0)
    for number in range(HEADS_MAX + 1):
        control.enqueue(ticket(f"{number}", flow=f"{number}", priority=1, subset=("0",)), 0.1)
    assert come(control, ticket("low", subset=("1",)), 0.2) == []


def test_a_drained_queue_refuses_everybody():
    control, _ = full()
    control.enqueue(ticket("a"), 0.1)
    (verdict,) = control.drain()
    assert verdict.result.reason is RefusalReason.SHUTTING_DOWN
    assert control.requests == 0
    (later,) = control.enqueue(ticket("b"), 0.2)
    assert later.result.reason is RefusalReason.SHUTTING_DOWN


def test_a_request_waits_no_longer_than_it_asked_for():
    """Nor longer than the settings allow, whatever it asks for."""
    control, _ = full(settings=FlowSettings(wait_s_max=60.0))
    control.enqueue(ticket("short", wait_s_max=5.0), 0.0)
    control.enqueue(ticket("long", wait_s_max=500.0), 0.0)
    assert control.next_wake(0.0) == 5.0
    assert names(control.expire(5.0)) == ["short"]
    (verdict,) = control.expire(60.0)
    assert verdict.result.reason is RefusalReason.WAIT_EXPIRED
    assert "waited 60.0 s: all slots are used" in verdict.result.message


def test_a_gateway_that_gives_up_gets_its_answer_before():
    control, endpoints = full(settings=FlowSettings(wait_s_max=60.0))
    control.enqueue(ticket("a", answer_within_s=0.2), 0.0)
    endpoints.slots, endpoints.used = [], []
    control.pump(0.1)
    assert names(control.expire(0.2)) == ["a"]


def test_the_earliest_due_first_token_is_placed_first():
    bands = {0: BandSettings(ordering=Ordering.FIRST_OUTPUT)}
    control, endpoints = full(settings=FlowSettings(bands=bands))
    control.enqueue(ticket("any"), 0.1)
    control.enqueue(ticket("soon", first_token_within_s=1.0), 0.2)
    control.enqueue(ticket("sooner", first_token_within_s=0.5), 0.3)
    assert [serve(control, endpoints)[0] for _ in range(3)] == ["sooner", "soon", "any"]


def test_charges_by_request_ignore_tokens():
    bands = {0: BandSettings(fairness=Fairness.REQUESTS)}
    control, endpoints = full(settings=FlowSettings(bands=bands))
    for number in range(3):
        control.enqueue(ticket(f"a{number}", flow="a", cost=1000), 0.1)
        control.enqueue(ticket(f"b{number}", flow="b", cost=1), 0.1)
    order = "".join(serve(control, endpoints)[0][0] for _ in range(6))
    assert order == "ababab"


def test_decaying_charges_outlive_an_idle_time():
    """A flow that was served much lately comes after one that was not, until its charge decayed."""
    bands = {0: BandSettings(fairness=Fairness.DECAYING_TOKENS, half_life_s=60.0)}
    control, endpoints = full(settings=FlowSettings(bands=bands, wait_s_max=0.0))
    control.enqueue(ticket("a0", flow="a", cost=1000), 0.0)
    assert serve(control, endpoints, 1.0) == ["a0"]
    control.enqueue(ticket("a1", flow="a", cost=10), 2.0)
    control.enqueue(ticket("b1", flow="b", cost=10), 2.1)
    assert serve(control, endpoints, 3.0) == ["b1"]
    assert serve(control, endpoints, 3.0) == ["a1"]
    control.enqueue(ticket("b2", flow="b", cost=10), 2000.0)
    control.enqueue(ticket("a2", flow="a", cost=10), 2000.1)
    # After so long, the later charges alone count: b was charged as much as a, and both decayed.
    assert sorted(serve(control, endpoints, 2000.2) + serve(control, endpoints, 2000.3)) == [
        "a2",
        "b2",
    ]


def test_requests_that_ask_for_any_wait_leave_nothing_behind():
    """A client may ask for a wait of years in each request."""
    control, endpoints = full()
    before = tickets_in_memory()
    for number in range(1_000):
        asked = ticket(f"{number}", wait_s_max=1e9)
        control.enqueue(asked, 0.5)
        assert serve(control, endpoints) == [f"{number}"]
    assert tickets_in_memory() - before < 100


def tickets_in_memory():
    gc.collect()
    return sum(isinstance(one, Ticket) for one in gc.get_objects())


def test_waits_that_end_together_are_refused_in_portions():
    """Each refusal takes time of the event loop."""
    control, _ = full(settings=FlowSettings(wait_s_max=10.0))
    for number in range(2 * PLACED_MAX):
        control.enqueue(ticket(f"{number}", wait_s_max=10.0 - number % 2), 0.0)
    assert len(control.expire(10.0)) == PLACED_MAX
    assert control.next_wake(10.0) == 10.0
    assert len(control.expire(10.0)) == PLACED_MAX
    assert control.next_wake(10.0) is None


def test_all_are_placed_in_portions_if_flow_control_is_switched_off():
    control, endpoints = full()
    for number in range(PLACED_MAX + 1):
        control.enqueue(ticket(f"{number}"), 0.1)
    endpoints.slots[0] = 1000
    assert len(control.release(1.0)) == PLACED_MAX
    assert len(control.release(1.0)) == 1
    assert control.requests == 0


def test_all_are_placed_if_flow_control_is_switched_off():
    control, endpoints = full()
    for name in "ab":
        control.enqueue(ticket(name), 0.1)
    endpoints.slots[0] = 10
    assert names(control.release(1.0)) == ["a", "b"]
    assert control.requests == control.bytes == 0


def test_reloaded_settings_keep_the_waits():
    """Requests move to the new bands; a lowered limit refuses newcomers only."""
    control, endpoints = full()
    for number in range(4):
        control.enqueue(ticket(f"{number}", priority=number % 2), float(number))
    lower = FlowSettings(requests_max=2, wait_s_max=10.0)
    control.configure(lower, 5.0)
    assert control.requests == 4
    (refused,) = control.enqueue(ticket("new", priority=0), 5.0)
    assert refused.ticket.state is State.REFUSED
    assert control.next_wake(5.0) == 10.0
    assert serve(control, endpoints, 6.0) == ["1"]


def test_invented_flows_share_queues():
    band = Band(FAIR)
    for number in range(FLOWS_MAX + 1_000):
        band.add(Ticket(request=request(), flow=f"{number}", number=number + 1), 60.0, 0.0)
    assert band.flows <= FLOWS_MAX + SHARED_FLOWS


def test_a_ticket_enters_once():
    control, _ = full()
    one = ticket()
    control.enqueue(one, 0.1)
    with pytest.raises(ValueError, match="the ticket is waiting, expected new"):
        control.enqueue(one, 0.2)


def evicting(*priorities, slots=None, settings=None):
    """A full endpoint at which requests of `priorities` run, oldest first, and their refusals."""
    settings = settings or FlowSettings(evicts=True)
    control, endpoints = full(settings=settings, slots=slots or len(priorities))
    refusals = []
    for priority in priorities:
        control.evictions.add(running(endpoints, 0, priority, refusals))
    return control, endpoints, refusals


def test_a_request_that_waited_long_evicts_one_of_negative_priority():
    control, endpoints, refusals = evicting(-1)
    control.enqueue(ticket("a"), 5.0)
    assert control.expire(5.0) == []
    assert control.next_wake(5.0) == 5.0 + EVICT_AFTER_S
    assert names(control.expire(5.0 + EVICT_AFTER_S)) == ["a"]
    (refusal,) = refusals
    assert (refusal.reason, refusal.status) == (RefusalReason.EVICTED, 429)
    assert refusal.message.endswith("for a request of priority 0 that has waited 1.0 s")
    assert refusal.retry_after_s >= 1
    assert control.evictions.evicted == {-1: 1}
    assert endpoints.used == [1]


def test_eviction_is_off_by_default():
    control, _, refusals = evicting(-1, settings=FlowSettings())
    control.enqueue(ticket("a"), 0.0)
    assert control.expire(50.0) == []
    assert control.next_wake(50.0) == 60.0
    assert refusals == []


@pytest.mark.parametrize("priority", [-3, -2])
def test_no_request_evicts_its_equals_or_betters(priority):
    control, _, refusals = evicting(-2)
    control.enqueue(ticket("a", priority=priority), 0.0)
    assert control.expire(50.0) == []
    assert refusals == []
    assert control.next_wake(50.0) == 60.0, "no call in vain"


def test_the_newest_of_the_lowest_priority_is_evicted():
    evictions = Evictions()
    endpoints = Endpoints(3)
    first, second, third = (running(endpoints, 0, priority) for priority in (-2, -2, -1))
    for one in (first, second, third):
        evictions.add(one)
    order = []
    while (victim := evictions.victim(0, {0})) is not None:
        order.append(victim)
        evictions.remove(victim)
    assert order == [second, first, third]
    assert not evictions.any_below(0)


def test_only_requests_of_negative_priority_can_be_evicted():
    with pytest.raises(ValueError, match="expected one below 0"):
        Evictions().add(running(Endpoints(1), 0, 0))


def test_a_victim_runs_where_the_waiting_request_may_go():
    control, _, refusals = evicting(-1)
    control.enqueue(ticket("a", subset=("7",)), 0.0)
    assert control.expire(50.0) == []
    assert refusals == []


def test_a_full_queue_evicts_at_once():
    """Otherwise the next request would be refused."""
    control, _, refusals = evicting(-1, settings=FlowSettings(evicts=True, requests_max=2))
    control.enqueue(ticket("a"), 0.0)
    assert control.pump(0.0) == []
    control.enqueue(ticket("b"), 0.0)
    assert names(control.pump(0.0)) == ["a"]
    assert len(refusals) == 1


def test_a_short_wait_evicts_before_it_ends():
    control, _, _ = evicting(-1)
    control.enqueue(ticket("a", wait_s_max=0.5), 0.0)
    assert control.next_wake(0.0) == 0.25
    assert names(control.expire(0.25)) == ["a"]


def test_an_eviction_makes_room_for_the_highest_band_first():
    control, _, _ = evicting(-1)
    control.enqueue(ticket("old"), 0.0)
    control.enqueue(ticket("high", priority=1), 0.9)
    assert names(control.expire(1.0)) == ["high"]


def test_one_request_is_evicted_for_each_that_waited_long():
    control, _, refusals = evicting(-1, -1, -1)
    for name, now in (("a", 0.0), ("b", 0.1), ("c", 5.0)):
        control.enqueue(ticket(name), now)
    assert names(control.expire(1.5)) == ["a", "b"]
    assert len(refusals) == 2


def test_an_eviction_without_effect_is_not_repeated_before_a_new_page():
    control, endpoints, refusals = evicting(-1, -1)
    endpoints.used[0] += 1
    control.enqueue(ticket("a"), 0.0)
    assert control.expire(1.0) == []
    assert len(refusals) == 1
    assert control.next_wake(1.0) == 1.0 + PAUSE_S
    assert control.expire(1.5) == []
    assert len(refusals) == 1
    assert names(control.expire(1.0 + PAUSE_S)) == ["a"]


def test_an_empty_pool_evicts_nothing():
    control, endpoints, refusals = evicting(-1)
    control.enqueue(ticket("a"), 0.0)
    endpoints.slots = []
    control.expire(50.0)
    assert refusals == []


def test_a_request_leaves_the_room_to_later_ones_while_it_waits_for_its_prefix():
    endpoints = Endpoints(1)
    control = FlowControl(FlowSettings(default_band=FAIR), endpoints, 0.0)
    come(control, ticket("running"), 0.0)
    for name in ("held", "b", "c", "d"):
        come(control, ticket(name, flow="x"), 1.0)
    endpoints.hold_s_of = {"held": 3.0, "b": 3.0}
    endpoints.used[0] = 0
    assert names(control.pump(2.0)) == ["c"]
    endpoints.used[0] = 0
    assert names(control.pump(3.0)) == ["d"]
    endpoints.used[0] = 0
    assert names(control.pump(4.0)) == []
    assert control.next_wake(4.0) == 5.0
    assert names(control.expire(5.0)) == ["held"], "it has waited as long as its prefix is worth"
    endpoints.used[0] = 0
    assert names(control.pump(5.0)) == ["b"]


def test_a_held_request_leaves_the_room_to_other_flows():
    endpoints = Endpoints(1)
    control = FlowControl(FlowSettings(default_band=FAIR), endpoints, 0.0)
    come(control, ticket("running"), 0.0)
    come(control, ticket("held", flow="x"), 1.0)
    come(control, ticket("other", flow="y"), 1.0)
    endpoints.hold_s_of = {"held": 3.0}
    endpoints.used[0] = 0
    assert names(control.pump(2.0)) == ["other"]
    endpoints.hold_s_of = {}
    endpoints.used[0] = 0
    assert names(control.pump(2.5)) == ["held"], "an endpoint with its prefix has room"


def test_a_new_request_waits_for_its_prefix_behind_other_bands():
    endpoints = Endpoints(1)
    control = FlowControl(FlowSettings(default_band=FAIR), endpoints, 0.0)
    come(control, ticket("running"), 0.0)
    come(control, ticket("low"), 1.0)
    endpoints.hold_s_of = {"high": 2.0}
    endpoints.used[0] = 0
    assert names(control.enqueue(ticket("high", priority=1), 2.0)) == []
    assert names(control.pump(2.0)) == ["low"]
