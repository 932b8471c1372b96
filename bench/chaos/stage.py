"""The processes to which `make chaos` does harm: pods, pickers and Envoy."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct, field

from bench.chaos.load import NUMBER_HEADER
from bench.chaos.pods import Fault
from bench.envoy import EnvoyPorts, running_envoy, write_bootstrap
from bench.place import Pods, free_ports, write_endpoints
from epp.shell.gateway.bootstrap import DESTINATION_HEADER
from sim.demo.arm import Child

PODS: Final = 5
READY_S_MAX: Final = 120.0
"""Maximum time in seconds until pods and pickers are ready, and then again until Envoy is.

Pods and pickers start at once, which takes a minute on a busy machine.
"""
_LOG: Final = {
    "number": f"%REQ({NUMBER_HEADER})%",
    "destination": f"%REQ({DESTINATION_HEADER})%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
}

Edit = Callable[[dict[str, Any]], None]


class Routed(Struct, frozen=True):
    """One line of Envoy's log: what became of one request."""

    number: str = ""
    destination: str = ""
    """Address (ip:port) of the pod that the picker chose; "" or "-" if it chose none."""
    flags: str = ""
    details: str = ""


class Picker:
    """One process of `epp serve` in `make chaos`: its addresses, its process id, and a function
    that sends it a signal.
    """

    def __init__(self, child: Child, address: str, metrics_port: int) -> None:
        self.address = address
        self.metrics_port = metrics_port
        self.pages = f"http://127.0.0.1:{metrics_port}"
        self.pid = child.pid
        self.signal = child.signal


class Stage(Struct, kw_only=True):
    """The addresses of all processes to which `make chaos` does harm: pods, pickers and Envoy."""

    folder: Path
    gateway: str
    """URL of Envoy to which clients send requests."""
    pods: Pods
    pickers: list[Picker] = field(default_factory=list)

    async def tell(self, port: int, fault: Fault) -> None:
        """Set the fault of the pod at `port` to `fault` from now on."""
        async with (
            ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/fault/{fault}") as response,
        ):
            assert response.status == 200, f"the pod answers {response.status}"

    def routed(self) -> dict[int, Routed]:
        """Return Envoy's log about each ended request, by the number of the request.

        It is complete once Envoy has ended.
        """
        found = {}
        for line in (self.folder / "access.log").read_text().splitlines():
            values = {name: value or "" for name, value in json.loads(line).items()}
            if values["number"].isdigit():
                found[int(values["number"])] = Routed(**values)
        return found


@contextlib.asynccontextmanager
async def staged(
    folder: Path,
    *,
    pickers: int = 2,
    flags: Sequence[str] = (),
    gateway_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    peers: Callable[[Sequence[int]], Sequence[Sequence[str]]] | None = None,
    pool: Callable[[Sequence[int]], Sequence[str]] | None = None,
    edit: Edit | None = None,
) -> AsyncIterator[Stage]:
    """Start pods, pickers and Envoy, and yield their addresses; stop them at the end of the
    context.

    `flags` and `environment` apply to each picker, `gateway_flags` to `epp envoy-config`. `peers`
    returns the flags of each picker from the ports by which the pickers reach each other; if it is
    None, each picker has the addresses of all. `pool` returns the flags that define the endpoints,
    from the ports of the pods; if it is None, the endpoints are in a file. `edit` changes the
    output of `epp envoy-config`.
    """
    drawn = free_ports(3 + 4 * pickers + PODS)
    gateway, free = EnvoyPorts(*drawn[:3]), drawn[3:]
    ports, free = free[:PODS], free[PODS:]
    found = (pool or _in_file(folder / "endpoints.json"))(ports)
    peer_ports = [free.pop() for _ in range(pickers)]
    together = (peers or _addresses_of_all)(peer_ports)
    stage = Stage(
        folder=folder,
        gateway=gateway.url,
        pods=Pods(folder, ports, "bench.chaos.pods"),
    )
    async with contextlib.AsyncExitStack() as started:
        await started.enter_async_context(stage.pods)
        for number in range(pickers):
            serving, health, metrics = (free.pop() for _ in range(3))
            command = (
                *(sys.executable, "-m", "epp", "serve", *found, "--secure-serving=false"),
                *("--grpc-port", str(serving)),
                *("--grpc-health-port", str(health), "--metrics-port", str(metrics)),
                *("--seed", "1", *together[number], *flags),
            )
            with _environment(environment or {}), _piped(folder / f"epp-{number}.log") as log:
                child = await started.enter_async_context(
                    Child.running(f"epp {number}", command, log)
                )
            picker = Picker(child, f"127.0.0.1:{serving}", metrics)
            # It has no clients left when it is ended.
            started.callback(picker.signal, signal.SIGKILL)
            stage.pickers.append(picker)
        bootstrap = folder / "envoy.yaml"
        addresses = [picker.address for picker in stage.pickers]
        await write_bootstrap(bootstrap, gateway, addresses, gateway_flags)
        document = yaml.safe_load(bootstrap.read_text())
        _log_requests(document, folder / "access.log")
        if edit is not None:
            edit(document)
        bootstrap.write_text(yaml.safe_dump(document))
        await _until_ready(stage, with_gateway=False)
        await started.enter_async_context(running_envoy(bootstrap, workers=2))
        await _until_ready(stage, with_gateway=True)
        yield stage


def _in_file(file: Path) -> Callable[[Sequence[int]], Sequence[str]]:
    def written(ports: Sequence[int]) -> Sequence[str]:
        write_endpoints(file, ports)
        return ("--endpoints-file", str(file))

    return written


def _addresses_of_all(ports: Sequence[int]) -> list[list[str]]:
    everybody = ",".join(f"127.0.0.1:{port}" for port in ports)
    return [[*own_port(port), "--peers", everybody] for port in ports]


def own_port(port: int) -> list[str]:
    """Return the flags that set the port of a picker to which other replicas connect."""
    return ["--peer-port", str(port), "--peer-bind-address", "127.0.0.1"]


@contextlib.contextmanager
def _piped(log: Path) -> Iterator[Path]:
    """Yield a path that leads through a pipe to the file `log`, so that a limit on the size of the
    writer's files does not stop its log.
    """
    read, write = os.pipe()

    def copy() -> None:
        with os.fdopen(read, "rb") as source, log.open("wb") as sink:
            shutil.copyfileobj(source, sink)

    threading.Thread(target=copy, name=f"log {log}", daemon=True).start()
    try:
        yield Path(f"/dev/fd/{write}")
    finally:
        os.close(write)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _log_requests(document: dict[str, Any], file: Path) -> None:
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    chain["filters"][0]["typed_config"]["access_log"] = [
        {
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": str(file),
                "log_format": {"json_format": _LOG},
            },
        }
    ]


async def _until_ready(stage: Stage, *, with_gateway: bool) -> None:
    timeout = ClientTimeout(total=5)
    async with ClientSession(timeout=timeout) as session, asyncio.timeout(READY_S_MAX):
        while not await _is_ready(session, stage, with_gateway):  # noqa: ASYNC110 - it is far away
            await asyncio.sleep(0.05)


async def _is_ready(session: ClientSession, stage: Stage, with_gateway: bool) -> bool:
    try:
        for picker in stage.pickers:
            async with session.get(f"{picker.pages}/debug/endpoints?format=json") as response:
                states = [row["state"] for row in (await response.json())["endpoints"]]
            if states != ["ready"] * len(stage.pods.ports):
                return False
        if with_gateway:
            async with session.get(f"{stage.gateway}/v1/models") as response:
                return response.status == 200
    except (ClientError, TimeoutError):
        return False
    return True
