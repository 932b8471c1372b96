"""Check a picker's health and send it one request that reaches no model server: HOST:PORT
tls|plaintext.
"""

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from epp.shell.gateway.ext_proc_messages import ProcessingRequest, ProcessingResponse

TIMEOUT_S = 10
SERVICE = "readiness"
"""Service name of the gRPC health check that a standby picker reports as serving too, because it
can answer.
"""
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEADERS = {":method": "GET", ":path": "/v1/models", ":authority": "helm-test"}


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until `reader` ends, then close `writer`."""
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def without_tls(address: str) -> AsyncIterator[str]:
    """Yield an address of loopback that leads to the picker at `address`, without TLS.

    Any certificate of the picker is accepted, as gateways do. Each replica may have a certificate
    of its own, so a certificate that was fetched before may be of another replica than the one that
    a Service leads to.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    leads: set[asyncio.Task[None] | None] = set()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leads.add(asyncio.current_task())
        with contextlib.suppress(OSError), contextlib.closing(writer):
            async with asyncio.timeout(TIMEOUT_S):
                up_reader, up_writer = await asyncio.open_connection(
                    host, int(port), ssl=context, ssl_shutdown_timeout=1
                )
            await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer))

    server = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*filter(None, leads))


async def check(address: str, target: str) -> int:
    """Check the picker at `address`, which `target` leads to without TLS. Return the exit code."""
    request = ProcessingRequest()
    request.request_headers.end_of_stream = True
    for name, value in HEADERS.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    async with grpc.aio.insecure_channel(target) as channel:
        question = health_pb2.HealthCheckRequest(service=SERVICE)
        health = await HealthStub(channel).Check(question, timeout=TIMEOUT_S, wait_for_ready=True)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            sys.stdout.write(f"{address} is not serving, expected SERVING\n")
            return 1
        process = channel.stream_stream(
            METHOD, ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        stream = process(iter([request]), timeout=TIMEOUT_S)
        answer = (await stream.read()).WhichOneof("response")
        stream.cancel()
    sys.stdout.write(f"{address} serves and answered a request with {answer}\n")
    return 0 if answer in {"request_headers", "immediate_response"} else 1


async def main(address: str, security: str) -> int:
    if security == "plaintext":
        return await check(address, address)
    async with without_tls(address) as target:
        return await check(address, target)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
