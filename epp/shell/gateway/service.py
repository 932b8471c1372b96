"""What gateways talk to, as one thing: ports, certificate, health, and how it ends."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, Self

import grpc.aio
import structlog

from epp.configuration.flags import ServeFlags
from epp.shell.gateway.health import Health
from epp.shell.gateway.listening import listen
from epp.shell.gateway.server import ExtProcServer, StreamObserver, grpc_server
from epp.shell.gateway.tls import ServerCertificate, read_authorities
from epp.shell.starting import StartError

HEALTH_MESSAGE_BYTES_MAX: Final = 65_536
CERTIFICATE_POLL_S: Final = 10.0
STOP_S: Final = 0.5
"""What stopping takes once nothing is left to wait for."""
QUIET_S: Final = 1.0
"""No gateway that would open another stream is left, if none did for this long."""
CONNECTION_AGE_MIN_S: Final = 2.0
_POLL_S: Final = 0.05

_log = structlog.get_logger(__name__)


class GatewayService:
    """Async context manager: its ports are taken inside; `start` serves, `drain` ends it."""

    def __init__(
        self, flags: ServeFlags, ext_proc: ExtProcServer, health: Health, observer: StreamObserver
    ) -> None:
        self._flags = flags
        self._ext_proc = ext_proc
        self._health = health
        self._observer = observer
        self._certificate: ServerCertificate | None = None
        self._opened = contextlib.AsyncExitStack()
        self._servers: tuple[grpc.aio.Server, grpc.aio.Server] | None = None

    async def __aenter__(self) -> Self:
        """Raises `StartError` when a port cannot be had or the certificate cannot be used."""
        async with contextlib.AsyncExitStack() as opened:
            server = grpc_server(
                self._flags.receive_message_max_bytes, _connection_age_max_s(self._flags)
            )
            opened.push_async_callback(server.stop, None)
            self._ext_proc.add_to(server)
            self._health.add_to(server)
            self._certificate = self._bind(server)
            health_server = grpc_server(HEALTH_MESSAGE_BYTES_MAX)
            opened.push_async_callback(health_server.stop, None)
            self._health.add_to(health_server)
            flag, port = "--grpc-health-port", self._flags.grpc_health_port
            listen(health_server, flag, port, address=self._flags.grpc_health_bind_address)
            self._servers = server, health_server
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def start(self) -> None:
        """Take streams."""
        assert self._servers is not None, "the ports are taken"
        for server in self._servers:
            await server.start()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What is to run beside it until it has drained, by the name of its task."""
        loops: dict[str, Coroutine[Any, Any, None]] = {"overdue": self._ext_proc.watch()}
        if self._certificate is not None and self._flags.enable_cert_reload:
            loops["certificate"] = self._certificate.watch(CERTIFICATE_POLL_S, _report_certificate)
        return loops

    async def drain(self, hurry: asyncio.Event) -> None:
        """Not ready; for `drain_grace` as before; then end what can end, and stop when it is quiet.

        gRPC refuses whatever reaches a server that stops, also what was under way when the gateway
        was told so. So streams are served until no gateway opens one any more: it has seen that we
        are not ready, or its connection has come of age. `hurry` cuts it short.
        """
        assert self._servers is not None, "the service was started"
        server, _ = self._servers
        flags = self._flags
        ends_at_s = time.monotonic() + flags.drain_timeout
        self._health.close()
        _log.info("draining", streams=self._ext_proc.open_streams)
        await _wait(hurry, min(flags.drain_grace, flags.drain_timeout))
        self._ext_proc.end_bypassed()
        while not hurry.is_set() and time.monotonic() < ends_at_s - STOP_S:
            if self._ext_proc.quiet_for_s() >= QUIET_S:
                break
            await _wait(hurry, _POLL_S)
        stopping = asyncio.create_task(server.stop(STOP_S), name="stop")
        # What is ending may still say so.
        await asyncio.wait({stopping}, timeout=STOP_S / 2)
        cut = self._ext_proc.open_streams
        if cut:
            self._observer.drain_cut(cut)
            _log.warning("streams were cut by the end of the drain", streams=cut)
        await server.stop(None)
        await stopping

    def _bind(self, server: grpc.aio.Server) -> ServerCertificate | None:
        flags = self._flags
        if not flags.secure_serving:
            listen(server, "--grpc-port", flags.grpc_port, address=flags.grpc_bind_address)
            return None
        directory = Path(flags.cert_path) if flags.cert_path else None
        client_ca = Path(flags.client_ca_file) if flags.client_ca_file else None
        flag = "--client-ca-file"
        try:
            authorities = None if client_ca is None else read_authorities(client_ca)
            flag = "--cert-path"
            certificate = ServerCertificate.open(directory, client_ca, authorities)
        except ValueError as error:
            raise StartError(f"{flag}: {error}") from error
        listen(
            *(server, "--grpc-port", flags.grpc_port, certificate.credentials),
            address=flags.grpc_bind_address,
        )
        return certificate


def _connection_age_max_s(flags: ServeFlags) -> float | None:
    """Young enough that a gateway which clings to its connection leaves within a drain."""
    if not flags.drain_timeout:
        return None
    return max(CONNECTION_AGE_MIN_S, flags.drain_timeout / 2)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until `event` or for `timeout_s`, whichever is first."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _report_certificate(sentence: str, good: bool) -> None:
    (_log.info if good else _log.error)(sentence)
