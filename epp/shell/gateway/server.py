"""The ext_proc server: pumps messages of each gRPC stream through its session."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc
import structlog

from epp.core.protocol.messages import Answer, Event, refusing
from epp.core.protocol.session import Gateway, Session, StreamFailure
from epp.core.types import Refusal, RefusalReason, Seconds
from epp.shell.gateway.codec import MalformedMessageError, encode
from epp.shell.gateway.connections import Connections, cut
from epp.shell.gateway.wire import Decoder

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
GATEWAYS_MAX: Final = 10_000
STREAMS_MAX: Final = 20_000
"""Streams open at once, of all gateways; one costs about 26 KB."""
SHEDDING_STREAMS_MAX: Final = 1_000
"""Streams above that which are waited for at once, to answer their first message."""
CONNECTION_STREAMS_MAX: Final = 4_096
"""Streams open at once on one connection; Envoy opens another one for more."""
REQUEST_TIMEOUT_S: Final = 60.0
OVERDUE_POLL_S: Final = 1.0
PENDING_STREAMS_MAX: Final = 20_000
"""Streams that have come and that Python has not taken up yet. Above it gRPC begins to answer
CANCELLED at random, and at twice as many it answers nothing else; its own limit of 1,000 is what
comes in while the loop is busy for a moment."""

_log = structlog.get_logger(__name__)


class StreamObserver(Protocol):
    """Is told how streams begin and end; must not raise."""

    def stream_opened(self) -> None: ...
    def stream_failed(self) -> None:
        """By a defect outside its request: while it was opened or closed."""
        ...

    def stream_closed(self, code: str, duration_s: float) -> None: ...
    def stream_shed(self, refusal: Refusal) -> None:
        """The stream was answered with `refusal` instead of being looked at."""
        ...

    def connection_cut(self) -> None: ...
    def drain_cut(self, streams: int) -> None: ...


@contextmanager
def _failing_as_cancelled() -> Iterator[None]:
    """A read or write that fails is a cancellation that gRPC has not told yet.

    So it is of a stream that was reset and of a server that has stopped; a wrong use of gRPC stays
    the defect that it is.
    """
    try:
        yield
    except grpc.aio.UsageError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


class _Stream:
    __slots__ = ("answered", "ending", "opened_at_s", "overdue", "session", "task", "writing")

    def __init__(self, session: Session, task: "asyncio.Task[Any]", opened_at_s: Seconds) -> None:
        self.session = session
        self.task = task
        self.opened_at_s = opened_at_s
        self.overdue = False
        """Its request did not become whole in time."""
        self.answered = False
        self.ending = False
        self.writing = False
        """Answers are on their way out; the pump looks at the drain after them."""


class ExtProcServer:
    """Serves `ExternalProcessor/Process` on the gRPC server it is added to.

    `new_session(gateway)` makes the state machine of one stream. Gateways are told apart by the
    host of their gRPC peer address; what is remembered of them is bounded. `clock` tells the `now`
    of each message.
    """

    def __init__(
        self,
        new_session: Callable[[Gateway], Session],
        observer: StreamObserver,
        clock: Callable[[], Seconds] = time.monotonic,
        *,
        streams_max: int = STREAMS_MAX,
        request_timeout_s: Seconds = REQUEST_TIMEOUT_S,
        decoder: Decoder | None = None,
    ) -> None:
        """Streams above `streams_max` are refused at their first message, which is not read.

        A request that is not whole after `request_timeout_s` is refused by `refuse_overdue`.
        """
        self._new_session = new_session
        self._observer = observer
        self._clock = clock
        self._streams_max = streams_max
        self._request_timeout_s = request_timeout_s
        self._decoder = decoder or Decoder()
        self._overloaded = Refusal(
            reason=RefusalReason.OVERLOADED,
            status=503,
            message=f"the picker is overloaded: {streams_max} requests are open",
        )
        self._overloaded_answer = encode(refusing(self._overloaded))
        self._gateways: OrderedDict[str, Gateway] = OrderedDict()
        self._connections = Connections()
        self._streams: set[_Stream] = set()
        self._opened_at_s = -math.inf
        self._shedding = 0
        self._draining = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        # No (de)serialisers: the session's codec works on the bytes themselves.
        process: Any = grpc.stream_stream_rpc_method_handler(self._contained)
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        server.add_generic_rpc_handlers((handler,))

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def quiet_for_s(self) -> float:
        """How long no stream has been open and none was opened; 0 while one is open."""
        return 0.0 if self._streams or self._shedding else self._clock() - self._opened_at_s

    def end_bypassed(self) -> None:
        """From now on end each stream with OK as soon as its response no longer needs it."""
        self._draining = True
        for stream in self._streams:
            if stream.session.may_end_for_drain() and not (stream.ending or stream.writing):
                stream.ending = True
                stream.task.cancel()

    async def watch(self) -> None:
        """Refuse what is overdue, until cancelled."""
        while True:
            await asyncio.sleep(OVERDUE_POLL_S)
            self.refuse_overdue(self._clock())

    def refuse_overdue(self, now: Seconds) -> None:
        """Refuse each request that should be whole by now."""
        for stream in self._streams:
            if now - stream.opened_at_s <= self._request_timeout_s:
                continue
            waits = stream.session.incomplete and not (stream.writing or stream.ending)
            if waits and not stream.overdue:
                stream.overdue = True
                stream.task.cancel()

    async def _contained(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Let no exception out: gRPC tells its text to the gateway.

        Messages are read from the context: gRPC 1.85 keeps the last one for ever when the iterator
        that it also passes is left before its end, as it is by every refusal.
        """
        try:
            await self._process(context)
        except Exception:  # noqa: BLE001  the boundary of a stream
            _log.exception("a stream was not opened or not closed")
            self._observer.stream_failed()
            self._fail(context, grpc.StatusCode.INTERNAL, "the picker failed")

    async def _process(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._opened_at_s = self._clock()
        peer = context.peer()
        if len(self._streams) >= self._streams_max:
            await self._shed(context)
            return
        session = self._new_session(self._gateway(peer))
        task = asyncio.current_task()
        assert task is not None
        stream = _Stream(session, task, self._opened_at_s)
        self._streams.add(stream)
        self._observer.stream_opened()
        code = "OK"
        try:
            with _failing_as_cancelled():
                await self._pump(context, stream)
            if session.violated:
                code = self._fail(context, grpc.StatusCode.INVALID_ARGUMENT, _VIOLATION)
        except asyncio.CancelledError:
            if not (stream.ending or stream.overdue):
                # Envoy also resets streams whose request went well: this is an ordinary end.
                code = "CANCELLED"
                raise
            # Ours: returning now ends the stream with OK.
            task.uncancel()
            if stream.overdue:
                await self._answer(session.time_out(self._clock()), context, stream)
        except MalformedMessageError as error:
            session.failed(StreamFailure.MALFORMED)
            code = self._fail(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:  # noqa: BLE001  the boundary of a request: a defect costs one stream
            session.failed(StreamFailure.INTERNAL)
            _log.exception("a stream failed", session=repr(session))
            code = self._fail(context, grpc.StatusCode.INTERNAL, "the picker failed")
        finally:
            self._streams.discard(stream)
            now = self._clock()
            self._observer.stream_closed(code, now - stream.opened_at_s)
            session.closed(now)
            if stream.answered:
                self._connections.answered(peer)
            elif code == "CANCELLED" and self._connections.abandoned(peer):
                self._cut(peer)

    async def _shed(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Refuse the request at its first message, without a look at it."""
        self._observer.stream_shed(self._overloaded)
        if self._shedding >= SHEDDING_STREAMS_MAX:
            # Too many to wait for a message of each: what this costs a client, the gateway decides.
            self._fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, self._overloaded.message)
            return
        self._shedding += 1
        try:
            with _failing_as_cancelled():
                if await _read(context) is not None:
                    await context.write(self._overloaded_answer)
        finally:
            self._shedding -= 1

    def _cut(self, peer: str) -> None:
        if cut(peer):
            self._observer.connection_cut()
            _log.warning("connection cut: it only opens streams and resets them", peer=peer)

    async def _pump(self, context: grpc.aio.ServicerContext[bytes, bytes], stream: _Stream) -> None:
        session = stream.session
        # What was read is let go before the next one is waited for.
        while (event := await self._next(context)) is not None:
            await self._answer(session.receive(event, self._clock()), context, stream)
            del event
            if session.finished or (self._draining and session.may_end_for_drain()):
                return
        await self._answer(session.half_closed(self._clock()), context, stream)

    async def _next(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> Event | None:
        """The next event of the stream; None: there are no more. Raises `MalformedMessageError`."""
        message = await _read(context)
        return None if message is None else self._decoder.decode(message)

    @staticmethod
    async def _answer(
        answers: Iterable[Answer],
        context: grpc.aio.ServicerContext[bytes, bytes],
        stream: _Stream,
    ) -> None:
        stream.writing = True
        for answer in answers:
            await context.write(encode(answer))
            stream.answered = True
        stream.session.sent()
        stream.writing = False

    def _gateway(self, peer: str) -> Gateway:
        host = peer.rpartition(":")[0]
        gateway = self._gateways.get(host)
        if gateway is None:
            gateway = self._gateways[host] = Gateway()
            if len(self._gateways) > GATEWAYS_MAX:
                self._gateways.popitem(last=False)
        else:
            self._gateways.move_to_end(host)
        return gateway

    @staticmethod
    def _fail(
        context: grpc.aio.ServicerContext[bytes, bytes], code: grpc.StatusCode, sentence: str
    ) -> str:
        context.set_code(code)
        context.set_details(sentence)
        return code.name


async def _read(context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes | None:
    """The next message of the stream; None: there are no more."""
    message: Any = await context.read()
    return None if message is grpc.aio.EOF else message


_VIOLATION: Final = "the gateway sent a message that the phase of the stream does not allow"


def grpc_server(
    receive_bytes_max: int, connection_age_max_s: Seconds | None = None
) -> grpc.aio.Server:
    """A gRPC server with the options that gateways need.

    A connection that is `connection_age_max_s` old, a tenth more or less, gets a GOAWAY: what is
    open on it and what still arrives is served, and the gateway connects anew. None: never.
    """
    options: list[tuple[str, int]] = [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
        ("grpc.server.max_pending_requests", PENDING_STREAMS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_STREAMS_MAX),
        # Envoy pings on its own schedule; the default would close its connection for it.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
        # Windows that grow with the speed of a link would let many clients make us hold as much:
        # 66 with 31 MB each took 1,300 MB, of which sessions held 512, and 680 without.
        ("grpc.http2.bdp_probe", 0),
    ]
    if connection_age_max_s is not None:
        options.append(("grpc.max_connection_age_ms", int(connection_age_max_s * 1_000)))
    return grpc.aio.server(options=options)
