"""What sessions and streams tell, as metrics and log lines. The only reader of the clock for it."""

import time
from typing import Final

import structlog

from epp.core.knowledge.inflight import Outcome
from epp.core.protocol.session import Exchange
from epp.core.types import Endpoint, Refusal, Seconds
from epp.shell.operators.debug_pages import RecentDecisions
from epp.shell.operators.logs import DecisionLog
from epp.shell.operators.telemetry import Telemetry

_log = structlog.get_logger(__name__)

_USAGE_UNSEEN: Final = (
    "--parse-response-usage has no effect: the gateway shows no response bodies, set its "
    "response_body_mode to STREAMED (`epp envoy-config --response-body-mode STREAMED`)"
)


class Observation:
    """The observer of every session and of the server's streams."""

    def __init__(
        self,
        telemetry: Telemetry,
        decisions: DecisionLog,
        recent: RecentDecisions | None = None,
    ) -> None:
        """`recent`: keeps the last decisions and refusals for who debugs."""
        self._telemetry = telemetry
        self._decisions = decisions
        self._recent = recent
        self._usage_seen = True

    def decided(self, exchange: Exchange) -> None:
        decision = exchange.decision
        assert decision is not None, "a decision was made"
        now = time.monotonic()
        self._telemetry.decided(
            decision,
            scheduling_s=now - exchange.answered_at_s,
            processing_s=now - exchange.started_at_s,
            request_bytes=exchange.request_bytes,
            model_name=exchange.incoming_model,
        )
        if exchange.unseen_body is not None:
            self._telemetry.scheduled_without_prefix(exchange.unseen_body.name.lower())
        self._decisions.decided(decision)
        if self._recent is not None:
            self._recent.decided(decision)

    def refused(self, exchange: Exchange, refusal: Refusal) -> None:
        now = time.monotonic()
        request = exchange.request
        self._telemetry.refused(
            refusal,
            scheduling_s=None if request is None else now - exchange.answered_at_s,
            request=request,
            model_name=exchange.incoming_model,
        )
        self._decisions.refused(refusal, now, request)
        if self._recent is not None:
            self._recent.refused(refusal, request)

    def response_started(self, exchange: Exchange) -> None:
        if exchange.response_started_at_s is not None:
            elapsed_s = exchange.response_started_at_s - exchange.started_at_s
            self._telemetry.response_started(elapsed_s=elapsed_s)

    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        decision, usage = exchange.decision, exchange.usage
        assert decision is not None, "what completes was decided"
        if exchange.first_output_at_s is not None:
            self._telemetry.first_output(
                decision,
                elapsed_s=exchange.first_output_at_s - exchange.started_at_s,
                model_name=exchange.incoming_model,
            )
        self._telemetry.completed(
            decision,
            outcome,
            elapsed_s=now - exchange.started_at_s,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            model_name=exchange.incoming_model,
        )

    def set_aside(self, endpoint: Endpoint) -> None:
        self._telemetry.set_aside(endpoint)
        _log.warning("endpoint set aside until its next good scrape", endpoint=endpoint.name)

    def unknown_body_mode(self, mode: int) -> None:
        self._telemetry.unknown_body_mode(mode)

    def protocol_violated(self, phase: str, event: str) -> None:
        self._telemetry.protocol_violated(phase, event)

    def usage_unseen(self) -> None:
        self._telemetry.usage_unseen()
        if self._usage_seen:
            self._usage_seen = False
            _log.warning(_USAGE_UNSEEN)

    def stream_opened(self) -> None:
        self._telemetry.stream_opened()

    def stream_closed(self, code: str, duration_s: Seconds) -> None:
        self._telemetry.stream_closed(code, elapsed_s=duration_s)

    def drain_cut(self, streams: int) -> None:
        self._telemetry.drain_cut(streams)
