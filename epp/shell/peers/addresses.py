"""Determine the addresses of the picker's replicas by polling DNS every few seconds."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import structlog

from epp.core.address import address_of
from epp.core.types import Seconds
from epp.shell.peers.admission import plain_host
from epp.shell.supervision import forever

POLL_S: Final[Seconds] = 5.0

Target: TypeAlias = tuple[str, int]
"""Host name or IP address of replicas, and their port."""
Resolve: TypeAlias = Callable[[str], Awaitable[list[str]]]
"""Type of a function that resolves a host name to IP addresses. It raises `OSError`."""

_GONE: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Error codes of the resolver for a name that does not exist, such as a headless Service without
replicas.
"""

_log = structlog.get_logger(__name__)


async def resolve(host: str) -> list[str]:
    """Return the IP addresses of `host` from the resolver of the operating system. Raises
    `OSError`.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


class Addresses:
    """A poller of the replicas' addresses.

    `on_found` is called with all addresses, "ip:port" each, after the first poll and after each
    change. If a name cannot be resolved, its previous addresses are kept, unless the resolver
    reports that it has none.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        on_found: Callable[[frozenset[str]], None],
        *,
        resolve: Resolve = resolve,
        poll_s: Seconds = POLL_S,
    ) -> None:
        self._targets = tuple(targets)
        self._on_found = on_found
        self._resolve = resolve
        self._poll_s = poll_s
        self._known: dict[Target, frozenset[str]] = {}
        self._problems: dict[Target, str] = {}

    async def run(self) -> None:
        """Resolve the replicas' names periodically until cancelled; IP addresses alone are reported
        only once.
        """
        told: frozenset[str] | None = None
        while True:
            for target in self._targets:
                await self._look_up(target)
            found = frozenset[str]().union(*self._known.values())
            if found != told:
                told = found
                self._on_found(found)
            if all(plain_host(host) is not None for host, _ in self._targets):
                await forever()
            await asyncio.sleep(self._poll_s)

    async def _look_up(self, target: Target) -> None:
        host, port = target
        if plain_host(host) is not None:
            self._known[target] = frozenset({address_of(host, port)})
            return
        try:
            hosts = await self._resolve(host)
        except OSError as problem:
            if problem.errno in _GONE:
                self._known[target] = frozenset()
            self._tell(target, problem.strerror or str(problem))
            return
        self._problems.pop(target, None)
        self._known[target] = frozenset(address_of(host, port) for host in hosts)

    def _tell(self, target: Target, problem: str) -> None:
        """Log a problem of resolving names once, until it is solved or another problem occurs."""
        if self._problems.get(target) != problem:
            self._problems[target] = problem
            _log.warning(
                "host name of replicas cannot be resolved", name=target[0], problem=problem
            )
