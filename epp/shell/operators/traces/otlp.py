"""Configure the export of spans from the standard `OTEL_*` environment variables."""

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.sdk.trace.export import SpanExporter

from epp.shell.operators.traces.span_export import (
    BATCH_SPANS_MAX,
    DELAY_S,
    QUEUE_SPANS_MAX,
    SpanExport,
)

PROTOCOLS: Final = ("grpc", "http/protobuf")
NUMBER_MAX: Final = 1_000_000


class OtelVariableError(Exception):
    """Raised if an `OTEL_*` environment variable is invalid or cannot be used. The message is one
    sentence without possible credentials.
    """


def open_export(environment: Mapping[str, str]) -> SpanExport | None:
    """Return the export of spans that the `OTEL_*` variables configure, or None if they disable
    tracing.

    The exporters read endpoint, headers, certificates, compression and timeout themselves from the
    environment of the process. Raises `OtelVariableError`.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise OtelVariableError(f"OTEL_TRACES_EXPORTER: expected otlp or none, got {exporter!r}")
    queue_spans_max = _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS_MAX)
    batch_spans_max = _number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS_MAX)
    delay_ms = _number(environment, "OTEL_BSP_SCHEDULE_DELAY", round(1_000 * DELAY_S))
    return SpanExport(
        _exporter(_protocol(environment)),
        queue_spans_max=queue_spans_max,
        batch_spans_max=min(batch_spans_max, queue_spans_max),
        delay_s=delay_ms / 1_000,
    )


def _protocol(environment: Mapping[str, str]) -> str:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name, "").strip()
        if protocol and protocol not in PROTOCOLS:
            raise OtelVariableError(f"{name}: expected {' or '.join(PROTOCOLS)}, got {protocol!r}")
        if protocol:
            return protocol
    return PROTOCOLS[0]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 7 else 0
    if not 1 <= number <= NUMBER_MAX:
        raise OtelVariableError(f"{name}: expected an integer from 1 to {NUMBER_MAX}, got {text!r}")
    return number


def _exporter(protocol: str) -> SpanExporter:
    try:
        return _over_grpc() if protocol == "grpc" else _over_http()
    except (ValueError, RuntimeError, OSError, InvalidCompressionValueException) as error:
        # The text of the error may quote a header.
        raise OtelVariableError(
            f"the OTEL_EXPORTER_OTLP_* variables cannot be used: {type(error).__name__}"
        ) from error


def _over_grpc() -> SpanExporter:
    # Each exporter is imported only if it is used.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )

    return OTLPSpanExporter()


def _over_http() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from requests import Response, Session  # noqa: PLC0415

    class HeadersOnly(Session):
        """An HTTP session for exporting spans that discards response bodies, because only the
        status is needed and a body may be endless.
        """

        def request(self, *asked: Any, **more: Any) -> Response:
            response = super().request(*asked, **(more | {"stream": True}))
            response.close()
            return response

    return OTLPSpanExporter(session=HeadersOnly())
