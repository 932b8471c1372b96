"""The endpoints that heavy flows leave to light ones."""

import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.flow.demand import COMPARED_S
from epp.core.flow.detectors import RoomDetector
from epp.core.flow.rooms import FIRST_FACTOR
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request
from tests.core.protocol.test_flow_queue import scheduler_settings

FLOW = "x-llm-d-inference-fairness-id"


class Shared:
    """A pool for which a large and a small flow compete, while requests wait."""

    def __init__(self, pods=4, fairness=Fairness.TOKENS, seed=1, **detector):
        flow = FlowSettings(
            default_band=BandSettings(fairness=fairness), detector=RoomDetector(**detector)
        )
        self.scheduler = Scheduler(scheduler_settings(flow=flow), seed=seed)
        self.pods = range(pods)
        self.scheduler.take(PoolReplaced([endpoint(number) for number in self.pods]), 0.0)
        self.now = 0.2
        for slot in self.pods:
            self.page(slot)
        rivalry = self.rivalry = self.scheduler.state.gate.rivalry
        rivalry.flow_of = lambda one: one.headers.get(FLOW, "")
        for _ in range(2):
            rivalry.met("large", 0, self.now, 1_000)
            rivalry.met("small", 0, self.now, 10)
        self.now += COMPARED_S
        rivalry.holding = True

    def page(self, slot, running=0.0, waiting=0.0):
        metrics = EndpointMetrics(
            running_requests=running,
            waiting_requests=waiting,
            kv_cache_usage=0.0,
            block_size_tokens=16,
            blocks_total=10_000,
        )
        self.scheduler.take(PageScraped(slot, metrics), self.now)

    def fill(self, slots):
        """Let two pages show more requests of other clients than there is room for."""
        for _ in range(2):
            self.now += 0.2
            for slot in self.pods:
                full = slot in slots
                self.page(slot, 500.0 if full else 0.0, 1_000.0 if full else 0.0)

    @property
    def reserved(self):
        gate = self.scheduler.state.gate
        ((_, candidates),) = self.scheduler.admission.of_stages(request(), self.now)
        return set(candidates.slot[gate._reserved(candidates)].tolist())

    def has_room(self, flow):
        return self.scheduler.admission.has_room(request(headers={FLOW: flow}), self.now)

    def chosen(self, flow, count=40):
        """The slots at which requests of `flow` are placed."""
        decisions = [
            self.scheduler.schedule(request(headers={FLOW: flow}), self.now) for _ in range(count)
        ]
        return {decision.lease.slot for decision in decisions}


@pytest.mark.parametrize(("pods", "count"), [(1, 0), (3, 0), (4, 1), (15, 1), (16, 2), (80, 10)])
def test_an_eighth_of_the_endpoints_is_reserved(pods, count):
    assert len(Shared(pods).reserved) == count


def test_all_pickers_reserve_the_same_endpoints():
    assert Shared(24, seed=1).reserved == Shared(24, seed=2).reserved


def test_heavy_flows_keep_off_and_light_ones_may_go_anywhere():
    shared = Shared()
    assert shared.chosen("large") == set(shared.pods) - shared.reserved
    assert shared.chosen("small", 4) & shared.reserved


def test_room_at_reserved_endpoints_is_for_light_flows_alone():
    shared = Shared()
    shared.fill(set(shared.pods) - shared.reserved)
    for _ in range(2):
        assert not shared.has_room("large")
        assert shared.has_room("small")
    why = shared.scheduler.admission.why_full(request(headers={FLOW: "large"}), shared.now)
    assert why.startswith("3 of 3 endpoints are full, and 1 left to flows that use less; ")


@pytest.mark.parametrize(
    "settings", [{"reserved_share": 0.0}, {"fairness": Fairness.NONE}, {"pods": 3}]
)
def test_nothing_is_reserved_without_turns_or_share_or_in_small_pools(settings):
    shared = Shared(**settings)
    assert shared.chosen("large") == set(shared.pods)
    shared.fill(set(shared.pods))
    why = shared.scheduler.admission.why_full(request(headers={FLOW: "large"}), shared.now)
    assert "left to flows" not in why


def test_nothing_is_reserved_while_no_request_waits():
    shared = Shared()
    shared.rivalry.holding = False
    assert shared.chosen("large") == set(shared.pods)


def test_nothing_is_reserved_once_the_light_flow_is_gone():
    shared = Shared()
    for _ in range(70):
        shared.now += 1.0
        for flow in ("large", "as-large"):
            shared.rivalry.met(flow, 0, shared.now, 1_000)
    for slot in shared.pods:
        shared.page(slot)
    assert not shared.rivalry.is_alone(request(), shared.now)
    assert shared.chosen("large") == set(shared.pods)


def test_pickers_do_not_divide_the_room_for_light_flows():
    """Each assumes that its peers send as much as itself, except of light flows."""
    shared = Shared()
    shared.scheduler.state.shares.pickers = 4
    gate = shared.scheduler.state.gate
    ((_, candidates),) = shared.scheduler.admission.of_stages(request(), shared.now)
    limits = {
        flow: gate.rooms.of(candidates, gate.lead(request(headers={FLOW: flow}), shared.now))
        for flow in ("large", "small")
    }
    for large, small in zip(limits["large"], limits["small"], strict=True):
        assert small.prefill_tokens_max == FIRST_FACTOR * large.prefill_tokens_max
    for _ in range(4):
        shared.scheduler.schedule(request(headers={FLOW: "large"}, prompt_tokens=400), shared.now)
    slots = shared.scheduler.state.gate.rooms.of(
        candidates, gate.lead(request(headers={FLOW: "large"}), shared.now)
    )
    whole = gate.rooms.of(candidates, gate.lead(request(headers={FLOW: "small"}), shared.now))
    assert [one.requests for one in slots] == [4 * one.requests for one in whole]
