"""Collectors that speak OTLP, by gRPC and by HTTP, in this process."""

from contextlib import asynccontextmanager

import grpc
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

PROTOCOLS = ("grpc", "http/protobuf")


class Collected:
    """Requests that a collector received, and how it answers.

    `status` is the status of HTTP answers. `code` is the status with which gRPC aborts a request;
    None if it succeeds.
    """

    def __init__(self):
        self.requests = []
        self.status = 200
        self.code = None
        self.details = ""
        self.variables = {}

    @property
    def spans(self):
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self):
        return attributes(self.requests[0].resource_spans[0].resource)


class _Service(TraceServiceServicer):
    def __init__(self, collected):
        self.collected = collected

    async def Export(self, request, context):  # noqa: N802  as the service names it
        if self.collected.code is not None:
            await context.abort(self.collected.code, self.collected.details)
        self.collected.requests.append(request)
        return ExportTraceServiceResponse()


@asynccontextmanager
async def collector(protocol, port=0):
    """Yield a running collector.

    Its `variables` are the environment variables that an exporter needs to reach it.
    """
    collected = Collected()
    collected.variables = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "5",
    }
    if protocol == "grpc":
        server = grpc.aio.server()
        add_TraceServiceServicer_to_server(_Service(collected), server)
        taken = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        collected.variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{taken}"
        try:
            yield collected
        finally:
            await server.stop(None)
        return

    async def export(request):
        body = await request.read()
        if collected.status == 200:
            collected.requests.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(status=collected.status, reason=collected.details or None)

    application = web.Application()
    application.add_routes([web.post("/v1/traces", export)])
    async with TestServer(application, port=port) as server:
        collected.variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = str(server.make_url("/"))
        yield collected


def attributes(of):
    """Return the attributes of a span, an event or a resource: value by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}
