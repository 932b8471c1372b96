"""Cost of a request through grpcio: the picker's server on the loopback interface.

`python -m bench.loopback` prints the table. Server and client are processes of their own. The
server is that of `epp serve` without TLS, with its metrics and its sampled log; CPU is the kernel's
count for its process. There are two patterns: the request phase alone (headers and an 8 KB body in,
headers and body out), and the request phase followed by response headers. The client opens one
stream per request, as Envoy does, and keeps `STREAMS` of them open. The best of some rounds counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import grpc
import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from bench.decision import Chats, Pool, telemetry_observer
from bench.gateway_messages import body_messages, headers_message
from epp.core.protocol.session import Session, SessionSettings
from epp.shell.gateway.ext_proc import PROCESS, ExtProc
from epp.shell.gateway.grpcio import GrpcioServer
from epp.shell.process.event_loop import loop_factory

STREAMS = 16
ROUNDS = 6
ROUND_REQUESTS = 1_000
SCRAPE_S = 0.2

PATTERNS = {"request phase": False, "request phase and response headers": True}


def _response_headers() -> bytes:
    status = HeaderValue(key=":status", raw_value=b"200")
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=HeaderMap(headers=[status]))
    ).SerializeToString()


async def _serve(tell: Connection) -> None:
    pool = Pool(100, now=time.monotonic())
    observation = telemetry_observer(pool)
    ext_proc = ExtProc(
        lambda gateway: Session(
            pool.scheduler, SessionSettings(), gateway, observation, lambda: "id"
        ),
        observation,
    )
    server = GrpcioServer(ext_proc.methods, receive_bytes_max=32 * 1024 * 1024)
    port = await server.listen("127.0.0.1", 0, None)
    await server.start()
    tell.send(port)
    loop = asyncio.get_running_loop()
    while True:
        # Return the used CPU on request, and keep metrics fresh meanwhile.
        pool.now = time.monotonic()
        pool.scrape()
        if await loop.run_in_executor(None, tell.poll, SCRAPE_S):
            if tell.recv() is None:
                break
            tell.send(time.process_time())
    await server.stop(None)


def serve(tell: Connection) -> None:
    """Run the picker's gRPC server until None arrives on the pipe `tell`. The server first sends
    its port on the pipe, and answers each other message with the CPU seconds used so far.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(tell))


@contextlib.contextmanager
def served() -> Iterator[Connection]:
    """Run `serve` in a new process during the context, and yield the pipe to it.

    The first message on the pipe is the server's port.
    """
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        yield ours
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        server.join(5)
        server.terminate()
        server.join()


class _Client:
    """A gateway that keeps `STREAMS` requests open, each on a stream of its own."""

    def __init__(self, port: int) -> None:
        # An Envoy has one connection per worker thread.
        self._channels = [
            grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)
            )
            for _ in range(2)
        ]
        self._calls = [channel.stream_stream(PROCESS) for channel in self._channels]
        chats = Chats(8_000, 5)
        self._headers = headers_message()
        self._bodies = [body_messages(chats.body())[0] for _ in range(ROUND_REQUESTS)]
        self._response_headers = _response_headers()

    async def round(self, *, responses: bool) -> None:
        """Send `ROUND_REQUESTS` requests to the picker's server, and wait for the answers to all of
        them.
        """
        left = iter(self._bodies)
        await asyncio.gather(*(self._stream(left, number, responses) for number in range(STREAMS)))

    async def _stream(self, left: Iterator[bytes], number: int, responses: bool) -> None:
        for body in left:
            call = self._calls[number % len(self._calls)]()
            await call.write(self._headers)
            await call.write(body)
            for _ in range(2):
                assert await call.read() is not grpc.aio.EOF, await call.details()
            if responses:
                await call.write(self._response_headers)
                assert await call.read() is not grpc.aio.EOF, await call.details()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def _measure(server: Connection) -> list[tuple[str, str]]:
    client = _Client(server.recv())

    def cpu_s() -> float:
        server.send("cpu")
        return float(server.recv())

    rows = []
    for pattern, responses in PATTERNS.items():
        await client.round(responses=responses)
        best_s = best_cpu_s = float("inf")
        for _ in range(ROUNDS):
            before_s, started_s = cpu_s(), time.monotonic()
            await client.round(responses=responses)
            best_s = min(best_s, time.monotonic() - started_s)
            best_cpu_s = min(best_cpu_s, cpu_s() - before_s)
        what = f"grpcio loopback, 8 KB chat over 100 endpoints, {pattern}: "
        rows.append((what + "CPU per request", f"{best_cpu_s / ROUND_REQUESTS * 1e6:.0f} µs"))
        rows.append((what + "requests/s", f"{ROUND_REQUESTS / best_s:,.0f}"))
    await client.close()
    return rows


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the cost of a request through grpcio."""
    with served() as server:
        return asyncio.run(_measure(server))


if __name__ == "__main__":
    for what, figure in run():
        print(f"{what:85} {figure:>10}")
