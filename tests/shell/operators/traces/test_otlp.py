"""What the standard variables say, obeyed by the exporters that they are written for."""

import asyncio
import logging
import os

import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc
from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

from epp.shell.operators.traces.otlp import OtelVariableError, open_export
from tests.envoy.rig import free_ports, until
from tests.shell.operators.collectors import PROTOCOLS, collector
from tests.shell.operators.traces.test_span_export import ending


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Exporters read the one of the process: nothing of the machine's may be in it."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    # It keeps what was said by an earlier test from being said again.
    monkeypatch.setattr(logging.getLogger(over_grpc.OTLPExporterMixin.__module__), "filters", [])

    def told(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return open_export(os.environ)

    return told


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_span_reaches_a_collector(protocol, environment):
    """By the protocol that is named."""
    async with collector(protocol) as collected:
        export = environment(**collected.variables)
        async with export:
            ending(export)("seen")
            await until(lambda: collected.spans, "the span")
        assert [span.name for span in collected.spans] == ["seen"]
        assert export.exported == 1


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({}, over_grpc.OTLPSpanExporter),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, over_http.OTLPSpanExporter),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            over_grpc.OTLPSpanExporter,
        ),
    ],
    ids=["default", "of all signals", "of traces"],
)
def test_the_protocol_is_that_of_the_variables(variables, kind, environment):
    """That of traces wins; without one it is gRPC."""
    export = environment(**variables)
    assert isinstance(export._exporter, kind)
    export._exporter.shutdown()


@pytest.mark.parametrize(
    "variables", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=str
)
def test_variables_can_turn_it_off(variables, environment):
    assert environment(**variables) is None


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: expected otlp or none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "expected grpc or http/protobuf"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE: expected an integer from 1"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "9" * 5_000}, "expected an integer from 1 to 1000000"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "5s"}, "OTEL_BSP_SCHEDULE_DELAY: expected an integer"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "hunter2"}, "variables cannot be used: ValueError"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "hunter2"}, "variables cannot be used"),
    ],
    ids=str,
)
def test_a_variable_that_cannot_be_obeyed_is_refused(variables, sentence, environment):
    """In a sentence that names it; what might be a credential is not in it."""
    with pytest.raises(OtelVariableError, match=sentence) as raised:
        environment(**variables)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_collector_that_is_down_is_told_of_once(protocol, environment):
    """And when it is back that is told too, without a restart."""
    (port,) = free_ports(1)
    variables = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    with structlog.testing.capture_logs() as lines:
        export = environment(**variables)
        end = ending(export)
        async with export:
            for lost in (1, 2):
                end("lost")
                await until(lambda so_far=lost: export.failed == so_far, "the failure")
                export.report()
            assert len(lines) == 1
            assert str(port) not in str(lines), "the address may hold a credential"
            async with collector(protocol, port) as collected:

                async def seen():
                    end("seen")
                    await asyncio.sleep(0.05)
                    return bool(collected.spans)

                await until(seen, "a span", 30)
                export.report()
    assert lines[-1]["event"] in {
        "spans are exported again",
        "spans are being lost; homing_spans_total counts them",
    }
    assert len(lines) <= 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_what_a_collector_answers_is_not_shown(protocol, environment):
    """It might quote our own credentials back at us."""
    async with collector(protocol) as collected:
        collected.status, collected.details = 403, "hunter2"
        collected.code = over_grpc.StatusCode.PERMISSION_DENIED
        with structlog.testing.capture_logs() as lines:
            export = environment(**collected.variables)
            async with export:
                ending(export)("refused")
                await until(lambda: export.failed, "the failure")
                export.report()
    (line,) = lines
    assert "hunter2" not in str(lines)
    assert ("PERMISSION_DENIED" if protocol == "grpc" else "403") in line["last"]


async def test_an_answer_without_end_is_not_read(environment):
    """A body that goes on for ever would take the thread, or the memory."""
    left = asyncio.Event()

    async def export_without_end(request):
        await request.read()
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x" * 65_536)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise

    application = web.Application()
    application.add_routes([web.post("/v1/traces", export_without_end)])
    async with TestServer(application) as server:
        export = environment(
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
            OTEL_EXPORTER_OTLP_ENDPOINT=str(server.make_url("/")),
            OTEL_BSP_SCHEDULE_DELAY="10",
        )
        async with export:
            ending(export)("seen")
            await until(lambda: export.exported == 1, "the span")
            async with asyncio.timeout(15):
                await left.wait()
