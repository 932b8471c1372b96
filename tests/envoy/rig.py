"""A real Envoy on free ports, the one way to wait, and a client that shows every byte."""

import asyncio
import inspect
import random
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import yaml

from epp.shell.gateway.bootstrap import BootstrapOptions, render


def _find_envoy() -> Path | None:
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    return Path(found) if found else None


ENVOY = _find_envoy()


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 15.0) -> Any:
    """Ask `condition` (plain or async) every 10 ms until it is truthy, and return its value."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        await asyncio.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different.

    They lie below those that the kernel gives to clients, and each process draws at a place of its
    own: what is free here is not taken by somebody else before it is used.
    """
    return [next(_free) for _ in range(count)]


def _draw() -> Iterator[int]:
    first = random.SystemRandom().randrange(len(_PORTS))
    for number in count(first):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


_PORTS: Final = range(12_000, 32_000)
_free = _draw()


@asynccontextmanager
async def refusing_port() -> AsyncIterator[int]:
    """A port that nobody else can take and that refuses every connection."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Envoy:
    """A running Envoy."""

    def __init__(self, port: int, admin_port: int, readiness_port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.readiness_url = f"http://127.0.0.1:{readiness_port}"

    async def is_ready(self) -> bool:
        try:
            return await self._admin("/ready") == "LIVE\n"
        except aiohttp.ClientError:
            return False

    async def counter(self, name: str) -> int:
        """The sum of the counters or gauges that end in `name`."""
        lines = (await self._admin("/stats")).splitlines()
        values = [line.split(": ") for line in lines if line.split(": ")[0].endswith(name)]
        return sum(int(value) for _, value in values)

    async def _admin(self, path: str) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.admin_url + path) as response,
        ):
            return await response.text()


_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def dying_with_us(*command: str | Path) -> list[str]:
    """`command`, so that it dies with the test run, however that ends.

    A program in between sets that up, because a `preexec_fn` would make Python fork, and gRPC's
    threads do not survive a fork. To be started by the main thread: it is the parent that counts.
    """
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *map(str, command)]


async def start_process(
    *command: str | Path, log: Path, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Run `command`, its output appended to `log`; it dies with the test run."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *dying_with_us(*command), stdout=output, stderr=output, env=environment
        )


@asynccontextmanager
async def running_envoy(
    options: BootstrapOptions,
    directory: Path,
    edit: Callable[[dict[str, Any]], None] | None = None,
) -> AsyncIterator[Envoy]:
    """Start Envoy on free ports with what `options` renders, changed by `edit`; stop it after.

    The bootstrap and the log stay in `directory`; the end of the log is printed, so that a failing
    test shows it.
    """
    assert ENVOY is not None
    port, admin_port, readiness_port = free_ports(3)
    options = msgspec.structs.replace(
        options,
        listen_host="127.0.0.1",
        listen_port=port,
        admin_port=admin_port,
        readiness_port=readiness_port,
    )
    document = yaml.safe_load(render(options))
    if edit is not None:
        edit(document)
    config, log = directory / f"envoy-{port}.yaml", directory / f"envoy-{port}.log"
    config.write_text(yaml.safe_dump(document))
    process = await start_process(
        *(ENVOY, "--config-path", config, "--concurrency", "1", "--log-level", "warning"),
        *("--disable-hot-restart", "--drain-time-s", "1"),
        log=log,
    )
    envoy = Envoy(port, admin_port, readiness_port)
    try:
        # A process that has died ends the wait too.
        await until(lambda: process.returncode is not None or envoy.is_ready(), "Envoy to be ready")
        assert process.returncode is None, log.read_text()[-4000:]
        yield envoy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        print(f"--- end of {log}\n{log.read_text()[-4000:]}")


def http_connections(document: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of the rendered bootstrap, to be edited in place."""
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    config: dict[str, Any] = chain["filters"][0]["typed_config"]
    return config


def http_filters(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The HTTP filters of the rendered bootstrap, to be edited in place."""
    filters: list[dict[str, Any]] = http_connections(document)["http_filters"]
    return filters


def ext_proc(document: dict[str, Any]) -> dict[str, Any]:
    """The ext_proc filter of the rendered bootstrap, to be edited in place."""
    (found,) = (f for f in http_filters(document) if f["name"] == "envoy.filters.http.ext_proc")
    config: dict[str, Any] = found["typed_config"]
    return config


def http_client(envoy: Envoy) -> aiohttp.ClientSession:
    """A client of `envoy` without a limit of connections, but with one of time."""
    return aiohttp.ClientSession(
        envoy.url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=30),
    )


class RawConnection:
    """HTTP/1.1 by hand: bodies in parts, reading in parts, leaving without a goodbye."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator["RawConnection"]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_head(self, method: str, path: str, **headers: str | int) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: test"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def read_until(self, mark: bytes, timeout_s: float = 15.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self._reader.readuntil(mark)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.read_until(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def read_to_end(self, timeout_s: float = 15.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self._reader.read()

    def leave(self) -> None:
        """Reset the connection, as a client that is killed does."""
        self._writer.transport.abort()
