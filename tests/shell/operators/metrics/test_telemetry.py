import math
import sys
from collections import Counter as Tally

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from epp.core.abilities import Origin
from epp.core.decision.account import Route
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import DIFFERED, ShadowTotals, ShadowVerdict
from epp.core.decision.stages import Stages
from epp.core.flow.bands import State
from epp.core.knowledge.agent_sessions import SessionCounts
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.hit_accuracy import ErrorHistogram, HitComparison
from epp.core.knowledge.index import IndexMeasures, IndexStanding
from epp.core.knowledge.inflight import Ending, Lease, Outcome
from epp.core.knowledge.latency import LatencyErrors
from epp.core.knowledge.outliers import Outlier
from epp.core.peers.exchange import PeerExchange, Taken
from epp.core.peers.frames import Frame, encode
from epp.core.protocol.flow_queue import BandSnapshot, FlowTotals, QueueSnapshot
from epp.core.types import Refusal, RefusalReason, Stage
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import KVEventsSnapshot
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.service import TokensSnapshot
from epp.shell.gateway.calls import Connected, Cut
from epp.shell.kubernetes.state import ClusterSnapshot, Reflection
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.metrics.metric_table import METRICS, REQUEST_BUCKETS_S
from epp.shell.operators.metrics.role_loads import RoleLoad
from epp.shell.operators.metrics.telemetry import (
    EXEMPLARS_MAX,
    LABEL_CHARACTERS_MAX,
    WAITING_MAX,
    Children,
    PoolSnapshot,
    Telemetry,
    endpoint_labels,
)
from epp.shell.peers.state import PeersSnapshot
from epp.shell.process.own_process import ProcessSnapshot
from tests.shell.operators.decided import (
    make_candidates,
    make_decision,
    make_endpoints,
    make_request,
    with_leg,
)
from tests.test_hermetic import pods

LLAMA = {"model_name": "llama", "target_model_name": "llama", "priority": "0"}


class Exported:
    """A registry with its telemetry, and how to read it."""

    def __init__(self, pool=None, **options):
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(self.registry, pool, **options)

    def __call__(self, name, /, **labels):
        return self.registry.get_sample_value(name, labels)

    def decide(self, decision, **fields):
        arguments = {"scheduling_s": 4e-5, "processing_s": 2e-4, "request_bytes": 8192} | fields
        self.telemetry.decided(decision.leg, **arguments)


@pytest.fixture
def exported():
    return Exported()


def shadow_totals():
    totals = ShadowTotals()
    told = {"uncached_tokens": 32.0, "live_uncached_tokens": 64.0, "inflight_requests": 2}
    totals.add(ShadowVerdict(verdict=DIFFERED, **told), 1)
    return totals


def errors_of(*errors):
    histogram = ErrorHistogram()
    for error in errors:
        histogram.observe(error)
    return histogram


def snapshot(count=4, **fields):
    candidates = make_candidates(count, **fields)
    return PoolSnapshot(
        pool="llama-pool",
        candidates=candidates,
        first_tokens={
            endpoint.endpoint_id: FirstTokens(sum_s=2.5, count=10.0, lately_s=None)
            for endpoint in list(candidates.endpoints)[:2]
        },
        hits={
            2: HitComparison(
                predicted=0.5,
                engine=0.375,
                low=0.375,
                high=0.375,
                known_share=1.0,
                tiers={"device": 0.25, "host": 0.125, "disk": 0.0},
                indexes={"approx": 0.25, "all": 0.125},
            )
        },
        hit_verdicts={"measured": 1, "still": 3},
        hit_errors={"over": errors_of(0.125), "under": errors_of()},
        latency_errors={
            1: {
                "ttft": LatencyErrors(40, 0.75, 0.125, "learned"),
                "tpot": LatencyErrors(3, math.nan, math.nan, "estimate"),
            }
        },
        answer_tokens=120.0,
        bytes_per_token={"llama": 4.5, "m" * 128 + "1": 2.0, "m" * 128 + "2": 3.0},
        process=ProcessSnapshot(cpu_s=12.5, resident_bytes=2**27),
        tokens=[
            TokensSnapshot(
                backend="vllm",
                waiting=2,
                results={"found": 3, "timeout": 1},
                compared={"agrees": 7, "differs": 1},
            ),
            TokensSnapshot(backend="local", circuit_open=True, results={"loading": 4}),
        ],
        ready=3,
        set_aside=1,
        prefills_overdue=2,
        kv_link_bytes_per_s=2.5e9,
        kv_link_ignored=3,
        queue=QueueSnapshot(
            totals=FlowTotals(
                outcomes=Tally({(State.PLACED, 0): 7, (State.EXPIRED, -1): 1}),
                waits=Tally({(State.PLACED, 0): 3}),
                waited_s={(State.PLACED, 0): 1.25},
            ),
            bands=(
                BandSnapshot(
                    priority=0,
                    requests=2,
                    bytes=900,
                    flows=1,
                    oldest_wait_s=0.5,
                    light_wait_ratio=0.25,
                ),
                BandSnapshot(priority=-1, requests=0, bytes=0, flows=0, oldest_wait_s=0.0),
            ),
            saturation=0.75,
            evicted={-1: 2},
            agents=SessionCounts(admitted=3, tokens=9_000.0, admissions=8, pauses=5),
            agents_waiting=4,
        ),
        revision_shares={"a1b2": 0.75},
        roles={
            "decode": RoleLoad(
                endpoints=2,
                waiting_mean=1.5,
                running_mean=3.0,
                kv_cache_usage_mean=0.25,
                inflight_requests=4,
                inflight_prefill_tokens=900.0,
            )
        },
        capture=JournalSnapshot(
            requests=5, events=9, dropped={"queue": 2, "disk": 0}, write_errors=1, bytes=4096
        ),
        history=JournalSnapshot(
            requests=0, events=7, dropped={"queue": 1}, write_errors=2, bytes=512
        ),
        shadow=shadow_totals(),
        indexes=[
            IndexStanding(
                name="approx",
                type_name="approx-prefix-cache-producer",
                origin=Origin.DECIDED,
                is_open=True,
                memory_max_bytes=None,
                measures=IndexMeasures(
                    entries=12,
                    memory_bytes=768,
                    lookups={"full": 1, "partial": 2, "none": 3},
                    evictions={"ttl": 4, "capacity": 5},
                    known_from_peers=8,
                ),
            ),
            IndexStanding(
                name="mute",
                type_name="mute-producer",
                origin=None,
                is_open=True,
                memory_max_bytes=None,
                measures=None,
            ),
        ],
        messages={"scan": 7, "protobuf": 2},
        connected=Connected(connections=3, unacknowledged_bytes=70),
        segments={"known": 5, "new": 6},
        spans={"exported": 8, "dropped": 1},
        slowness={2: 4.5, 3: 0.5},
        outliers={2: Outlier(cause=Cause.SLOW, slowness=4.5, failures=0, ejected=True)},
        ejections={"slow": 3, "failing": 0},
        plugin_errors={"queue-scorer": 0, "near-scorer": 3},
        memory_limit_bytes=2**30,
        memory_pressure=1,
        load_reports={"read": 6, "unread": 2},
        rank_choices={"named": 3, "crowded": 0},
        cluster=ClusterSnapshot(
            kinds={
                "pods": Reflection(
                    objects=7,
                    synced=True,
                    stale_s=1.5,
                    lists=2,
                    watches=3,
                    repairs=1,
                    errors={"gone": 4},
                )
            },
            events={"written": 5, "dropped": 6},
            leading=False,
        ),
        pages_unread={"gpus": 2, "models": 0},
        kv_events=KVEventsSnapshot(
            states={"live": 3, "stale": 1},
            incomplete=2,
            silent=1,
            events={"stored": 5, "removed": 4},
            faults={"too large": 1},
            streams={"gaps": 2, "replays": 3},
        ),
        peers=acquainted(),
        peer_links=PeersSnapshot(
            known=3,
            frames={("sent", "dropped"): 4, ("received", "received"): 5},
            bytes_sent=6,
            bytes_received=7,
            failures={"handshake": 8},
            snapshots={("file", "saved"): 9},
        ),
    )


def acquainted(replicas=3, now=10.0):
    """Picker 1 of `replicas`, which picker 2 told of itself and of one decision, 0.3 s old."""
    talks = [
        PeerExchange(pods((0, 0.1)), origin=bytes([number]) * 8, now=0.0, replicas=replicas)
        for number in (1, 2)
    ]
    frames = [(frame, talk.origin) for talk in talks for frame in talk.outgoing(now - 1.0)]
    for talk in talks:
        taken = [talk.receive(frame, now - 1.0, origin) for frame, origin in frames]
        assert taken.count(Taken.TAKEN) == 1
    here, there = talks
    request = make_request(prompts=(b"x" * 1024,))
    there._scheduler.schedule(request, now - 0.3)
    for frame in there.outgoing(now):
        assert here.receive(frame, now, there.origin) is Taken.TAKEN
    while here.pending():
        here.apply(now)
    return here


def exercise(exported):
    """Let everything that can be counted happen at least once."""
    telemetry = exported.telemetry
    decision = make_decision()
    exported.decide(decision)
    telemetry.staged(Route.PREFILL_DECODE, ())
    telemetry.refused(
        Refusal(
            reason=RefusalReason.SATURATED,
            status=429,
            message="full",
            eliminated={"f": 2},
            stage=Stage.PREFILL,
        ),
        scheduling_s=1e-5,
        request=make_request(),
    )
    telemetry.response_started(elapsed_s=0.2)
    telemetry.first_output(decision, elapsed_s=0.3)
    telemetry.first_token_compared(0.2, 0.3)
    telemetry.completed(
        decision, Outcome(status=502), elapsed_s=1.0, output_tokens=9, cached_tokens=128
    )
    answer(telemetry, decision.endpoint)
    telemetry.scheduled_without_prefix("streamed")
    telemetry.request_unparsed("responses", "encoding-corrupt")
    telemetry.unknown_body_mode(5)
    telemetry.protocol_violated("ended", "RequestBody")
    telemetry.usage_unseen()
    telemetry.responses_unseen()
    telemetry.task_ended("tick", 1)
    telemetry.last_good_in_force("configuration", True)
    telemetry.last_good_not_kept("endpoints")
    telemetry.peer_snapshot("peer", 0.3)
    telemetry.tokens_asked("vllm", TokensResult.FOUND, 0.004, 900)
    telemetry.set_aside(make_endpoints(1)[0])
    telemetry.scraped(elapsed_s=0.01)
    telemetry.scrape_failed("timeout")
    telemetry.config_applied(profile_settings(2.0), config_hash="abc", generation=1)
    telemetry.config_rejected()
    telemetry.stream_closed("OK", elapsed_s=1.0)
    telemetry.connection_cut(Cut.EVICTED)
    telemetry.drain_cut(2)
    telemetry.failed("internal")
    telemetry.telemetry_failed("decided")


def answer(telemetry, endpoint, **fields):
    """`endpoint` answered with an error, and all of it was seen."""
    seen = {
        "headers_s": 12345.678,
        "ttft_s": 12345.678,
        "duration_s": 12345.678,
        "status": 500,
        "by_gateway": False,
        "prompt_tokens": 700,
        "predicted_hit_tokens": 192,
    }
    telemetry.by_endpoint.answered(endpoint, **(seen | fields))


def profile_settings(weight):
    class Nothing:
        type_name = "nothing"

    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=(WeightedScorer("queue-scorer", Nothing(), weight),),
        picker_name="max-score-picker",
        picker=Nothing(),
    )
    return SchedulerSettings(stages=Stages(decode=profile))


def samples_of(families):
    return [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
    ]


def test_every_metric_of_the_table_is_exported_and_no_other():
    """The table and the page list the same names, with the same type, help and labels."""
    exported = Exported(snapshot)
    exported.telemetry.endpoints_replaced(make_endpoints(4))
    exercise(exported)
    page = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in exported.registry.collect()
    }
    assert set(page) == {row.name for row in METRICS}
    for row in METRICS:
        family = page[row.name]
        assert (family.type, family.documentation) == (row.kind, row.help)
        labels = {
            frozenset(sample.labels) - {"le"}
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        assert labels == {frozenset(row.labels)}, row.name


def test_table_names_are_unique_prefixed_and_documented():
    """No name is listed twice; each begins with homing_, has a sentence and a unit."""
    assert [name for name, count in Tally(row.name for row in METRICS).items() if count > 1] == []
    for row in METRICS:
        assert row.name.startswith("homing_")
        assert row.help.endswith(".")
        assert row.unit
        assert (row.kind == "counter") == row.name.endswith("_total")
        assert (row.kind == "histogram") == bool(row.buckets)
        assert list(row.buckets) == sorted(set(row.buckets))


@pytest.mark.parametrize(
    ("encode", "parse"),
    [
        (generate_latest, text_string_to_metric_families),
        (generate_openmetrics, parse_openmetrics),
    ],
)
def test_the_page_parses_and_no_series_appears_twice(encode, parse):
    """Both exposition formats are valid, with hostile label values too."""
    exported = Exported(snapshot)
    exported.telemetry.endpoints_replaced(make_endpoints(4))
    exercise(exported)
    hostile = make_request('a"b\\c\nd\ud800é{}', priority=-1)
    exported.decide(make_decision(hostile))
    series = samples_of(parse(encode(exported.registry).decode()))
    assert len(series) == len(set(series)) > 100


def test_a_decision_is_counted_by_model_endpoint_and_scorer(exported):
    """One decision: one attempt at its endpoint, its prediction, each scorer's contribution."""
    exported.decide(make_decision())
    assert exported("homing_request_total", **LLAMA) == 1
    assert exported("homing_request_running", **LLAMA) == 1
    assert exported("homing_request_size_bytes_sum", **LLAMA) == 8192
    assert exported("homing_request_input_tokens_sum", **LLAMA) == 700
    assert exported("homing_scheduler_e2e_duration_seconds_bucket", le="5e-05") == 1
    assert exported("homing_scheduler_e2e_duration_seconds_bucket", le="2e-05") == 0
    attempt = {
        "status": "success",
        "target_model_name": "llama",
        "endpoint_name": "vllm-3",
        "namespace": "prod",
        "port": "8000",
    }
    assert exported("homing_scheduler_attempts_total", **attempt) == 1
    assert exported("homing_prefix_indexer_hit_ratio_sum") == pytest.approx(0.3)
    assert exported("homing_predicted_hit_tokens_total") == 3 * 64
    assert exported("homing_prefix_indexer_hit_bytes_sum") == 3 * 64 * 4
    contribution = "homing_scorer_contribution_sum"
    assert exported(contribution, scorer="prefix-cache-scorer") == 3.0
    assert exported(contribution, scorer="queue-scorer") == 0.25
    assert exported("homing_filter_eliminated_total", filter="fresh-metrics-filter") == 1


def test_changed_scorers_are_counted_under_their_new_names(exported):
    """After a reload with other scorers each contribution goes to its own name."""
    decision = make_decision()
    exported.decide(decision)
    exported.decide(with_leg(make_decision(), scorers=("a", "b", "c")))
    exported.decide(decision)
    assert exported("homing_scorer_contribution_sum", scorer="a") == 3.0
    assert exported("homing_scorer_contribution_sum", scorer="prefix-cache-scorer") == 6.0


def test_a_rewritten_model_is_counted_under_both_names(exported):
    """model_name is what the client asked for, target_model_name what serves."""
    exported.decide(make_decision(), model_name="gpt")
    labels = LLAMA | {"model_name": "gpt"}
    assert exported("homing_request_total", **labels) == 1
    assert exported("homing_request_total", **LLAMA) is None


def test_running_returns_to_zero_when_all_have_ended(exported):
    """Whatever ends a request, one completion undoes one decision."""
    endings = [Outcome(), Outcome(ending=Ending.CLIENT_LEFT), Outcome(status=503)]
    for number in range(len(endings)):
        exported.decide(make_decision(number=number + 1))
    assert exported("homing_request_running", **LLAMA) == 3
    for outcome in endings:
        exported.telemetry.completed(make_decision(), outcome, elapsed_s=1.0)
    assert exported("homing_request_running", **LLAMA) == 0
    assert exported("homing_request_duration_seconds_count", **LLAMA) == 3


def page(exported):
    """Sample -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in exported.registry.collect()
        for sample in family.samples
    }


def decisions(count, models=1):
    """That differ in all that is counted of them."""
    made = []
    for number in range(count):
        request = make_request(f"m{number % models}", prompt_tokens=100 * number)
        decision = make_decision(request, number=number, picked=number % 4)
        dropped = {"f": np.arange(number % 3)}
        made.append(with_leg(decision, dropped=dropped, total_blocks=10 * (number % 5 > 0)))
    return made


@pytest.mark.parametrize("models", [1, 7, 3 * WAITING_MAX])
def test_decisions_count_together_as_they_do_alone(models):
    """On every page, however many wait; sums differ by rounding."""
    together, alone = Exported(), Exported()
    made = decisions(2 * WAITING_MAX + 17, models)
    for number, decision in enumerate(made):
        fields = {"scheduling_s": 1e-5 * number, "request_bytes": 10 * number}
        fields["model_name"] = "alias" if number % 4 == 1 else ""
        together.decide(decision, **fields)
        alone.decide(decision, **fields)
        alone.telemetry.fold()
        if number in (10, WAITING_MAX):
            assert page(together) == pytest.approx(page(alone))
    for exported in (together, alone):
        for decision in made[::3]:
            exported.telemetry.completed(decision, Outcome(), elapsed_s=1.0)
    assert page(together) == pytest.approx(page(alone))
    assert together("homing_scheduler_e2e_duration_seconds_count") == len(made)


def test_children_are_looked_up_once_for_all_that_wait(exported, monkeypatch):
    """A model that many ask for costs a look-up for each metric, not for each request."""
    looked_up = []
    find = Children.__call__

    def counting(children, *labels):
        looked_up.append(labels)
        return find(children, *labels)

    monkeypatch.setattr(Children, "__call__", counting)
    decision = with_leg(make_decision(), dropped={})
    for _ in range(WAITING_MAX):
        assert looked_up == [], "they wait"
        exported.decide(decision)
    scorers = [(name,) for name in decision.leg.scorers]
    model = ("llama", "llama", "0")
    attempt = ("success", "llama", *endpoint_labels(decision.endpoint))
    assert looked_up == [model, model, attempt, *scorers]


def test_what_waits_keeps_nothing_alive(exported):
    """Neither the decision nor its request, nor a name as long as a body."""
    request = make_request("m" * 1_000_000)
    decision = make_decision(request)
    kept = [
        decision,
        request,
        request.model,
        decision.lease,
        decision.leg.candidates,
        decision.leg.scored,
    ]
    before = list(map(sys.getrefcount, kept))
    exported.decide(decision, model_name=request.model)
    assert list(map(sys.getrefcount, kept)) == before
    name = "m" * LABEL_CHARACTERS_MAX
    labels = {"model_name": name, "target_model_name": name, "priority": "0"}
    assert exported("homing_request_total", **labels) == 1


def test_a_decision_that_cannot_be_counted_costs_no_other():
    """It is told of; what waits with it is counted, once."""
    told = []
    exported = Exported(could_not=lambda event, error: told.append((event, type(error))))
    nameless = msgspec.structs.replace(make_endpoints(1)[0], name=None)
    broken = with_leg(make_decision(), endpoint=nameless)
    for decision in (make_decision(), broken, make_decision(), make_decision()):
        exported.decide(decision)
    assert exported("homing_request_total", **LLAMA) == 3
    assert exported("homing_scheduler_e2e_duration_seconds_count") == 3
    assert exported("homing_scorer_contribution_count", scorer="queue-scorer") == 3
    assert told == [("decided", AttributeError)]
    assert exported("homing_telemetry_failures_total", event="decided") is None
    alone = Exported()
    alone.decide(broken)
    alone.telemetry.fold()
    assert alone("homing_telemetry_failures_total", event="decided") == 1


def test_scorers_may_change_while_decisions_wait(exported):
    """Each is counted under those that it was made with."""
    decision = make_decision()
    exported.decide(decision)
    scored = decision.leg.scored
    fewer = type(scored)(scored.total, scored.scores[:1], scored.weights[:1])
    exported.decide(with_leg(decision, scorers=("new-scorer",), scored=fewer))
    exported.decide(decision)
    assert exported("homing_scorer_contribution_count", scorer="queue-scorer") == 2
    assert exported("homing_scorer_contribution_count", scorer="new-scorer") == 1


def test_what_waits_does_not_bring_back_an_endpoint_that_left(exported):
    """Its picks go with it."""
    decision = make_decision()
    exported.decide(decision)
    exported.telemetry.endpoints_replaced([])
    assert "homing_scheduler_attempts_total" not in {name for name, _ in page(exported)}
    assert exported("homing_request_total", **LLAMA) == 1


@pytest.mark.parametrize(
    ("outcome", "error_code"),
    [
        (Outcome(), None),
        (Outcome(status=200), None),
        (Outcome(status=404), "404"),
        (Outcome(status=503), "503"),
        (Outcome(status=4711), "other"),
        (Outcome(ending=Ending.ERROR), "error"),
        (Outcome(ending=Ending.CLIENT_LEFT, status=200), "client-disconnect"),
    ],
)
def test_failures_are_counted_by_what_went_wrong(exported, outcome, error_code):
    """Success adds no error; a failure adds one, under one code."""
    decision = make_decision()
    exported.decide(decision)
    exported.telemetry.completed(decision, outcome, elapsed_s=1.0)
    errors = [
        sample.labels["error_code"]
        for family in exported.registry.collect()
        for sample in family.samples
        if sample.name == "homing_request_error_total"
    ]
    assert errors == ([error_code] if error_code else [])


@pytest.mark.parametrize("routed", [False, True])
def test_a_stream_that_fails_is_one_request_and_one_error(exported, routed):
    """By its reason, under the model if it is known; the end of the lease adds no second one."""
    decision = make_decision()
    if routed:
        exported.decide(decision)
    request = decision.lease.request if routed else None
    exported.telemetry.failed("internal", request=request, counted=routed)
    if routed:
        left = Outcome(ending=Ending.CLIENT_LEFT)
        exported.telemetry.completed(decision, left, elapsed_s=1.0, counted=True)
    labels = LLAMA if routed else {"model_name": "", "target_model_name": "", "priority": "0"}
    assert exported("homing_request_total", **labels) == 1
    assert exported("homing_request_error_total", error_code="internal", **labels) == 1
    assert exported("homing_request_error_total", error_code="client-disconnect", **labels) is None


def test_streams_cut_by_a_drain_are_errors(exported):
    """They were not answered."""
    exported.telemetry.drain_cut(3)
    nameless = {"model_name": "", "target_model_name": "", "priority": "0"}
    assert exported("homing_request_error_total", error_code="drain-cut", **nameless) == 3


def test_parsed_usage_shows_how_good_the_prediction_was(exported):
    """Predicted and served tokens are added up over the same requests."""
    decision = make_decision()
    exported.decide(decision)
    exported.decide(decision)
    exported.telemetry.completed(decision, Outcome(), elapsed_s=1.0)
    exported.telemetry.completed(decision, Outcome(), elapsed_s=1.0, cached_tokens=128)
    assert exported("homing_prefix_hit_tokens_total", source="predicted") == 192
    assert exported("homing_prefix_hit_tokens_total", source="served") == 128
    assert exported("homing_request_cached_tokens_count", **LLAMA) == 1


def test_a_refusal_before_parsing_is_counted_without_a_model(exported):
    """Bad JSON has no model and made no attempt to schedule."""
    refusal = Refusal(reason=RefusalReason.BAD_REQUEST, status=400, message="bad")
    exported.telemetry.refused(refusal)
    nameless = {"model_name": "", "target_model_name": "", "priority": "0"}
    assert exported("homing_refusals_total", reason="bad-request") == 1
    assert exported("homing_request_total", **nameless) == 1
    assert exported("homing_request_error_total", error_code="bad-request", **nameless) == 1
    assert exported("homing_scheduler_e2e_duration_seconds_count") == 0


def test_client_chosen_models_cannot_grow_the_page(exported):
    """Past the budget all new models count as "other"; known ones stay apart, nothing is lost."""
    for number in range(1500):
        request = make_request(f"model-{number}")
        exported.telemetry.refused(
            Refusal(reason=RefusalReason.NO_ENDPOINTS, status=503, message="none"),
            request=request,
        )
    totals = {
        sample.labels["model_name"]: sample.value
        for family in exported.registry.collect()
        for sample in family.samples
        if sample.name == "homing_request_total"
    }
    assert 300 < len(totals) < 1500
    assert totals["other"] == 1500 - (len(totals) - 1)
    assert totals["model-0"] == 1


MODELS = {
    "short": lambda number: f"m{number}",
    "long": lambda number: f"{number}-" + "m" * 200,
    "quoted": lambda number: f"{number}" + '\\"' * 100,
    "wide": lambda number: f"{number}" + "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 200,
    "unprintable": lambda number: f"{number}" + "\0\ud800" * 100,
}


@pytest.mark.parametrize("name_of", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("encode", "parse"),
    [
        (generate_latest, text_string_to_metric_families),
        (generate_openmetrics, parse_openmetrics),
    ],
    ids=["text", "openmetrics"],
)
def test_a_page_is_bounded(name_of, encode, parse):
    """4,000 models of any name at 1,000 endpoints, all that a request can count counted of each."""
    candidates = make_candidates(1_000)
    endpoints = [
        type(endpoint)(
            endpoint_id=endpoint.endpoint_id,
            name=f"models/vllm-llama-3-8b-instruct-7d9f8c5b6d-{number:05d}",
            address=endpoint.address,
        )
        for number, endpoint in enumerate(candidates.endpoints)
    ]
    candidates._columns.endpoints[:] = endpoints
    slowness = dict.fromkeys(range(1_000), 1.2345678901234567)
    outlier = Outlier(cause=Cause.FAILING, slowness=1.0, failures=5, ejected=False)
    outliers = dict.fromkeys(range(1_000), outlier)
    exported = Exported(
        lambda: PoolSnapshot(
            pool="llama-pool", candidates=candidates, slowness=slowness, outliers=outliers
        )
    )
    telemetry = exported.telemetry
    telemetry.endpoints_replaced(endpoints)
    exercise(exported)
    decision = make_decision()
    for number in range(4_000):
        endpoint = endpoints[number % 1_000]
        request = make_request(name_of(number // 2))
        lease = Lease(request, 3, 0, 3, 1000.0)
        routed = with_leg(decision, endpoint=endpoint, lease=lease)
        exported.decide(routed, model_name=name_of(number))
        telemetry.first_output(routed, elapsed_s=1.0, model_name=name_of(number))
        telemetry.completed(
            *(routed, Outcome(status=503)),
            elapsed_s=12345.678,
            output_tokens=123_456,
            cached_tokens=654_321,
            model_name=name_of(number),
        )
        telemetry.set_aside(endpoint)
        for status, by_gateway in ((404, False), (500, False), (503, True)):
            answer(telemetry, endpoint, status=status, by_gateway=by_gateway)
    page = encode(exported.registry)
    assert 3_000_000 < len(page) < 4_500_000
    families = list(parse(page.decode()))
    children = Tally(sample.name for family in families for sample in family.samples)
    assert children["homing_inflight_requests"] == 1_000
    assert children["homing_per_endpoint_ttft_seconds_sum"] == 1_000
    assert children["homing_scheduler_attempts_total"] <= 3_000
    assert children["homing_request_total"] <= 1_000
    assert children["homing_request_duration_seconds_count"] <= 100
    counted = Tally()
    for family in families:
        for sample in family.samples:
            counted[sample.name] += sample.value
    total = 4_000 + 2
    assert counted["homing_request_total"] == total + 1
    assert counted["homing_request_duration_seconds_count"] == total - 1
    assert counted["homing_scheduler_attempts_total"] == total
    assert counted["homing_request_output_tokens_count"] == total - 1


def test_pods_that_leave_give_their_bytes_back(exported):
    """A pool whose pods are replaced for months still tells picks by model."""
    endpoints = make_endpoints(1_000)
    decision = make_decision()
    for day in range(3):
        lease = Lease(make_request("m" * 100), 3, 0, 3, 1000.0)
        exported.telemetry.endpoints_replaced([])
        pods = [
            type(endpoint)(endpoint_id=f"{day}", name=f"{day}/{endpoint.name}", address="a:1")
            for endpoint in endpoints[:400]
        ]
        exported.telemetry.endpoints_replaced(pods)
        for endpoint in pods:
            exported.decide(with_leg(decision, endpoint=endpoint, lease=lease))
    models = {
        sample.labels["target_model_name"]
        for family in exported.registry.collect()
        for sample in family.samples
        if sample.name == "homing_scheduler_attempts_total"
    }
    assert models == {"m" * 100}


@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=3)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_children_are_bounded_and_every_event_is_counted(events):
    """Whatever the labels, children and label lengths are bounded and nothing is lost."""
    counts = {}

    def make(labels):
        counts[labels] = [0]
        return counts[labels]

    children = Children(make, children_max=5)
    for labels in events:
        children(*labels)[0] += 1
    assert sum(count for [count] in counts.values()) == len(events)
    assert len(children) == len(counts) <= 6
    assert all(len(value) <= LABEL_CHARACTERS_MAX for labels in counts for value in labels)


def test_endpoints_that_left_take_their_counters_with_them(exported):
    """Pods come and go for months; only those that are there keep series."""
    exported.decide(make_decision(picked=3))
    exported.decide(make_decision(picked=2))
    exported.telemetry.set_aside(make_endpoints(4)[3])
    exported.telemetry.endpoints_replaced(make_endpoints(3))
    left = {
        sample.labels["endpoint_name"]
        for family in exported.registry.collect()
        for sample in family.samples
        if sample.name in {"homing_scheduler_attempts_total", "homing_set_aside_total"}
    }
    assert left == {"vllm-2"}
    exported.decide(make_decision(picked=3))
    labels = {"endpoint_name": "vllm-3", "namespace": "prod", "port": "8000"}
    labels |= {"status": "success", "target_model_name": "llama"}
    assert exported("homing_scheduler_attempts_total", **labels) == 1


def test_the_pool_is_read_when_the_page_is_made():
    """Gauges are those of the scheduler at that moment."""
    exported = Exported(snapshot)
    pool = {"name": "llama-pool"}
    place = {"endpoint_name": "vllm-2", "namespace": "prod", "port": "8000"}
    assert exported("homing_ready_endpoints", **pool) == 3
    assert exported("homing_endpoints_set_aside", **pool) == 1
    assert exported("homing_average_queue_size", **pool) == 1.5
    assert exported("homing_average_running_requests", **pool) == 3.0
    assert exported("homing_average_kv_cache_utilization", **pool) == pytest.approx(0.375)
    queue = {"model_server_endpoint": "prod/vllm-2", "port": "8000", **pool}
    assert exported("homing_per_endpoint_queue_size", **queue) == 2
    assert exported("homing_per_endpoint_metrics_age_seconds", **place) == 2.0
    assert exported("homing_inflight_requests", **place) == 3
    assert exported("homing_inflight_tokens", **place) == 128
    assert exported("homing_extproc_messages_total", path="scan") == 7
    assert exported("homing_extproc_messages_total", path="protobuf") == 2
    assert exported("homing_extproc_connections") == 3
    assert exported("homing_extproc_unacknowledged_bytes") == 70
    assert exported("homing_prompt_segments_total", result="known") == 5
    assert exported("homing_rank_choices_total", result="named") == 3
    assert exported("homing_rank_choices_total", result="crowded") == 0
    assert exported("homing_prefix_indexer_size", index="approx") == 12
    kind = "approx-prefix-cache-producer"
    assert exported("homing_index_info", index="approx", type=kind, origin="decided") == 1
    assert exported("homing_index_info", index="mute", type="mute-producer", origin="") == 1
    assert exported("homing_prefix_indexer_size", index="mute") is None
    evicted = exported("homing_prefix_indexer_evictions_total", index="approx", cause="ttl")
    assert evicted == 4


def test_who_is_an_outlier_is_shown_and_nobody_else():
    """And how slow each is that was compared."""
    exported = Exported(snapshot)
    pod = {"endpoint_name": "vllm-2", "namespace": "prod", "port": "8000"}
    other = pod | {"endpoint_name": "vllm-3"}
    assert exported("homing_per_endpoint_outlier", cause="slow", **pod) == 1
    assert exported("homing_per_endpoint_outlier", cause="slow", **other) is None
    assert exported("homing_per_endpoint_slowness_ratio", **pod) == 4.5
    assert exported("homing_per_endpoint_slowness_ratio", **other) == 0.5
    assert exported("homing_per_endpoint_cache_hit_tokens_total", **pod) == 200
    assert exported("homing_per_endpoint_cache_queried_tokens_total", **pod) == 2000
    assert exported("homing_per_endpoint_kv_cache_utilization", **pod) == 0.5
    assert exported("homing_endpoints_ejected", name="llama-pool") == 1
    assert exported("homing_endpoint_ejections_total", cause="slow") == 3


def test_belief_stands_beside_what_engines_count():
    """A tier in which nothing was found is not shown, and nobody who was not compared."""
    exported = Exported(snapshot)
    pod = {"endpoint_name": "vllm-2", "namespace": "prod", "port": "8000"}
    predicted = "homing_predicted_hit_ratio"
    assert exported(predicted, index="all", **pod) == 0.5, "whatever an index is called"
    assert exported(predicted, index="approx", **pod) == 0.25
    assert exported(predicted, index="all", **(pod | {"endpoint_name": "vllm-1"})) is None
    assert exported("homing_engine_hit_ratio", tier="all", **pod) == 0.375
    assert exported("homing_engine_hit_ratio", tier="host", **pod) == 0.125
    assert exported("homing_engine_hit_ratio", tier="disk", **pod) is None
    assert exported("homing_hit_verdicts", verdict="still") == 3
    error = "homing_predicted_hit_error_ratio"
    assert exported(f"{error}_bucket", side="over", le="0.1") == 0
    assert exported(f"{error}_bucket", side="over", le="0.2") == 1
    assert exported(f"{error}_count", side="over") == 1
    assert exported(f"{error}_sum", side="over") == 0.125
    assert exported(f"{error}_count", side="under") == 0
    assert exported("homing_bytes_per_token", model_name="llama") == 4.5
    assert exported("homing_bytes_per_token", model_name="m" * 128) == 2.0
    assert exported("homing_answer_tokens") == 120.0


def test_errors_of_predicted_latencies_are_shown_once_they_are_known():
    """By the estimate and by the regression, with what is used."""
    exported = Exported(snapshot)
    pod = {"endpoint_name": "vllm-1", "namespace": "prod", "port": "8000"}
    error, used = "homing_latency_prediction_error_ratio", "homing_latency_prediction_used"
    assert exported(error, latency="ttft", by="estimate", **pod) == 0.75
    assert exported(error, latency="ttft", by="learned", **pod) == 0.125
    assert exported(error, latency="tpot", by="learned", **pod) is None
    assert exported(used, latency="ttft", by="learned", **pod) == 1
    assert exported(used, latency="tpot", by="estimate", **pod) == 1


def test_every_plugin_has_its_count_of_failures():
    """0 from the start, so that the first one is an increase; names that are cut alike add up."""
    counts = {"queue-scorer": 0, "near-scorer": 3, "x" * 200 + "1": 1, "x" * 200 + "2": 1}
    exported = Exported(lambda: PoolSnapshot(candidates=make_candidates(0), plugin_errors=counts))
    assert exported("homing_plugin_errors_total", plugin="queue-scorer") == 0
    assert exported("homing_plugin_errors_total", plugin="near-scorer") == 3
    assert exported("homing_plugin_errors_total", plugin="x" * 128) == 2


def test_what_is_unknown_is_absent_not_zero():
    """Endpoints that were never scraped have no queue, no age and no average."""
    exported = Exported(lambda: snapshot(scraped=False))
    assert exported("homing_average_queue_size", name="llama-pool") is None
    assert exported("homing_known_endpoints", name="llama-pool") == 4
    names = {name for name, _ in samples_of(exported.registry.collect())}
    assert "homing_per_endpoint_metrics_age_seconds" not in names
    assert "homing_per_endpoint_queue_size" not in names


def test_an_empty_pool_makes_a_valid_page():
    """No endpoints, no indexes: 0 known, no averages, nothing raised."""
    exported = Exported(lambda: PoolSnapshot(candidates=make_candidates(0)))
    assert exported("homing_known_endpoints", name="") == 0
    generate_latest(exported.registry)


def test_a_capture_and_a_shadow_are_told_as_they_stand():
    """Where there is neither, nothing is told of them."""
    exported = Exported(snapshot)
    assert exported("homing_capture_dropped_total", reason="queue") == 2
    assert exported("homing_capture_bytes") == 4096
    assert exported("homing_shadow_decisions_total", verdict="differed") == 1
    assert exported("homing_shadow_uncached_tokens_total", profile="live") == 64
    assert exported("homing_shadow_inflight_requests_total", profile="shadow") == 2
    named = {"endpoint_name": "vllm-1", "namespace": "prod", "port": "8000"}
    assert exported("homing_shadow_picks_total", **named) == 1
    without = Exported(lambda: PoolSnapshot(candidates=make_candidates(1)))
    names = {name for name, _ in samples_of(without.registry.collect())}
    assert not [name for name in names if "shadow" in name or "capture" in name]


def test_registering_does_not_read_the_scheduler():
    """Telemetry is built before there is a scheduler to read."""

    def too_early():
        raise AssertionError

    Telemetry(CollectorRegistry(), too_early)


def test_only_the_configuration_in_force_is_shown(exported):
    """A reload replaces hash and weights; a rejected one leaves them and lowers the flag."""
    exported.telemetry.config_applied(profile_settings(2.0), config_hash="aa", generation=1)
    exported.telemetry.config_applied(profile_settings(5.0), config_hash="bb", generation=2)
    weight = {"profile": "default", "scorer": "queue-scorer"}
    assert exported("homing_scorer_weight", **weight) == 5.0
    assert exported("homing_config_info", hash="aa", generation="1") is None
    assert exported("homing_config_last_reload_successful") == 1
    exported.telemetry.config_rejected()
    assert exported("homing_config_last_reload_successful") == 0
    assert exported("homing_config_info", hash="bb", generation="2") == 1
    assert exported("homing_scorer_weight", **weight) == 5.0
    assert exported("homing_config_reloads_total", result="failure") == 1


def test_streams_are_counted_by_code():
    """Open streams are a gauge, ended ones a counter by gRPC code."""
    exported = Exported(lambda: PoolSnapshot(candidates=make_candidates(0), streams=1))
    exported.telemetry.stream_closed("CANCELLED", elapsed_s=2.0)
    assert exported("homing_extproc_streams_inflight") == 1
    assert exported("homing_extproc_streams_total", code="CANCELLED") == 1
    assert exported("homing_extproc_stream_duration_seconds_sum") == 2.0


def test_streams_that_cannot_be_counted_cost_no_page(exported, monkeypatch):
    """Nor the request whose stream ended, or the task that counts."""
    exported.telemetry.stream_closed("OK", elapsed_s=1.0)
    broken = (_ for _ in ()).throw
    monkeypatch.setattr(exported.telemetry, "_streams_ended", lambda _: broken(ValueError()))
    exported.telemetry.fold()
    assert exported("homing_telemetry_failures_total", event="stream_closed") == 1


def test_streams_are_counted_together(exported, monkeypatch):
    """Also without a page, as soon as many have ended."""
    asked = []
    counted = exported.telemetry._streams_ended
    monkeypatch.setattr(
        exported.telemetry, "_streams_ended", lambda code: asked.append(code) or counted(code)
    )
    for number in range(WAITING_MAX):
        assert asked == []
        exported.telemetry.stream_closed("OK" if number else "CANCELLED", elapsed_s=1.0)
    assert sorted(asked) == ["CANCELLED", "OK"]
    assert exported("homing_extproc_streams_total", code="OK") == WAITING_MAX - 1
    assert exported("homing_extproc_stream_duration_seconds_count") == WAITING_MAX


@pytest.mark.parametrize(
    ("name", "address", "labels"),
    [
        ("prod/vllm-0", "10.0.0.1:8000", ("vllm-0", "prod", "8000")),
        ("vllm-0", "[fd00::1]:8001", ("vllm-0", "", "8001")),
    ],
)
def test_namespace_and_port_come_from_name_and_address(name, address, labels):
    """A name without a namespace has an empty one; IPv6 keeps its port."""
    [endpoint] = make_endpoints(1)
    endpoint = type(endpoint)(endpoint_id="e", name=name, address=address)
    assert endpoint_labels(endpoint) == labels


def test_what_the_api_server_told_is_shown_by_kind():
    """Without a cluster, or an election, nothing of it is there."""
    exported = Exported(snapshot)
    told = {
        "staleness_seconds": 1.5,
        "synced": 1.0,
        "objects": 7.0,
        "lists_total": 2.0,
        "watches_total": 3.0,
        "repairs_total": 1.0,
    }
    for name, value in told.items():
        assert exported(f"homing_kube_{name}", resource="pods") == value
    assert exported("homing_kube_errors_total", resource="pods", kind="gone") == 4
    assert exported("homing_kube_events_total", result="dropped") == 6
    assert exported("homing_leader") == 0
    alone = Exported(lambda: msgspec.structs.replace(snapshot(), cluster=None))
    assert alone("homing_leader") is None
    assert alone("homing_kube_synced", resource="pods") is None


def test_what_replicas_tell_each_other_is_shown():
    """Of who is heard, who is not, and what became of it; alone nothing of it is there."""
    exported = Exported(snapshot)
    assert exported("homing_peers") == 1
    assert exported("homing_peer_replicas_unheard") == 1
    received = {
        "applied": 1,
        **dict.fromkeys(("unknown_endpoint", "unknown_chain", "unreadable"), 0),
        **dict.fromkeys(("dropped", "over_rate"), 0),
    }
    for outcome, count in received.items():
        labels = {"direction": "received", "outcome": outcome}
        assert exported("homing_peer_records_total", **labels) == count
    assert exported("homing_peer_records_total", direction="sent", outcome="sent") == 0
    assert exported("homing_peer_lag_seconds") == pytest.approx(0.3)
    assert exported("homing_peer_frames_lost_total") == 0
    assert exported("homing_prefix_known_from_peers_total", index="approx") == 8
    alone = Exported(lambda: msgspec.structs.replace(snapshot(), peers=None))
    told = {name for name, _ in samples_of(alone.registry.collect())}
    assert "homing_prefix_known_from_peers_total" in told
    of_others = ("replicas_unheard", "records_total", "lag_seconds", "frames_lost_total")
    assert not told & {"homing_peers", *(f"homing_peer_{name}" for name in of_others)}


def test_a_replica_that_leaves_takes_its_lag_with_it():
    """And totals stay."""
    talk = acquainted()
    exported = Exported(lambda: msgspec.structs.replace(snapshot(), peers=talk))
    talk.tick(60.0)
    assert exported("homing_peers") == 0
    assert exported("homing_peer_replicas_unheard") == 2
    assert exported("homing_peer_lag_seconds") is None
    labels = {"direction": "received", "outcome": "applied"}
    assert exported("homing_peer_records_total", **labels) == 1


def test_a_hostile_replica_cannot_grow_the_page():
    """Origins, records and numbers that it makes up: no label, no line more."""
    talk = acquainted()
    exported = Exported(lambda: msgspec.structs.replace(snapshot(), peers=talk))
    lines = len(samples_of(exported.registry.collect()))
    for number in range(1_000):
        origin = number.to_bytes(8, "big")
        lie = Frame(origin, 2**63, 0, -1e300, records=b"\xff" * 64, load=b"\xff" * 64)
        talk.receive(encode(lie), 10.0, origin)
        talk.apply(10.0)
    assert len(samples_of(exported.registry.collect())) == lines
    generate_latest(exported.registry)


def test_pages_that_are_not_read_are_shown_where_they_are_asked_for():
    """By page."""
    exported = Exported(snapshot)
    assert exported("homing_endpoint_pages_unread", page="gpus") == 2
    assert exported("homing_endpoint_pages_unread", page="models") == 0
    without = Exported(lambda: msgspec.structs.replace(snapshot(), pages_unread={}))
    assert without("homing_endpoint_pages_unread", page="gpus") is None


def test_kv_events_are_shown_where_an_index_hears_engines():
    """By state, type, reason and kind; else nothing is."""
    exported = Exported(snapshot)
    assert exported("homing_kv_event_streams", state="live") == 3
    assert exported("homing_kv_event_streams_incomplete") == 2
    assert exported("homing_kv_event_streams_silent") == 1
    assert exported("homing_kv_events_total", type="removed") == 4
    assert exported("homing_kv_event_faults_total", reason="too large") == 1
    assert exported("homing_kv_event_stream_changes_total", kind="replays") == 3
    without = Exported(lambda: msgspec.structs.replace(snapshot(), kv_events=None))
    assert without("homing_kv_event_streams_silent") is None


def test_peers_are_counted_by_direction_outcome_and_place():
    """Without sharing the page says nothing of them but that there are such metrics."""
    exported = Exported(snapshot)
    exported.telemetry.peer_snapshot("broker", 0.2)
    value = exported.registry.get_sample_value
    assert value("homing_peers_known") == 3
    dropped = {"direction": "sent", "outcome": "dropped"}
    assert value("homing_peer_frames_total", dropped) == 4
    assert value("homing_peer_bytes_total", {"direction": "received"}) == 7
    assert value("homing_peer_failures_total", {"kind": "handshake"}) == 8
    assert value("homing_peer_snapshots_total", {"place": "file", "outcome": "saved"}) == 9
    assert value("homing_peer_snapshot_seconds_count", {"source": "broker"}) == 1
    alone = Exported(lambda: msgspec.structs.replace(snapshot(), peer_links=None))
    assert alone.registry.get_sample_value("homing_peers_known") is None


def test_histograms_name_so_many_traces_and_no_more(exported):
    """However many models clients name; what has an exemplar goes on getting newer ones."""
    models = 100
    for number in range(models):
        decision = make_decision(request=make_request(model=f"model-{number}"))
        for elapsed_s in REQUEST_BUCKETS_S:
            exported.telemetry.traced(
                decision, f"{number:032x}", 1e9, elapsed_s=elapsed_s, headers_s=0.02, ttft_s=0.02
            )
    page = generate_openmetrics(exported.registry).decode()
    named = [line for line in page.splitlines() if "# {trace_id=" in line]
    assert len(named) == EXEMPLARS_MAX
    (newest,) = [line for line in named if line.startswith("homing_response_headers_seconds")]
    assert f"{models - 1:032x}" in newest


def test_what_engines_say_of_first_tokens_is_a_summary_of_those_that_tell():
    exported = Exported(snapshot)
    name = "homing_per_endpoint_engine_ttft_seconds"
    told = [
        (exported(f"{name}_sum", **labels), exported(f"{name}_count", **labels))
        for labels in (
            dict(zip(("endpoint_name", "namespace", "port"), endpoint_labels(each), strict=True))
            for each in make_endpoints(4)
        )
    ]
    assert told == [(2.5, 10.0)] * 2 + [(None, None)] * 2


def test_the_process_is_told_and_where_the_kernel_does_not_tell_nothing_is():
    exported = Exported(snapshot)
    assert exported("homing_process_cpu_seconds_total") == 12.5
    assert exported("homing_process_resident_memory_bytes") == 2**27
    unknown = Exported(
        lambda: PoolSnapshot(
            candidates=make_candidates(0), process=ProcessSnapshot(cpu_s=1.0, resident_bytes=0)
        )
    )
    assert unknown("homing_process_resident_memory_bytes") is None


def test_each_late_timer_is_a_sample_of_the_lag(exported):
    exported.telemetry.loop_lagged([0.25, 0.15, 0.0])
    assert exported("homing_loop_lag_seconds_count") == 3
    assert exported("homing_loop_lag_seconds_bucket", le="0.2") == 2


def test_how_questions_for_tokens_ended_is_counted_by_who_was_asked():
    """With how long requests waited; those that did not wait are in no histogram."""
    exported = Exported(snapshot)
    exported.telemetry.tokens_asked("vllm", TokensResult.TIMEOUT, 0.02, 0)
    exported.telemetry.tokens_asked("vllm", TokensResult.MEDIA, 0.0, 0)
    value = exported.registry.get_sample_value
    timeouts = {"backend": "vllm", "result": "timeout"}
    assert value("homing_tokenize_requests_total", timeouts) == 1
    assert value("homing_tokenize_duration_seconds_count", {"backend": "vllm"}) == 1
    assert value("homing_tokenize_waiting", {"backend": "vllm"}) == 2
    labels = {"backend": "vllm", "result": "agrees"}
    assert value("homing_tokenize_compared_total", labels) == 7
    assert value("homing_tokenize_circuit_open", {"backend": "local"}) == 1


def test_a_first_token_is_late_or_early_by_so_much():
    """Two sums tell how expectation and truth compare over all of them."""
    exported = Exported(snapshot)
    for expected_s, observed_s in ((0.2, 0.5), (0.4, 0.1), (0.3, 0.3)):
        exported.telemetry.first_token_compared(expected_s, observed_s)
    value = exported.registry.get_sample_value
    assert value("homing_first_token_error_seconds_count", {"came": "later"}) == 2
    assert value("homing_first_token_error_seconds_count", {"came": "earlier"}) == 1
    assert value("homing_first_token_error_seconds_sum", {"came": "earlier"}) == pytest.approx(0.3)
    assert value("homing_first_token_expected_seconds_total") == pytest.approx(0.9)
    assert value("homing_first_token_observed_seconds_total") == pytest.approx(0.9)
