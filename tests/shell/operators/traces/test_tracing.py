"""What a span tells of a request, and what it does not; from real streams and real decisions."""

import time

import pytest
import structlog
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from epp.core.knowledge.inflight import Ending
from epp.core.protocol.session import SessionSettings, StreamFailure
from epp.shell.gateway.codec import _kept_headers, _round_own
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.traces.span_export import SpanExport
from epp.shell.operators.traces.tracing import TEXT_CHARACTERS_MAX, TracedObservation, Tracer
from tests import gateway as gw
from tests.test_hermetic import pods

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
SECRET = "c4n4ry"
MODES = gw.protocol(gw.FULL_DUPLEX, gw.STREAMED)
RATIO = ("parentbased_traceidratio", "0")


class Traced:
    """An observation that traces, and the spans that it ended."""

    def __init__(self, *, queue_spans_max=100):
        self.registry = CollectorRegistry()
        self.export = SpanExport(
            SpanExporter(), queue_spans_max=queue_spans_max, batch_spans_max=queue_spans_max
        )
        tracer = Tracer(self.export, instance="epp-0", namespace="prod")
        log = DecisionLog(structlog.get_logger(), level="warning")
        self.observation = TracedObservation(tracer, Telemetry(self.registry), log)

    def stream(self, pool=None, **fields):
        made = pool or pods((0, 0.1), (5, 0.5))
        return gw.Stream(made, told=self.observation, now=time.monotonic(), **fields)

    def request(self, body=None, *, modes=MODES, pool=None, settings=None, **headers):
        """(the answer to the headers, the stream) of a completion."""
        stream = self.stream(pool, settings=settings)
        named = gw.COMPLETIONS | {name.replace("_", "-"): at for name, at in headers.items()}
        answers = stream.send(
            gw.request_headers(named, modes=modes), gw.request_body(body or gw.prompt("hello"))
        )
        return answers[0], stream

    @property
    def spans(self):
        return list(self.export._queue)

    @property
    def span(self):
        (span,) = self.spans
        return span


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("SAMPLER", "SAMPLER_ARG"):
        monkeypatch.delenv(f"OTEL_TRACES_{name}", raising=False)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sampler(monkeypatch):
    def choose(name, argument=""):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)

    return choose


def parts(traceparent):
    """(trace id, span id, whether it is sampled)"""
    version, trace_id, span_id, flags = traceparent.split("-")
    assert version == "00"
    return trace_id, span_id, bool(int(flags, 16) & 1)


def test_the_span_of_a_request_tells_where_it_went_and_why():
    """The destination and how it ended as attributes, the reasons as an event."""
    traced = Traced()
    answer, stream = traced.request(traceparent=SAMPLED)
    stream.now += 0.5
    stream.send(gw.response_headers(200))
    stream.now += 0.5
    stream.send(gw.response_body(b"data", end=False))
    stream.now += 1
    stream.send(gw.response_body(b"", end=True))
    stream.close()
    span = traced.span
    assert span.name == "homing.route"
    told = dict(span.attributes)
    assert gw.destination(answer) == f"{told['server.address']}:{told['server.port']}"
    assert told["gen_ai.request.model"] == "my-model"
    assert told["homing.decision"] == 1
    assert told["http.response.status_code"] == 200
    assert told["homing.ending"] == "complete"
    events = {event.name: event for event in span.events}
    assert list(events) == ["homing.decided", "homing.response_headers", "homing.first_output"]
    why = dict(events["homing.decided"].attributes)
    scores = {name: part for name, part in why.items() if name.startswith("homing.score.")}
    assert sum(scores.values()) == pytest.approx(why["homing.score"])
    assert why["homing.candidates"] == 2
    assert why["homing.runner_up.score"] <= why["homing.score"]
    assert why["homing.runner_up"] != told["homing.endpoint"]
    seconds = (events["homing.response_headers"].timestamp - span.start_time) / 1e9
    assert seconds == pytest.approx(0.5, abs=1e-3)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2, abs=1e-3)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "homing-epp"
    assert span.resource.attributes["service.instance.id"] == "epp-0"


def test_the_model_servers_span_will_be_a_child_of_ours_and_ours_of_the_gateways():
    """By the header that comes and the one that goes on."""
    traced = Traced()
    answer, stream = traced.request(traceparent=SAMPLED, tracestate="vendor=kept")
    trace_id, span_id, sampled = parts(gw.set_headers(answer)["traceparent"])
    assert "tracestate" not in gw.removed_headers(answer)
    stream.close()
    span = traced.span
    assert (trace_id, sampled) == (TRACE_ID, True)
    assert span_id == f"{span.context.span_id:016x}"
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.parent.is_remote


@pytest.mark.parametrize(
    ("mode", "answer"), [(gw.BUFFERED, 1), (gw.NONE, 0)], ids=["buffered", "at the headers"]
)
def test_the_header_goes_with_the_destination_in_every_body_mode(mode, answer):
    traced = Traced()
    stream = traced.stream()
    answers = stream.send(
        gw.request_headers(gw.COMPLETIONS | {"traceparent": SAMPLED}, modes=gw.protocol(mode)),
        gw.request_body(gw.prompt("hello")),
    )
    assert parts(gw.set_headers(answers[answer])["traceparent"])[0] == TRACE_ID


@pytest.mark.parametrize(
    "traceparent",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", SAMPLED + "-more", "0" * 100_000, "ÿ" * 55],
    ids=["none", "nonsense", "no trace", "too long for its version", "hostile", "no ASCII"],
)
def test_without_a_parent_that_can_be_read_a_trace_begins(traceparent):
    """And the state that belonged to what could not be read does not go on."""
    traced = Traced()
    headers = {"traceparent": traceparent} if traceparent else {}
    answer, stream = traced.request(tracestate=f"vendor={SECRET}", **headers)
    trace_id, _, sampled = parts(gw.set_headers(answer)["traceparent"])
    assert trace_id != TRACE_ID
    assert sampled
    assert "tracestate" in gw.removed_headers(answer)
    stream.close()
    assert traced.span.parent is None


def test_what_the_parent_does_not_sample_is_not_sampled():
    """Nothing is exported, and the model server hears it too."""
    traced = Traced()
    answer, stream = traced.request(traceparent=UNSAMPLED)
    stream.close()
    assert parts(gw.set_headers(answer)["traceparent"])[::2] == (TRACE_ID, False)
    assert traced.spans == []


def test_a_ratio_samples_roots_and_parents_win(sampler):
    """By the trace id alone, so that every service decides alike."""
    sampler("parentbased_traceidratio", "0.25")
    traced = Traced()
    pool = pods((0, 0.1))
    answers = [traced.request(pool=pool)[0] for _ in range(200)]
    sampled = [parts(gw.set_headers(answer)["traceparent"])[2] for answer in answers]
    assert 20 < sum(sampled) < 90
    sampler(*RATIO)
    traced = Traced()
    assert not parts(gw.set_headers(traced.request()[0])["traceparent"])[2]
    _, stream = traced.request(traceparent=SAMPLED)
    stream.close()
    assert len(traced.spans) == 1


def test_what_the_header_says_of_a_root_is_what_becomes_of_it(sampler):
    """A part of them is sampled: those alone make spans, of the very traces that the headers name."""
    sampler("parentbased_traceidratio", "0.5")
    traced = Traced(queue_spans_max=400)
    told = []
    for _ in range(400):
        answer, stream = traced.request()
        told.append(parts(gw.set_headers(answer)["traceparent"]))
        stream.close()
    assert (
        len({trace_id for trace_id, _, _ in told})
        == len({span_id for _, span_id, _ in told})
        == 400
    )
    sampled = [(trace_id, span_id) for trace_id, span_id, is_sampled in told if is_sampled]
    # 400 draws of one half are within these bounds but for one time in 10^9.
    assert 138 < len(sampled) < 262
    made = [(f"{one.context.trace_id:032x}", f"{one.context.span_id:016x}") for one in traced.spans]
    assert made == sampled


def test_replicas_with_the_same_seed_make_different_traces():
    """Ids are not of the dice that decisions are repeated with."""
    sent = {gw.set_headers(Traced().request()[0])["traceparent"] for _ in range(3)}
    assert len({parts(traceparent)[0] for traceparent in sent}) == 3


@pytest.mark.parametrize(
    ("body", "pool", "attributes", "failed"),
    [
        (b"{", None, {"homing.refusal": "bad-request", "http.response.status_code": 400}, False),
        (
            None,
            (),
            {"homing.refusal": "rejected-no-endpoints", "http.response.status_code": 503},
            True,
        ),
    ],
    ids=["of the client", "of ours"],
)
def test_a_refusal_is_a_span_too(body, pool, attributes, failed):
    """An error where it is not the client's fault."""
    traced = Traced()
    made = None if pool is None else pods(*pool)
    _, stream = traced.request(body, pool=made, traceparent=SAMPLED)
    stream.close()
    span = traced.span
    assert attributes.items() <= dict(span.attributes).items()
    assert (span.status.status_code is StatusCode.ERROR) == failed
    assert f"{span.parent.span_id:016x}" == PARENT_ID


def test_a_stream_that_breaks_is_a_span_with_its_reason():
    """Before a decision at once, after one when the stream ends."""
    traced = Traced()
    stream = traced.stream()
    stream.send(gw.request_headers(gw.COMPLETIONS | {"traceparent": SAMPLED}))
    stream.send(gw.request_headers())
    stream.close()
    assert traced.span.attributes["error.type"] == StreamFailure.VIOLATION.value
    traced = Traced()
    _, stream = traced.request(traceparent=SAMPLED)
    stream.session.failed(StreamFailure.INTERNAL)
    assert traced.spans == []
    stream.close()
    assert traced.span.attributes["error.type"] == StreamFailure.INTERNAL.value


@pytest.mark.parametrize(("status", "failed"), [(200, False), (404, False), (503, True)])
def test_an_engine_that_fails_makes_a_span_that_failed(status, failed):
    traced = Traced()
    _, stream = traced.request()
    stream.send(gw.response_headers(status, end=True))
    stream.close()
    assert (traced.span.status.status_code is StatusCode.ERROR) == failed
    assert traced.span.attributes.get("error.type") == (str(status) if failed else None)


def test_a_client_that_leaves_is_no_error():
    traced = Traced()
    _, stream = traced.request()
    stream.send(gw.response_headers(200))
    stream.close()
    assert traced.span.attributes["homing.ending"] == Ending.CLIENT_LEFT.value
    assert traced.span.status.status_code is StatusCode.UNSET


def test_usage_is_told_where_it_was_read():
    traced = Traced()
    _, stream = traced.request(settings=SessionSettings(parse_response_usage=True))
    usage = {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    stream.send(gw.response_headers(200, content_type="application/json"))
    stream.send(gw.response_body(gw.json.dumps({"usage": usage}).encode()))
    stream.close()
    told = traced.span.attributes
    assert (told["gen_ai.usage.output_tokens"], told["homing.cached_tokens"]) == (7, 3)


def test_a_full_queue_makes_no_span_at_all():
    """It is dropped before its attributes are put together, and no histogram names its trace."""
    traced = Traced(queue_spans_max=1)
    for _ in range(3):
        _, stream = traced.request()
        stream.close()
    assert len(traced.spans) == 1
    assert traced.export.dropped == 2
    kept = f"{traced.spans[0].context.trace_id:032x}"
    page = generate_latest(traced.registry).decode()
    assert {
        line.partition('trace_id="')[2][:32] for line in page.splitlines() if "# {" in line
    } == {kept}


def test_histograms_name_traces_in_openmetrics():
    """With the value that was observed, in the bucket that it is in."""
    traced = Traced()
    _, stream = traced.request(traceparent=SAMPLED)
    stream.now += 0.04
    stream.send(gw.response_headers(200, end=True))
    stream.close()
    page = generate_latest(traced.registry).decode()
    named = [line for line in page.splitlines() if TRACE_ID in line]
    assert {line.partition("{")[0] for line in named} == {
        "homing_response_headers_seconds_bucket",
        "homing_request_duration_seconds_bucket",
    }
    assert all('le="0.05"' in line for line in named)
    assert all(0.039 < float(line.split("} ")[2].split()[0]) < 0.05 for line in named)


def test_a_hostile_name_of_a_model_stays_small_and_printable():
    traced = Traced()
    _, stream = traced.request(gw.prompt("x", model="\x1b[31m" + "m" * 100_000))
    stream.close()
    shown = traced.span.attributes["gen_ai.request.model"]
    assert shown.isprintable()
    assert len(shown) < 2 * TEXT_CHARACTERS_MAX


def test_nothing_of_a_request_but_its_model_is_in_a_span():
    """Secrets in every header and every part of the body."""
    traced = Traced()
    headers = dict.fromkeys(
        ("authorization", "cookie", "tracestate", "baggage", "x_request_id", "x_session_id"),
        SECRET,
    )
    body = gw.prompt(f"{SECRET} " * 200, user=SECRET, cache_salt=SECRET, stop=[SECRET])
    for given in (body, SECRET.encode(), gw.prompt("x", model=[SECRET])):
        for traceparent in (SAMPLED, SECRET):
            _, stream = traced.request(
                given, **headers, traceparent=traceparent, authority=f"{SECRET}.example.com"
            )
            stream.send(gw.response_headers(200, end=True, set_cookie=SECRET))
            stream.close()
    assert len(traced.spans) == 6
    assert not [span.to_json() for span in traced.spans if SECRET in span.to_json()]


def test_a_trace_of_one_request_does_not_displace_what_all_share():
    """What is kept of header answers is one an endpoint, however many traces go there."""
    traced = Traced()
    pool = pods((0, 0.1))
    kept = _kept_headers, _round_own
    for cache in kept:
        cache.cache_clear()
    sent = {
        gw.set_headers(traced.request(pool=pool, x_request_id="given")[0])["traceparent"]
        for _ in range(5)
    }
    assert len(sent) == 5
    assert [cache.cache_info().currsize for cache in kept] == [0, 1]


def test_a_tracer_with_a_defect_fails_no_request(monkeypatch):
    """It is counted, and the request goes on without a trace."""
    traced = Traced()

    def broken(*_):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(traced.observation._tracer, "begin", broken)
    with structlog.testing.capture_logs():
        answer, stream = traced.request()
        stream.send(gw.response_headers(200, end=True))
        stream.close()
    assert gw.destination(answer)
    assert "traceparent" not in gw.set_headers(answer)
    labels = {"event": "trace_decided"}
    assert traced.registry.get_sample_value("homing_telemetry_failures_total", labels) == 1
