"""Whose child a span is, when gateway, picker and model server each make one."""

import pytest

from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.process import running_epp
from tests.envoy.rig import http_client, http_connections, running_envoy, until
from tests.envoy.upstream import running_pods
from tests.shell.operators.collectors import collector

pytestmark = pytest.mark.envoy

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = b'{"model":"m","prompt":"p"}'


def tracing_to(port):
    """Let Envoy make spans of its own, and send them where the picker's go."""

    def edit(document):
        endpoint = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}
        options = {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
        document["static_resources"]["clusters"].append(
            {
                "name": "collector",
                "type": "STATIC",
                "connect_timeout": "1s",
                "typed_extension_protocol_options": {
                    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
                },
                "load_assignment": {
                    "cluster_name": "collector",
                    "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
                },
            }
        )
        config = {
            "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
            "grpc_service": {"envoy_grpc": {"cluster_name": "collector"}, "timeout": "5s"},
            "service_name": "gateway",
        }
        provider = {"name": "envoy.tracers.opentelemetry", "typed_config": config}
        http_connections(document)["tracing"] = {"provider": provider}

    return edit


@pytest.fixture
def behind(opened, tmp_path, transport, monkeypatch):
    """Ask once, with a parent; (what the pod got, the spans)."""

    async def ask(*, envoy_traces):
        collected = await opened.enter_async_context(collector("grpc"))
        for name, value in collected.variables.items():
            monkeypatch.setenv(name, value)
        port = int(collected.variables["OTEL_EXPORTER_OTLP_ENDPOINT"].rpartition(":")[2])
        (pod,) = await opened.enter_async_context(running_pods(1))
        flags = ("--secure-serving=false", f"--transport={transport}", "--tracing")
        epp = await opened.enter_async_context(running_epp(tmp_path, [pod], *flags))
        options = BootstrapOptions(picker_address=epp.address, plaintext=True)
        edit = tracing_to(port) if envoy_traces else None
        envoy = await opened.enter_async_context(running_envoy(options, tmp_path, edit))
        client = await opened.enter_async_context(http_client(envoy))
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=kept"}
        async with client.post("/v1/completions", data=BODY, headers=headers) as response:
            assert response.status == 200
            await response.read()
        wanted = {"homing.route", "ingress"} if envoy_traces else {"homing.route"}
        await until(lambda: wanted <= {span.name for span in collected.spans}, "the spans", 30)
        return pod.received[-1].headers, {span.name: span for span in collected.spans}

    return ask


async def test_behind_a_gateway_that_makes_no_spans_the_engines_is_a_child_of_ours(behind):
    headers, spans = await behind(envoy_traces=False)
    ours = spans["homing.route"]
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert headers["traceparent"] == f"00-{TRACE_ID}-{ours.span_id.hex()}-01"
    assert headers["tracestate"] == "vendor=kept"


async def test_behind_an_envoy_that_makes_spans_ours_is_in_the_same_trace(behind):
    """It writes the header last, so the engine's span is a child of its own, beside ours."""
    headers, spans = await behind(envoy_traces=True)
    ours, gateways = spans["homing.route"], spans["ingress"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert ours.parent_span_id.hex() == gateways.parent_span_id.hex() == PARENT_ID
    assert headers["traceparent"] == f"00-{TRACE_ID}-{gateways.span_id.hex()}-01"
