from epp.core.decision.inputs import PageScraped, PoolReplaced, ScrapeFailed, Tick
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.hit_accuracy import Verdict
from epp.core.peers.exchange import PeerExchange
from epp.core.prompt.blocks import SEGMENT_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.budget import BodyBudget
from epp.core.types import EndpointMetrics, KvTransfers
from epp.shell.operators.metrics.snapshot import pool_snapshot
from epp.shell.process.pressure import MemoryPressure
from tests.builders import endpoint
from tests.core.decision.staged import chat, pool_of
from tests.test_hermetic import pods


def test_a_snapshot_counts_what_is_known_and_what_is_ready():
    """Indexes with an account of their memory are shown by name."""
    scheduler = pods((0, 0.1), (3, 0.5))
    assert isinstance(scheduler, Scheduler)
    assert isinstance(scheduler.settings, SchedulerSettings)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1), endpoint(2, ready_after_s=60.0)]), 1.0)
    bodies = BodyBudget(100)
    bodies.take(7)
    pressure = MemoryPressure(1_000)
    shown = pool_snapshot(
        scheduler, "llama-pool", bodies, pressure, None, 1.0, messages={"scan": 3}
    )
    assert shown.messages == {"scan": 3}
    assert shown.segments == {"known": 0, "new": 0}
    assert (shown.held_body_bytes, shown.held_body_bytes_max) == (7, 100)
    assert shown.pool == "llama-pool"
    assert len(shown.candidates) == 3
    assert shown.ready == 2
    assert shown.set_aside == 0
    assert {index.name for index in shown.indexes} == set(scheduler.indexes)
    assert (shown.memory_limit_bytes, shown.memory_pressure) == (1_000, 0)
    assert shown.load_reports == {"read": 0, "unread": 0}
    assert shown.rank_choices == {}
    assert (shown.cluster, shown.peers) == (None, None)


def test_a_snapshot_counts_what_is_known_of_long_prompts():
    """The second turn of a conversation repeats the first one."""
    scheduler = pods((0, 0.1), (3, 0.5))
    turn = bytes(range(256)) * 300
    for prompt in (turn, turn + b"x" * SEGMENT_BYTES):
        request = InferenceRequest(
            request_id="r", model="m", prompts=(prompt,), segments=scheduler.segments
        )
        assert isinstance(scheduler.schedule(request, 0.0), Decision)
    shown = pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 0.0)
    assert shown.segments == {"known": 4, "new": 5}


def test_a_snapshot_counts_what_is_owed_to_a_peer():
    """The second turn of a conversation whose first one another picker placed."""
    pickers = pods((0, 0.1), (3, 0.5)), pods((0, 0.1), (3, 0.5))
    talks = [
        PeerExchange(made, origin=bytes([number]) * 8, now=0.0, replicas=2)
        for number, made in enumerate(pickers)
    ]

    def settle(now):
        for told, heard in (talks, talks[::-1]):
            for frame in told.outgoing(now):
                heard.receive(frame, now, told.origin)
            while heard.pending():
                heard.apply(now)

    settle(0.0)
    turn = bytes(range(256)) * 30
    for now, made in enumerate(pickers):
        request = InferenceRequest(request_id="r", model="m", prompts=(turn,))
        assert isinstance(made.schedule(request, float(now)), Decision)
        settle(now + 0.5)
    first, second = (
        pool_snapshot(made, "", BodyBudget(1), MemoryPressure(1), None, 2.0, peers=talk)
        for made, talk in zip(pickers, talks, strict=True)
    )
    assert [index.measures.known_from_peers for index in first.indexes] == [0]
    assert [index.measures.known_from_peers for index in second.indexes] == [1]
    assert (first.peers, second.peers) == tuple(talks)


def test_who_is_gone_is_not_counted_as_ready():
    """Unreachable or with metrics of long ago: nothing goes there while others are left."""
    scheduler = pods((0, 0.1), (3, 0.5), (4, 0.5))
    for slot in range(3):
        scheduler.take(PageScraped(slot, EndpointMetrics(waiting_requests=1.0)), 1.0)
    assert pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 1.5).ready == 3
    for _ in range(2):
        scheduler.take(ScrapeFailed(slot=1, answered=False), 0.0)
    assert pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 1.5).ready == 2
    assert pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 9.0).ready == 0


def test_a_snapshot_counts_the_failures_of_every_plugin_configured():
    """Scorers, picker and indexes, and those alone that are."""
    scheduler = pods((0, 0.1), (3, 0.5))
    assert set(scheduler.settings.plugin_names) > set(scheduler.indexes)
    scheduler.failures.add("queue-scorer", "score raised KeyError")
    counts = pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 1.0).plugin_errors
    assert counts == dict.fromkeys(scheduler.settings.plugin_names, 0) | {"queue-scorer": 1}


def test_a_snapshot_says_what_became_of_every_endpoints_counters():
    scheduler = pods((0, 0.1), (3, 0.5))
    shown = pool_snapshot(scheduler, "", BodyBudget(1), MemoryPressure(1), None, 0.0)
    assert set(shown.hit_verdicts) == {verdict.value for verdict in Verdict}
    assert sum(shown.hit_verdicts.values()) == len(shown.candidates)
    assert (shown.hits, shown.bytes_per_token) == ({}, {})
    assert set(shown.hit_errors) == {"over", "under"}


def test_a_snapshot_has_the_load_of_each_role():
    """Only ready endpoints with a label of their role count; all unknown values are one role."""
    made = pool_of(["prefill", "prefill", "decode", None, "typo"])
    for slot, waiting in ((0, 2.0), (1, 4.0), (2, 1.0)):
        page = EndpointMetrics(waiting_requests=waiting, running_requests=1.0, kv_cache_usage=0.5)
        made.take(PageScraped(slot, page), 0.1)
    made.schedule(chat(512), 0.1)
    roles = pool_snapshot(made, "", BodyBudget(1), MemoryPressure(1), None, 0.1).roles
    assert {role: load.endpoints for role, load in roles.items()} == {
        "prefill": 2,
        "decode": 1,
        "other": 1,
    }
    assert (roles["prefill"].waiting_mean, roles["decode"].waiting_mean) == (3.0, 1.0)
    assert roles["prefill"].kv_cache_usage_mean == 0.5
    assert (roles["prefill"].inflight_requests, roles["decode"].inflight_requests) == (1, 1)
    assert roles["prefill"].inflight_prefill_tokens == 512.0
    assert roles["decode"].inflight_prefill_tokens == 0.0


def test_a_snapshot_counts_overdue_prefills_only_where_there_are_stages():
    plain = pool_snapshot(pods((0, 0.1)), "", BodyBudget(1), MemoryPressure(1), None, 0.0)
    assert (plain.roles, plain.prefills_overdue) == ({}, None)
    made = pool_of(["prefill", "decode"])
    made.schedule(chat(), 0.0)
    made.take(Tick(), 60.0)
    shown = pool_snapshot(made, "", BodyBudget(1), MemoryPressure(1), None, 60.0)
    assert shown.prefills_overdue == 1


def test_a_snapshot_has_the_speed_of_kv_transfers_only_where_there_are_stages():
    plain = pool_snapshot(pods((0, 0.1)), "", BodyBudget(1), MemoryPressure(1), None, 0.0)
    assert (plain.kv_link_bytes_per_s, plain.kv_link_ignored) == (None, None)
    made = pool_of(["prefill", "decode"])

    def shown(*sums):
        told = KvTransfers(received_bytes=sums[0], ended=sums[1], ended_s=sums[2])
        made.take(PageScraped(1, EndpointMetrics(waiting_requests=0.0, transfers=told)), 0.0)
        found = pool_snapshot(made, "", BodyBudget(1), MemoryPressure(1), None, 0.0)
        return found.kv_link_bytes_per_s, found.kv_link_ignored

    assert shown(0.0, 0.0, 0.0) == (None, 0)
    assert shown(5e9, 1.0, 2.0) == (2.5e9, 0)
    assert shown(5e9, 2.0, 2.0) == (2.5e9, 1)
