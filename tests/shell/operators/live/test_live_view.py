"""What is seen of a picker at one look."""

import asyncio

import msgspec
import pytest
from msgspec import structs

from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured
from epp.core.decision.scheduler import Decision
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.inflight import Outcome
from epp.core.kv_events.stream import StreamState
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.protocol.usage import Usage
from epp.core.types import EndpointMetrics
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import SourceRow
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.live import live_view
from epp.shell.operators.live.live_view import LOOK_S, Live, LiveView
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.process.own_process import ProcessLately
from tests.builders import endpoint
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_recent_decisions import exchange_of
from tests.shell.operators.pages.test_debug_pages import REFUSAL, Picker


class Seen:
    """A picker with two endpoints, and a look at it."""

    def __init__(self):
        self.picker = Picker()
        self.changes = ConfigurationChanges(clock=lambda: 5.0)
        self.now_s = 100.0
        self.view = LiveView(
            self.picker.scheduler,
            self.picker.recent,
            self.changes,
            self.picker.states,
            "llama-pool",
            clock=lambda: self.now_s,
        )

    async def look(self):
        self.now_s += LOOK_S
        return msgspec.json.decode(await self.view.look(), type=Live)


@pytest.fixture
def seen():
    return Seen()


async def test_traffic_is_told_by_endpoint(seen):
    """Shares, predicted and actual hits, failures, and what is in flight."""
    decisions = [seen.picker.decide(prompt_tokens=100) for _ in range(4)]
    chosen = decisions[0].endpoint.name
    usage = Usage(cached_tokens=25)
    seen.picker.recent.completed(exchange_of(decisions[0], usage=usage), Outcome(status=200), 101.0)
    seen.picker.recent.completed(exchange_of(decisions[1]), Outcome(status=502), 101.0)
    live = await seen.look()
    assert (live.pool, live.decided, live.decided_total) == ("llama-pool", 4, 4)
    assert live.endpoints_total == 2
    assert [one.name for one in live.endpoints] == ["pod-0", "pod-1"]
    assert sum(one.share for one in live.endpoints) == pytest.approx(1.0)
    there = next(one for one in live.endpoints if one.name == chosen)
    assert there.requests == 4
    assert there.inflight_requests == 4
    assert there.failed == 1
    assert (there.predicted_hits, there.compared_hits, there.actual_hits) == (0.0, 0.0, 0.25)
    other = next(one for one in live.endpoints if one.name != chosen)
    assert (other.requests, other.predicted_hits, other.actual_hits) == (0, None, None)


async def test_decisions_and_refusals_are_told_newest_first(seen):
    """With the scores of both who were ahead, and how they ended."""
    decision = seen.picker.decide(request_id="a", model="llama")
    seen.picker.recent.completed(exchange_of(decision), Outcome(status=200), 101.0)
    seen.picker.recent.refused(REFUSAL, None, request_id="b")
    seen.picker.recent.shed += 3
    seen.picker.recent.unparsed["no-prompt"] += 2
    live = await seen.look()
    refused, decided = live.decisions
    assert (refused.request_id, refused.refused, refused.status) == (
        "b",
        "rejected-no-endpoints",
        503,
    )
    assert (decided.request_id, decided.model, decided.status) == ("a", "llama", 200)
    assert decided.score.endpoint == decision.endpoint.name
    assert decided.score.total == pytest.approx(sum(decided.score.parts.values()), abs=1e-3)
    assert decided.runner_up.endpoint != decided.score.endpoint
    assert live.refused == {"rejected-no-endpoints": 1}
    assert live.shed_total == 3
    assert live.unparsed_total == {"no-prompt": 2}


async def test_the_configuration_and_its_last_change_are_told(seen):
    """And a refused one, until the next is taken."""
    seen.changes.apply(2, "abc", "config.yaml", ["weight of queue-scorer: 2 -> 3"], {"q": 3.0})
    seen.changes.refuse("config.yaml: no such plugin")
    live = await seen.look()
    assert live.configuration.generation == 2
    assert live.configuration.changes == ("weight of queue-scorer: 2 -> 3",)
    assert live.configuration.at_s == 5.0
    assert live.configuration_refused.problem == "config.yaml: no such plugin"
    seen.changes.apply(3, "def", "config.yaml", [], {})
    assert (await seen.look()).configuration_refused is None


async def test_of_a_large_pool_the_notable_are_shown(seen, monkeypatch):
    """Those that are not ready and those with most requests; how many there are is told."""
    monkeypatch.setattr(live_view, "ENDPOINTS_MAX", 2)
    seen.picker.scheduler.take(PoolReplaced([endpoint(at) for at in range(5)]), 1.0)
    live = await seen.look()
    assert live.endpoints_total == 5
    assert live.endpoints_ready == 0
    assert len(live.endpoints) == 2
    assert {one.state for one in live.endpoints} <= {"never scraped", "stale"}


async def test_many_who_watch_cost_as_much_as_one(seen, monkeypatch):
    """A look serves everybody who asks within a second; one at a time is made."""
    made = []
    lately = seen.picker.recent.lately

    async def counting(*asked):
        made.append(asked)
        await asyncio.sleep(0)
        return await lately(*asked)

    monkeypatch.setattr(seen.picker.recent, "lately", counting)
    looks = await asyncio.gather(*(seen.view.look() for _ in range(50)))
    assert len(set(looks)) == 1
    assert len(made) == 1
    await seen.look()
    assert len(made) == 2
    assert made[0] == (live_view.WINDOW_S, live_view.RECORDS_MAX)


async def test_an_idle_picker_is_told_too(seen):
    """No decision, no share of anything, no division by nothing."""
    live = await seen.look()
    assert live.decided == 0
    assert live.decisions == []
    assert {one.share for one in live.endpoints} == {0.0}


async def test_how_kv_events_are_heard_is_told_where_they_are_to_be(seen):
    (_, one), _ = seen.picker.scheduler.pool.endpoints()
    row = SourceRow(endpoint=one.name, state=StreamState.STALE, problem="it closed")
    assert {each.kv_events for each in (await seen.look()).endpoints} == {None}
    seen.view = LiveView(
        seen.picker.scheduler,
        seen.picker.recent,
        seen.changes,
        seen.picker.states,
        clock=lambda: seen.now_s,
        kv_events=lambda endpoint: row if endpoint is one else None,
    )
    told = {
        each.name: (each.kv_events, each.kv_events_problem)
        for each in (await seen.look()).endpoints
    }
    assert told == {"pod-0": (None, None), "pod-1": (None, None)} | {
        one.name: ("stale", "it closed")
    }


async def test_first_tokens_process_and_capture_are_told_where_they_are_known(seen):
    """By the endpoint's id, as scrapes are; the rest as it was measured."""
    (_, one), _ = seen.picker.scheduler.pool.endpoints()
    told = {one.endpoint_id: FirstTokens(sum_s=9.0, count=3.0, lately_s=0.12345)}
    process = ProcessLately(lag_mean_s=0.01, lag_most_s=0.2, cpu_cores=0.5, resident_bytes=10)
    capture = JournalSnapshot(requests=1, events=2, dropped={"disk": 3}, write_errors=4, bytes=5)
    seen.view = LiveView(
        seen.picker.scheduler,
        seen.picker.recent,
        seen.changes,
        seen.picker.states,
        clock=lambda: seen.now_s,
        process=lambda: process,
        first_tokens=lambda _: told,
        capture=lambda: capture,
    )
    live = await seen.look()
    assert (live.process, live.capture) == (process, capture)
    by_name = {each.name: each.engine_ttft_s for each in live.endpoints}
    assert by_name == {"pod-0": None, "pod-1": None} | {one.name: 0.123}


class Asleep:
    """The `Waker` of a queue that nobody calls."""

    def soon(self):
        pass

    def at(self, time_s):
        pass


async def test_waiting_requests_and_the_room_of_endpoints_are_shown(seen):
    """By band and flow; without a queue, neither is."""
    scheduler = seen.picker.scheduler
    assert (await seen.look()).queue is None
    flow = FlowSettings(detector=ConcurrencyDetector(max_concurrency=1))
    scheduler.take(Reconfigured(structs.replace(scheduler.settings, flow=flow)), seen.now_s)
    queue = FlowQueue(scheduler, Asleep(), seen.now_s)
    seen.view = LiveView(
        scheduler,
        seen.picker.recent,
        seen.changes,
        seen.picker.states,
        clock=lambda: seen.now_s,
        queue=lambda: queue,
    )
    assert (await seen.look()).queue == []
    entered_s = seen.now_s
    for tenant, times in (("first", 2), ("big", 3), ("small", 1)):
        for _ in range(times):
            headers = {"x-llm-d-inference-fairness-id": tenant}
            queue.enter(make_request(headers=headers), lambda _: None, entered_s)
    live = await seen.look()
    (band,) = live.queue
    assert (band.priority, band.requests, band.flows) == (0, 4, 1)
    assert band.oldest_wait_s == seen.now_s - entered_s
    assert [(one.flow, one.requests) for one in band.most] == [("big", 3), ("small", 1)]
    assert [one.room_load for one in live.endpoints] == [1.0, 1.0]
    assert [one.room_requests for one in live.endpoints] == [None, None]


async def test_the_learned_room_is_told_in_requests_and_a_sentence(seen):
    scheduler = seen.picker.scheduler
    scheduler.take(
        Reconfigured(structs.replace(scheduler.settings, flow=FlowSettings())), seen.now_s
    )
    live = await seen.look()
    assert all(0.0 <= one.room_load < 1.0 for one in live.endpoints)
    assert all(one.room_requests > 0 for one in live.endpoints)
    rows = endpoint_rows(scheduler, seen.picker.states, seen.now_s)
    assert rows[0]["room"].startswith("pod-0 has room for")


async def test_prefill_tokens_fill_an_endpoint_only_while_flows_compete(seen):
    """A request without competition is placed although many tokens are pending."""
    scheduler = seen.picker.scheduler
    scheduler.take(
        Reconfigured(structs.replace(scheduler.settings, flow=FlowSettings())), seen.now_s
    )
    decision = scheduler.schedule(make_request(prompt_tokens=100_000), seen.now_s)
    assert isinstance(decision, Decision)

    async def load():
        live = await seen.look()
        return next(one.room_load for one in live.endpoints if one.name == decision.endpoint.name)

    assert await load() < 1.0
    rows = endpoint_rows(scheduler, seen.picker.states, seen.now_s)
    assert all("has room for" in row["room"] for row in rows)
    rivalry = scheduler.state.gate.rivalry
    rivalry.met("first", 0, seen.now_s)
    assert rivalry.met("second", 1, seen.now_s)
    assert await load() >= 1.0


async def test_the_room_leaves_a_part_of_the_cache_to_higher_priorities(seen):
    """The page shows the room that the gate finds for a request of the usual priority."""
    scheduler = seen.picker.scheduler
    scheduler.take(
        Reconfigured(structs.replace(scheduler.settings, flow=FlowSettings())), seen.now_s
    )
    page = EndpointMetrics(kv_cache_usage=0.97, block_size_tokens=16, blocks_total=1_000)
    scheduler.take(PageScraped(0, page), seen.now_s)
    row = endpoint_rows(scheduler, seen.picker.states, seen.now_s)[0]
    assert row["room_load"] < 1.0
    scheduler.state.gate.rivalry.met("", 1, seen.now_s)
    scheduler.state.gate.rivalry.met("", 0, seen.now_s)
    row = endpoint_rows(scheduler, seen.picker.states, seen.now_s)[0]
    assert row["room_load"] > 1.0
