"""The gRPC transport with the library grpcio: one coroutine for each stream passes its messages to
the call.

gRPC for Python does not expose its connections. Connections are bounded by gRPC's options and by a
search for its sockets (`connections`).
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from epp.core.address import address_of
from epp.core.types import Seconds
from epp.shell.gateway.arrivals import Lag, NoLag
from epp.shell.gateway.calls import CANCELLED, DEFECT, Call, Cut, Opener, Status
from epp.shell.gateway.connections import Connections, cut
from epp.shell.gateway.tls import ServerCertificate
from epp.shell.starting import EVERYWHERE
from epp.shell.supervision import Loop

CONNECTION_STREAMS_MAX: Final = 4_096
"""Maximum number of open streams on one gateway's connection; Envoy opens another connection for
more.
"""
PING_INTERVAL_MIN_MS: Final = 500
"""Shortest interval of a gateway's pings in milliseconds: half of that in Homing's bootstrap."""
PENDING_STREAMS_MAX: Final = 20_000
"""Maximum number of streams that gRPC has received and Python has not accepted yet. Above it gRPC
begins to answer CANCELLED at random, and at twice the number it answers nothing else. gRPC's
default of 1,000 is reached while the event loop is busy for a moment.
"""

_log = structlog.get_logger(__name__)
_Context = grpc.aio.ServicerContext[bytes, bytes]


@contextlib.contextmanager
def _failing_as_cancelled() -> Iterator[None]:
    """Raise `CancelledError` instead of the error of a read or write that fails because the stream
    was reset or the server has stopped.

    gRPC reports the cancellation of such a stream later. An error for a wrong use of gRPC is still
    raised.
    """
    try:
        yield
    except grpc.aio.UsageError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


def _read_error(operation: "asyncio.Task[Any]") -> None:
    """Read the error of `operation`, so that the event loop does not report it as a failed task.

    A coroutine that still waits for the operation gets the error. If the picker has ended the
    stream, the operation fails and no coroutine waits for it.
    """
    if not operation.cancelled():
        operation.exception()


class _GrpcioWire:
    """The `Wire` of one call under grpcio, while a coroutine passes on the stream's messages."""

    __slots__ = (
        "_operations", "_pushed", "_pushing", "_task",
        "answered", "call", "came_at_s", "context", "ended", "over", "writing",
    )  # fmt: skip

    def __init__(
        self,
        context: _Context,
        task: "asyncio.Task[Any]",
        operations: "set[asyncio.Task[Any]]",
        came_at_s: Seconds,
    ) -> None:
        """Create the wire of a stream. `operations` keeps references to running reads and writes
        that no coroutine may await any more.
        """
        self.context = context
        self.came_at_s = came_at_s
        self._task = task
        self._operations = operations
        self.answered = False
        self.writing = False
        """True while answers are being written to the stream; the same writer then sends pushed
        messages.
        """
        self.ended: Status | None = None
        self.call: Call | None = None
        """The call that serves this stream, or None before it is opened and after the stream has
        ended.
        """
        self.over = asyncio.Event()
        self._pushed: list[bytes] = []
        self._pushing: asyncio.Task[None] | None = None

    def push(self, message: bytes) -> None:
        self._pushed.append(message)
        if not self.writing and self._pushing is None:
            # The write runs beside the read that the pump awaits.
            self._pushing = asyncio.get_running_loop().create_task(self._push())

    def end(self, status: Status) -> None:
        if self.ended is not None:
            return
        self.ended = status
        self.over.set()
        if not self.writing:
            # The pump waits for a message.
            self._task.cancel()

    async def read(self) -> Any:
        """Return the stream's next message, or `grpc.aio.EOF` after the last one."""
        return await self._to_its_end(self.context.read())

    async def _to_its_end(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a read or write of the stream. A cancellation ends the waiting, but never the
        operation itself, which ends with its stream.

        gRPC 1.85 frees its allocation for an operation only if it is awaited to its end. Otherwise
        each reset stream would leak 100 bytes or more (https://github.com/grpc/grpc/issues/43360).
        """
        running = asyncio.get_running_loop().create_task(operation)
        self._operations.add(running)
        running.add_done_callback(self._operations.discard)
        running.add_done_callback(_read_error)
        return await asyncio.shield(running)

    async def write(self, answers: Iterable[bytes]) -> None:
        """Send `answers` on the stream, and then the messages that were pushed meanwhile."""
        self.writing = True
        try:
            for answer in answers:
                await self._to_its_end(self.context.write(answer))
                self.answered = True
            await self.flush()
        finally:
            self.writing = False

    async def flush(self) -> None:
        """Send the messages that were pushed to the stream and not sent yet."""
        if self._pushing is not None and self._pushing is not asyncio.current_task():
            await asyncio.wait({self._pushing})
        while self._pushed:
            await self._to_its_end(self.context.write(self._pushed.pop(0)))
            self.answered = True

    async def _push(self) -> None:
        try:
            with contextlib.suppress(grpc.aio.BaseError):
                while self._pushed:
                    await self.context.write(self._pushed.pop(0))
                    self.answered = True
                if self.call is not None:
                    self.call.sent()
        finally:
            self._pushing = None


class GrpcioServer:
    """A gRPC server of `methods` (by path) with the library grpcio. It calls `cut` when it closes a
    connection because of the gateway's behaviour.
    """

    def __init__(
        self,
        methods: Mapping[str, Opener],
        *,
        receive_bytes_max: int,
        connection_age_max_s: Seconds | None = None,
        cut: Callable[[Cut], None] = lambda _: None,
        lag: Lag | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Create the server. A connection that is `connection_age_max_s` old, plus or minus a
        tenth, gets a GOAWAY.

        Its open and arriving streams are still served, and the gateway reconnects. None means no
        maximum age.
        """
        options: list[tuple[str, int]] = [
            ("grpc.max_receive_message_length", receive_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
            ("grpc.server.max_pending_requests", PENDING_STREAMS_MAX),
            ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_STREAMS_MAX),
            # While requests wait, Envoy pings each second and sends nothing else. gRPC counts pings
            # at shorter intervals than this one, and closes the connection after the third.
            ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
            # Growing windows would let many clients occupy as much memory: 66 clients with 31 MB
            # each took 1,300 MB, of which sessions held 512 MB, and 680 MB without them.
            ("grpc.http2.bdp_probe", 0),
        ]
        if connection_age_max_s is not None:
            options.append(("grpc.max_connection_age_ms", int(connection_age_max_s * 1_000)))
        self._server = grpc.aio.server(options=options)
        self._cut = cut
        self._lag = lag or NoLag()
        self._clock = clock
        self._operations: set[asyncio.Task[Any]] = set()
        self._spoken_to = False
        self._connections = Connections()
        for path, opener in methods.items():
            _, service, method = path.split("/")
            # Calls work on bytes, so there are no (de)serialisers. A registered method has its own
            # queue in gRPC. A health check therefore does not wait behind thousands of streams, for
            # which a gateway would consider the picker dead.
            handler: Any = grpc.stream_stream_rpc_method_handler(self._handler(opener))
            self._server.add_registered_method_handlers(service, {method: handler})
            generic = grpc.method_handlers_generic_handler(service, {method: handler})
            self._server.add_generic_rpc_handlers((generic,))

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Listen for gateways on `port` at `host` (0 for any free port) and return the port number.
        Raises `OSError`.
        """
        # gRPC would report the reason only on standard error, and not as a log line.
        _try_port(host, port)
        address = address_of(host, port)
        try:
            if certificate is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, _credentials(certificate))
        except RuntimeError as error:
            raise OSError(str(error)) from error

    async def start(self) -> None:
        """Begin to accept streams on the ports of `listen`."""
        await self._server.start()

    @property
    def has_gateway(self) -> bool:
        """True if any stream was ever opened, because grpcio does not report connections."""
        return self._spoken_to

    def loops(self) -> dict[str, Loop]:
        """Return no coroutines, because grpcio needs none."""
        return {}

    def connected(self) -> None:
        """Return None, because grpcio does not report its connections."""

    def send_away(self, away: bool) -> None:
        """Do nothing, because grpcio cannot ask gateways to connect elsewhere; gateways leave when
        their connections reach the maximum age.
        """

    async def stop(self, wait_s: Seconds | None) -> None:
        """Accept no more streams, and cut the open streams after `wait_s` seconds, or at once if it
        is None.
        """
        await self._server.stop(wait_s)

    def _handler(self, opener: Opener) -> Callable[[object, _Context], Coroutine[Any, Any, None]]:
        async def serve(_: object, context: _Context) -> None:
            # Messages are read from the context. gRPC 1.85 leaks the last message if its iterator
            # is left before the end, as every refusal does.
            await self._serve(opener, context)

        return serve

    async def _serve(self, opener: Opener, context: _Context) -> None:
        self._spoken_to = True
        peer = context.peer()
        task = asyncio.current_task()
        assert task is not None
        # gRPC reads its sockets in its own threads and does not report when.
        now = self._clock()
        wire = _GrpcioWire(context, task, self._operations, now - self._lag.backlog_s(now))
        call = wire.call = opener(peer, wire)
        status = CANCELLED
        try:
            with _failing_as_cancelled():
                status = await self._pump(call, wire)
        except asyncio.CancelledError:
            if wire.ended is None:
                # Envoy also resets streams of successful requests, so this is an ordinary end.
                raise
            # The cancellation came from `end`: returning now ends the stream.
            task.uncancel()
            with _failing_as_cancelled():
                await wire.flush()
            status = wire.ended
        except Exception:  # noqa: BLE001  the boundary of a stream
            _log.exception("a gRPC stream failed because of a defect of the transport")
            status = DEFECT
        finally:
            wire.call = None
            waited = call.closed(status)
            if wire.answered:
                self._connections.answered(peer)
            elif (
                status is CANCELLED
                and not waited
                and self._connections.abandoned(peer)
                and cut(peer)
            ):
                self._cut(Cut.RESETS)
                _log.warning(
                    "connection cut: the gateway only opens streams and resets them", peer=peer
                )
        if status.code:
            context.set_code(_CODES[status.code])
            context.set_details(status.details)

    @staticmethod
    async def _pump(call: Call, wire: _GrpcioWire) -> Status:
        """Pass a stream's messages to its call and send the call's answers, until the call has
        ended. Return the status with which it ended.
        """
        while True:
            ended = call.ended or wire.ended
            if ended is not None:
                return ended
            message: Any = await wire.read()
            if message is grpc.aio.EOF:
                break
            await wire.write(call.receive(message))
            # The message is released before the wait for the next one.
            del message
            call.sent()
        await wire.write(call.half_close())
        call.sent()
        if call.ended is None:
            await wire.over.wait()
            await wire.flush()
        ended = call.ended or wire.ended
        assert ended is not None, "the call has ended"
        return ended


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def _credentials(certificate: ServerCertificate) -> grpc.ServerCredentials:
    """Return server credentials. gRPC requests their certificate at each TLS handshake, in a thread
    of its own.
    """

    def in_force() -> grpc.ServerCertificateConfiguration:
        pair = certificate.pair
        return grpc.ssl_server_certificate_configuration(
            [(pair.private_key, pair.certificate_chain)], root_certificates=certificate.authorities
        )

    return grpc.dynamic_ssl_server_credentials(
        in_force(),
        in_force,
        require_client_authentication=certificate.authorities is not None,
    )


def _try_port(address: str, port: int) -> None:
    """Raise `OSError` if it is impossible to listen on `port` at `address`."""
    if address == EVERYWHERE and not socket.has_dualstack_ipv6():
        socket.create_server(("", port)).close()
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dualstack = address == EVERYWHERE
    socket.create_server((address, port), family=family, dualstack_ipv6=dualstack).close()
