"""The picker's service for gateways as a whole: ports, certificate, health and drain."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Final, Self

import structlog

from epp.core.protocol.budget import BodyBudget
from epp.flags.serve import ServeFlags
from epp.flags.values import IpAddress
from epp.flags.values import Transport as TransportName
from epp.shell.gateway.arrivals import Lag
from epp.shell.gateway.calls import Connected, Opener, Transport
from epp.shell.gateway.envoy_admin import EnvoyAdmin
from epp.shell.gateway.ext_proc import ExtProc, StreamObserver
from epp.shell.gateway.health import Health
from epp.shell.gateway.tls import ServerCertificate, read_authorities
from epp.shell.starting import StartError, cannot_listen
from epp.shell.supervision import Loop

HEALTH_MESSAGE_BYTES_MAX: Final = 65_536
CERTIFICATE_POLL_S: Final = 10.0
STOP_S: Final = 0.5
"""Time in seconds, before the drain timeout ends, at which the server begins to stop. Streams that
are ending have half of it to send their last messages.
"""
QUIET_S: Final = 1.0
"""Time in seconds without a new stream after which the drain assumes that no gateway opens further
streams.
"""
CLINGING_AGE_S: Final = 15.0
"""Upper limit in seconds of a connection's maximum age with grpcio if a drain timeout is set, so
that most of the drain's time is left when the last gateway has reconnected elsewhere.
"""
CONNECTION_AGE_MIN_S: Final = 2.0
_POLL_S: Final = 0.05

_log = structlog.get_logger(__name__)


class GatewayService:
    """An async context manager that holds the picker's ports for gateways. `start` begins to serve,
    and `drain` ends it.

    `budget` is the memory budget of all streams' bodies.
    """

    def __init__(
        self,
        flags: ServeFlags,
        ext_proc: ExtProc,
        health: Health,
        observer: StreamObserver,
        budget: BodyBudget,
        *,
        lag: Lag,
        seed: int,
        refuse_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Create the service. `lag` is that of the event loop; `seed` determines random differences
        between the maximum ages of connections. A drain calls `refuse_waiting` after its grace
        period, if there is a queue.
        """
        self._refuse_waiting = refuse_waiting
        self._lag = lag
        self._flags = flags
        self._ages = Random(f"{seed}:connection-age")  # noqa: S311  ages, not secrets
        self._ext_proc = ext_proc
        self._health = health
        self._observer = observer
        self._budget = budget
        self._certificate: ServerCertificate | None = None
        port = flags.envoy_admin_port
        self._envoy = None if port is None else EnvoyAdmin(port)
        self._draining = False
        self._opened = contextlib.AsyncExitStack()
        self._serving: Transport | None = None
        self._checking: Transport | None = None

    async def __aenter__(self) -> Self:
        """Listen on the serving port and the health port. Raises `StartError` if a port or the
        certificate cannot be used.
        """
        flags = self._flags
        async with contextlib.AsyncExitStack() as opened:
            self._certificate = _certificate(flags) if flags.secure_serving else None
            methods = {**self._ext_proc.methods, **self._health.methods}
            self._serving = self._transport(methods, flags.receive_message_max_bytes)
            opened.push_async_callback(self._serving.stop, None)
            at = "--grpc-port", flags.grpc_port, flags.grpc_bind_address
            await _listen(self._serving, *at, certificate=self._certificate)
            self._checking = self._transport(self._health.methods, HEALTH_MESSAGE_BYTES_MAX)
            opened.push_async_callback(self._checking.stop, None)
            at = "--grpc-health-port", flags.grpc_health_port, flags.grpc_health_bind_address
            await _listen(self._checking, *at)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def start(self) -> None:
        """Begin to accept streams on the serving port and the health port, and let an Envoy beside
        the picker keep its clients again.
        """
        for transport in self._transports():
            await transport.start()
        if self._envoy is not None:
            await self._envoy.call_back()

    @property
    def has_gateway(self) -> bool:
        """True if a gateway is connected to the serving port, as far as the transport knows."""
        return self._transports()[0].has_gateway

    def stand_by(self, stands_by: bool) -> None:
        """Start or stop asking gateways to use the leading replica instead of this standby.
        Gateways that connect here all the same are served. Ignored during a drain.
        """
        if not self._draining:
            self._transports()[0].send_away(stands_by)

    def loops(self) -> dict[str, Loop]:
        """Return the coroutines that must run until the drain has ended, by the names of their
        tasks.
        """
        loops: dict[str, Loop] = {"overdue": self._ext_proc.watch}
        for port, transport in zip(("serving", "health"), self._transports(), strict=True):
            loops |= {f"{name} ({port})": loop for name, loop in transport.loops().items()}
        certificate = self._certificate
        if certificate is not None and self._flags.enable_cert_reload:
            loops["certificate"] = lambda: certificate.watch(
                CERTIFICATE_POLL_S, _report_certificate
            )
        return loops

    def connected(self) -> Connected | None:
        """Return the counts of gateways' connections, or None if the transport does not know them
        or the ports are not open.
        """
        return self._serving.connected() if self._serving is not None else None

    async def drain(self, hurry: asyncio.Event) -> None:
        """Drain the picker: become not ready, serve on for `drain_grace`, end bypassed streams, and
        stop when quiet.

        A server that stops refuses all streams that reach it, including those that were under way
        when the gateway was notified. Streams are therefore served until no gateway opens one any
        more. By then every gateway has seen that this picker is not ready, was asked to connect
        elsewhere, or its connection reached the maximum age. An Envoy beside this picker stops
        together with it: its clients are sent away, and its requests are awaited too. The drain
        ends after `drain_timeout`, or earlier if the event `hurry` is set; streams that are then
        cut are counted and logged.
        """
        serving, _ = self._transports()
        flags = self._flags
        ends_at_s = time.monotonic() + flags.drain_timeout
        self._health.close()
        self._draining = True
        _log.info("drain started", streams=self._ext_proc.open_streams)
        if self._envoy is not None:
            await self._envoy.send_away()
        await _wait(hurry, min(flags.drain_grace, flags.drain_timeout))
        serving.send_away(True)
        if self._refuse_waiting is not None:
            self._refuse_waiting()
        self._ext_proc.end_bypassed()
        while not hurry.is_set() and time.monotonic() < ends_at_s - STOP_S:
            if self._ext_proc.quiet_for_s() >= QUIET_S and await self._envoy_idle():
                break
            await _wait(hurry, _POLL_S)
        stopping = asyncio.create_task(serving.stop(STOP_S), name="stop")
        # Streams that are ending may still send their last messages.
        await asyncio.wait({stopping}, timeout=STOP_S / 2)
        cut = self._ext_proc.open_streams
        if self._envoy is not None:
            # Bypassed requests have no stream here, so Envoy's count is used.
            cut = max(cut, self._envoy.active_requests)
        if cut:
            self._observer.drain_cut(cut)
            _log.warning("streams were cut by the end of the drain", streams=cut)
        await serving.stop(None)
        await stopping

    async def _envoy_idle(self) -> bool:
        return self._envoy is None or await self._envoy.idle_for_s() >= QUIET_S

    def _transports(self) -> tuple[Transport, Transport]:
        """Return the gRPC transports of the serving port and of the health port."""
        assert self._serving is not None, "the ports are taken"
        assert self._checking is not None, "the ports are taken"
        return self._serving, self._checking

    def _transport(self, methods: Mapping[str, Opener], message_bytes_max: int) -> Transport:
        # Transports are imported on demand, because gRPC takes 15 MB.
        if self._flags.transport is TransportName.NGH2:
            from epp.shell.gateway.http2 import Http2Server, Http2Settings  # noqa: PLC0415

            return Http2Server(
                methods,
                budget=self._budget,
                settings=Http2Settings(
                    message_bytes_max=message_bytes_max,
                    connection_age_max_s=self._flags.connection_age_max or None,
                ),
                cut=self._observer.connection_cut,
                lag=self._lag,
                random=self._ages,
            )
        from epp.shell.gateway.grpcio import GrpcioServer  # noqa: PLC0415

        return GrpcioServer(
            methods,
            receive_bytes_max=message_bytes_max,
            connection_age_max_s=_connection_age_max_s(self._flags),
            cut=self._observer.connection_cut,
            lag=self._lag,
        )


async def _listen(
    transport: Transport,
    flag: str,
    port: int,
    address: IpAddress,
    *,
    certificate: ServerCertificate | None = None,
) -> None:
    """Make `transport` listen on `port` at `address`. `flag` names the port in errors. Raises
    `StartError`.
    """
    try:
        await transport.listen(address, port, certificate)
    except OSError as error:
        raise cannot_listen(flag, port, error, address) from error


def _certificate(flags: ServeFlags) -> ServerCertificate:
    """Return the TLS certificate that the command-line flags specify. Raises `StartError` if it is
    unusable.
    """
    directory = Path(flags.cert_path) if flags.cert_path else None
    client_ca = Path(flags.client_ca_file) if flags.client_ca_file else None
    flag = "--client-ca-file"
    try:
        authorities = None if client_ca is None else read_authorities(client_ca)
        flag = "--cert-path"
        return ServerCertificate.open(directory, client_ca, authorities)
    except ValueError as error:
        raise StartError(f"{flag}: {error}") from error


def _connection_age_max_s(flags: ServeFlags) -> float | None:
    """Return the maximum age in seconds of gateways' connections, or None for no limit.

    With a drain timeout it is at most half of that and at most `CLINGING_AGE_S`, but this limit is
    never below `CONNECTION_AGE_MIN_S`. Gateways then reconnect elsewhere during the drain.
    """
    age_s = flags.connection_age_max or math.inf
    if flags.drain_timeout:
        within_s = min(CLINGING_AGE_S, flags.drain_timeout / 2)
        age_s = min(age_s, max(CONNECTION_AGE_MIN_S, within_s))
    return None if age_s == math.inf else age_s


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set, but at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _report_certificate(sentence: str, good: bool) -> None:
    (_log.info if good else _log.error)(sentence)
