"""What sessions and streams tell, as numbers and lines."""

import pytest
import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry

from epp.core.decision.profile import Scored
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.pool import EndpointPool
from epp.core.protocol.messages import BodyMode
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.protocol.usage import Usage
from epp.core.types import Refusal, RefusalReason
from epp.shell.gateway.calls import Cut
from epp.shell.operators import observation
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.observation import Observation
from tests.shell.operators.decided import make_decision, make_endpoints, make_request

LLAMA = {"model_name": "llama", "target_model_name": "llama", "priority": "0"}
ALIAS = LLAMA | {"model_name": "alias"}
NOW_S = 1_000.0


class Observed:
    """An observation, its metrics and its decision lines, at 1000.0 s."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.lines = []
        self.answered = []
        log = DecisionLog(self, level="debug")
        self.picked = []
        self.served = []
        telemetry = Telemetry(self.registry)
        telemetry.endpoints_replaced(make_endpoints(4))
        self.observation = Observation(
            telemetry,
            log,
            answered=self.answered.append,
            picked=self.picked.append,
            served=lambda *told: self.served.append(told),
        )

    def debug(self, event, **line):
        self.lines.append(event)

    info = debug

    def __call__(self, name, /, **labels):
        return self.registry.get_sample_value(f"homing_{name}", labels)


@pytest.fixture
def observed(monkeypatch):
    monkeypatch.setattr(observation.time, "monotonic", lambda: NOW_S)
    return Observed()


def exchange(*, decision=True, **fields):
    """Began 3 s ago; what is answered now came 1 s ago."""
    made = Exchange(NOW_S - 3)
    made.answered_at_s = NOW_S - 1
    if decision:
        made.decision = make_decision()
        made.request = made.decision.lease.request
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_decision_is_counted_timed_and_logged(observed):
    """Scheduling from the message that was answered, processing from the first."""
    observed.observation.decided(exchange(request_bytes=700))
    assert observed("request_total", **LLAMA) == 1
    assert observed("scheduler_e2e_duration_seconds_sum") == 1
    assert observed("request_processing_duration_seconds_sum") == 3
    assert observed("request_size_bytes_sum", **LLAMA) == 700
    assert observed.lines == ["decision"]


def test_what_the_scorers_gave_is_worked_out_once(observed, monkeypatch):
    """For the numbers and for the page of decisions alike."""
    asked = []
    parts_of = Scored.parts_of

    def counting(scored, position):
        asked.append(position)
        return parts_of(scored, position)

    monkeypatch.setattr(Scored, "parts_of", counting)
    recent, registry = RecentDecisions(EndpointPool()), CollectorRegistry()
    silent = DecisionLog(observed, level="error")
    Observation(Telemetry(registry), silent, recent).decided(exchange())
    assert len(recent) == 1
    sums = {"scorer": "prefix-cache-scorer"}
    assert registry.get_sample_value("homing_scorer_contribution_sum", sums) == 3.0
    assert asked == [3]


def test_a_rewritten_model_is_counted_under_both_names(observed):
    """What the client asked for, and what serves it."""
    routed = exchange(incoming_model="alias")
    observed.observation.decided(routed)
    assert observed("request_running", **ALIAS) == 1
    observed.observation.completed(routed, Outcome(), NOW_S)
    assert observed("request_running", **ALIAS) == 0
    assert observed("request_total", **ALIAS) == 1
    assert observed("request_total", **LLAMA) is None


@pytest.mark.parametrize(
    ("outcome", "known", "told"),
    [
        (Outcome(status=200), True, True),
        (Outcome(status=200), False, False),
        (Outcome(status=200, by_gateway=True), True, False),
        (Outcome(status=200, ending=Ending.CLIENT_LEFT), True, False),
        (Outcome(status=503), True, False),
        (Outcome(), True, False),
    ],
)
def test_what_was_served_to_its_end_is_told(observed, outcome, known, told):
    """With who served it."""
    where = make_endpoints(1)[0] if known else None
    one = exchange(endpoint=where)
    observed.observation.completed(one, outcome, NOW_S)
    assert observed.served == ([(one.decision.lease.request, where, NOW_S)] if told else [])


def test_deciding_without_the_body_is_counted_by_its_mode(observed):
    """An operator can see that the gateway hides bodies."""
    observed.observation.decided(exchange(unseen_body=BodyMode.STREAMED))
    observed.observation.decided(exchange())
    assert observed("scheduled_without_prefix_total", mode="streamed") == 1


@pytest.mark.parametrize("parsed", [False, True])
def test_a_refusal_is_counted_with_what_is_known(observed, parsed):
    """A body that cannot be read has no model, and took no scheduling."""
    refusal = Refusal(reason=RefusalReason.SATURATED, status=429, message="no")
    request = make_request() if parsed else None
    observed.observation.refused(exchange(decision=False, request=request), refusal)
    assert observed("refusals_total", reason="rejected-saturated") == 1
    assert observed("scheduler_e2e_duration_seconds_count") == (1 if parsed else 0)
    labels = LLAMA if parsed else dict.fromkeys(LLAMA, "") | {"priority": "0"}
    assert observed("request_total", **labels) == 1
    assert observed.lines == ["refusal"]


def test_a_stream_that_fails_is_counted_by_its_reason(observed):
    """Before it was routed, and after: then its lease ends without another error."""
    observed.observation.failed(exchange(decision=False), StreamFailure.MALFORMED)
    nameless = dict.fromkeys(LLAMA, "") | {"priority": "0"}
    assert observed("request_error_total", error_code="malformed-message", **nameless) == 1
    assert observed("request_total", **nameless) == 1
    routed = exchange(failure=StreamFailure.INTERNAL)
    observed.observation.decided(routed)
    observed.observation.failed(routed, StreamFailure.INTERNAL)
    observed.observation.completed(routed, Outcome(ending=Ending.CLIENT_LEFT), NOW_S)
    assert observed("request_error_total", error_code="internal", **LLAMA) == 1
    assert observed("request_error_total", error_code="client-disconnect", **LLAMA) is None
    assert observed("request_total", **LLAMA) == 1


def test_who_is_cut_by_a_drain_did_not_leave(observed):
    """What ends after the cut is counted as that, once."""
    routed = exchange()
    observed.observation.decided(routed)
    observed.observation.drain_cut(1)
    observed.observation.completed(routed, Outcome(ending=Ending.CLIENT_LEFT), NOW_S)
    nameless = dict.fromkeys(LLAMA, "") | {"priority": "0"}
    assert observed("request_error_total", error_code="drain-cut", **nameless) == 1
    assert observed("request_error_total", error_code="client-disconnect", **LLAMA) is None


def test_telemetry_that_fails_fails_no_request(observed, monkeypatch):
    """Whatever is told: counted each time, logged once a second."""

    def broken(*_, **__):
        raise ZeroDivisionError

    for name in [name for name in vars(Telemetry) if not name.startswith("_")]:
        if name != "telemetry_failed":
            monkeypatch.setattr(Telemetry, name, broken)
    told, routed = observed.observation, exchange(response_started_at_s=NOW_S)
    refusal = Refusal(reason=RefusalReason.SATURATED, status=429, message="no")
    (endpoint,) = make_endpoints(1)
    with structlog.testing.capture_logs() as lines:
        told.decided(routed)
        told.refused(routed, refusal)
        told.failed(routed, StreamFailure.INTERNAL)
        told.response_started(routed)
        told.completed(routed, Outcome(), NOW_S)
        told.set_aside(endpoint)
        told.unknown_body_mode(9)
        told.protocol_violated("routed", "RequestHeaders")
        told.stream_closed("OK", 1.0)
        told.drain_cut(1)
    events = ["decided", "refused", "failed", "response_started", "completed", "set_aside"]
    events += ["unknown_body_mode", "protocol_violated", "stream_closed"]
    assert {observed("telemetry_failures_total", event=event) for event in events} == {1}
    (line,) = lines
    assert (line["telling"], line["log_level"]) == ("decided", "error")


def test_response_headers_are_timed_from_the_request(observed):
    """Only where they were seen."""
    observed.observation.response_started(exchange(response_started_at_s=NOW_S - 1))
    observed.observation.response_started(exchange())
    assert observed("response_headers_seconds_count") == 1
    assert observed("response_headers_seconds_sum") == 2


@pytest.mark.parametrize(
    ("status", "alive"), [(200, True), (400, True), (500, True), (503, False), (None, False)]
)
def test_an_endpoint_that_served_is_told(observed, status, alive):
    """A gateway says 502, 503 and 504 of one that does not; those of an engine are no great proof."""
    served = exchange(status=status, response_started_at_s=NOW_S)
    observed.observation.response_started(served)
    observed.observation.response_started(exchange(decision=False, status=200))
    assert observed.answered == [served.decision.endpoint] * alive


def test_what_ends_tells_what_was_seen_of_it(observed):
    """Time to first token, tokens and duration of a response that was parsed."""
    usage = Usage(prompt_tokens=700, completion_tokens=9, cached_tokens=128)
    seen = exchange(first_output_at_s=NOW_S - 1, usage=usage)
    observed.observation.decided(seen)
    observed.observation.completed(seen, Outcome(status=200), NOW_S + 1)
    assert observed("request_ttft_seconds_sum", **LLAMA) == 2
    assert observed("request_output_tokens_sum", **LLAMA) == 9
    assert observed("request_cached_tokens_sum", **LLAMA) == 128
    assert observed("request_duration_seconds_sum", **LLAMA) == 4


def test_what_ends_is_told_of_who_got_it(observed):
    """Time to first token of a stream only; nothing, if somebody else got it whom nobody knows."""
    pod = {"endpoint_name": "vllm-3", "namespace": "prod", "port": "8000"}
    for stream in (True, False):
        seen = exchange(response_started_at_s=NOW_S - 2, first_output_at_s=NOW_S - 1)
        lease = seen.decision.lease
        lease.request = structs.replace(lease.request, stream=stream)
        seen.endpoint = seen.decision.endpoint
        observed.observation.completed(seen, Outcome(status=500), NOW_S)
    observed.observation.completed(exchange(status=200), Outcome(status=200), NOW_S)
    left = exchange(endpoint=seen.decision.endpoint)
    observed.observation.completed(left, Outcome(ending=Ending.CLIENT_LEFT), NOW_S)
    observed.observation._telemetry.fold()
    assert observed("per_endpoint_response_headers_seconds_sum", **pod) == 2
    assert observed("per_endpoint_ttft_seconds_sum", **pod) == 2
    assert observed("per_endpoint_request_duration_seconds_sum", **pod) == 6
    assert observed("per_endpoint_error_total", status="5xx", **pod) == 2
    assert observed("per_endpoint_prompt_tokens_total", **pod) == 3 * 700
    assert observed("per_endpoint_predicted_hit_tokens_total", **pod) == 3 * 3 * 64


def test_what_was_not_seen_is_not_counted(observed):
    """No zeros where nothing was measured; the duration is always known."""
    unseen = exchange()
    observed.observation.decided(unseen)
    observed.observation.completed(unseen, Outcome(ending=Ending.UNSEEN), NOW_S)
    assert observed("request_duration_seconds_count", **LLAMA) == 1
    assert observed("request_ttft_seconds_count", **LLAMA) is None
    assert observed("request_output_tokens_count", **LLAMA) is None


def test_an_endpoint_that_is_set_aside_is_counted_and_logged(observed):
    """By its name."""
    (endpoint,) = make_endpoints(1)
    with structlog.testing.capture_logs() as lines:
        observed.observation.set_aside(endpoint)
    ((line),) = lines
    assert (line["endpoint"], line["log_level"]) == ("prod/vllm-0", "warning")
    labels = {"endpoint_name": "vllm-0", "namespace": "prod", "port": "8000"}
    assert observed("set_aside_total", **labels) == 1


def test_a_stream_that_was_not_looked_at_is_counted_as_a_request_that_failed(observed):
    """By its reason, without a model; the log has its line."""
    refusal = Refusal(reason=RefusalReason.OVERLOADED, status=503, message="no")
    observed.observation.stream_shed(refusal)
    unknown = dict.fromkeys(LLAMA, "") | {"priority": "0"}
    assert observed("refusals_total", reason="rejected-overloaded") == 1
    assert observed("request_total", **unknown) == 1
    assert observed("request_error_total", **unknown, error_code="rejected-overloaded") == 1
    assert observed.lines == ["refusal"]


def test_usage_that_the_gateway_hides_is_warned_of_once(observed):
    """And counted each time; the line names the other half of the setting."""
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            observed.observation.usage_unseen()
    ((line),) = lines
    assert line["log_level"] == "warning"
    assert "--parse-response-usage" in line["event"]
    assert "response_body_mode" in line["event"]
    assert observed("response_usage_unseen_total") == 3


def test_a_gateway_that_shows_no_responses_is_warned_of(observed):
    """Because then nobody is set aside, and nobody would know why."""
    with structlog.testing.capture_logs() as lines:
        observed.observation.responses_unseen()
    ((line),) = lines
    assert line["log_level"] == "warning"
    assert "response_header_mode" in line["event"]
    assert observed("gateways_without_responses_total") == 1


def test_streams_and_what_goes_wrong_in_them_are_counted(observed):
    """Ended ones by their code, breaches of the protocol, unknown modes, the cut."""
    told = observed.observation
    told.stream_closed("CANCELLED", 2.5)
    told.unknown_body_mode(9)
    told.protocol_violated("routed", "RequestHeaders")
    told.connection_cut(Cut.RESETS)
    told.drain_cut(1)
    assert observed("extproc_streams_total", code="CANCELLED") == 1
    assert observed("extproc_stream_duration_seconds_sum") == 2.5
    assert observed("unknown_body_mode_total", mode="9") == 1
    assert observed("protocol_violations_total", phase="routed", event="RequestHeaders") == 1
    assert observed("extproc_connections_cut_total", reason="resets") == 1
    assert observed("extproc_connections_cut_total", reason="evicted") == 0
    assert observed("drain_cut_streams_total") == 1


def test_a_body_that_could_not_be_read_is_counted_by_its_reason(observed):
    """By the path that a parser claims, or by the kind of the request."""
    one = exchange(unparsed="encoding-corrupt", unparsed_api="responses")
    observed.observation.decided(one)
    observed.observation.decided(exchange(unparsed="anything"))
    observed.observation.decided(exchange())
    corrupt = {"api": "responses", "reason": "encoding-corrupt"}
    assert observed("requests_unparsed_total", **corrupt) == 1
    kind = one.decision.lease.request.api.value
    assert observed("requests_unparsed_total", api=kind, reason="anything") == 1


def test_who_is_picked_is_told_at_once_and_a_body_that_passed_is_counted(observed):
    """The scraper is to look there soon; the operator, at the memory."""
    passed = exchange(passed_unread=True)
    observed.observation.decided(passed)
    assert observed.picked == [passed.decision.endpoint]
    assert observed("scheduled_without_prefix_total", mode="memory") == 1
