"""The queue of a picker: requests wait for room, and sessions are resumed with the decision."""

import weakref

import pytest
from msgspec import structs

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.decision import Decision
from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured, RequestEnded
from epp.core.decision.profile import NamedFilter
from epp.core.decision.scheduler import Scheduler
from epp.core.flow.bands import State
from epp.core.flow.control import PLACED_MAX
from epp.core.flow.detectors import ConcurrencyDetector, RoomDetector
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.knowledge.agent_sessions import SessionCounts
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.protocol.flow_queue import (
    FLOW_CHARACTERS_MAX,
    FLOWS_SHOWN,
    FlowQueue,
    Place,
)
from epp.core.types import EndpointMetrics, Refusal, RefusalReason
from tests.builders import endpoint, request
from tests.core.decision.test_profile import Holds

DEFAULTS = build_settings(default_config(plugin_tables()))


def scheduler_settings(**fields):
    return structs.replace(DEFAULTS, **fields)


class Waker:
    """Remembers what it was asked for."""

    def __init__(self):
        self.asked = 0
        self.at_s = None

    def soon(self):
        self.asked += 1

    def at(self, time_s):
        self.at_s = time_s


class Picker:
    """A picker with `pods` endpoints that have room for `each` requests."""

    def __init__(self, pods=1, each=1, memory_bytes=0, **flow):
        self.flow = FlowSettings(
            **{
                "detector": ConcurrencyDetector(max_concurrency=each),
                "default_band": BandSettings(fairness=Fairness.TOKENS),
            }
            | flow
        )
        self.scheduler = Scheduler(scheduler_settings(flow=self.flow), seed=1)
        self.scheduler.take(PoolReplaced([endpoint(at) for at in range(pods)]), 0.0)
        for slot in range(pods):
            self.scheduler.take(PageScraped(slot, EndpointMetrics()), 0.0)
        self.waker = Waker()
        self.queue = FlowQueue(self.scheduler, self.waker, 0.0, bytes_max=memory_bytes)
        self.results = {}

    def enter(self, name, now=0.0, tenant="", **fields):
        headers = {"x-llm-d-inference-fairness-id": tenant} if tenant else {}
        headers |= fields.pop("headers", {})
        one = request(request_id=name, headers=headers, **fields)
        entered = self.queue.enter(
            one, lambda result: self.results.__setitem__(name, result), now, body_bytes=10
        )
        if not isinstance(entered, Place):
            self.results[name] = entered
        return entered

    def end(self, name, now):
        outcome = Outcome(ending=Ending.COMPLETE, status=200)
        self.scheduler.take(RequestEnded(self.results[name].lease, outcome), now)
        self.queue.pump(now)


def test_a_request_that_has_room_is_placed_at_once():
    picker = Picker()
    entered = picker.enter("a")
    assert isinstance(entered, Decision)
    assert entered.account.queued is None
    assert picker.waker.asked == 0
    assert picker.scheduler.changed is None


def test_a_request_waits_until_another_ends():
    picker = Picker()
    picker.enter("a")
    assert isinstance(picker.enter("b", 1.0), Place)
    picker.queue.pump(1.0)
    assert "b" not in picker.results
    picker.end("a", 5.0)
    decision = picker.results["b"]
    assert isinstance(decision, Decision)
    queued = decision.account.queued
    assert (queued.waited_s, queued.ahead, queued.flow) == (4.0, 0, "")
    assert queued.why.startswith("1 of 1 endpoints are full")
    assert queued.charged_tokens > 0
    assert picker.scheduler.changed is None, "nothing waits any more"


class Resumed:
    """A session, to which the function that resumes it refers."""

    def resume(self, result):
        pass


@pytest.mark.parametrize(
    "ends",
    [
        lambda picker, place: picker.end("a", 5.0),
        lambda picker, place: place.cancel(),
        lambda picker, place: picker.queue.pump(1_000.0),
        lambda picker, place: picker.queue.drain(5.0),
    ],
    ids=["placed", "cancelled", "expired", "drained"],
)
def test_a_place_keeps_neither_prompts_nor_the_session_after_the_verdict(ends):
    """Sessions keep their places until their responses end, and a cycle would be garbage."""
    picker = Picker()
    picker.enter("a")
    session = Resumed()
    one = request(request_id="b", prompts=(b"x" * 64,))
    place = picker.queue.enter(one, session.resume, 1.0, body_bytes=10)
    assert place.ticket.request.prompts
    kept = weakref.ref(session)
    del session
    ends(picker, place)
    assert place.ticket.request.prompts == ()
    assert kept() is None


def test_a_long_flow_is_cut():
    """Decision records contain it, and the client chooses its length."""
    picker = Picker()
    picker.enter("a")
    place = picker.enter("b", tenant="t" * 10_000)
    assert picker.queue.wait_of(place, 1.0).flow == "t" * FLOW_CHARACTERS_MAX


def test_each_input_asks_for_a_call_while_a_request_waits():
    picker = Picker()
    picker.enter("a")
    picker.enter("b")
    before = picker.waker.asked
    picker.scheduler.take(PageScraped(0, EndpointMetrics()), 0.5)
    assert picker.waker.asked == before + 1


@pytest.mark.parametrize("flow", [{}, {"detector": RoomDetector()}])
def test_a_request_that_a_plugin_holds_is_told_so(flow):
    """The endpoint has room for it."""
    picker = Picker(**flow)
    settings = picker.scheduler.settings
    held = structs.replace(settings.stages.decode, filters=(NamedFilter("line", Holds()),))
    settings = structs.replace(settings, stages=structs.replace(settings.stages, decode=held))
    picker.scheduler.take(Reconfigured(settings), 0.0)
    waits = picker.enter("a")
    assert isinstance(waits, Place)
    assert waits.why == "a plugin held it"


def test_a_decision_prefers_endpoints_with_room():
    picker = Picker(pods=2, each=1)
    places = {picker.enter(name).endpoint.name for name in "ab"}
    assert len(places) == 2
    assert isinstance(picker.enter("c"), Place)


def test_the_end_of_the_longest_wait_is_told_and_refuses():
    picker = Picker(wait_s_max=10.0)
    picker.enter("a")
    picker.enter("b", 2.0)
    picker.queue.pump(2.0)
    assert picker.waker.at_s == 12.0
    picker.queue.pump(12.0)
    refusal = picker.results["b"]
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefusalReason.WAIT_EXPIRED, 429)
    assert refusal.message.startswith("waited 10.0 s: 1 of 1 endpoints are full")


def test_a_client_may_ask_for_a_shorter_wait():
    picker = Picker(wait_s_max=10.0)
    picker.enter("a")
    picker.enter("b", headers={"x-llm-d-inference-ttl": "1500ms"})
    picker.enter("c", headers={"x-llm-d-inference-ttl": "nonsense"})
    picker.queue.pump(1.5)
    assert picker.results["b"].reason is RefusalReason.WAIT_EXPIRED
    assert "c" not in picker.results


AGENTS = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: agent-identity
- type: thunder-agent
  parameters: {capacityTokens: 1000, idleLeaseSeconds: 5, headWaitStarvationMs: 0}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: thunder-agent
  - pluginRef: max-score-picker
flowControl:
  saturationDetector: {pluginRef: thunder-agent}
  defaultPriorityBand: {fairnessPolicyRef: thunder-agent}
"""


class AgentPicker(Picker):
    """A picker with two endpoints that admits agent sessions."""

    def __init__(self):
        settings = build_settings(load_config(AGENTS, "agents", plugin_tables()))
        self.scheduler = Scheduler(settings, seed=1)
        self.scheduler.take(PoolReplaced([endpoint(at) for at in range(2)]), 0.0)
        for slot in range(2):
            self.scheduler.take(PageScraped(slot, EndpointMetrics()), 0.0)
        self.waker = Waker()
        self.queue = FlowQueue(self.scheduler, self.waker, 0.0)
        self.results = {}

    def turn(self, name, tokens, now=0.0, **fields):
        headers = {"session-id": name.rstrip("0123456789")}
        return self.enter(
            name, now, headers=headers, prompt_tokens=tokens - 1, output_tokens_max=1, **fields
        )


def test_agent_sessions_are_admitted_where_they_have_room():
    """A new one goes to the endpoint with room, and an admitted one stays at its endpoint."""
    picker = AgentPicker()
    first = picker.turn("a1", 900).endpoint
    second = picker.turn("b1", 900).endpoint
    assert first != second
    waits = picker.turn("c1", 300, 1.0)
    assert isinstance(waits, Place)
    assert waits.why == "no endpoint has room for an agent session of 299 tokens"
    assert waits.ticket.flow == "c"
    picker.end("b1", 2.0)
    assert picker.turn("b2", 950, 3.0).endpoint == second, "an admitted session passes"
    picker.end("b2", 4.0)
    picker.queue.pump(8.9)
    assert "c1" not in picker.results
    picker.queue.pump(9.0)
    decision = picker.results["c1"]
    assert decision.endpoint == second
    assert decision.account.queued.waited_s == 8.0
    assert isinstance(picker.turn("b3", 950, 9.5), Place), "its room was taken"


def test_requests_without_a_session_pass_those_that_wait():
    picker = AgentPicker()
    for name in ("a1", "b1", "c1"):
        picker.turn(name, 900)
    assert isinstance(picker.enter("plain"), Decision)


def test_without_its_index_no_session_waits():
    """It may have failed (D16)."""
    picker = AgentPicker()
    for name in ("a1", "b1"):
        picker.turn(name, 900)
    picker.scheduler.indexes._by_name.clear()
    assert isinstance(picker.turn("c1", 900), Decision)


def test_an_agent_names_its_flow():
    """Unless a header names another."""
    picker = Picker(identity_headers=("x-agent", "session-id"))
    picker.enter("first")
    flows = [
        picker.enter(name, headers=headers).ticket.flow
        for name, headers in (
            ("a", {"session-id": "s", "x-agent": "t"}),
            ("b", {"session-id": "s"}),
            ("c", {"session-id": "s", "x-llm-d-inference-fairness-id": "tenant"}),
            ("d", {}),
        )
    ]
    assert flows == ["t", "s", "tenant", ""]


def test_a_client_that_leaves_is_never_placed():
    picker = Picker()
    picker.enter("a")
    place = picker.enter("b")
    place.cancel()
    place.cancel()
    picker.end("a", 1.0)
    assert "b" not in picker.results
    assert picker.queue.totals.outcomes[State.CANCELLED, 0] == 1


def test_a_displaced_request_is_answered_after_the_event():
    picker = Picker(requests_max=1)
    picker.enter("a")
    picker.enter("low", priority=-1)
    assert isinstance(picker.enter("high", priority=1), Place)
    assert "low" not in picker.results, "not inside the call of another request"
    picker.queue.pump(0.0)
    assert picker.results["low"].status == 429
    picker.end("a", 1.0)
    assert isinstance(picker.results["high"], Decision)


@pytest.mark.parametrize("configured", [0, 1_000])
def test_waiting_bodies_take_no_more_than_the_picker_has_for_them(configured):
    """Or the bodies of those that wait leave no memory for requests that arrive."""
    picker = Picker(memory_bytes=25, bytes_max=configured)
    picker.enter("a")
    picker.enter("b")
    picker.enter("c")
    refused = picker.enter("d")
    assert (refused.reason, refused.status) == (RefusalReason.SATURATED, 429)
    assert isinstance(picker.enter("high", priority=1), Place)
    picker.queue.pump(0.0)
    assert picker.results["c"].reason is RefusalReason.SATURATED
    assert picker.queue.control.bytes == 20


def test_peers_do_not_divide_the_memory_of_a_picker():
    picker = Picker(memory_bytes=25)
    picker.scheduler.state.shares.pickers = 4
    picker.enter("a")
    assert isinstance(picker.enter("b"), Place)
    assert isinstance(picker.enter("c"), Place)
    assert picker.queue.control.bytes == 20


def test_the_saturation_falls_when_the_endpoints_drain():
    """Also if nothing waits any more."""
    picker = Picker(detector=RoomDetector())
    # Requests of other clients count once they are on two pages.
    picker.scheduler.take(PageScraped(0, busy(waiting=400.0)), 0.0)
    picker.scheduler.take(PageScraped(0, busy(waiting=400.0)), 0.1)
    assert picker.queue.snapshot(0.1).saturation > 1.0
    picker.scheduler.take(PageScraped(0, busy(waiting=0.0)), 0.2)
    picker.scheduler.take(PageScraped(0, busy(waiting=0.0)), 0.3)
    assert picker.queue.snapshot(0.3).saturation < 0.5


def busy(waiting):
    return EndpointMetrics(waiting_requests=waiting, running_requests=1.0, kv_cache_usage=0.1)


def test_a_displaced_request_whose_client_left_is_not_answered():
    picker = Picker(requests_max=1)
    picker.enter("a")
    low = picker.enter("low", priority=-1)
    picker.enter("high", priority=1)
    low.cancel()
    picker.queue.pump(0.0)
    assert "low" not in picker.results


def test_tenants_take_turns():
    picker = Picker()
    picker.enter("first")
    for number in range(4):
        picker.enter(f"big{number}", tenant="big", prompt_tokens=1_000)
    picker.enter("small", tenant="small", prompt_tokens=10)
    picker.end("first", 1.0)
    picker.end("big0", 2.0)
    assert isinstance(picker.results["small"], Decision)
    assert "big1" not in picker.results


def test_an_empty_pool_lets_requests_wait():
    picker = Picker(empty_pool_wait_s_max=5.0)
    picker.scheduler.take(PoolReplaced([]), 0.0)
    assert isinstance(picker.enter("a"), Place)
    picker.queue.pump(0.0)
    assert picker.waker.at_s == 5.0
    picker.scheduler.take(PoolReplaced([endpoint(7)]), 1.0)
    picker.scheduler.take(PageScraped(0, EndpointMetrics()), 1.0)
    picker.queue.pump(1.0)
    assert picker.results["a"].endpoint == endpoint(7)


def test_a_request_for_no_endpoint_of_the_pool_is_refused_at_once():
    picker = Picker()
    refused = picker.enter("a", subset=("192.0.2.99:1",))
    assert refused.reason is RefusalReason.NO_ENDPOINTS
    assert picker.queue.snapshot(0.0).totals.outcomes == {(State.REFUSED, 0): 1}


def test_a_full_subset_blocks_no_other():
    picker = Picker(pods=2)
    one, other = (endpoint(at).address for at in range(2))
    picker.enter("a", subset=(one,))
    assert isinstance(picker.enter("b", subset=(one,)), Place)
    picker.enter("c", subset=(other,))
    picker.queue.pump(0.0)
    assert isinstance(picker.results["c"], Decision)


def test_new_settings_keep_those_that_wait():
    picker = Picker()
    picker.enter("a")
    picker.enter("b", 1.0)
    bigger = FlowSettings(detector=ConcurrencyDetector(max_concurrency=2))
    picker.scheduler.take(Reconfigured(scheduler_settings(flow=bigger)), 2.0)
    picker.queue.configure(2.0)
    picker.queue.pump(2.0)
    assert picker.results["b"].account.queued.waited_s == 1.0


def test_a_queue_that_is_switched_off_places_all():
    picker = Picker()
    picker.enter("a")
    picker.enter("b")
    picker.scheduler.take(Reconfigured(scheduler_settings()), 1.0)
    picker.queue.configure(1.0)
    assert isinstance(picker.results["b"], Decision)
    assert not picker.queue.active


def test_a_long_queue_that_is_switched_off_is_placed_in_portions():
    """One call that places thousands would block the event loop for a second."""
    picker = Picker()
    picker.enter("first")
    for number in range(PLACED_MAX + 1):
        picker.enter(f"{number}")
    picker.scheduler.take(Reconfigured(scheduler_settings()), 1.0)
    picker.queue.configure(1.0)
    assert picker.queue.control.requests == 1
    asked = picker.waker.asked
    picker.queue.pump(1.0)
    assert isinstance(picker.results[f"{PLACED_MAX}"], Decision)
    assert picker.waker.asked == asked


def test_a_drain_refuses_those_that_wait_and_those_that_would():
    picker = Picker()
    picker.enter("a")
    picker.enter("b")
    picker.queue.drain(1.0)
    assert picker.results["b"].reason is RefusalReason.SHUTTING_DOWN
    assert picker.enter("c", 2.0).reason is RefusalReason.SHUTTING_DOWN
    picker.end("a", 3.0)
    assert isinstance(picker.enter("d", 3.0), Decision)


def test_a_request_of_negative_priority_waits_as_well():
    """Without the queue, the saturated pool would refuse it."""
    picker = Picker()
    picker.enter("a")
    assert isinstance(picker.enter("b", priority=-1), Place)


@pytest.mark.parametrize(("tokens", "charged"), [(None, 0.0), (1_000, 2.0 * 744)])
def test_the_charge_is_corrected_by_the_usage(tokens, charged):
    """256 answer tokens were expected."""
    picker = Picker()
    picker.enter("a")
    place = picker.enter("b", prompt_tokens=100)
    picker.end("a", 1.0)
    before = place.ticket.charged_tokens
    outcome = Outcome(ending=Ending.COMPLETE, status=200, output_tokens=tokens)
    picker.queue.settled(place, outcome, 2.0)
    assert place.ticket.charged_tokens == before + charged


def learned_picker():
    """Return a picker with two endpoints that learns their room."""
    picker = Picker(pods=2)
    flow = FlowSettings(default_band=BandSettings(fairness=Fairness.TOKENS))
    picker.scheduler.take(Reconfigured(scheduler_settings(flow=flow)), 0.0)
    picker.queue.configure(0.0)
    return picker


def test_a_request_of_the_only_flow_does_not_wait_for_prefill():
    picker = learned_picker()
    for number in range(20):
        entered = picker.enter(f"{number}", tenant="a", prompt_tokens=50_000)
        assert isinstance(entered, Decision)


def test_requests_wait_once_flows_have_competed_for_full_endpoints_for_a_while():
    picker = learned_picker()
    for number in range(20):
        tenant = "ab"[number % 2]
        entered = picker.enter(f"{number}", tenant=tenant, prompt_tokens=50_000)
        assert isinstance(entered, Decision), "the burst may end soon"
    entered = picker.enter("later", 1.5, tenant="a", prompt_tokens=50_000)
    assert isinstance(entered, Place)
    assert "prefill tokens are pending" in entered.why
    picker.queue.pump(200.0)
    assert isinstance(picker.results["later"], Refusal | Decision)


def test_the_choice_is_not_restricted_while_no_request_waits():
    """A request keeps its cached prefix."""
    picker = learned_picker()
    before = picker.enter("first", prompt_tokens=10).endpoint
    slot = picker.scheduler.pool.slot_of(before)
    full = EndpointMetrics(kv_cache_usage=1.0, block_size_tokens=16, blocks_total=1_000)
    picker.scheduler.take(PageScraped(slot, full), 0.2)
    decision = picker.enter("second", 0.2, prompt_tokens=10)
    assert len(decision.leg.candidates) == 2
    assert not decision.leg.dropped


def test_the_choice_is_restricted_to_endpoints_with_room_while_competing_requests_wait():
    picker = learned_picker()
    before = picker.enter("first", tenant="a", prompt_tokens=10).endpoint
    slot = picker.scheduler.pool.slot_of(before)
    full = EndpointMetrics(kv_cache_usage=1.0, block_size_tokens=16, blocks_total=1_000)
    picker.scheduler.take(PageScraped(slot, full), 0.2)
    picker.enter("second", 0.2, tenant="b", prompt_tokens=10)
    picker.scheduler.state.gate.rivalry.holding = True
    decision = picker.enter("third", 0.2, tenant="b", prompt_tokens=10)
    assert picker.scheduler.pool.slot_of(decision.endpoint) != slot
    assert len(decision.leg.candidates) == 1


def test_a_request_waits_for_a_full_endpoint_with_its_prefix_only_while_competing_requests_wait():
    picker = learned_picker()
    prompt = {"prompts": (b"x" * 25_600,), "prompt_tokens": 6_400}
    before = picker.enter("first", tenant="a", **prompt).endpoint
    slot = picker.scheduler.pool.slot_of(before)
    full = EndpointMetrics(kv_cache_usage=1.0, block_size_tokens=16, blocks_total=1_000)
    picker.scheduler.take(PageScraped(slot, full), 0.2)
    picker.enter("other", 0.2, tenant="b", prompt_tokens=10)
    admission = picker.scheduler.admission
    again = request(request_id="again", **prompt)
    assert admission.hold_s(again, 0.2) == 0.0
    picker.scheduler.state.gate.rivalry.holding = True
    assert admission.hold_s(again, 0.2) > 0.0
    assert admission.hold_s(request(request_id="new", prompt_tokens=6_400), 0.2) == 0.0


def test_the_record_says_behind_which_flow_a_request_waited():
    picker = Picker()
    picker.enter("first")
    for number in range(3):
        picker.enter(f"big{number}", tenant="big")
    picker.enter("small", 1.0, tenant="small")
    picker.end("first", 2.0)
    picker.end("big0", 3.0)
    queued = picker.results["small"].account.queued
    assert (queued.ahead, queued.behind, queued.behind_requests) == (3, "big", 3)
    assert picker.results["big0"].account.queued.behind_requests == 0


def test_waiting_flows_are_listed_by_their_requests():
    picker = Picker()
    picker.enter("first")
    picker.enter("small", 1.0, tenant="small")
    for number in range(2):
        picker.enter(f"big{number}", 2.0 + number, tenant="big")
    picker.enter("urgent", 4.0, priority=1)
    (urgent,), flows = picker.queue.waiting_flows(5.0).values()
    assert (urgent.flow, urgent.requests, urgent.oldest_wait_s) == ("", 1, 1.0)
    assert [(one.flow, one.requests, one.oldest_wait_s) for one in flows] == [
        ("big", 2, 3.0),
        ("small", 1, 4.0),
    ]


def test_the_number_of_listed_flows_is_bounded():
    picker = Picker()
    picker.enter("first")
    for number in range(FLOWS_SHOWN + 5):
        picker.enter(f"{number}", tenant=f"tenant-{number}")
    (flows,) = picker.queue.waiting_flows(1.0).values()
    assert len(flows) == FLOWS_SHOWN
    assert picker.queue.snapshot(1.0).bands[0].flows == FLOWS_SHOWN + 5


def test_a_light_flow_that_waits_as_long_as_a_heavy_one_is_shown():
    """In turn by arrival, because the band has one queue for all flows."""
    picker = Picker(default_band=BandSettings())
    picker.enter("first")
    for number in range(4):
        picker.enter(f"big{number}", tenant="big", prompt_tokens=10_000)
    picker.enter("small", tenant="small", prompt_tokens=10)
    done = ["first", *(f"big{number}" for number in range(4))]
    for at, name in enumerate(done):
        picker.end(name, 1.0 + at)
    assert picker.queue.snapshot(6.0).bands[0].light_wait_ratio is None
    ratios = {band.priority: band.light_wait_ratio for band in picker.queue.snapshot(61.0).bands}
    assert ratios[0] == pytest.approx(5.0 / 3.0)


def test_agent_sessions_are_counted():
    """Admitted ones with their tokens, those that wait, and how often either changed."""
    picker = AgentPicker()
    assert Picker().queue.snapshot(0.0).agents is None
    picker.turn("a1", 900)
    picker.turn("b1", 800)
    for name in ("c1", "c2", "d1"):
        assert isinstance(picker.turn(name, 300, 1.0), Place)
    told = picker.queue.snapshot(1.0)
    assert told.agents == SessionCounts(admitted=2, tokens=1_700.0, admissions=2, pauses=0)
    assert told.agents_waiting == 2
    picker.end("b1", 2.0)
    picker.turn("b2", 850, 3.0)
    told = picker.queue.snapshot(3.0)
    assert (told.agents.tokens, told.agents.admissions) == (1_750.0, 2), "b stays admitted"
    picker.end("b2", 4.0)
    picker.queue.pump(9.0)
    told = picker.queue.snapshot(9.0)
    assert told.agents.pauses == 1, "c and d have the room of b"
    assert (told.agents.admitted, told.agents.admissions, told.agents_waiting) == (3, 4, 0)
