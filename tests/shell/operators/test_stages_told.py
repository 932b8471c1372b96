"""Operators see the route of a request and the endpoint of each stage."""

import asyncio

import msgspec
import pytest
import structlog
from aiohttp.test_utils import make_mocked_request
from msgspec import structs
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from epp.commands.decisions import _text
from epp.core.decision.account import Route
from epp.core.decision.explaining import REASON_HEADER, explained, explaining_headers
from epp.core.decision.inputs import PageScraped, PoolReplaced, ResponseStarted, Tick
from epp.core.decision.stages import Always, ByTime, Never, Order, Stages
from epp.core.journal.events import Responding
from epp.core.journal.witness import CaptureWitness, Sample
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S, prefill_work
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import Exchange
from epp.core.types import EndpointMetrics, KvTransfers
from epp.journal.decision_record import PACKED_FROM, Decided, unpack_decided
from epp.journal.past import NO_SETTING, PastDecision
from epp.plugins.added_time import AddedTime
from epp.plugins.filters import DecodeRole, PrefillRole
from epp.plugins.rollout import RolloutScreener
from epp.plugins.scorers import ActiveRequests
from epp.plugins.stage_time import DecodeTime, PrefillTime
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.decision_sums import Stretch
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.operators.decisions.recent_decisions import RecentDecisions, Wanted
from epp.shell.operators.live.live_view import Live, LivePrefills, LiveView
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.snapshot import pool_snapshot
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.observation import Observation
from epp.shell.operators.pages.debug_pages import DebugPages
from epp.shell.operators.pages.endpoint_rows import endpoint_rows
from epp.shell.operators.traces.tracing import _destination
from epp.shell.process.pressure import MemoryPressure
from tests.core.decision.staged import BOTH, DECODE, chat, of_role, pool_of, profile, scrape


def exchange_of(decision):
    made = Exchange(0.0, request=decision.account.request)
    made.decision = decision
    return made


def test_a_line_of_the_log_has_the_route_and_both_endpoints():
    decision = pool_of(["prefill", "decode"]).schedule(chat(512), 0.1)
    with capture_logs() as lines:
        DecisionLog(structlog.get_logger(), level="debug").decided(decision)
    (line,) = lines
    assert (line["endpoint"], line["route"]) == ("pod-1", "prefill-decode")
    assert line["uncached_tokens"] == 512
    assert line["prefill"]["endpoint"] == "pod-0"
    assert line["prefill"]["eliminated"] == {"prefill-filter": 1}
    assert line["prefill"]["scores"][0]["endpoint"] == "pod-0"


def test_a_span_has_the_route_and_both_endpoints():
    decision = pool_of(["prefill", "decode"]).schedule(chat(512), 0.1)
    found = _destination(decision.account)
    assert found["homing.endpoint"] == "pod-1"
    assert found["homing.route"] == "prefill-decode"
    assert found["homing.prefill.endpoint"] == "pod-0"


def test_routes_and_refusals_are_counted_by_stage():
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    observer = Observation(telemetry, DecisionLog(structlog.get_logger(), level="error"), None)
    made = pool_of(["prefill", "decode"])
    observer.decided(exchange_of(made.schedule(chat(), 0.1)))
    refusal = pool_of(["decode"]).schedule(chat(), 0.1)
    observer.refused(Exchange(0.0), refusal)
    telemetry.fold()

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("homing_routes_total", route="prefill-decode") == 1
    assert value("homing_stage_refusals_total", stage="prefill") == 1
    assert value("homing_refusals_total", reason="rejected-no-prefill-endpoints") == 1
    assert value("homing_filter_eliminated_total", filter="decode-filter") == 1


def test_the_end_of_a_prefill_is_captured():
    made = pool_of(["prefill", "decode"])
    notes = []
    made.witness = CaptureWitness(
        made, sample=Sample(1.0, 1), tell=notes.append, failed=raise_again
    )
    decision = made.schedule(chat(), 0.1)
    made.take(ResponseStarted(decision.lease), 0.2)
    assert notes[-1] == Responding(at_s=0.2, request=0)


def raise_again(error):
    raise error


class Recorded:
    """Recent decisions of a pool with a prefill and a decode endpoint."""

    def __init__(self, roles=("prefill", "decode"), stages=BOTH):
        self.scheduler = pool_of(list(roles), stages)
        self.recent = RecentDecisions(self.scheduler.pool)
        self.recent.configured(1, self.scheduler.settings)

    def decide(self, tokens=512, **fields):
        decision = self.scheduler.schedule(chat(tokens, **fields), 0.1)
        self.recent.decided(decision)
        return decision

    def rows(self, wanted=Wanted(), why_not=""):  # noqa: B008  it is immutable
        return asyncio.run(self.recent.rows(9, wanted, why_not))


def test_a_row_has_the_route_and_the_endpoint_of_each_stage():
    recorded = Recorded()
    recorded.decide()
    (row,) = recorded.rows()
    assert (row["endpoint"], row["route"], row["uncached_tokens"]) == (
        "pod-1",
        "prefill-decode",
        512,
    )
    assert row["prefill"]["endpoint"] == "pod-0"
    assert row["prefill"]["eliminated"] == {"prefill-filter": 1}
    assert row["prefill"]["score"]["parts"] == {"prefix-cache-scorer": 0.0}
    assert row["prefill"]["known"]["inflight_requests"] == 0
    assert "encode" not in row


def test_a_row_without_stages_has_no_route():
    recorded = Recorded(roles=("decode",), stages=Stages(decode=DECODE))
    recorded.decide()
    (row,) = recorded.rows()
    assert not {"route", "uncached_tokens", "prefill", "encode"} & row.keys()


def test_each_stage_is_shown_with_the_names_of_its_own_scorers():
    """Also if profiles alternate: their settings are recorded once each."""
    prefill = profile("prefill", PrefillRole(), scorers=[ActiveRequests()])
    recorded = Recorded(
        roles=("prefill", "prefill", "decode"),
        stages=Stages(decode=DECODE, prefill=prefill, prefill_if=Always()),
    )
    for _ in range(100):
        recorded.decide()
    row, *_ = recorded.rows()
    assert list(row["score"]["parts"]) == ["prefix-cache-scorer"]
    assert list(row["prefill"]["score"]["parts"]) == ["active-request-scorer"]
    assert row["prefill"]["runner_up"]["endpoint"] != row["prefill"]["endpoint"]
    assert len(recorded.recent._context.settings) == 2


def test_a_decision_is_explained_with_both_endpoints():
    recorded = Recorded()
    decision = recorded.decide()
    (row,) = recorded.rows()
    lines = explanation(row).splitlines()
    prefiller = decision.prefiller
    assert f"  routed to pod-1 at {decision.endpoint.address}" in lines
    assert "  route prefill-decode: 512 of 512 prompt tokens were not cached at pod-1" in lines
    assert f"  prefill at pod-0 at {prefiller.address}" in lines
    assert any(line.startswith("  pod-0 at that time: 0 waiting") for line in lines)


ADDED_TIME = profile("decode", DecodeRole(), scorers=[AddedTime()])
PREFILL_TIME = profile("prefill", PrefillRole(), scorers=[PrefillTime()])
DECODE_TIME = profile("decode", DecodeRole(), scorers=[DecodeTime()])
ELSEWHERE = Stages(decode=ADDED_TIME, prefill=PREFILL_TIME, prefill_if=Always())


def prefill_s(tokens):
    """Return the time of a prompt without cached tokens after another of the same length."""
    return (tokens + prefill_work(tokens, tokens)) / PREFILL_TOKENS_PER_S


def second_decision(recorded, tokens):
    """Return the second of two decisions for other prompts at the same time."""
    recorded.decide(tokens, text=b"b")
    return recorded.decide(tokens, text=b"c")


def test_the_first_token_is_expected_after_the_prefill_elsewhere():
    """The prefill endpoint has another prompt to compute first. The decode endpoint computes none,
    and its load is no part of the expectation.
    """
    recorded = Recorded(stages=ELSEWHERE)
    decision = second_decision(recorded, 6_400)
    assert decision.account.route is Route.PREFILL_DECODE
    expected_s = prefill_s(6_400)
    (row, _) = recorded.rows()
    assert row["expected_first_token_s"] == pytest.approx(expected_s, abs=1e-6)
    assert f"first token expected after {expected_s:.3g} s" in explanation(row)
    ended = exchange_of(decision)
    ended.first_output_at_s = 2.0
    recorded.recent.completed(ended, Outcome(status=200), 3.0)
    assert recorded.recent.first_tokens() == [(pytest.approx(expected_s), 2.0)]


def test_the_first_token_of_a_prefill_at_the_decode_endpoint_is_expected_as_before():
    stages = structs.replace(ELSEWHERE, prefill_if=Never())
    recorded = Recorded(roles=("decode",), stages=stages)
    recorded.decide(6_400)
    (row,) = recorded.rows()
    own_s = row["costs"][0]["endpoints"][0]["parts"]["prefill"]
    assert row["expected_first_token_s"] == pytest.approx(own_s)
    assert own_s == pytest.approx(prefill_work(6_400, 6_400) / PREFILL_TOKENS_PER_S, abs=1e-6)


def test_the_client_is_told_the_first_token_after_the_prefill_elsewhere():
    made = pool_of(["prefill", "decode"], ELSEWHERE)
    made.schedule(chat(6_400, text=b"b"), 0.1)
    decision = made.schedule(chat(6_400, text=b"c"), 0.1)
    noted = explained(decision.leg, {}, decision.earlier)
    reason = explaining_headers(noted, made.failures)[REASON_HEADER]
    assert f"first token expected after {prefill_s(6_400):.3g} s" in reason


@pytest.mark.parametrize("running", [0.0, 20.0])
def test_the_default_by_role_shows_its_costs_in_seconds(running):
    """A remote prefill and its transfer are parts of the cost if they take less time."""
    stages = Stages(
        decode=DECODE_TIME, prefill=PREFILL_TIME, prefill_if=ByTime(), order=Order.PREFILL_FIRST
    )
    recorded = Recorded(roles=("prefill", "decode", "decode"), stages=stages)
    recorded.scheduler.placements.keeps_costs = True
    scrape(recorded.scheduler, 0.05, running_requests=running)
    decision = recorded.decide(6_400)
    (row,) = recorded.rows()
    (cost,) = row["costs"]
    assert (cost["scorer"], cost["unit"]) == ("decode-time-scorer", "s")
    for endpoint in cost["endpoints"]:
        assert endpoint["total"] == pytest.approx(sum(endpoint["parts"].values()), abs=1e-5)
    parts = cost["endpoints"][0]["parts"]
    remote = decision.prefiller is not None
    assert remote == bool(running)
    assert (parts["remote prefill"] > 0, parts["KV transfer"] > 0) == (remote, remote)
    assert (parts["prefill"] > 0) != remote
    waits = ("queue", "prefill", "adapter", "remote prefill", "KV transfer")
    expected_s = sum(parts[name] for name in waits)
    assert row["expected_first_token_s"] == pytest.approx(expected_s, abs=1e-5)


def test_a_prefill_endpoint_is_found_and_was_chosen():
    recorded = Recorded()
    recorded.decide()
    (row,) = recorded.rows(Wanted(endpoint="pod-0"), "pod-0")
    assert row["why_not"] == {"endpoint": "pod-0", "verdict": "chosen", "stage": "prefill"}
    assert "why not pod-0: it was chosen for stage prefill" in explanation(row)


def test_a_record_without_stages_of_an_earlier_version_is_read():
    """The fields for stages and those after them have defaults."""
    decided = Decided(
        *(1, 1, "r", "m", 0, 512, None, "pod-1", "10.0.0.1:8000", (), 0, 8, 64, 2, {}, 1, [0.0]),
        *(512.0, (), 0, 0),
    )
    packed = msgspec.msgpack.encode(decided)
    fields = msgspec.msgpack.decode(packed)
    first = Decided.__struct_fields__.index("route")
    assert Decided.__struct_fields__[first : first + 3] == ("route", "uncached_tokens", "earlier")
    assert unpack_decided(msgspec.msgpack.encode(fields[:first])) == decided


def test_recorded_decisions_are_listed_with_both_endpoints():
    recorded = Recorded()
    recorded.decide(request_id="r-1", model="")
    told = asyncio.run(first_record(recorded))
    past = PastDecision(
        at_s=1.0, picker="", told=told, setting=NO_SETTING, states={}, leg_settings=(NO_SETTING,)
    )
    head, line = _text(Stretch(0.0, 2.0), [past], 0).splitlines()[-2:]
    assert " endpoint  prefill  encode  route " in head
    assert line.split()[1:] == [
        *("-", "r-1", "-", "pod-1", "pod-0", "-", "prefill-decode", "0/8", "-", "-", "-")
    ]


async def first_record(recorded):
    records = [record async for record in recorded.recent._newest_first()]
    return unpack_decided(records[0][PACKED_FROM:])


class Pages:
    """The debug pages of a pool with a prefill and a decode endpoint."""

    def __init__(self):
        self.recorded = Recorded()
        scheduler = self.scheduler = self.recorded.scheduler
        self.states = EndpointStates(scheduler)
        self.pages = DebugPages(scheduler, self.recorded.recent, lambda: (None, 1), self.states)

    def explained(self, request_id):
        """Return the text of /debug/explain."""
        query = f"/debug/explain?request_id={request_id}"
        answer = asyncio.run(self.pages._explain_page(make_mocked_request("GET", query)))
        return answer.text

    def rows(self, now=1.0):
        return endpoint_rows(self.scheduler, self.states, now)


def test_explain_names_the_pair_whose_prefills_hang():
    """Also for another request of that pair, and only for pairs."""
    made = Pages()
    made.recorded.decide(request_id="first")
    assert "overdue" not in made.explained("first")
    made.scheduler.take(Tick(), 60.1)
    made.recorded.decide(request_id="second")
    for request_id in ("first", "second"):
        assert (
            "overdue: 1 prefills at pod-0 for pod-1 neither ended nor failed within 60 s"
            in made.explained(request_id)
        )
    assert [row["overdue_prefills"] for row in made.rows(60.2)] == [1, 1]


def test_the_page_of_endpoints_has_the_transfers_of_kv_caches():
    """Only if an engine reports any."""
    made = Pages()
    assert "kv_received_tokens" not in made.rows()[0]
    assert "overdue_prefills" not in made.rows()[0]
    told = KvTransfers(received_tokens=512.0, failed=1.0)
    made.scheduler.take(PageScraped(1, EndpointMetrics(waiting_requests=0.0, transfers=told)), 1.0)
    prefill, decode = made.rows()
    assert (decode["kv_received_tokens"], decode["kv_transfers_failed"]) == (512.0, 1.0)
    assert decode["kv_transfers_expired"] is None
    assert prefill["kv_received_tokens"] is None
    assert decode["kv_link_bytes_per_s"] is None


def test_the_page_of_endpoints_has_the_measured_speeds_of_kv_transfers():
    made = Pages()
    for ended in (0.0, 2.0):
        told = KvTransfers(received_bytes=ended * 1e9, ended=ended, ended_s=ended * 0.4)
        page = EndpointMetrics(waiting_requests=0.0, transfers=told)
        made.scheduler.take(PageScraped(1, page), 1.0 + ended)
    prefill, decode = made.rows()
    assert (decode["kv_transfers_ended"], decode["kv_transfers_ended_s"]) == (2.0, 0.8)
    assert decode["kv_link_bytes_per_s"] == 5e9
    assert prefill["kv_link_bytes_per_s"] is None


REVISION = "disaggregatedset.x-k8s.io/revision"
SET_ROLE = "disaggregatedset.x-k8s.io/role"


def test_operators_see_which_revisions_are_screened():
    """The share of each revision, and how many endpoints the screener dropped."""
    gating = {"mode": "sum", "requireRoles": {"values": ["prefill", "decode"]}}
    screener = msgspec.convert({"revisionGating": gating}, RolloutScreener)
    made = pool_of([], structs.replace(BOTH, screen=profile("screen", screener)))
    revisions = [("a", "prefill"), ("a", "decode"), ("b", "decode")]
    members = [
        of_role(at, role, address=f"10.0.0.{at}:8000") for at, (_, role) in enumerate(revisions)
    ]
    members = [
        structs.replace(one, labels=one.labels | {REVISION: revision, SET_ROLE: role})
        for one, (revision, role) in zip(members, revisions, strict=True)
    ]
    made.take(PoolReplaced(members), 0.0)
    scrape(made, 0.0)
    shown = pool_snapshot(made, "", BodyBudget(1), MemoryPressure(1), None, 0.1)
    assert shown.revision_shares == {"a": 1.0, "b": 0.0}
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    observer = Observation(telemetry, DecisionLog(structlog.get_logger(), level="error"), None)
    decision = made.schedule(chat(), 0.1)
    assert decision.leg.eliminated == {RolloutScreener.type_name: 1, "decode-filter": 1}
    observer.decided(exchange_of(decision))
    telemetry.fold()
    dropped = registry.get_sample_value(
        "homing_filter_eliminated_total", {"filter": RolloutScreener.type_name}
    )
    assert dropped == 2, "once in each stage"


async def test_the_live_view_shows_prefills_in_flight_by_pair():
    made = pool_of(["prefill", "decode", "decode"], BOTH)
    view = LiveView(
        made,
        RecentDecisions(made.pool),
        ConfigurationChanges(),
        EndpointStates(made),
        clock=lambda: 1.0,
    )
    first, second = made.schedule(chat(), 0.1), made.schedule(chat(), 0.1)
    assert {first.endpoint.name, second.endpoint.name} == {"pod-1"}
    shown = msgspec.json.decode(await view.look(), type=Live)
    assert shown.prefills == [LivePrefills(prefill="pod-0", decode="pod-1", requests=2)]
