"""Create a span for each sampled request: its destination, the reasons, and its end.

The span lasts from the request headers to the end of the response. Its parent is the request's
`traceparent`. The request continues with a `traceparent` of this span, so that the model server's
span is its child. A request that is not sampled continues with a header that says so, so that the
model server need not sample it either. `tracestate` is not read. It is passed on, or removed if
the request has no valid `traceparent`.

The only data from clients in attributes is the model's name, shortened. Prompts, other headers and
names of files are never included.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epp import __version__
from epp.core.decision.account import Account, Leg
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.types import Refusal, Seconds
from epp.shell.operators.observation import Observation, contained
from epp.shell.operators.traces.otlp import OtelVariableError
from epp.shell.operators.traces.span_export import SpanExport
from epp.shell.printable import printable

SPAN: Final = "homing.route"
SERVICE: Final = "homing-epp"
PARENT_HEADER: Final = "traceparent"
STATE_HEADER: Final = "tracestate"
PARENT_CHARACTERS_MAX: Final = 256
"""Maximum number of characters of a `traceparent` header, which has 55 today."""
TEXT_CHARACTERS_MAX: Final = 128
DRAWN_AHEAD: Final = 64
"""Number of trace ids that are generated together for requests without a parent span. Generating
single ids takes three times as long, because the sampler's data is no longer in the processor's
cache.
"""
_NS: Final = 1_000_000_000
_CONTEXT: Final = TraceContextTextMapPropagator()
_NO_CONTEXT: Final = Context()


class UnsampledTrace(Struct, gc=False):
    """The trace of a request that is not sampled, so that it has no span."""

    own_header: tuple[str, str]
    remove_headers: tuple[str, ...] = ()


class RequestTrace(Struct):
    """The span of one request, with the headers that the gateway must set and remove."""

    span: Span
    origin_ns: int
    """Unix time in ns at which the monotonic clock was 0. Times of the span are based on it, so
    that changes of the clock do not affect them.
    """
    decided_at_s: Seconds
    own_header: tuple[str, str]
    remove_headers: tuple[str, ...] = ()

    def at_ns(self, at_s: Seconds) -> int:
        return self.origin_ns + int(at_s * _NS)

    @property
    def trace_id(self) -> str:
        """Trace id of the span in hexadecimal."""
        return f"{self.span.get_span_context().trace_id:032x}"


class _Ids(IdGenerator):
    """A generator of random span and trace ids, which returns a trace id that was chosen before its
    span is created.
    """

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.next_trace_id = 0
        """Trace id of the next span that has no parent."""

    def draw_trace_id(self) -> int:
        return self._random.generate_trace_id()

    def generate_trace_id(self) -> int:
        return self.next_trace_id

    def generate_span_id(self) -> int:
        return self._random.generate_span_id()


class Tracer:
    """A factory of spans for requests."""

    def __init__(self, export: SpanExport, *, instance: str, namespace: str) -> None:
        """Create the factory. `instance` and `namespace` describe the picker's pod in the spans; ""
        omits them.

        `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` and the limits of
        spans are respected. Raises `OtelVariableError`.
        """
        self.export: Final = export
        self._ids = _Ids()
        own = {
            "service.version": __version__,
            "service.instance.id": instance,
            "k8s.pod.name": instance,
            "k8s.namespace.name": namespace if instance else "",
        }
        resource = Resource.create({name: value for name, value in own.items() if value})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        try:
            # The picker closes its components itself, in its own order.
            provider = TracerProvider(
                resource=resource, shutdown_on_exit=False, id_generator=self._ids
            )
        except ValueError as error:
            raise OtelVariableError(f"the OTEL_* variables cannot be used: {error}") from error
        provider.add_span_processor(export)
        self._sampler = provider.sampler
        self._tracer = provider.get_tracer("homing", __version__)
        self._ahead: list[tuple[int, tuple[str, str] | None]] = []
        """Trace ids generated in advance for requests without parent span, each with the result of
        `_unsampled` for it.
        """

    def begin(self, exchange: Exchange, now: Seconds) -> RequestTrace | UnsampledTrace:
        """Return the span of the request `exchange`, which was decided, was refused or failed at
        `now`, or the trace of an unsampled request.
        """
        headers = exchange.headers
        said = headers.get(PARENT_HEADER, "")
        parent = _NO_CONTEXT
        if said and len(said) <= PARENT_CHARACTERS_MAX:
            parent = _CONTEXT.extract({PARENT_HEADER: said}, _NO_CONTEXT)
        remove_headers: tuple[str, ...] = ()
        if parent:
            trace_id = get_current_span(parent).get_span_context().trace_id
            unsampled = self._unsampled(parent, trace_id)
        else:
            if not self._ahead:
                self._draw_ahead()
            trace_id, unsampled = self._ahead.pop()
            self._ids.next_trace_id = trace_id
            if STATE_HEADER in headers:
                # The specification requires that state without a readable parent is discarded.
                remove_headers = (STATE_HEADER,)
        if unsampled is not None:
            return UnsampledTrace(unsampled, remove_headers)
        origin_ns = time.time_ns() - int(time.monotonic() * _NS)
        span = self._tracer.start_span(
            SPAN,
            parent,
            SpanKind.SERVER,
            start_time=origin_ns + int(exchange.started_at_s * _NS),
        )
        ours = span.get_span_context()
        told = _told(ours.trace_id, ours.span_id, ours.trace_flags)
        return RequestTrace(span, origin_ns, now, told, remove_headers)

    def _draw_ahead(self) -> None:
        """Generate trace ids in advance. The decision to sample a request without parent depends
        only on the id.
        """
        for _ in range(DRAWN_AHEAD):
            trace_id = self._ids.draw_trace_id()
            self._ahead.append((trace_id, self._unsampled(_NO_CONTEXT, trace_id)))

    def _unsampled(self, parent: Context, trace_id: int) -> tuple[str, str] | None:
        """Return the header that marks the trace as unsampled, or None if it is sampled.

        The sampler is asked before a span is created, because most requests are not sampled and
        creating a span takes three times as long.
        """
        sampling = self._sampler.should_sample(parent, trace_id, SPAN, SpanKind.SERVER)
        if sampling.decision is not Sampling.DROP:
            return None
        return _told(trace_id, self._ids.generate_span_id(), TraceFlags.DEFAULT)

    def end(
        self, exchange: Exchange, now: Seconds, attributes: Mapping[str, Any], error: str
    ) -> bool:
        """End the span of the request `exchange`. Return True if it was sampled and queued for
        export. If the queue is full, count it as dropped.

        `attributes` describe the end of the request. `error` is the reason of its failure, or "".
        """
        trace = exchange.trace
        if not isinstance(trace, RequestTrace):
            return False
        span = trace.span
        if not span.is_recording():
            return False
        if self.export.full:
            self.export.drop()
            return False
        span.set_attributes(_request_attributes(exchange))
        span.set_attributes(attributes)
        decision = exchange.decision
        if decision is not None:
            span.set_attributes(_destination(decision.account))
            span.add_event(
                "homing.decided", _reasons(decision.leg), trace.at_ns(trace.decided_at_s)
            )
        for event, at_s in (
            ("homing.response_headers", exchange.response_started_at_s),
            ("homing.first_output", exchange.first_output_at_s),
        ):
            if at_s is not None:
                span.add_event(event, None, trace.at_ns(at_s))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(trace.at_ns(now))
        return True


class TracedObservation(Observation):
    """An observer of sessions and streams that also creates spans; it is used only if tracing is
    enabled.
    """

    def __init__(self, tracer: Tracer, *told: Any, **more: Any) -> None:
        """Create the observer, which creates spans with `tracer`. `told` and `more` are the
        arguments of `Observation`.
        """
        super().__init__(*told, **more)
        self._tracer = tracer

    def decided(self, exchange: Exchange) -> None:
        super().decided(exchange)
        self.trace_decided(exchange)

    def refused(self, exchange: Exchange, refusal: Refusal) -> None:
        super().refused(exchange, refusal)
        self.trace_refused(exchange, refusal)

    def failed(self, exchange: Exchange, failure: StreamFailure) -> None:
        super().failed(exchange, failure)
        self.trace_failed(exchange, failure)

    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        super().completed(exchange, outcome, now)
        if isinstance(exchange.trace, RequestTrace):
            self.trace_completed(exchange, outcome, now)

    @contained
    def trace_decided(self, exchange: Exchange) -> None:
        exchange.trace = self._tracer.begin(exchange, time.monotonic())

    @contained
    def trace_refused(self, exchange: Exchange, refusal: Refusal) -> None:
        now = time.monotonic()
        # A routed request can still be refused if the rest of it is too long.
        exchange.trace = exchange.trace or self._tracer.begin(exchange, now)
        attributes = {
            "homing.refusal": refusal.reason.value,
            "http.response.status_code": refusal.status,
            **_eliminated(refusal.eliminated),
        }
        error = refusal.reason.value if refusal.status >= 500 else ""
        self._tracer.end(exchange, now, attributes, error)

    @contained
    def trace_failed(self, exchange: Exchange, failure: StreamFailure) -> None:
        # A routed request also completes.
        if exchange.decision is None and exchange.trace is None:
            now = time.monotonic()
            exchange.trace = self._tracer.begin(exchange, now)
            self._tracer.end(exchange, now, {}, failure.value)

    @contained
    def trace_completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        trace = exchange.trace
        if not isinstance(trace, RequestTrace) or not trace.span.is_recording():
            return
        ended = _ending(exchange, outcome), _error(exchange, outcome)
        if self._tracer.end(exchange, now, *ended):
            self._exemplify(exchange, trace, now)

    def _exemplify(self, exchange: Exchange, trace: RequestTrace, now: Seconds) -> None:
        """Attach the trace id of a request, as exemplar, to the histograms that counted the
        request.
        """
        decision = exchange.decision
        assert decision is not None, "a completed request was decided"
        times = exchange.response_started_at_s, exchange.first_output_at_s
        headers_s, ttft_s = (
            None if at_s is None else at_s - exchange.started_at_s for at_s in times
        )
        self._telemetry.traced(
            decision,
            trace.trace_id,
            trace.at_ns(now) / _NS,
            elapsed_s=now - exchange.started_at_s,
            headers_s=headers_s,
            ttft_s=ttft_s,
            model_name=exchange.incoming_model,
        )


def _told(trace_id: int, span_id: int, flags: int) -> tuple[str, str]:
    """Return the header `traceparent` with the ids of a span (W3C Trace Context, version 00)."""
    return PARENT_HEADER, f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def _request_attributes(exchange: Exchange) -> dict[str, Any]:
    request = exchange.request
    if request is None:
        return {}
    decision = exchange.decision
    decided = request if decision is None else decision.account.request
    return {
        "gen_ai.request.model": _cut(request.model),
        "homing.api": request.api.value,
        "homing.priority": request.priority,
        "homing.prompt_tokens": decided.prompt_tokens,
        "homing.streams": request.stream,
    }


def _destination(account: Account) -> dict[str, Any]:
    leg = account.leg
    stages: dict[str, Any] = {}
    if account.route is not None:
        stages = {"homing.route": account.route.value}
    for earlier in account.legs[1:]:
        stages[f"homing.{earlier.stage}.endpoint"] = _cut(earlier.endpoint.name)
        stages[f"homing.{earlier.stage}.matched_blocks"] = earlier.matched_blocks
    return {
        "server.address": leg.endpoint.host,
        "server.port": leg.endpoint.port,
        "homing.endpoint": _cut(leg.endpoint.name),
        "homing.decision": account.number,
        "homing.matched_blocks": leg.matched_blocks,
        "homing.total_blocks": leg.total_blocks,
        "homing.block_tokens": leg.block_tokens,
        **stages,
    }


def _reasons(leg: Leg) -> dict[str, Any]:
    """Return the span attributes that give the reasons for the choice of the endpoint."""
    found: dict[str, Any] = {
        "homing.ready": leg.ready,
        "homing.candidates": len(leg.candidates),
        "homing.score": leg.total,
        **_eliminated(leg.eliminated),
    }
    for scorer, part in zip(leg.scorers, leg.parts, strict=True):
        found[f"homing.score.{_cut(scorer)}"] = part
    if leg.runner_up is not None:
        found["homing.runner_up"] = _cut(leg.candidates.name_of(leg.runner_up))
        found["homing.runner_up.score"] = float(leg.scored.total[leg.runner_up])
    return found


def _eliminated(eliminated: Mapping[str, int]) -> dict[str, int]:
    return {f"homing.eliminated.{_cut(name)}": count for name, count in eliminated.items()}


def _ending(exchange: Exchange, outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"homing.ending": outcome.ending.value}
    if outcome.status is not None:
        found["http.response.status_code"] = outcome.status
    usage = exchange.usage
    if usage is not None:
        used = {
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "homing.cached_tokens": usage.cached_tokens,
        }
        found |= {name: tokens for name, tokens in used.items() if tokens is not None}
    return found


def _error(exchange: Exchange, outcome: Outcome) -> str:
    if exchange.failure is not None:
        return exchange.failure.value
    if outcome.status is not None and outcome.status >= 500:
        return str(outcome.status)
    return outcome.ending.value if outcome.ending is Ending.ERROR else ""


def _cut(text: str) -> str:
    return printable(text[:TEXT_CHARACTERS_MAX])
