"""Model servers for the tests: what arrives is noted, what is answered the request says."""

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType

from aiohttp import web
from msgspec import Struct

REQUEST_BYTES_MAX = 64 * 1024 * 1024
RECEIVED_MAX = 2_000

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started_at_s}
"""


class Received(Struct, frozen=True):
    method: str
    path: str
    headers: dict[str, str]
    body_bytes: int
    body_sha256: str


def sse_event(number: int) -> bytes:
    """Event `number` of the stream that every test pod sends."""
    return f'data: {{"index": {number}, "text": "token {number} é"}}\n\n'.encode()


def sse_stream(count: int) -> bytes:
    """The whole of it, as the client must see it, byte for byte."""
    return b"".join(map(sse_event, range(count))) + b"data: [DONE]\n\n"


def large_body(size_bytes: int) -> bytes:
    """A body of which no two stretches are alike."""
    return random.Random(size_bytes).randbytes(size_bytes)


class Pod:
    """One model server on loopback. `x-test-*` request headers say how it answers:

    `events`: that many server-sent events; `pause-after`: having sent that many, wait for `resume`;
    `status`: answer with it; `response-bytes`: a body of that size; `hold`: wait for `resume` before
    the response starts; `hold-body`: before the body is read. A WebSocket gets its messages back. Otherwise JSON that tells what arrived.
    """

    labels: Mapping[str, str] = MappingProxyType({})

    def __init__(self, name: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` 0: any that is free."""
        self.name = name
        self.host = host
        self.port = port
        self.received: list[Received] = []
        self.resume = asyncio.Event()
        self.serving = 0
        """Requests that are being answered right now."""
        self.waiting_requests = 0
        self.running_requests = 0
        self.kv_cache_usage = 0.0
        self.refuses: dict[str, str] | None = None
        """Headers of the 429 by which every request is answered; None: the pod serves."""
        self.started_at_s = 1_700_000_000
        self.scrapes = 0
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen; a second start takes the same port, and is a restart to whoever scrapes."""
        app = web.Application(client_max_size=REQUEST_BYTES_MAX)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=0.01,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.started_at_s += 1

    async def stop(self) -> None:
        """Die: the port refuses, what was being served is cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        return web.Response(
            text=METRICS.format(
                running=self.running_requests,
                waiting=self.waiting_requests,
                usage=self.kv_cache_usage,
                started_at_s=self.started_at_s,
            )
        )

    async def _models(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response({"object": "list", "data": [{"id": "m"}], "pod": self.name})

    async def _note(self, request: web.Request) -> Received:
        body = await request.read()
        received = Received(
            method=request.method,
            path=request.path,
            headers={name.lower(): value for name, value in request.headers.items()},
            body_bytes=len(body),
            body_sha256=hashlib.sha256(body).hexdigest(),
        )
        assert len(self.received) < RECEIVED_MAX
        self.received.append(received)
        return received

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.serving += 1
        try:
            if "x-test-hold-body" in request.headers:
                await self.resume.wait()
            received = await self._note(request)
            if "x-test-hold" in request.headers:
                await self.resume.wait()
            if request.headers.get("upgrade") == "websocket":
                return await _echo(request)
            if "x-test-events" in request.headers:
                return await self._stream(request)
            return self._whole(request, received)
        finally:
            self.serving -= 1

    def _whole(self, request: web.Request, received: Received) -> web.Response:
        if self.refuses is not None:
            return web.Response(status=429, headers=self.refuses)
        size_bytes = request.headers.get("x-test-response-bytes")
        if size_bytes is not None:
            return web.Response(body=large_body(int(size_bytes)))
        return web.Response(
            status=int(request.headers.get("x-test-status", "200")),
            content_type="application/json",
            text=json.dumps(
                {
                    "pod": self.name,
                    "body_bytes": received.body_bytes,
                    "body_sha256": received.body_sha256,
                }
            ),
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        pause_after = int(request.headers.get("x-test-pause-after", "-1"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        # The client may leave at any time.
        with suppress(ConnectionResetError):
            await response.prepare(request)
            for number in range(int(request.headers["x-test-events"])):
                if number == pause_after:
                    await self.resume.wait()
                await response.write(sse_event(number))
                # Without a turn of the loop many events would travel as one chunk.
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


async def _echo(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(message.data)
    return socket


@asynccontextmanager
async def running_pods(count: int) -> AsyncIterator[list[Pod]]:
    """Pods "pod-0", "pod-1" ... that serve until the end of the block."""
    pods = [Pod(f"pod-{number}") for number in range(count)]
    try:
        for pod in pods:
            await pod.start()
        yield pods
    finally:
        for pod in pods:
            pod.resume.set()
            await pod.stop()
