"""The real Envoy as a process in front of pickers, all on the loopback interface."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from msgspec import Struct

from sim.demo.arm import Child, find_envoy


class EnvoyPorts(Struct, frozen=True):
    """The ports on which Envoy listens."""

    gateway: int
    admin: int
    readiness: int

    @property
    def url(self) -> str:
        """URL of Envoy to which clients send requests."""
        return f"http://127.0.0.1:{self.gateway}"


async def write_bootstrap(
    file: Path, ports: EnvoyPorts, pickers: Sequence[str], flags: Sequence[str] = ()
) -> None:
    """Write the bootstrap configuration of Envoy, the output of `epp envoy-config`, to `file`.

    `pickers` are the addresses (ip:port) of the pickers, and `flags` are further flags of the
    command.
    """
    written = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp", "envoy-config", "--out", str(file), "--plaintext"),
        *("--listen-host", "127.0.0.1", "--listen-port", str(ports.gateway)),
        *("--admin-port", str(ports.admin), "--readiness-port", str(ports.readiness)),
        *("--picker-address", ",".join(pickers), *flags),
    )
    assert await written.wait() == 0, "epp envoy-config failed"


def running_envoy(bootstrap: Path, *, workers: int = 1) -> AbstractAsyncContextManager[Child]:
    """Return a context in which Envoy runs with the configuration file `bootstrap` and `workers`
    threads.

    Its log is the file `envoy.log` beside the configuration.
    """
    command = (
        *(str(find_envoy()), "--config-path", str(bootstrap), "--concurrency", str(workers)),
        *("--disable-hot-restart", "--log-level", "warning"),
    )
    return Child.running("envoy", command, bootstrap.with_name("envoy.log"))
