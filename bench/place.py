"""Processes for measurements: simple pods, `epp serve` and optionally the real Envoy.

The pods are plain HTTP servers (`python -m bench.place PORT`), because they are not measured. Each
answers a completion with its port, after the seconds in the header `x-takes-s`. Its metrics page is
the one that `POST /page/KIND` chose last.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from msgspec import Struct

from bench.envoy import EnvoyPorts, running_envoy, write_bootstrap
from sim.demo.arm import Child

READY_S_MAX = 30.0
ROOT = Path(__file__).resolve().parents[1]
PAGE = """\
vllm:num_requests_waiting {waiting}
vllm:num_requests_running 0
vllm:kv_cache_usage_perc 0.1
"""


def client_session(timeout_s: float) -> ClientSession:
    """Return an HTTP session with any number of connections.

    A request may take `timeout_s` seconds.
    """
    return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=timeout_s))


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports of the loopback interface."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Place(Struct, frozen=True, kw_only=True):
    """The addresses of the processes under measurement: picker, Envoy and pods."""

    folder: Path
    picker: str
    """Address of the picker's ext_proc service as "host:port", without TLS."""
    gateway: str
    """URL of Envoy to which clients send requests, or "" if Envoy does not run."""
    pages: str
    """Base URL of the picker's metrics and debug pages."""
    pods: "Pods"
    picker_pid: int

    @property
    def endpoints_file(self) -> Path:
        return self.folder / "endpoints.json"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    def resident_bytes(self) -> int:
        """Return the resident memory of the picker in bytes."""
        for line in Path(f"/proc/{self.picker_pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the picker has ended")


def write_endpoints(file: Path, ports: Sequence[int]) -> None:
    """Replace the endpoints file atomically by one with pods at `ports`."""
    rows = [{"name": f"pod-{port}", "address": "127.0.0.1", "port": port} for port in ports]
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"endpoints": rows}))
    beside.replace(file)


class Pods:
    """Async context manager that runs a pod process at each of `ports`.

    The Python module `module` is run with a port as its argument. A pod may be killed within the
    context.
    """

    def __init__(self, folder: Path, ports: Sequence[int], module: str = "bench.place") -> None:
        self.ports = tuple(ports)
        self._folder = folder
        self._module = module
        self._running: dict[int, contextlib.AsyncExitStack] = {}
        self._children: dict[int, Child] = {}

    async def __aenter__(self) -> Self:
        for port in self.ports:
            await self.start(port)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stack in self._running.values():
            await stack.aclose()

    async def start(self, port: int) -> None:
        """Start the process of the pod at `port`."""
        command = (sys.executable, "-m", self._module, str(port))
        stack = self._running[port] = contextlib.AsyncExitStack()
        child = Child.running(f"pod {port}", command, self._folder / f"pod-{port}.log")
        self._children[port] = await stack.enter_async_context(child)

    def pid(self, port: int) -> int:
        """Return the process id of the pod at `port`."""
        return self._children[port].pid

    def send_signal(self, port: int, number: signal.Signals) -> None:
        """Send the signal `number` to the process group of the pod at `port`; do nothing if it has
        ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._children[port].pid, number)

    async def kill(self, port: int) -> None:
        """Kill the pod at `port` with SIGKILL, and wait until its process has ended."""
        self.send_signal(port, signal.SIGKILL)
        await self._running.pop(port).aclose()


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, pods: int, envoy: bool, flags: Sequence[str] = (), config: str = ""
) -> AsyncIterator[Place]:
    """Start the pods, the picker and, with `envoy`, Envoy, and yield their addresses.

    They are stopped at the end of the context.
    """
    drawn = free_ports(6 + pods)
    gateway = EnvoyPorts(*drawn[:3])
    picker, health, metrics, *ports = drawn[3:]
    endpoints = folder / "endpoints.json"
    write_endpoints(endpoints, ports)
    if config:
        (folder / "config.yaml").write_text(config)
        flags = (*flags, "--config-file", str(folder / "config.yaml"))
    serve = (
        *(sys.executable, "-m", "epp", "serve"),
        *("--endpoints-file", str(endpoints), "--secure-serving=false"),
        *("--grpc-port", str(picker), "--grpc-health-port", str(health)),
        *("--metrics-port", str(metrics), "--seed", "1", *flags),
    )
    pages = f"http://127.0.0.1:{metrics}"
    async with contextlib.AsyncExitStack() as started:
        held = await started.enter_async_context(Pods(folder, ports))
        log = folder / "epp.log"
        child = await started.enter_async_context(Child.running("epp", serve, log))
        if envoy:
            bootstrap = folder / "envoy.yaml"
            await write_bootstrap(bootstrap, gateway, [f"127.0.0.1:{picker}"])
            await started.enter_async_context(running_envoy(bootstrap))
        place = Place(
            folder=folder,
            picker=f"127.0.0.1:{picker}",
            gateway=gateway.url if envoy else "",
            pages=pages,
            pods=held,
            picker_pid=child.pid,
        )
        await _until_ready(place)
        yield place


async def _until_ready(place: Place) -> None:
    async with ClientSession() as session, asyncio.timeout(READY_S_MAX):
        while True:
            if await _is_ready(session, place):
                return
            await asyncio.sleep(0.05)


async def _is_ready(session: ClientSession, place: Place) -> bool:
    try:
        async with session.get(f"{place.pages}/debug/endpoints?format=json") as response:
            states = [row["state"] for row in (await response.json())["endpoints"]]
        if states != ["ready"] * len(place.pods.ports):
            return False
        if not place.gateway:
            return True
        body = b'{"model": "m", "prompt": "ready?"}'
        async with session.post(f"{place.gateway}/v1/completions", data=body) as response:
            return response.status == 200
    except ClientError:
        return False


# The process of a pod.


async def _serve_pod(port: int, pages: Mapping[str, Callable[[], bytes]]) -> None:
    # Engines judge the content of requests; these pods accept all.
    runner = web.AppRunner(_pod(port, pages), access_log=None, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


def _pod(port: int, pages: Mapping[str, Callable[[], bytes]]) -> web.Application:
    page = PAGE.format(waiting=0).encode()
    drips = False

    async def say(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(float(request.headers.get("x-takes-s", "0")))
        return web.Response(text=str(port))

    async def choose(request: web.Request) -> web.Response:
        nonlocal page, drips
        kind = request.match_info["kind"]
        drips = kind == "drip"
        page = pages.get(kind, lambda: PAGE.format(waiting=0).encode())()
        return web.Response()

    async def metrics(request: web.Request) -> web.StreamResponse:
        if not drips:
            return web.Response(body=page, content_type="text/plain")
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for position in range(len(page)):
            await response.write(page[position : position + 1])
        await response.write_eof()
        return response

    application = web.Application(client_max_size=64 * 1024 * 1024)
    application.add_routes(
        [
            web.get("/metrics", metrics),
            web.post("/page/{kind}", choose),
            web.route("*", "/{path:.*}", say),
        ]
    )
    return application


def _series() -> bytes:
    lines = (
        f'vllm:num_requests_waiting{{model_name="m",engine="{number}"}} 0'
        for number in range(90_000)
    )
    return "\n".join(lines).encode()[: 4 * 2**20 - 1].rpartition(b"\n")[0] + b"\n"


def _adapters() -> bytes:
    names = ",".join(f"a{number}" for number in range(500_000))
    line = f'vllm:lora_requests_info{{running_lora_adapters="{names}",waiting_lora_adapters="",max_lora="4"}} 1.0\n'
    return PAGE.format(waiting=0).encode() + line.encode()[: 4 * 2**20 - 4096]


PAGES: Mapping[str, Callable[[], bytes]] = {
    "series": _series,
    "adapters": _adapters,
    "drip": lambda: PAGE.format(waiting=0).encode() * 200,
}
"""Kinds of metrics pages that no real engine serves, by the KIND of `POST /page/KIND`."""

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_pod(int(sys.argv[1]), PAGES))
