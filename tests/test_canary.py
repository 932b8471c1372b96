"""Nothing of a request leaks: secrets in each of its parts, and each boundary fails in turn.

A picker of its own process, on both transports, in both log formats and at the highest verbosity, found through a fake
API server. Neither its output, nor a page, nor an Event, nor its capture, nor what a failing stream
tells the gateway may hold a secret. A request id, a model and the path of a refusal are shown, cut.
"""

import asyncio
import base64
import contextlib
import gzip
import json
import os
import sys
from contextlib import asynccontextmanager

import grpc
import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer
from envoy_data_plane.envoy.service.ext_proc import v3

from epp.journal.decisions import read_past
from tests import gateway as gw
from tests.app.test_wiring import CONFIG, PREFIX_FIRST
from tests.canary_picker import LAST, OTHERS, PAGES, STREAM
from tests.envoy.rig import free_ports, start_process, until
from tests.shell.kubernetes.fake_api_server import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    POOLS,
    FakeApiServer,
    pod,
    pool,
)
from tests.shell.operators.collectors import collector
from tests.streams import PROCESS, channel_to
from tests.transports import TRANSPORTS

SECRET = "c4n4ry"
ENCODED = (
    SECRET,
    SECRET.encode().hex(),
    *(base64.b64encode(b"x" * shift + SECRET.encode())[4:8].decode() for shift in range(3)),
)
"""What must not be found: the marker, and what it looks like in hexadecimal and in base64."""
BODY_BYTES_MAX = 20_000

HEADERS = {
    ":method": "POST",
    ":authority": f"{SECRET}.example.com",
    ":path": f"/v1/chat/completions?api_key={SECRET}&q={SECRET}",
    "content-type": "application/json",
    "authorization": f"Bearer {SECRET}",
    "cookie": f"session={SECRET}",
    "x-api-key": SECRET,
    "x-session-token": base64.b64encode(f"llm/{SECRET}".encode()).decode(),
    "x-session-id": SECRET,
    "x-gateway-inference-fairness-id": SECRET,
    "x-forwarded-for": SECRET,
    f"x-{SECRET}": SECRET,
    "traceparent": SECRET,
    "tracestate": f"vendor={SECRET}",
    "baggage": f"user={SECRET}",
    "x-request-id": "shown-id",
}
CHAT = {
    "model": "shown-model",
    "user": SECRET,
    "cache_salt": SECRET,
    "metadata": {SECRET: SECRET},
    "stop": [SECRET],
    "messages": [
        {"role": "system", "content": f"{SECRET} " * 100},
        {
            "role": "user",
            "name": SECRET,
            "content": [
                {"type": "text", "text": f"once upon a {SECRET}"},
                {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{SECRET}{'A' * 400}"},
                },
            ],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": SECRET,
                    "type": "function",
                    "function": {"name": SECRET, "arguments": json.dumps({SECRET: SECRET})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": SECRET, "content": SECRET},
    ],
    "tools": [{"type": "function", "function": {"name": SECRET, "parameters": {SECRET: {}}}}],
}
ANSWERED = {"set-cookie": SECRET, "content-type": "text/event-stream", "x-inner": SECRET}
CHUNK = f'data: {{"choices": [{{"text": "{SECRET}"}}], "usage": {{"completion_tokens": 1}}}}\n\n'

LONG = "l" * 300 + SECRET
"""An identity that is too long to be shown whole."""


def chat(**fields):
    return json.dumps(CHAT | fields).encode()


def headers(**fields):
    return gw.request_headers(HEADERS | fields)


def trailers(request_or_response):
    """The codec does not read them; the gateway sends them all the same."""
    told = v3.HttpTrailers(trailers=gw.headers({"x-checksum": SECRET}))
    return bytes(v3.ProcessingRequest(**{request_or_response: told}))


RESPONSE = (
    bytes(
        v3.ProcessingRequest(
            response_headers=v3.HttpHeaders(headers=gw.headers({":status": "200"} | ANSWERED))
        )
    ),
    gw.response_body(CHUNK.encode(), end=False),
    trailers("response_trailers"),
)
REFUSED = {
    "bad JSON": (headers(), gw.request_body(b'{"model": "m", ' + SECRET.encode())),
    "a wrong type": (headers(), gw.request_body(chat(messages={SECRET: SECRET}))),
    "no text": (headers(), gw.request_body(b'{"model": "' + SECRET.encode() + b'\\ud800"}')),
    "no UTF-8": (headers(), gw.request_body(b'{"a": "\xff' + SECRET.encode())),
    "too long": (headers(), gw.request_body(SECRET.encode() * (BODY_BYTES_MAX // 5))),
    "nobody allowed": (
        gw.request_headers(HEADERS, hint=gw.subset(gw.string(f"{SECRET}:80"))),
        gw.request_body(chat()),
    ),
    "a long identity": (
        gw.request_headers(
            HEADERS | {"x-request-id": LONG, ":path": f"/{LONG}"}, hint=gw.subset(gw.string("no"))
        ),
        gw.request_body(chat(model=LONG)),
    ),
}
BROKEN = {
    "no message": (b"\xff" + SECRET.encode(),),
    "an empty message": (b"",),
    "a phase that is not allowed": (gw.request_body(chat()),),
    "headers twice": (headers(), headers()),
}


class Pod:
    """Serves pages of metrics that quote."""

    PAGES = (
        ("200", f'vllm:num_requests_waiting{{model="{SECRET}"}} 0\nvllm:num_requests_running 0\n'),
        ("200", f"vllm:num_requests_waiting{{{SECRET} 1\n"),
        ("200", f"vllm:num_requests_waiting {SECRET}\n"),
        ("200", f"<html>{SECRET}</html>"),
        ("404", SECRET),
    )

    def __init__(self):
        (self.port,) = free_ports(1)
        self.asked = 0
        self.broken = False

    async def page(self, _):
        self.asked += 1
        status, text = self.PAGES[self.asked % len(self.PAGES) if self.broken else 0]
        return web.Response(status=int(status), reason=SECRET, text=text)


class Canary:
    """A picker whose boundaries fail on command."""

    def __init__(self, server, pod, collected, folder, ports, process, channel, http):
        self.server, self.pod, self.collected = server, pod, collected
        self.ports, self.process, self.channel, self.http = ports, process, channel, http
        self._armed, self._fired = folder / "armed", folder / "fired"
        self._log = folder / "log"
        self._capture = folder / "capture"
        self._decisions = folder / "decisions"
        self.told = []
        """(while what failed, what was said)"""

    def arm(self, boundary):
        beside = self._armed.with_name("arming")
        beside.write_text(boundary)
        beside.replace(self._armed)

    @property
    def fired(self):
        return set(self._fired.read_text().split())

    def log(self):
        return self._log.read_text()

    async def stream(self, *messages):
        """Send all, read until it ends; what it ended with."""
        call = self.channel.stream_stream(PROCESS)(timeout=10)
        # It may have ended before all was sent.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        return f"{await call.code()} {await call.details()} {call!r}"

    async def requests(self, failing):
        """One that is served, and one of each kind that is not."""
        for messages in (
            (headers(), gw.request_body(chat()), *RESPONSE),
            (headers(), gw.request_body(chat(), end=False), trailers("request_trailers")),
            (gw.request_headers(HEADERS, end=True), gw.response_headers(503, end=True)),
            (gw.request_headers(HEADERS, modes=gw.protocol(gw.STREAMED)), gw.request_body(chat())),
            *REFUSED.values(),
            *BROKEN.values(),
        ):
            self.told.append((failing, await self.stream(*messages)))

    async def pages(self, failing):
        """Every page in every format."""
        paths = ["/", "/metrics", "/healthz", "/readyz", "/nothing", "/debug/config"]
        paths += ["/debug/endpoints", "/debug/decisions?n=1000", "/debug/decisions?refused=true"]
        paths += ["/live", "/debug/live", "/debug/explain?request_id=shown-id&endpoint=a"]
        paths += [f"/debug/explain?request_id={'l' * 256}"]
        accepts = ("*/*", "application/json", "application/openmetrics-text;version=1.0.0")
        for path in paths:
            for accept in accepts:
                async with self.http.get(path, headers={"accept": accept}) as response:
                    self.told.append((f"{failing}: {path}", await response.text()))

    async def garbage(self):
        """What is no HTTP on the port of HTTP, and no gRPC on that of gRPC."""
        told = f"GET /{SECRET} HTTP/9.{SECRET}\r\n{SECRET}\r\n\r\n".encode()
        for port in self.ports:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(told)
            await writer.drain()
            writer.write_eof()
            await reader.read(1 << 16)
            writer.close()

    def captured(self):
        """Return the content of all files of the capture."""
        return _contents(self._capture)

    def kept(self):
        """Return the content of all files of decisions."""
        return _contents(self._decisions)

    def leaks(self):
        """(while what failed, around the secret)."""
        said = [*self.told, ("log", self.log()), *self.captured().items(), *self.kept().items()]
        said += [("event", json.dumps(event)) for event in self.server.objects[EVENTS].values()]
        said += [("spans", str(request)) for request in self.collected.requests]
        return [
            (failing, text[max(0, at - 300) : at + 100])
            for failing, text in said
            for marker in ENCODED
            if (at := text.lower().find(marker.lower())) >= 0
        ]


def _contents(folder):
    return {
        path.name: gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        for path in folder.iterdir()
    }


def config_map(text):
    return {"metadata": {"name": "homing", "uid": "uid-config"}, "data": {"config.yaml": text}}


@asynccontextmanager
async def canary(folder, log_format, transport):
    page = Pod()
    application = web.Application()
    application.add_routes([web.get("/{path:.*}", page.page)])
    (folder / "armed").write_text("")
    (folder / "fired").write_text("")
    (folder / "config.yaml").write_text(PREFIX_FIRST)
    ports = free_ports(3)
    names = ("grpc-port", "grpc-health-port", "metrics-port")
    flags = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    flags += ["--pool-name=llama-pool", "--pool-namespace=llm", "--secure-serving=false"]
    flags += ["--config-map=homing", f"--config-file={folder / 'config.yaml'}", "--seed=1"]
    flags += [f"--log-format={log_format}", "--v=9", "--parse-response-usage", "--explain-headers"]
    flags += [f"--transport={transport}", "--tracing", f"--capture={folder / 'capture'}"]
    flags += [f"--decisions-dir={folder / 'decisions'}"]
    flags += ["--refresh-metrics-interval=50ms", "--metrics-staleness-threshold=60s"]
    flags += [
        f"--request-body-max-bytes={BODY_BYTES_MAX}",
        "--drain-grace=0s",
        "--drain-timeout=1s",
    ]
    async with (
        FakeApiServer() as server,
        TestServer(application, port=page.port),
        collector("grpc") as collected,
    ):
        server.put(POOLS, pool(ports=(page.port,)))
        server.put(PODS, pod("a", ip="127.0.0.1", annotations={"note": SECRET}))
        server.put(CONFIG_MAPS, config_map(PREFIX_FIRST))
        told = {"KUBECONFIG": str(server.kubeconfig(folder)), "PYTHONPATH": os.getcwd()}
        told |= {"CANARY_ARMED": str(folder / "armed"), "CANARY_FIRED": str(folder / "fired")}
        process = await start_process(
            *(sys.executable, "-m", "tests.canary_picker", "serve", *flags),
            log=folder / "log",
            environment=os.environ
            | told
            | collected.variables
            | {"CANARY_SECRET": SECRET, "NAMESPACE": "llm"},
        )
        try:
            async with (
                channel_to(f"127.0.0.1:{ports[0]}") as channel,
                ClientSession(f"http://127.0.0.1:{ports[2]}") as http,
            ):
                yield Canary(server, page, collected, folder, ports, process, channel, http)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            print(f"--- end of the log\n{(folder / 'log').read_text()[-4000:]}")


async def serves(bird):
    """It is ready, and the pod was scraped."""
    try:
        async with bird.http.get("/debug/endpoints?format=json") as response:
            endpoints = (await response.json())["endpoints"]
    except ClientError:
        return False
    return bool(endpoints) and endpoints[0]["waiting"] == 0


@pytest.fixture(params=["json", "console"])
def log_format(request):
    return request.param


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


async def test_nothing_leaks_whatever_fails(log_format, transport, tmp_path):
    """Requests, pages, scrapes, reloads and watches, at each boundary; then the drain."""
    async with canary(tmp_path, log_format, transport) as bird:
        await until(lambda: serves(bird), "the first scrape", 30)
        await bird.requests("nothing")
        await bird.pages("nothing")
        await bird.garbage()
        for boundary in (*STREAM, "write"):
            bird.arm(boundary)
            await bird.requests(boundary)
        for boundary in PAGES:
            bird.arm(boundary)
            await bird.requests(boundary)
            await bird.pages(boundary)
        for number, boundary in enumerate(OTHERS):
            bird.arm(boundary)
            # What tells of a change: a configuration, a pod.
            bird.server.put(CONFIG_MAPS, config_map(CONFIG.format(prefix=2, queue=number)))
            bird.server.put(PODS, pod(f"b{number}", ip="127.0.0.1"))
            await until(lambda at=boundary: at in bird.fired, f"{boundary} to fail")
            bird.arm("")
        bird.pod.broken = True
        asked = bird.pod.asked
        await until(lambda: bird.pod.asked > asked + 10, "pages that quote")
        bird.pod.broken = False
        bird.server.put(CONFIG_MAPS, config_map("kind: nonsense"))
        await until(lambda: "ConfigRejected" in json.dumps(bird.server.objects[EVENTS]), "an Event")
        await bird.requests("nothing, in the end")
        await bird.pages("nothing, in the end")
        cut = bird.channel.stream_stream(PROCESS)(timeout=30)
        await cut.write(headers())
        await cut.write(gw.request_body(chat(), end=False))
        bird.process.terminate()
        async with asyncio.timeout(20):
            assert await bird.process.wait() == 0
        assert bird.fired == {*STREAM, "write", *PAGES, *OTHERS}
        assert bird.leaks() == []
        page = next(text for what, text in reversed(bird.told) if what.endswith(": /metrics"))
        for reason in (
            *("internal", "malformed-message", "protocol-violation"),
            *("bad-request", "body-too-large", "rejected-no-endpoints"),
        ):
            assert f'error_code="{reason}"' in page
        assert 'homing_telemetry_failures_total{event="decided"}' in page
        assert 'homing_telemetry_failures_total{event="trace_decided"}' in page
        assert "shown-model" in str(bird.collected.requests)
        captured = " ".join(bird.captured().values())
        assert captured.count("completed") > 10
        assert captured.count("observed") > 10
        assert "shown-" not in captured
        kept = "".join(bird.kept().values())
        assert "shown-id" in kept
        assert "shown-model" in kept
        assert len(list(read_past(tmp_path / "decisions", 0.0, 4e9))) > 20
        log = bird.log()
        assert "shown-id" in log
        assert "shown-model" in log
        assert "/v1/chat/completions" in log
        if log_format == "json":
            assert [line for line in log.splitlines() if not json.loads(line)["event"]] == []


async def test_the_end_of_a_task_gives_nothing_away(log_format, transport, tmp_path):
    """Of what nobody handles too the log has types and places only; the picker goes on."""
    async with canary(tmp_path, log_format, transport) as bird:
        await until(lambda: serves(bird), "the first scrape", 30)
        await bird.requests("nothing")
        (boundary,) = LAST
        bird.arm(boundary)
        ended = "background task ended unexpectedly"
        await until(lambda: ended in bird.log(), "the line of the log", 20)
        await bird.requests("nothing")
        assert bird.process.returncode is None
        assert bird.fired == {boundary}
        assert "DefectError" in bird.log()
        assert bird.leaks() == []
