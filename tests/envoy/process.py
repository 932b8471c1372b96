"""`epp serve` as a process of its own: what must survive a signal is tested with signals."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import yaml
from grpc_health.v1 import health_pb2

from tests.envoy.rig import free_ports, start_process, until
from tests.envoy.upstream import Pod

READY_S_MAX = 60.0
"""Time in seconds in which a process starts on a machine that others use too."""


class EppProcess:
    """A running `epp serve`."""

    def __init__(
        self, log: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Choose free ports; the process gets `flags` at each start.

        `environment` replaces the environment of the tests; None means that it inherits that one.
        """
        self.port, self.health_port, self.metrics_port = free_ports(3)
        self.address = f"127.0.0.1:{self.port}"
        self.metrics_url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        self._log = log
        self._flags = flags
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def launch(self, *flags: str) -> None:
        """Begin to serve."""
        self._process = await start_process(
            *(sys.executable, "-m", "epp", "serve"),
            *("--grpc-port", str(self.port), "--grpc-health-port", str(self.health_port)),
            *("--metrics-port", str(self.metrics_port), "--seed", "1"),
            *(*self._flags, *flags),
            log=self._log,
            environment=self._environment,
        )

    async def start(self, *flags: str) -> None:
        """Serve, and return once the process says that it is ready."""
        await self.launch(*flags)
        await until(lambda: not self.alive or self.is_ready(), "epp serve to be ready", READY_S_MAX)
        assert self.alive, self.log_text()

    async def is_ready(self) -> bool:
        """Return True if gRPC health reports "readiness" as SERVING; False also on an RPC error."""
        request = health_pb2.HealthCheckRequest(service="readiness").SerializeToString()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            try:
                answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(
                    request, timeout=1
                )
            except grpc.aio.AioRpcError:
                return False
        response = health_pb2.HealthCheckResponse.FromString(answer)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def signal(self, number: signal.Signals) -> None:
        """Send the signal `number` to the process."""
        self._running().send_signal(number)

    def terminate(self) -> None:
        """Ask the process to drain, by SIGTERM."""
        self.signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End it without a chance to do anything."""
        self._running().kill()
        await self._running().wait()

    @property
    def alive(self) -> bool:
        return self._running().returncode is None

    async def exit_code(self) -> int:
        """Wait for it to end."""
        async with asyncio.timeout(30):
            return await self._running().wait()

    def log_text(self) -> str:
        return self._log.read_text()

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the process was started"
        return self._process


def write_endpoints(directory: Path, pods: Sequence[Pod]) -> Path:
    """Write an endpoints file for `pods` into `directory`, and return its path."""
    endpoints = [
        {"name": pod.name, "address": "127.0.0.1", "port": pod.port, "labels": dict(pod.labels)}
        for pod in pods
    ]
    file = directory / "endpoints.yaml"
    file.write_text(yaml.safe_dump({"endpoints": endpoints}))
    return file


@asynccontextmanager
async def running_epp(
    directory: Path, pods: Sequence[Pod], *flags: str
) -> AsyncIterator[EppProcess]:
    """Yield an `epp serve` for `pods` on free ports; kill it at the end if it still runs."""
    file = write_endpoints(directory, pods)
    epp = EppProcess(directory / "epp.log", f"--endpoints-file={file}")
    await epp.start(*flags)
    try:
        yield epp
    finally:
        if epp.alive:
            await epp.kill()
        print(f"--- end of the log of epp serve\n{epp.log_text()[-4000:]}")
