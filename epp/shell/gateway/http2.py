"""gRPC on libnghttp2: one connection is one `asyncio.Protocol`, one stream one `Call`.

Theory. `ngh2` turns bytes into events and messages into bytes; it checks frames, headers and flow
control and does no I/O. What is left for this module is what gRPC adds to HTTP/2 (five bytes before
each message, a status in the trailers) and that one peer cannot take more than its share:

* Work. What a read brings may be thousands of streams. Events are worked off `TURN_EVENTS_MAX` at a
  time; between two turns the loop serves the others, and the socket is not read.
* What comes in. A stream is granted a window, and gets it back only as its messages are answered.
  What has come of a message that is not whole counts against the budget of all bodies.
* What goes out. Answers are made as they are taken: only while less than `QUEUED_BYTES_MAX` of a
  stream waits for its window, and only while the socket takes what is written.
* Streams. As many at once as `CONNECTION_STREAMS_MAX`; who mostly resets what it opens is cut off.

Nothing here has a timer of its own but a deadline that a client asks for: `Http2Server.run` looks
at all connections once in a while.
"""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import structlog
from msgspec import Struct
from ngh2 import Configuration, Connection, Role, events
from ngh2.enums import ErrorCode, Setting
from ngh2.exceptions import ConnectionProtocolError, NGH2Error

from epp.core.protocol.budget import BodyBudget
from epp.core.types import Seconds
from epp.shell.gateway.arrivals import Lag, NoLag, arrivals, newest_data_age_s
from epp.shell.gateway.calls import CANCELLED, DEFECT, Call, Code, EndedCall, Opener, Status
from epp.shell.gateway.tls import ServerCertificate
from epp.shell.starting import EVERYWHERE

CONNECTIONS_MAX: Final = 1_024
CONNECTION_STREAMS_MAX: Final = 4_096
"""Open at once on one connection; Envoy opens another one for more."""
STREAM_WINDOW_BYTES: Final = 1_048_576
CONNECTION_WINDOW_BYTES: Final = 2**31 - 1
"""No limit: one stream that waits must not hold up those beside it."""
HEADER_LIST_BYTES_MAX: Final = 65_536
TURN_EVENTS_MAX: Final = 64
"""Of a connection between two turns of the loop."""
QUEUED_BYTES_MAX: Final = 262_144
"""Of the answers of one stream that wait for its window."""
RESETS_MAX: Final = CONNECTION_STREAMS_MAX
"""Streams in a row that a connection may reset before any was answered: all that it may open, once.
Envoy resets the streams of clients that leave, between others that are served."""
PING_AFTER_S: Final = 30.0
"""A connection that says nothing for so long is asked whether it is there."""
PING_WAIT_S: Final = 20.0
LINGER_S: Final = 2.0
"""So long a client may take to close a stream that we have ended before it is reset. A reset right
behind the status makes gRPC's own client lose the status and the answers with it."""
POLL_S: Final = 0.25
BACKLOG: Final = 1_024

_PREFIX_BYTES: Final = 5
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_HEAD: Final = ((b":status", b"200"), _CONTENT_TYPE)
_GRACEFUL: Final = ErrorCode.NO_ERROR
_NO_LIMIT: Final = (2**40, 2**40)
_CONFIGURATION: Final = Configuration(
    auto_window_update=False,
    max_inbound_header_list_size=HEADER_LIST_BYTES_MAX,
    # Ours counts unanswered streams only: Envoy also resets streams that went well.
    stream_reset_rate_limit=_NO_LIMIT,
)
_SETTINGS: Final[Mapping[int, int]] = {
    Setting.MAX_CONCURRENT_STREAMS: CONNECTION_STREAMS_MAX,
    Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
}
_NO_GRPC: Final = Status(Code.UNKNOWN, "the content type is not that of gRPC")
_NO_METHOD: Final = Status(Code.UNIMPLEMENTED, "there is no such method")
_OVER: Final = EndedCall(CANCELLED)
"""In place of the call of a stream that is closed."""
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_log = structlog.get_logger(__name__)


class Http2Settings(Struct, frozen=True, kw_only=True):
    message_bytes_max: int = 4 * 1024 * 1024
    connections_max: int = CONNECTIONS_MAX
    resets_max: int = RESETS_MAX
    ping_after_s: Seconds = PING_AFTER_S
    ping_wait_s: Seconds = PING_WAIT_S


class _RefusedError(Exception):
    """The stream cannot go on, for a reason that the client is told."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


class _Messages:
    """Cuts the bytes of one stream into messages: a flag, a length, so many bytes."""

    __slots__ = ("_bytes_max", "_have", "_need", "_parts")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        self._have = 0
        self._need = _PREFIX_BYTES

    @property
    def held_bytes(self) -> int:
        """What has come of a message that is not whole."""
        return self._have

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises `_RefusedError`."""
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        found: list[bytes] = []
        start, end = 0, len(data)
        while True:
            if end - start < _PREFIX_BYTES:
                self._need = _PREFIX_BYTES
                break
            if data[start]:
                raise _RefusedError(
                    Status(Code.UNIMPLEMENTED, "compressed messages are not understood")
                )
            length = int.from_bytes(data[start + 1 : start + _PREFIX_BYTES], "big")
            if length > self._bytes_max:
                raise _RefusedError(
                    Status(
                        Code.RESOURCE_EXHAUSTED,
                        f"a message of {length} bytes is longer than {self._bytes_max}",
                    )
                )
            self._need = _PREFIX_BYTES + length
            if end - start < self._need:
                break
            found.append(data[start + _PREFIX_BYTES : start + self._need])
            start += self._need
        self._have = end - start
        self._parts = [data[start:]] if self._have else []
        return found


class _Stream:
    """One stream of a connection, and the `Wire` of its call."""

    __slots__ = (
        "answered", "answers", "call", "closing", "connection", "deadline", "ended", "half_closed",
        "half_told", "inbox", "messages", "stream_id", "taken_bytes", "unacknowledged_bytes",
        "unsent", "waited_s",
    )  # fmt: skip

    call: Call

    def __init__(
        self, connection: "_Connection", stream_id: int, bytes_max: int, waited_s: Seconds
    ) -> None:
        self.connection = connection
        self.waited_s = waited_s
        self.stream_id = stream_id
        self.messages = _Messages(bytes_max)
        self.inbox: deque[bytes] = deque()
        """Messages that came while answers to an earlier one wait for their window."""
        self.answers: Iterator[bytes] | None = None
        self.answered = False
        self.unsent = False
        """Something was answered that the other side may not have."""
        self.half_closed = False
        self.half_told = False
        self.ended: Status | None = None
        self.closing = False
        """Its trailers are on their way."""
        self.taken_bytes = 0
        """Of the budget."""
        self.unacknowledged_bytes = 0
        self.deadline: asyncio.TimerHandle | None = None

    def push(self, message: bytes) -> None:
        if not self.closing:
            self.connection.write(self, message)
            self.connection.flush()

    def end(self, status: Status) -> None:
        if self.ended is None:
            self.ended = status
            self.connection.carry_on(self)
            self.connection.flush()


class _Connection(asyncio.Protocol):
    """One connection of a gateway."""

    def __init__(self, server: "Http2Server") -> None:
        self._server = server
        self._settings = server.settings
        self._engine = Connection(Role.SERVER, _CONFIGURATION)
        self._events: deque[events.Event] = deque()
        self._streams: dict[int, _Stream] = {}
        self._lingering: dict[int, Seconds] = {}
        """Streams that we have ended and the other side has not yet -> since when."""
        self._waiting: set[_Stream] = set()
        """Streams with answers that wait, or of which not all is on its way."""
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._paused = False
        self._turn_due = False
        self._heard_at_s = 0.0
        self._read_at_s = 0.0
        """Of the first read whose events are not all worked off."""
        self._came_at_s: deque[Seconds] = deque()
        """Of the next streams that are opened, where that was before they were read."""
        self._pinged_at_s: Seconds | None = None
        self._resets = 0
        """Of streams that were not answered, since the last one that was."""

    def __repr__(self) -> str:
        return f"<_Connection [{len(self._streams)} streams of {self._peer}]>"

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are transports by what they do, not by what they are.
        self._transport = transport = cast("asyncio.Transport", transport)
        self._peer = _peer_of(transport)
        self._heard_at_s = self._server.clock()
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            transport.close()
            return
        if not self._server.admit(self):
            transport.abort()
            return
        self._engine.initiate_connection(_SETTINGS)
        self._engine.set_local_window_size(CONNECTION_WINDOW_BYTES)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = self._server.clock()
        self._pinged_at_s = None
        try:
            self._engine.receive_data(data)
        except ConnectionProtocolError:
            # What it says of why goes out with what is left.
            self.flush()
            self.close()
            return
        fresh = self._engine.events()
        if not self._events:
            self._read_at_s = self._heard_at_s
        overdue_s = self._server.lag.overdue_s(self._heard_at_s)
        if overdue_s:
            fresh = list(fresh)
            self._read_late(fresh, overdue_s)
        self._events.extend(fresh)
        if not self._turn_due:
            self._turn()

    def _read_late(self, fresh: Sequence[events.Event], overdue_s: Seconds) -> None:
        opened = sum(isinstance(event, events.RequestReceived) for event in fresh)
        if opened and self._transport is not None:
            age_s = newest_data_age_s(self._transport.get_extra_info("socket"))
            # Those of an earlier read that are still to be opened came before.
            earlier = sum(isinstance(event, events.RequestReceived) for event in self._events)
            self._came_at_s.extend([self._read_at_s] * (earlier - len(self._came_at_s)))
            self._came_at_s.extend(arrivals(opened, self._heard_at_s, overdue_s, age_s))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    def eof_received(self) -> None:
        """Without a goodbye: whatever was open is over."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._events.clear()
        self._waiting.clear()
        for stream in list(self._streams.values()):
            self._over(stream, stream.ended if stream.closing else CANCELLED)
        self._server.left(self)

    # Events, a few at a time.

    def _turn(self) -> None:
        self._turn_due = False
        if self._transport is None:
            return
        for _ in range(TURN_EVENTS_MAX):
            if not self._events:
                break
            self._contained(self._events.popleft())
        self.flush()
        transport = self._transport
        if self._events:
            self._turn_due = True
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._turn)
        elif not transport.is_closing():
            transport.resume_reading()

    def _contained(self, event: events.Event) -> None:
        try:
            self._handle(event)
        except Exception:  # noqa: BLE001  the boundary of a stream: a defect costs no other one
            _log.exception("a stream failed")
            stream = self._streams.get(getattr(event, "stream_id", 0))
            if stream is not None:
                stream.answers = None
                self._finish(stream, DEFECT)

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.DataReceived():
                # What comes for one that is over is not asked for more.
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    self._data(stream, event.data, ends=event.end_stream)
            case events.RequestReceived():
                self._open(event)
            case events.StreamClosed():
                self._lingering.pop(event.stream_id, None)
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    self._over(stream, stream.ended if stream.closing else None)
            case events.TrailersReceived():
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    self._half_close(stream)
            case _:
                # Windows, settings and pings are the engine's business.
                pass

    def _open(self, event: events.RequestReceived) -> None:
        fields = dict(event.headers)
        stream_id = event.stream_id
        came_at_s = self._came_at_s.popleft() if self._came_at_s else self._read_at_s
        waited_s = max(0.0, self._server.clock() - came_at_s)
        stream = _Stream(self, stream_id, self._settings.message_bytes_max, waited_s)
        self._streams[stream_id] = stream
        opener = self._server.methods.get(fields.get(b":path", b"").decode("latin-1"))
        if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.call = EndedCall(_NO_GRPC)
        elif opener is None or fields.get(b":method") != b"POST":
            stream.call = EndedCall(_NO_METHOD)
        else:
            stream.call = opener(self._peer, stream)
        timeout_s = _timeout_s(fields.get(b"grpc-timeout", b""))
        if timeout_s is not None:
            stream.deadline = asyncio.get_running_loop().call_later(
                timeout_s, stream.end, Status(Code.DEADLINE_EXCEEDED, "the deadline has passed")
            )
        if event.end_stream:
            self._half_close(stream)
        elif stream.call.ended is not None:
            self.carry_on(stream)

    def _data(self, stream: _Stream, data: bytes, *, ends: bool) -> None:
        stream.unacknowledged_bytes += len(data)
        if stream.ended is None:
            try:
                stream.inbox.extend(stream.messages.feed(data))
                self._count(stream)
            except _RefusedError as refused:
                stream.ended = refused.status
        if ends:
            stream.half_closed = True
        self.carry_on(stream)

    def _half_close(self, stream: _Stream) -> None:
        stream.half_closed = True
        self.carry_on(stream)

    def _count(self, stream: _Stream) -> None:
        """Hold what has come of a message that is not whole, within the budget of all."""
        held = stream.messages.held_bytes
        more = held - stream.taken_bytes
        if more > 0 and not self._server.budget.take(more, stream.taken_bytes):
            raise _RefusedError(
                Status(Code.RESOURCE_EXHAUSTED, "the picker holds as many bytes as it may")
            )
        if more < 0:
            self._server.budget.give_back(-more)
        stream.taken_bytes = held

    # Answers, as far as the other side takes them.

    def carry_on(self, stream: _Stream) -> None:
        """Go on with `stream` as far as its window and what has come allow."""
        call = stream.call
        while not stream.closing:
            if stream.answers is not None:
                if not self._answer(stream, stream.answers):
                    self._waiting.add(stream)
                    return
                stream.answers = None
            if stream.ended is None:
                stream.ended = call.ended
            if stream.ended is not None:
                self._finish(stream, stream.ended)
            elif stream.inbox:
                stream.answers = self._asked(stream, call.receive, stream.inbox.popleft())
            elif stream.half_closed and not stream.half_told:
                stream.half_told = True
                stream.answers = self._asked(stream, call.half_close)
            else:
                break
        if stream.unacknowledged_bytes:
            self._acknowledge(stream.stream_id, stream.unacknowledged_bytes)
            stream.unacknowledged_bytes = 0
        if stream.unsent or stream.closing:
            self._waiting.add(stream)

    def _asked(
        self, stream: _Stream, ask: Callable[..., Iterable[bytes]], *message: bytes
    ) -> Iterator[bytes]:
        return iter(ask(*message))

    def _answer(self, stream: _Stream, answers: Iterator[bytes]) -> bool:
        """Write what `answers` gives; False: as much as may wait is waiting."""
        for answer in answers:
            self.write(stream, answer)
            if self._engine.queued_body_size(stream.stream_id) >= QUEUED_BYTES_MAX:
                return False
        return True

    def write(self, stream: _Stream, message: bytes) -> None:
        """Queue one message."""
        try:
            if not stream.answered:
                stream.answered = True
                self._engine.send_response(stream.stream_id, _HEAD)
            self._engine.send_data(
                stream.stream_id, b"\0" + len(message).to_bytes(4, "big") + message
            )
        except NGH2Error:
            # It was reset meanwhile, and the event that says so is on its way.
            return
        stream.unsent = True

    def _finish(self, stream: _Stream, status: Status) -> None:
        stream.ended = status
        stream.closing = True
        stream.inbox.clear()
        try:
            if stream.answered:
                self._engine.send_trailers(stream.stream_id, _trailers(status))
            else:
                headers = (*_HEAD, *_trailers(status))
                self._engine.send_response(stream.stream_id, headers, end_stream=True)
        except NGH2Error:
            # As above.
            pass

    def _acknowledge(self, stream_id: int, count: int) -> None:
        """Let the other side send `count` bytes more."""
        # A stream that is over needs none; its share of the connection's window is not missed.
        with contextlib.suppress(NGH2Error):
            self._engine.acknowledge_received_data(count, stream_id)

    def flush(self) -> None:
        """Write what there is to write, and let what waited for it go on."""
        while self._transport is not None and not self._paused:
            out = self._engine.data_to_send()
            if out:
                self._transport.write(out)
                # What was sent may have been the end of streams.
                for event in self._engine.events():
                    self._contained(event)
            if not self._settle():
                break
        if self._transport is not None and not (self._engine.want_read or self._engine.want_write):
            self.close()

    def _settle(self) -> bool:
        """Streams whose queue is empty have been sent; whether that gave more to write."""
        more = False
        for stream in list(self._waiting):
            if self._engine.queued_body_size(stream.stream_id):
                if stream.answers is None:
                    continue
                if self._engine.queued_body_size(stream.stream_id) >= QUEUED_BYTES_MAX:
                    continue
            elif stream.answers is None:
                self._waiting.discard(stream)
                stream.unsent = False
                if not stream.closing:
                    stream.call.sent()
                elif stream.stream_id in self._streams:
                    if not stream.half_closed:
                        self._lingering[stream.stream_id] = self._server.clock()
                    self._over(stream, stream.ended)
                continue
            self._waiting.discard(stream)
            self.carry_on(stream)
            more = True
        return more

    # How streams and connections end.

    def _over(self, stream: _Stream, status: Status | None) -> None:
        """`stream` is closed; `status` None: the other side has reset it."""
        del self._streams[stream.stream_id]
        self._waiting.discard(stream)
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.taken_bytes:
            self._server.budget.give_back(stream.taken_bytes)
            stream.taken_bytes = 0
        stream.closing = True
        stream.answers = None
        stream.inbox.clear()
        # The call knows its stream: without this both would wait for the garbage collector, and the
        # request with them.
        call, stream.call = stream.call, _OVER
        call.closed(status or CANCELLED)
        if stream.answered:
            self._resets = 0
        elif status is None:
            self._reset_unanswered()

    def _reset_unanswered(self) -> None:
        self._resets += 1
        if self._resets > self._settings.resets_max and self._transport is not None:
            self._resets = 0
            self._server.cut()
            _log.warning("connection cut: it only opens streams and resets them", peer=self._peer)
            self._engine.terminate_connection(ErrorCode.ENHANCE_YOUR_CALM)
            self._events.clear()
            self.flush()
            self.close()

    def look(self, now: Seconds) -> None:
        """Ask a connection that is silent whether it is there, and close one that is not."""
        if self._transport is None:
            return
        self._end_lingering(now)
        if self._pinged_at_s is not None:
            if now - self._pinged_at_s > self._settings.ping_wait_s:
                self._transport.abort()
        elif now - self._heard_at_s > self._settings.ping_after_s:
            self._pinged_at_s = now
            self._engine.ping()
            self.flush()

    def _end_lingering(self, now: Seconds) -> None:
        """Reset streams that are over for us, and in which the other side has not stopped to send."""
        late = [at for at, since_s in self._lingering.items() if now - since_s > LINGER_S]
        for stream_id in late:
            del self._lingering[stream_id]
            with contextlib.suppress(NGH2Error):
                self._engine.reset_stream(stream_id, _GRACEFUL)
        if late:
            self.flush()

    def announce_end(self) -> None:
        """Ask the other side to open no more streams; those that it opens meanwhile are served."""
        if self._transport is not None:
            self._engine.send_shutdown_notice()
            self.flush()

    def go_away(self) -> None:
        """From here on no stream is taken; the connection closes once the open ones are over."""
        if self._transport is not None:
            self._engine.send_goaway()
            self.flush()

    def cut(self) -> None:
        """Close now, whatever is open."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what is written, then close."""
        if self._transport is not None:
            self._transport.close()


class Http2Server:
    """Serves `methods`, by their paths, on the ports that it is told to listen on.

    `budget` is what messages that are not whole may hold, with whoever else takes from it. `cut`
    is told that a connection was closed because it did nothing but reset streams. `lag` is that of
    the loop.
    """

    def __init__(
        self,
        methods: Mapping[str, Opener],
        *,
        budget: BodyBudget,
        settings: Http2Settings | None = None,
        cut: Callable[[], None] = lambda: None,
        lag: Lag | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self.methods = methods
        self.budget = budget
        self.settings = settings or Http2Settings()
        self.cut = cut
        self.lag = lag or NoLag()
        self.clock = clock
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def open_streams(self) -> int:
        return sum(connection.open_streams for connection in self._connections)

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Take `port` at `host`, 0: any free one, and return it. Raises `OSError`."""
        listening = _socket(host, port)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            sock=listening,
            ssl=None if certificate is None else certificate.ssl_context(),
            backlog=BACKLOG,
            start_serving=False,
        )
        self._servers.append(server)
        port_taken: int = listening.getsockname()[1]
        return port_taken

    async def start(self) -> None:
        """Take streams."""
        for server in self._servers:
            await server.start_serving()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What is to run beside it."""
        return {"connections": self._look_after()}

    async def _look_after(self) -> None:
        """Look after the connections, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            now = self.clock()
            for connection in list(self._connections):
                connection.look(now)

    def announce_end(self) -> None:
        """Tell every gateway to connect elsewhere; whatever still comes is served."""
        for connection in list(self._connections):
            connection.announce_end()

    async def stop(self, wait_s: Seconds | None) -> None:
        """Take no more streams, and cut those that are open after `wait_s`; None: at once."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.go_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s or 0.0):
                await self._empty.wait()
        for connection in list(self._connections):
            connection.cut()
        # asyncio tells connections of their end in a turn of its own.
        await self._empty.wait()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    # What connections call.

    def admit(self, connection: _Connection) -> bool:
        if len(self._connections) >= self.settings.connections_max:
            return False
        self._connections.add(connection)
        self._empty.clear()
        return True

    def left(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()


def _socket(host: str, port: int) -> socket.socket:
    """Listens at `host`, on both IPv4 and IPv6 where that is everywhere. Raises `OSError`."""
    dualstack = host == EVERYWHERE and socket.has_dualstack_ipv6()
    if host == EVERYWHERE and not dualstack:
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, dualstack_ipv6=dualstack, backlog=BACKLOG
    )


def _trailers(status: Status) -> tuple[tuple[bytes, bytes], ...]:
    code = (b"grpc-status", b"%d" % status.code)
    if not status.details:
        return (code,)
    return (code, (b"grpc-message", _percent_encoded(status.details)))


def _percent_encoded(text: str) -> bytes:
    """As gRPC wants it: what is not printable ASCII, and "%" itself, as %XX."""
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in text.encode()
    )


def _timeout_s(text: bytes) -> Seconds | None:
    """`grpc-timeout`: at most eight digits and a unit; None: there is none that can be read."""
    digits, unit = text[:-1], text[-1:].decode("latin-1")
    if not digits.isdigit() or len(digits) > 8 or unit not in _UNITS_S:
        return None
    return int(digits) * _UNITS_S[unit]


def _peer_of(transport: asyncio.Transport) -> str:
    """As gRPC spells it: "ipv4:10.0.0.1:1234" or "ipv6:[fd00::1]:1234"."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unknown"
    host, port, *_ = name
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
