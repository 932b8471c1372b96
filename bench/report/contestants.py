"""The measured servers, each a process of its own on one core (`GO_ANYWHERE` on all cores).

Homing is `epp serve` as installed, on each of its transports. The others do nothing
(`bench/servers`): their cost is the floor of a transport. The one in Go also decodes the JSON of
each body. It is built if Go is installed, into a cache outside the tree.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.place import free_ports
from bench.report.accounting import session_cpu_s
from epp.flags.values import Transport

ROOT: Final = Path(__file__).resolve().parents[2]
GO_SOURCES: Final = ROOT / "bench" / "servers" / "go"
GO: Final = "G"
"""Name of the reference server, which is written in Go, decodes the JSON of each body and does
nothing else.
"""
GO_ANYWHERE: Final = "G, any core"
"""Name of the reference server if it may run on every core, which costs Go more for its
parallelism.
"""
_READY_S_MAX: Final = 60.0
_BUILD_S_MAX: Final = 900.0


class ContestantError(Exception):
    """The error of a server that cannot be measured. Its text is one sentence with the reason."""


class Contestant(Struct, frozen=True, kw_only=True):
    """A running server that the performance report measures."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server's processes, those of one session of the operating
        system, have used so far.
        """
        return session_cpu_s(self.pid)


class Pool(Struct, frozen=True, kw_only=True):
    """The endpoints among which a measured picker chooses, with their addresses."""

    endpoints: int = 100
    pages_port: int | None = None
    """Port at which all endpoints serve their metrics pages; None if they serve none."""
    refresh: str = "1s"
    """Interval of scrapes, as a duration; "" for the picker's default."""


class Settings(Struct, frozen=True, kw_only=True):
    """Settings of a measured picker in addition to the usual ones."""

    name: str = ""
    """Suffix of the server's name; "" for the picker as installed."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


AS_INSTALLED: Final = Settings()


def homing(transport: str, settings: str = "") -> str:
    """Return the name of the picker on `transport`, with the `Settings` of the name `settings`."""
    return f"Homing, {transport}" + (f", {settings}" if settings else "")


def nothing(transport: str) -> str:
    """Return the name of the server on `transport` that does nothing."""
    return f"nothing, {transport}"


def transports() -> list[str]:
    """Return the names of the transports that `epp serve --transport` accepts."""
    return [str(each) for each in Transport]


def floors() -> tuple[dict[str, list[str]], list[str]]:
    """Return the commands of the servers that do nothing by name, and a sentence for each one that
    is missing. The Go server is built first if necessary.
    """
    python = [sys.executable, "-m"]
    found, missing = {}, []
    try:
        found[GO] = [str(go_server(os.environ))]
    except ContestantError as error:
        missing.append(f"There is no G: {error}.")
    found[nothing("grpcio")] = [*python, "bench.servers.on_grpcio"]
    if find_spec("ngh2") is None:
        missing.append("There is no server on ngh2 that does nothing: ngh2 is not installed.")
    else:
        found[nothing("ngh2")] = [*python, "bench.servers.on_ngh2"]
    return found, missing


def go_server(environment: Mapping[str, str]) -> Path:
    """Return the executable of the Go server, built if it does not exist or its sources have
    changed.

    Raise `ContestantError` if it cannot be built.
    """
    caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    folder = Path(caches).expanduser() / "homing" / f"bench-servers-{_pinned()}"
    built = folder / "server"
    newest = max(file.stat().st_mtime for file in GO_SOURCES.iterdir())
    if os.access(built, os.X_OK) and built.stat().st_mtime >= newest:
        return built
    go = shutil.which("go", path=environment.get("PATH"))
    if go is None:
        raise ContestantError("there is no go on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        ready = Path(scratch, "server")
        try:
            subprocess.run(
                [go, "build", "-p", "2", "-trimpath", "-ldflags", "-s -w", "-o", str(ready), "."],
                cwd=GO_SOURCES,
                env={**environment, "CGO_ENABLED": "0"},
                check=True,
                capture_output=True,
                text=True,
                timeout=_BUILD_S_MAX,
            )
        except subprocess.TimeoutExpired:
            raise ContestantError(f"go build took more than {_BUILD_S_MAX:.0f} s") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no output"])[-1]
            raise ContestantError(f"go build failed: {last}") from error
        ready.rename(built)
    return built


def _pinned() -> str:
    """Return the version of grpc-go that go.mod requires."""
    text = (GO_SOURCES / "go.mod").read_text(encoding="utf-8")
    (version,) = re.findall(r"^\tgoogle\.golang\.org/grpc (v\S+)", text, re.MULTILINE)
    return f"grpc-{version}"


@contextlib.contextmanager
def doing_nothing(name: str, command: Sequence[str], core: frozenset[int]) -> Iterator[Contestant]:
    """Run a server of `floors` during the context, and yield it. Raise `ContestantError` if it ends
    before it listens.
    """
    with _process(command, core, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ContestantError(f"{name} ended before it listened")
        yield Contestant(name=name, port=int(line), pid=process.pid)


@contextlib.contextmanager
def serving_homing(
    transport: str,
    pool: Pool,
    folder: Path,
    core: frozenset[int],
    settings: Settings = AS_INSTALLED,
) -> Iterator[Contestant]:
    """Run `epp serve` with ready endpoints during the context, and yield it. Raise
    `ContestantError` if it ends, or if they are not ready within a minute.
    """
    grpc, health, metrics = free_ports(3)
    file = folder / f"endpoints-{grpc}.json"
    file.write_text(json.dumps({"endpoints": _endpoints(pool)}))
    command = [
        *(sys.executable, "-m", "epp", "serve", "--secure-serving=false", "--seed=1"),
        *(f"--transport={transport}", f"--endpoints-file={file}"),
        *(f"--grpc-port={grpc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}"),
        *([f"--refresh-metrics-interval={pool.refresh}"] if pool.refresh else []),
        *settings.flags,
    ]
    log = folder / f"homing-{grpc}.log"
    environment = os.environ | settings.environment
    with (
        log.open("wb") as out,
        _process(command, core, stdout=out, environment=environment) as process,
    ):
        _until_ready(process, metrics, pool.endpoints, log)
        yield Contestant(name=homing(transport, settings.name), port=grpc, pid=process.pid)


def _endpoints(pool: Pool) -> list[dict[str, object]]:
    metrics = {"port": pool.pages_port} if pool.pages_port else False
    return [
        {"name": f"pod-{n}", "address": "127.0.0.1", "port": 20_000 + n, "metrics": metrics}
        for n in range(pool.endpoints)
    ]


@contextlib.contextmanager
def _process(
    command: Sequence[str],
    core: frozenset[int],
    *,
    stdout: object,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a process on the given cores from the beginning, in a session of its own, during the
    context.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=stdout,  # type: ignore[call-overload]
            stderr=None if stdout == subprocess.PIPE else subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
    finally:
        os.sched_setaffinity(0, allowed)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _until_ready(
    process: subprocess.Popen[str], metrics_port: int, endpoints: int, log: Path
) -> None:
    url = f"http://127.0.0.1:{metrics_port}/debug/endpoints?format=json"
    give_up_s = time.monotonic() + _READY_S_MAX
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url, timeout=5.0) as response:
                states = [row["state"] for row in json.load(response)["endpoints"]]
            if states == ["ready"] * endpoints:
                return
        time.sleep(0.1)
    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing was logged"])[-1]
    raise ContestantError(f"Homing did not become ready: {last[-300:]}")
