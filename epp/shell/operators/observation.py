"""Report events of sessions and streams as metrics and log lines.

This is the only module that reads the clock for metrics and log lines of requests. A defect here
must not fail a request: exceptions are logged, counted and suppressed.
"""

import math
import time
from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import structlog

from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.pool import UPSTREAM_FAILURES
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.types import Endpoint, Refusal, Seconds
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.gateway.calls import Cut
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.per_second import PerSecond

OBJECTIVE_WARNING_S: Final = 60.0
"""Minimum time in seconds between two warnings about requests that name an unknown objective;
clients determine how often that occurs.
"""
FAILURES_PER_SECOND_MAX: Final = 1
"""Maximum number of log lines per second that say that the picker failed to record an event in
metrics or log lines. Such a failure may recur with each request.
"""

_NOT_SERVED: Final = frozenset({None, *UPSTREAM_FAILURES})
"""Response statuses that do not show that an endpoint works; None means that no response was
seen.
"""

_log = structlog.get_logger(__name__)
_Told = ParamSpec("_Told")
_Observer = TypeVar("_Observer", bound="Observation")


def contained(
    tell: Callable[Concatenate[_Observer, _Told], None],
) -> Callable[Concatenate[_Observer, _Told], None]:
    """Return a function that calls `tell` with positional arguments. An exception of `tell` is
    counted and sometimes logged, but not raised.
    """
    call: Callable[..., None] = tell

    @wraps(tell)
    def telling(observer: _Observer, /, *told: Any) -> None:
        try:
            call(observer, *told)
        except Exception as error:  # noqa: BLE001  telemetry never fails a request
            observer.could_not(tell.__name__, error)

    return cast(Callable[Concatenate[_Observer, _Told], None], telling)


def _since(exchange: Exchange, at_s: Seconds | None) -> Seconds | None:
    return None if at_s is None else at_s - exchange.started_at_s


_USAGE_UNSEEN: Final = (
    "--parse-response-usage has no effect because the gateway sends no response bodies: set its "
    "response_body_mode to STREAMED (`epp envoy-config --response-body-mode STREAMED`)"
)
_RESPONSES_UNSEEN: Final = (
    "a gateway sends no responses, so failing and slow endpoints cannot be detected: set its "
    "ext_proc response_header_mode to SEND"
)


class Observation:
    """The observer of all sessions and streams, which reports their events as metrics and log
    lines.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        decisions: DecisionLog,
        recent: RecentDecisions | None = None,
        answered: Callable[[Endpoint], None] = lambda _: None,
        picked: Callable[[Endpoint], None] = lambda _: None,
        served: Callable[[InferenceRequest, Endpoint, Seconds], None] = lambda *_: None,
    ) -> None:
        """Create the observer. `recent` records decisions and refusals. `answered` is called with
        each endpoint that served a request, `picked` with each endpoint that is about to get one,
        and `served` with each request that ended successfully.
        """
        self._telemetry = telemetry
        self._decisions = decisions
        self._recent = recent
        self._objective_warned_at_s = -math.inf
        self._answered = answered
        self._picked = picked
        self._served = served
        self._failures = PerSecond(FAILURES_PER_SECOND_MAX)
        self._cut = False
        self._usage_seen = True

    def could_not(self, event: str, error: Exception) -> None:
        """Count that the metrics or log lines of `event` failed with an error, and log it at most
        `FAILURES_PER_SECOND_MAX` times a second.
        """
        self._telemetry.telemetry_failed(event)
        if self._failures.admits(time.monotonic()):
            left_out = self._failures.left_out()
            _log.error(
                "recording metrics or log lines of an event failed",
                telling=event,
                exc_info=error,
                **left_out,
            )

    @contained
    def decided(self, exchange: Exchange) -> None:
        decision = exchange.decision
        assert decision is not None, "a decision was made"
        leg, now = decision.leg, time.monotonic()
        self._telemetry.decided(
            leg,
            scheduling_s=now - exchange.answered_at_s,
            processing_s=now - exchange.started_at_s,
            request_bytes=exchange.request_bytes,
            model_name=exchange.incoming_model,
        )
        route = decision.account.route
        if route is not None:
            self._telemetry.staged(route, decision.earlier)
        if exchange.unseen_body is not None:
            self._telemetry.scheduled_without_prefix(exchange.unseen_body.name.lower())
        if exchange.passed_unread:
            self._telemetry.scheduled_without_prefix("memory")
        if exchange.unparsed:
            api = exchange.unparsed_api or decision.lease.request.api
            self._telemetry.request_unparsed(api, exchange.unparsed)
            if self._recent is not None:
                self._recent.unparsed[exchange.unparsed] += 1
        self._picked(leg.endpoint)
        self._decisions.decided(decision)
        if self._recent is not None:
            self._recent.decided(decision)

    @contained
    def refused(self, exchange: Exchange, refusal: Refusal) -> None:
        now = time.monotonic()
        request = exchange.request
        self._telemetry.refused(
            refusal,
            scheduling_s=None if request is None else now - exchange.answered_at_s,
            request=request,
            model_name=exchange.incoming_model,
        )
        asked = {"request_id": exchange.request_id, "path": exchange.path}
        self._decisions.refused(refusal, now, request, **asked, queued=exchange.queued)
        if self._recent is not None:
            self._recent.refused(refusal, request, **asked, queued=exchange.queued)

    @contained
    def failed(self, exchange: Exchange, failure: StreamFailure) -> None:
        self._telemetry.failed(
            failure.value,
            request=exchange.request,
            model_name=exchange.incoming_model,
            counted=exchange.decision is not None,
        )

    @contained
    def tokens_asked(
        self, backend: str, result: TokensResult, waited_s: Seconds, tokens: int
    ) -> None:
        self._telemetry.tokens_asked(backend, result, waited_s, tokens)

    @contained
    def response_started(self, exchange: Exchange) -> None:
        if exchange.response_started_at_s is not None:
            elapsed_s = exchange.response_started_at_s - exchange.started_at_s
            self._telemetry.response_started(elapsed_s=elapsed_s)
        if self._recent is not None and exchange.served:
            self._recent.served(exchange)
        if exchange.decision is not None and exchange.status not in _NOT_SERVED:
            self._answered(exchange.decision.endpoint)

    @contained
    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        decision, usage = exchange.decision, exchange.usage
        assert decision is not None, "a completed request was decided"
        lease = decision.leg.lease
        request = lease.request
        if exchange.first_output_at_s is not None:
            self._telemetry.first_output(
                decision,
                elapsed_s=exchange.first_output_at_s - exchange.started_at_s,
                model_name=exchange.incoming_model,
            )
        if exchange.endpoint is not None:
            self._telemetry.by_endpoint.answered(
                exchange.endpoint,
                headers_s=_since(exchange, exchange.response_started_at_s),
                ttft_s=_since(exchange, exchange.first_output_at_s) if request.stream else None,
                duration_s=now - exchange.started_at_s
                if outcome.ending is Ending.COMPLETE
                else None,
                status=outcome.status,
                by_gateway=outcome.by_gateway,
                prompt_tokens=request.prompt_tokens,
                predicted_hit_tokens=decision.predicted_tokens,
            )
        cut = self._cut and outcome.ending is Ending.CLIENT_LEFT
        self._telemetry.completed(
            decision,
            outcome,
            elapsed_s=now - exchange.started_at_s,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            model_name=exchange.incoming_model,
            counted=cut or exchange.failure is not None,
        )
        if self._recent is not None:
            self._recent.completed(exchange, outcome, now)
        served = outcome.ending is Ending.COMPLETE and outcome.status == HTTPStatus.OK
        if served and exchange.endpoint is not None and not outcome.by_gateway:
            self._served(request, exchange.endpoint, now)

    @contained
    def set_aside(self, endpoint: Endpoint) -> None:
        self._telemetry.set_aside(endpoint)
        _log.warning(
            "endpoint excluded after failed responses, until its next successful scrape",
            endpoint=endpoint.name,
        )

    @contained
    def unknown_body_mode(self, mode: int) -> None:
        self._telemetry.unknown_body_mode(mode)

    @contained
    def unknown_objective(self) -> None:
        self._telemetry.unknown_objective()
        now = time.monotonic()
        if now >= self._objective_warned_at_s + OBJECTIVE_WARNING_S:
            self._objective_warned_at_s = now
            _log.warning(
                "requests name an unknown objective and have priority 0; "
                "homing_unknown_objective_total counts them"
            )

    @contained
    def protocol_violated(self, phase: str, event: str) -> None:
        self._telemetry.protocol_violated(phase, event)

    @contained
    def response_body_declined(self) -> None:
        self._telemetry.response_body_declined()

    @contained
    def usage_unseen(self) -> None:
        self._telemetry.usage_unseen()
        if self._usage_seen:
            self._usage_seen = False
            _log.warning(_USAGE_UNSEEN)

    @contained
    def responses_unseen(self) -> None:
        self._telemetry.responses_unseen()
        _log.warning(_RESPONSES_UNSEEN)

    @contained
    def stream_failed(self) -> None:
        self._telemetry.failed(StreamFailure.INTERNAL.value)

    @contained
    def stream_closed(self, code: str, duration_s: Seconds) -> None:
        self._telemetry.stream_closed(code, elapsed_s=duration_s)

    @contained
    def stream_shed(self, refusal: Refusal) -> None:
        # Shed streams are not recorded individually, because they would displace all other records.
        self._telemetry.refused(refusal)
        self._decisions.refused(refusal, time.monotonic())
        if self._recent is not None:
            self._recent.shed += 1

    @contained
    def connection_cut(self, reason: Cut) -> None:
        self._telemetry.connection_cut(reason)

    @contained
    def drain_cut(self, streams: int) -> None:
        # From now on the picker ends streams, not the client.
        self._cut = True
        self._telemetry.drain_cut(streams)
