"""The gRPC transport with the library nghttp2: each connection is an `asyncio.BufferedProtocol`, and
each stream has a `Call`.

Theory. `ngh2` turns bytes into events and messages into bytes. It checks frames, headers and flow
control, and does no I/O. This module adds what gRPC adds to HTTP/2: five bytes before each message,
and a status in the trailers. It also limits the share of each gateway:

* Work. One read may bring thousands of streams or messages. They are processed in `turns`; between
  two turns the loop serves other tasks, and the socket is not read.
* Input. A stream has a window, which is returned only as its messages are answered. Data that has
  arrived and cannot be processed yet counts against the budget of all bodies.
* Output. A stream's answers are created as they are sent: only while less than `QUEUED_BYTES_MAX`
  of them wait for room in the stream's window, and only while the socket accepts data. The frames
  that were sent tell which windows moved, so that other streams are not examined.
* Streams. At most `CONNECTION_STREAMS_MAX` are open at once. A connection that resets many streams
  in a row before an answer is closed.
* Connections. Their number is limited by `places`.

Flow control is an invariant: every received byte is acknowledged, also those of ended streams, or
the connection is retired. The HTTP/2 engine knows how much of the connection's window is missing.
If much of it is, for whatever reason, the gateway is asked to reconnect long before the window is
used up. An old connection is retired in the same way.

No object here has its own timer, except for a deadline that a client requests. `Http2Server.loops`
returns a coroutine that examines all connections periodically.
"""

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Final, NamedTuple, cast

import structlog
from msgspec import Struct
from ngh2 import Configuration, Connection, Role
from ngh2.enums import ErrorCode, Setting
from ngh2.events import DataReceived, Event, RequestReceived, StreamClosed, TrailersReceived
from ngh2.exceptions import ConnectionStateError, DenialOfServiceError, NGH2Error

from epp.core.protocol.budget import BodyBudget
from epp.core.types import Seconds
from epp.shell.gateway.arrivals import Lag, NoLag, arrivals, newest_data_age_s
from epp.shell.gateway.calls import (
    CANCELLED,
    DEFECT,
    Call,
    Code,
    Connected,
    Cut,
    EndedCall,
    Opener,
    Status,
)
from epp.shell.gateway.places import CONNECTIONS_MAX, HOST_CONNECTIONS_MAX, Places
from epp.shell.gateway.tls import HANDSHAKE_S_MAX, ServerCertificate
from epp.shell.gateway.turns import Turn, Turns
from epp.shell.starting import EVERYWHERE
from epp.shell.supervision import Loop

CONNECTION_STREAMS_MAX: Final = 4_096
"""Maximum number of open streams on one gateway's connection; Envoy opens another connection for
more.
"""
STREAM_WINDOW_BYTES: Final = 1_048_576
READ_BYTES_MAX: Final = 65_536
"""Maximum number of received bytes that are parsed into HTTP/2 frames at a time; they may contain
thousands of small frames.
"""
COPIED_BYTES_MAX: Final = 16_384
"""Length in bytes from which a message is not copied behind its prefix. A copy of a shorter one takes
less time than another call of the HTTP/2 engine.
"""
RECEIVED_BYTES_MAX: Final = 262_144
"""Maximum number of bytes that are received from a connection at a time."""
CONNECTION_WINDOW_BYTES: Final = 2**31 - 1
"""Flow-control window in bytes of a gateway's HTTP/2 connection. It is as large as HTTP/2 allows
and so never limits anything, so that a waiting stream does not block other streams on its
connection.
"""
WINDOW_LEFT_SHARE_MIN: Final = 0.25
"""Share of the connection's flow-control window below which the connection is retired, that is, the
gateway is asked to open a new one.

The HTTP/2 engine returns acknowledged bytes to the window when they are half of it. If all bytes
are acknowledged, half of the window is therefore always left.
"""
HEADER_LIST_BYTES_MAX: Final = 65_536
QUEUED_BYTES_MAX: Final = 262_144
"""Size in bytes of the answers of one stream that wait for room in the stream's flow-control window
from which no further answers are created.
"""
RESETS_MAX: Final = CONNECTION_STREAMS_MAX
"""Maximum number of consecutive streams that a gateway may reset on one connection before any was
answered: as many as may be open. Envoy resets the streams of clients that leave, between served
ones.
"""
PING_AFTER_S: Final = 30.0
"""Time in seconds without received data after which a gateway's connection is pinged."""
PING_WAIT_S: Final = 20.0
LINGER_S: Final = 2.0
"""Time in seconds that a client has to close a stream after the picker has ended it; then the
picker resets the stream. A reset directly after the status would make gRPC's own client lose the
status and the answers.
"""
NOTICE_S: Final = 1.0
"""Time in seconds between the notice that a connection will be closed and the last stream that it
accepts. Streams under way arrive in that time.
"""
AWAY_AGE_S: Final = 2.0
"""Age in seconds at which a connection is asked to leave while the picker sends gateways away. A
gateway that finds no other picker connects here again, and is served until the next request to
leave.
"""
AGE_JITTER: Final = 0.1
"""Relative random variation of a connection's maximum age, so that not all connections end at
once.
"""
TELL_S: Final = 10.0
"""Minimum time in seconds between two log lines about evicted or rejected connections."""
POLL_S: Final = 0.25
BACKLOG: Final = 1_024

_PREFIX_BYTES: Final = 5
_PREFIX: Final = struct.Struct(">BI")
"""Format of the prefix of a gRPC message: whether it is compressed, and its length."""
_read_prefix: Final = _PREFIX.unpack_from
_prefix: Final = _PREFIX.pack
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_HEAD: Final = ((b":status", b"200"), _CONTENT_TYPE)
_GRACEFUL: Final = ErrorCode.NO_ERROR
_NO_LIMIT: Final = (2**40, 2**40)
_CONFIGURATION: Final = Configuration(
    auto_window_update=False,
    max_inbound_header_list_size=HEADER_LIST_BYTES_MAX,
    # The picker's own limit counts unanswered streams only, because Envoy also resets successful
    # streams.
    stream_reset_rate_limit=_NO_LIMIT,
)
_SETTINGS: Final[Mapping[int, int]] = {
    Setting.MAX_CONCURRENT_STREAMS: CONNECTION_STREAMS_MAX,
    Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
}
_NO_GRPC: Final = ((b":status", b"415"), (b"content-type", b"text/plain"))
_NO_GRPC_BODY: Final = b"expected the content type application/grpc\n"
_NO_METHOD: Final = Status(Code.UNIMPLEMENTED, "there is no such gRPC method")
_FULL: Final = Status(Code.RESOURCE_EXHAUSTED, "the picker's memory for request bodies is full")
_OVER: Final = EndedCall(CANCELLED)
"""Placeholder for the call of a stream that is closed."""
_FRAME_HEAD_BYTES: Final = 9
_read_head: Final = struct.Struct(">BHBBI").unpack_from
"""Parser of the head of an HTTP/2 frame: its length in two parts, type, flags and stream id (RFC
9113, section 4.1).
"""
_DATA, _HEADERS, _GOAWAY = 0, 1, 7
"""Numbers of the types of HTTP/2 frames that this module recognises."""
_END_STREAM: Final = 1
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_log = structlog.get_logger(__name__)


class Http2Settings(Struct, frozen=True, kw_only=True):
    """The limits of an `Http2Server`: of messages, connections, ages, resets and pings."""

    message_bytes_max: int = 4 * 1024 * 1024
    connections_max: int = CONNECTIONS_MAX
    host_connections_max: int = HOST_CONNECTIONS_MAX
    connection_window_bytes: int = CONNECTION_WINDOW_BYTES
    connection_age_max_s: Seconds | None = None
    """Maximum age of a gateway's connection in seconds, or None for no limit."""
    resets_max: int = RESETS_MAX
    ping_after_s: Seconds = PING_AFTER_S
    ping_wait_s: Seconds = PING_WAIT_S


class _RefusedError(Exception):
    """Raised if a stream cannot go on. The client receives the reason as the stream's gRPC
    status.
    """

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


class _Messages:
    """A parser of one stream's received bytes into gRPC messages. Each message is a flag, a length
    and the message's bytes.
    """

    __slots__ = ("_bytes_max", "_need", "_parts", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        self.held_bytes = 0
        """Number of received bytes of a message that is still incomplete."""
        self._need = _PREFIX_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """Add received `data` and return the messages that are complete now. Raises `_RefusedError`
        for a message that is compressed or too long.
        """
        before_bytes = self.held_bytes
        self.held_bytes += len(data)
        if self.held_bytes < self._need:
            self._parts.append(data)
            return []
        found: list[bytes] = []
        start = 0
        if self._need > _PREFIX_BYTES:
            # The parts begin after the prefix, so that joining them with the end is the only copy.
            start = self._need - before_bytes
            found.append(b"".join((*self._parts, memoryview(data)[:start])))
        elif before_bytes:
            data = b"".join((*self._parts, data))
        end = len(data)
        self._need = _PREFIX_BYTES
        while end - start >= _PREFIX_BYTES:
            compressed, length = _read_prefix(data, start)
            if compressed or length > self._bytes_max:
                raise self._refused(length, compressed=bool(compressed))
            stop = start + _PREFIX_BYTES + length
            if stop > end:
                self._need = stop - start
                break
            found.append(data[start + _PREFIX_BYTES : stop])
            start = stop
        self.held_bytes = end - start
        self._parts = []
        if self.held_bytes:
            # The rest is a copy, because a view would keep the messages before it in memory.
            self._parts.append(
                data[start + _PREFIX_BYTES if self._need > _PREFIX_BYTES else start :]
            )
        return found

    def _refused(self, length: int, *, compressed: bool) -> _RefusedError:
        """Return the error of a message that is compressed, or whose `length` is too long."""
        if compressed:
            return _RefusedError(
                Status(Code.UNIMPLEMENTED, "compressed gRPC messages are not supported")
            )
        return _RefusedError(
            Status(
                Code.RESOURCE_EXHAUSTED,
                f"a gRPC message has {length} bytes, expected at most {self._bytes_max}",
            )
        )


class _Stream:
    """One gRPC stream of a connection, which is also the `Wire` of its call."""

    __slots__ = (
        "answered", "answers", "call", "came_at_s", "closing", "connection", "deadline", "due",
        "ended", "half_closed", "half_told", "inbox", "messages", "stream_id", "taken_bytes",
        "unacknowledged_bytes", "unsent",
    )  # fmt: skip

    call: Call

    def __init__(
        self, connection: "_Connection", stream_id: int, bytes_max: int, came_at_s: Seconds
    ) -> None:
        self.connection = connection
        self.came_at_s = came_at_s
        self.stream_id = stream_id
        self.messages = _Messages(bytes_max)
        self.inbox: deque[bytes] = deque()
        """Received messages that are not processed yet. They may wait until answers to an earlier
        message fit into the stream's window.
        """
        self.due = False
        """True if the stream is among the due streams of its connection."""
        self.answers: Iterator[bytes] | None = None
        self.answered = False
        self.unsent = False
        """True if an answer was written that may not have been sent to the gateway yet."""
        self.half_closed = False
        self.half_told = False
        self.ended: Status | None = None
        self.closing = False
        """True if the picker has ended this stream, so that its trailers are being sent, or if the
        stream is over.
        """
        self.taken_bytes = 0
        """Number of bytes of this stream's unprocessed messages that count against the memory
        budget of bodies. Its session counts the body that it stores itself.
        """
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


class _Lingering:
    """The record of a stream that the picker has ended and on which the gateway may still send."""

    __slots__ = ("sent_bytes", "since_s")

    def __init__(self, since_s: Seconds) -> None:
        self.since_s = since_s
        self.sent_bytes = 0
        """Number of bytes that the gateway has sent on this stream since the picker ended it."""


class _Read(NamedTuple):
    """Bytes that were read from a connection at one time, or a piece of them."""

    data: bytes | memoryview
    at_s: Seconds
    overdue_s: Seconds
    """Estimated time in seconds that these bytes waited before the event loop read them."""


class _Connection(asyncio.BufferedProtocol):
    """One HTTP/2 connection of a gateway."""

    def __init__(self, server: "Http2Server") -> None:
        self._server = server
        self._settings = server.settings
        self._engine = Connection(Role.SERVER, _CONFIGURATION)
        self._unread: deque[_Read] = deque()
        """Data that was received on this connection and is not parsed yet, in pieces."""
        self._events: deque[Event] = deque()
        """HTTP/2 events that were parsed from received data and not processed yet."""
        self._due: deque[_Stream] = deque()
        """Streams with new messages. They are processed after the HTTP/2 events that were parsed
        together: the processor then runs the code for events, and after it the code for messages,
        several times in a row from its cache. What exceeds a turn is left for the next one.
        """
        self._turn = Turn(server.clock)
        self._in_turn = False
        self._turn_due = False
        self._streams: dict[int, _Stream] = {}
        self._last_stream_id = 0
        self._lingering: dict[int, _Lingering] = {}
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self.host = ""
        self._paused = False
        self._failed = False
        """True if the HTTP/2 engine has reported an error and cannot go on."""
        self._made_at_s = 0.0
        self.age_max_s: Seconds = math.inf
        self.heard_at_s = 0.0
        self._read_at_s = 0.0
        """Time at which the data of the events being processed was read."""
        self._came_at_s: deque[Seconds] = deque()
        """Estimated arrival times of the next streams to be opened; empty if they arrived when they
        were read.
        """
        self._pinged_at_s: Seconds | None = None
        self._retired_at_s: Seconds | None = None
        self._gone_away = False
        self._resets = 0
        """Number of consecutive streams that the gateway has reset before an answer."""
        self.unacknowledged_bytes = 0
        """Number of received bytes whose events were processed and that were not returned to the
        flow-control windows yet.
        """

    def __repr__(self) -> str:
        return f"<_Connection [{len(self._streams)} streams of {self._peer}]>"

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def peer(self) -> str:
        return self._peer

    # Methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the base class.
        self._transport = transport = cast("asyncio.Transport", transport)
        self._peer = _peer_of(transport)
        self.host = self._peer.rpartition(":")[0]
        self._made_at_s = self.heard_at_s = self._server.clock()
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            transport.close()
            return
        if not self._server.admit(self):
            transport.abort()
            return
        self._engine.initiate_connection(_SETTINGS)
        self._engine.set_local_window_size(self._settings.connection_window_bytes)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.received

    def buffer_updated(self, nbytes: int) -> None:
        if self._failed:
            return
        self.heard_at_s = now = self._server.clock()
        self._pinged_at_s = None
        overdue_s = self._server.lag.overdue_s(now)
        received, unread = self._server.received, self._unread
        for start in range(0, nbytes, READ_BYTES_MAX):
            piece = received[start : min(start + READ_BYTES_MAX, nbytes)]
            unread.append(_Read(piece, now, overdue_s))
        if not self._turn_due and (not self._server.turns.idle or self.turn()):
            self._wait_for_turn()
        # The next read of any connection overwrites these bytes.
        for position, read in enumerate(unread):
            if not isinstance(read.data, bytes):
                unread[position] = read._replace(data=bytes(read.data))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    def eof_received(self) -> None:
        """Do nothing when the gateway closes its side: asyncio closes the connection, and
        `connection_lost` ends its streams.
        """

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._forget_work()
        for stream in list(self._streams.values()):
            self._over(stream, stream.ended if stream.closing else CANCELLED)
        self._server.left(self)

    # Processing of events and messages, a few at a time.

    def turn(self) -> bool:
        """Process received data of the connection, as far as one turn allows, and return whether
        more remains. If not, resume reading the socket.
        """
        self._turn_due = False
        self._turn.begin()
        self._in_turn = True
        try:
            # Due streams come first, so that they wait for one turn and not for the end of new data.
            self._carry_on_due()
            while not self._due and (self._events or self._read()):
                self._handle_events()
                self._carry_on_due()
                if self._events:
                    break
            self.flush()
        finally:
            self._in_turn = False
        self._turn_due = bool(self._unread or self._events or self._due)
        if not self._turn_due and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return self._turn_due

    def _carry_on_due(self) -> None:
        """Process the messages of the streams that are due now, as far as the turn allows."""
        due = self._due
        for _ in range(len(due)):
            stream = due.popleft()
            stream.due = False
            try:
                self.carry_on(stream)
            except Exception:  # noqa: BLE001  the boundary of a stream: others go on
                self._defect(stream.stream_id)

    def _handle_events(self) -> None:
        """Handle the events that were parsed and not handled yet, as far as the turn allows."""
        events = self._events
        while events and self._turn.take():
            event = events.popleft()
            try:
                self._handle(event)
            except Exception:  # noqa: BLE001  the boundary of a stream: others go on
                self._defect(getattr(event, "stream_id", 0))

    def _read(self) -> bool:
        """Parse received data until there is an HTTP/2 event to process, and return whether there
        is one.
        """
        while self._unread and not self._events:
            read = self._unread.popleft()
            try:
                self._engine.receive_data(read.data)
            except NGH2Error as error:
                self._fail(error)
                return False
            self._events.extend(self._engine.events())
            self._read_at_s = read.at_s
            if read.overdue_s:
                self._read_late(read)
        return bool(self._events)

    def _read_late(self, read: _Read) -> None:
        opened = sum(isinstance(event, RequestReceived) for event in self._events)
        if opened and self._transport is not None:
            age_s = newest_data_age_s(self._transport.get_extra_info("socket"))
            self._came_at_s.extend(arrivals(opened, read.at_s, read.overdue_s, age_s))

    def _wait_for_turn(self) -> None:
        if self._transport is not None and not self._failed:
            self._turn_due = True
            self._transport.pause_reading()
            self._server.turns.due(self)

    def _forget_work(self) -> None:
        self._unread.clear()
        self._events.clear()
        self._due.clear()

    def _contained(self, stream_id: int, do: Callable[..., None], *about: object) -> None:
        try:
            do(*about)
        except Exception:  # noqa: BLE001  the boundary of a stream, as in `turn`
            self._defect(stream_id)

    def _defect(self, stream_id: int) -> None:
        """Log the current exception, and end the stream whose processing raised it with a status
        that says that the picker failed.
        """
        _log.exception("a gRPC stream failed because of a defect of the transport")
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.closing:
            stream.answers = None
            self._finish(stream, DEFECT)

    def _handle(self, event: Event) -> None:
        if type(event) is DataReceived:
            stream = self._streams.get(event.stream_id)
            if stream is None:
                self.unacknowledged_bytes += len(event.data)
                self._data_past_end(event.stream_id, len(event.data))
            else:
                self._data(stream, event)
        elif type(event) is RequestReceived:
            self._open(event)
        elif type(event) is StreamClosed:
            self._lingering.pop(event.stream_id, None)
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                self._over(stream, stream.ended if stream.closing else None)
        elif type(event) is TrailersReceived:
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                self._half_close(stream)
        # The engine itself handles all other events: windows, settings and pings.

    def _open(self, event: RequestReceived) -> None:
        fields = dict(event.headers)
        stream_id = event.stream_id
        self._last_stream_id = stream_id
        came_at_s = self._came_at_s.popleft() if self._came_at_s else self._read_at_s
        if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            self._answer_plainly(stream_id)
            return
        stream = _Stream(self, stream_id, self._settings.message_bytes_max, came_at_s)
        self._streams[stream_id] = stream
        opener = self._server.methods.get(fields.get(b":path", b""))
        if opener is None or fields.get(b":method") != b"POST":
            stream.call = EndedCall(_NO_METHOD)
        else:
            stream.call = opener(self._peer, stream)
        if b"grpc-timeout" in fields:
            self._set_deadline(stream, fields[b"grpc-timeout"])
        if event.end_stream:
            self._half_close(stream)
        elif stream.call.ended is not None:
            self.carry_on(stream)

    def _set_deadline(self, stream: _Stream, timeout: bytes) -> None:
        timeout_s = _timeout_s(timeout)
        if timeout_s is not None:
            stream.deadline = asyncio.get_running_loop().call_later(
                timeout_s,
                stream.end,
                Status(Code.DEADLINE_EXCEEDED, "the deadline of the gRPC call has passed"),
            )

    def _answer_plainly(self, stream_id: int) -> None:
        """Answer a request that does not use gRPC with an HTTP status and without trailers, as gRPC
        specifies.
        """
        self._lingering[stream_id] = _Lingering(self._server.clock())
        # The engine raises an error if the stream was reset meanwhile; an event reports that.
        with contextlib.suppress(NGH2Error):
            self._engine.send_response(stream_id, _NO_GRPC)
            self._engine.send_data(stream_id, _NO_GRPC_BODY, end_stream=True)

    def _data(self, stream: _Stream, event: DataReceived) -> None:
        """Take the data of `event`. The messages among it are processed when the stream is due."""
        data = event.data
        self.unacknowledged_bytes += len(data)
        stream.unacknowledged_bytes += len(data)
        if stream.ended is None:
            try:
                stream.inbox.extend(stream.messages.feed(data))
            except _RefusedError as refused:
                stream.ended = refused.status
        if event.end_stream:
            stream.half_closed = True
        self._make_due(stream)

    def _half_close(self, stream: _Stream) -> None:
        stream.half_closed = True
        self._make_due(stream)

    def _data_past_end(self, stream_id: int, count: int) -> None:
        """Acknowledge `count` bytes that arrived for a stream after its end, because these bytes
        are not processed. Reset the stream if more than its window arrived after its end.
        """
        if count:
            self._acknowledge(stream_id, count)
        lingering = self._lingering.get(stream_id)
        if lingering is not None:
            lingering.sent_bytes += count
            if lingering.sent_bytes > STREAM_WINDOW_BYTES:
                # The other side sends more than it could have sent before it received the status.
                self._reset(stream_id)

    def _hold(self, stream: _Stream) -> bool:
        """Adjust the stream's share of the memory budget to its unprocessed data. Return False if
        the budget has no room for it.
        """
        held = 0
        if not stream.closing:
            held = stream.messages.held_bytes
            if stream.inbox:
                held += stream.unacknowledged_bytes
        more = held - stream.taken_bytes
        if more > 0 and not self._server.budget.take(more, stream.taken_bytes):
            return False
        if more < 0:
            self._server.budget.give_back(-more)
        stream.taken_bytes = held
        return True

    # Answers, as far as the other side accepts them.

    def carry_on(self, stream: _Stream) -> None:
        """Process the messages of `stream` and write answers, as far as the stream's window, its
        data and the current turn allow. Refuse the stream if the memory budget has no room for its
        unprocessed data.
        """
        call = stream.call
        while not stream.closing:
            if stream.answers is not None:
                if not self._answer(stream, stream.answers):
                    break
                stream.answers = None
            if stream.ended is None:
                stream.ended = call.ended
            if stream.ended is not None:
                self._finish(stream, stream.ended)
            elif stream.inbox:
                if not self._turn.take():
                    self._make_due(stream)
                    break
                answers = call.receive(stream.inbox.popleft())
                stream.answers = iter(answers) if answers else None
            elif stream.half_closed and not stream.half_told:
                stream.half_told = True
                answers = call.half_close()
                stream.answers = iter(answers) if answers else None
            else:
                if stream.unacknowledged_bytes:
                    self._acknowledge(stream.stream_id, stream.unacknowledged_bytes)
                    stream.unacknowledged_bytes = 0
                break
        # Nearly every stream has no such data, so that nothing needs to be counted.
        holds = stream.taken_bytes or stream.messages.held_bytes or stream.inbox
        if holds and not self._hold(stream):
            stream.answers = None
            self._finish(stream, _FULL)
            self._hold(stream)

    def _make_due(self, stream: _Stream) -> None:
        if not stream.due:
            stream.due = True
            self._due.append(stream)
            if not self._in_turn and not self._turn_due:
                self._wait_for_turn()

    def _answer(self, stream: _Stream, answers: Iterator[bytes]) -> bool:
        """Write answers until `QUEUED_BYTES_MAX` wait for the stream's window. Return False once
        that limit is reached, even after the last answer.
        """
        for answer in answers:
            self.write(stream, answer)
            if self._engine.queued_body_size(stream.stream_id) >= QUEUED_BYTES_MAX:
                return False
        return True

    def write(self, stream: _Stream, message: bytes) -> None:
        """Queue one gRPC message, and before the first one the response headers, to be sent on
        `stream`, unless the stream was reset.
        """
        try:
            if not stream.answered:
                stream.answered = True
                self._engine.send_response(stream.stream_id, _HEAD)
            prefix, stream_id = _prefix(0, len(message)), stream.stream_id
            if len(message) < COPIED_BYTES_MAX:
                self._engine.send_data(stream_id, prefix + message)
            else:
                self._engine.send_data(stream_id, prefix)
                self._engine.send_data(stream_id, message)
        except NGH2Error:
            # The stream was reset meanwhile; an event reports that.
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
            # The stream was reset meanwhile, as above.
            pass

    def _acknowledge(self, stream_id: int, count: int) -> None:
        """Let the gateway send `count` more bytes, at least one, on this stream; if the stream has
        ended, on other streams of the connection.
        """
        self.unacknowledged_bytes -= count
        # `suppress` takes three calls, and each chunk of a response passes here.
        try:  # noqa: SIM105
            self._engine.acknowledge_received_data(count, stream_id)
        except NGH2Error:
            # The connection is ending, so the bytes need no acknowledgement.
            pass

    def flush(self) -> None:
        """Write the HTTP/2 engine's pending data to the socket, and continue the streams that
        waited for that. Close the connection if HTTP/2 has ended it.
        """
        try:
            while self._transport is not None and not self._paused and not self._failed:
                out = self._engine.data_to_send()
                if not out:
                    break
                self._transport.write(out)
                # Sending may have ended streams.
                for event in self._engine.events():
                    self._contained(getattr(event, "stream_id", 0), self._handle, event)
                self._settle(out)
            if self._transport is None or self._failed:
                return
            if not (self._engine.want_read or self._engine.want_write):
                self.close()
        except NGH2Error as error:
            self._fail(error)

    def _settle(self, out: bytes) -> None:
        """Continue the streams whose frames in `out` have just been sent.

        A stream whose trailers were sent is over. A stream without queued data has sent all its
        answers. A stream with little queued data may write further answers.
        """
        for stream_id, ends in _sent(out).items():
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            if stream.closing:
                if ends:
                    if not stream.half_closed:
                        self._lingering[stream_id] = _Lingering(self._server.clock())
                    self._over(stream, stream.ended)
                continue
            queued = self._engine.queued_body_size(stream_id)
            if stream.answers is not None:
                if queued < QUEUED_BYTES_MAX:
                    self._contained(stream_id, self.carry_on, stream)
            elif stream.unsent and not queued:
                stream.unsent = False
                stream.call.sent()

    # The end of streams and connections.

    def _over(self, stream: _Stream, status: Status | None) -> None:
        """Handle the end of `stream`. `status` is None if the gateway has reset the stream; too
        many consecutive resets before an answer close the connection.
        """
        del self._streams[stream.stream_id]
        if stream.deadline is not None:
            stream.deadline.cancel()
        stream.closing = True
        stream.answers = None
        stream.inbox.clear()
        if stream.taken_bytes:
            self._hold(stream)
        if stream.unacknowledged_bytes:
            self._acknowledge(stream.stream_id, stream.unacknowledged_bytes)
            stream.unacknowledged_bytes = 0
        # The call refers to its stream. Without this, both would keep the request in memory until
        # the garbage collector runs.
        call, stream.call = stream.call, _OVER
        waited = call.closed(status or CANCELLED)
        if stream.answered:
            self._resets = 0
        elif status is None and not waited:
            self._reset_unanswered()

    def _reset_unanswered(self) -> None:
        self._resets += 1
        if self._resets > self._settings.resets_max and self._transport is not None:
            self._resets = 0
            self._server.cut(Cut.RESETS)
            _log.warning(
                "connection cut: the gateway only opens streams and resets them",
                peer=self._peer,
            )
            self._engine.terminate_connection(ErrorCode.ENHANCE_YOUR_CALM)
            self._forget_work()
            self.flush()
            self.close()

    def _fail(self, error: NGH2Error) -> None:
        """Report an error of the HTTP/2 engine to the gateway, as HTTP/2 specifies, count it and
        close the connection. Data after the end of the connection is not an error, so it is neither
        reported nor counted.
        """
        if self._failed:
            return
        self._failed = True
        self._forget_work()
        if isinstance(error, ConnectionStateError):
            # Data after the final frame of either side is not a violation.
            self.close()
            return
        self._server.failed(self)
        if self._transport is not None:
            flood = isinstance(error, DenialOfServiceError)
            code = ErrorCode.ENHANCE_YOUR_CALM if flood else ErrorCode.PROTOCOL_ERROR
            # The engine sends nothing any more, not even this frame.
            self._transport.write(_goaway(self._last_stream_id, code))
            self._transport.close()

    def look(self, now: Seconds) -> None:
        """Do what is due at `now`: retire the connection if it is old or too little of its window
        is left, ping it, abort it if it does not respond, and reset lingering streams.
        """
        if self._transport is None:
            return
        if self._failed:
            # The other side does not accept the data that was written.
            if now - self.heard_at_s > self._settings.ping_wait_s:
                self._transport.abort()
            return
        self._end_lingering(now)
        self._retire_in_time(now)
        if self._pinged_at_s is not None:
            if now - self._pinged_at_s > self._settings.ping_wait_s:
                self._transport.abort()
        elif now - self.heard_at_s > self._settings.ping_after_s:
            self._pinged_at_s = now
            self._say(self._engine.ping)

    def _retire_in_time(self, now: Seconds) -> None:
        if self._retired_at_s is None:
            age_max_s = min(self.age_max_s, self._server.age_max_s)
            if now - self._made_at_s > age_max_s:
                self.retire(now)
            elif self._window_left() < WINDOW_LEFT_SHARE_MIN:
                self._server.cut(Cut.WINDOW)
                _log.warning(
                    "connection retired: bytes received from the gateway are not acknowledged",
                    peer=self._peer,
                    streams=len(self._streams),
                    unacknowledged_bytes=self.unacknowledged_bytes,
                )
                self.retire(now)
        elif not self._gone_away and now - self._retired_at_s > NOTICE_S:
            self.go_away()

    def _window_left(self) -> float:
        """Return the share of the connection's flow-control window that the gateway may still use,
        from 0 to 1.
        """
        return self._engine.local_window_size / self._settings.connection_window_bytes

    def _end_lingering(self, now: Seconds) -> None:
        """Reset the streams that the picker ended `LINGER_S` ago or earlier and that the gateway
        has not closed.
        """
        late = [at for at, one in self._lingering.items() if now - one.since_s > LINGER_S]
        for stream_id in late:
            self._reset(stream_id)
        if late:
            self.flush()

    def _reset(self, stream_id: int) -> None:
        """Reset a stream that the picker has ended, with a code that does not mean an error."""
        del self._lingering[stream_id]
        with contextlib.suppress(NGH2Error):
            self._engine.reset_stream(stream_id, _GRACEFUL)

    def retire(self, now: Seconds) -> None:
        """Ask the gateway to use a new connection, and count this one as leaving. Streams that are
        open or under way on it are still served.
        """
        if self._retired_at_s is None and self._transport is not None and not self._failed:
            self._retired_at_s = now
            self._server.places.leaving(self)
            self._say(self._engine.send_shutdown_notice)

    def go_away(self) -> None:
        """Accept no further stream on this connection, which closes when its open streams have
        ended.
        """
        self._gone_away = True
        self._say(self._engine.send_goaway)

    def _say(self, tell: Callable[[], None]) -> None:
        if self._transport is None or self._failed:
            return
        # After the final frame of either side, nothing may be sent.
        with contextlib.suppress(ConnectionStateError):
            tell()
        self.flush()

    def cut(self) -> None:
        """Close the connection now, and with it all its streams."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send the data that was written to the connection, then close it."""
        if self._transport is not None:
            self._transport.close()


class Http2Server:
    """A gRPC server of `methods`, given by their paths, on the ports given to `listen`.

    `budget` limits the bytes of unprocessed data, together with the other users of this budget.
    `cut` is called when the server closes, retires or rejects a connection because of its behaviour
    or for lack of room. `lag` estimates how late the event loop reads.
    """

    def __init__(
        self,
        methods: Mapping[str, Opener],
        *,
        budget: BodyBudget,
        settings: Http2Settings | None = None,
        cut: Callable[[Cut], None] = lambda _: None,
        lag: Lag | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        """Create the server. `random` varies the ages at which connections are retired."""
        self.methods = {path.encode("latin-1"): opener for path, opener in methods.items()}
        self.budget = budget
        self.settings = settings or Http2Settings()
        self.cut = cut
        self.lag = lag or NoLag()
        self.clock = clock
        self.turns = Turns(clock)
        self.places: Places[_Connection] = Places(
            self.settings.connections_max, self.settings.host_connections_max
        )
        self._random = random or Random(0)  # noqa: S311  ages, not secrets
        self.age_max_s: Seconds = math.inf
        """Maximum age in seconds of every connection; the smaller of this and a connection's own
        maximum age applies.
        """
        self._connections: set[_Connection] = set()
        self._crowd = _Crowd()
        self._servers: list[asyncio.Server] = []
        self.received = memoryview(bytearray(RECEIVED_BYTES_MAX))
        """Buffer into which the event loop reads the data of all connections, one after the other."""
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def open_streams(self) -> int:
        return sum(connection.open_streams for connection in self._connections)

    def connected(self) -> Connected:
        """Return the number of gateways' open connections and of their unacknowledged bytes."""
        return Connected(
            connections=len(self._connections),
            unacknowledged_bytes=sum(one.unacknowledged_bytes for one in self._connections),
        )

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Listen for gateways on `port` at `host` (0 for any free port) and return the port number.
        Raises `OSError`.
        """
        listening = _socket(host, port)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            sock=listening,
            ssl=None if certificate is None else certificate.ssl_context(),
            ssl_handshake_timeout=None if certificate is None else HANDSHAKE_S_MAX,
            backlog=BACKLOG,
            start_serving=False,
        )
        self._servers.append(server)
        port_taken: int = listening.getsockname()[1]
        return port_taken

    async def start(self) -> None:
        """Begin to accept connections and their streams on the ports of `listen`."""
        for server in self._servers:
            await server.start_serving()

    @property
    def has_gateway(self) -> bool:
        return bool(self._connections)

    def loops(self) -> dict[str, Loop]:
        """Return the coroutines that must run as tasks beside the server, by the names of these
        tasks.
        """
        return {"connections": self._look_after}

    async def _look_after(self) -> None:
        """Examine all connections of gateways periodically, and log how many were evicted or
        rejected, until cancelled.
        """
        while True:
            await asyncio.sleep(POLL_S)
            now = self.clock()
            for connection in list(self._connections):
                connection.look(now)
            self._crowd.tell(now)

    def send_away(self, away: bool) -> None:
        """Start (`away` True) or stop (False) asking gateways to connect to another picker.
        Gateways that connect here all the same are served.
        """
        self.age_max_s = AWAY_AGE_S if away else math.inf

    async def stop(self, wait_s: Seconds | None) -> None:
        """Accept no more streams, and cut the open streams after `wait_s` seconds, or at once if it
        is None.
        """
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.go_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s or 0.0):
                await self._empty.wait()
        for connection in list(self._connections):
            connection.cut()
        # asyncio reports the end of connections in a later iteration of its loop.
        await self._empty.wait()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    # Methods that connections call.

    def admit(self, connection: _Connection) -> bool:
        """Give `connection` one of the limited places, if necessary that of another connection,
        which is evicted. Return False if there is none. Evictions and rejections are counted.
        """
        admission = self.places.take(connection)
        if not admission.admitted:
            self._crowd.refused(connection.peer)
            self.cut(Cut.REFUSED)
            return False
        self._connections.add(connection)
        self._empty.clear()
        if self.settings.connection_age_max_s is not None:
            jitter = self._random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            connection.age_max_s = self.settings.connection_age_max_s * jitter
        if admission.evicted is not None:
            self._crowd.evicted(admission.evicted.peer)
            self.cut(Cut.EVICTED)
            admission.evicted.retire(self.clock())
            if not admission.evicted.open_streams:
                # Its place is needed, and it has been silent for longer than all others.
                admission.evicted.go_away()
        return True

    def failed(self, connection: _Connection) -> None:
        """Count that the gateway of `connection` violated HTTP/2, and treat the connection as
        leaving.
        """
        if connection in self._connections:
            self.places.leaving(connection)
            self.cut(Cut.PROTOCOL)

    def left(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self.places.left(connection)
        if not self._connections:
            self._empty.set()


class _Crowd:
    """Counts of evicted and rejected connections since the last log line about them."""

    def __init__(self) -> None:
        self._evicted = 0
        self._refused = 0
        self._peer = ""
        self._told_at_s = -TELL_S

    def evicted(self, peer: str) -> None:
        self._evicted += 1
        self._peer = peer

    def refused(self, peer: str) -> None:
        self._refused += 1
        self._peer = peer

    def tell(self, now: Seconds) -> None:
        """Log the counts of evicted and rejected connections if there are any, at most once in
        `TELL_S` seconds.
        """
        if not (self._evicted or self._refused) or now - self._told_at_s < TELL_S:
            return
        _log.warning(
            "more connections of gateways than the limit: some were asked to leave or new ones "
            "refused",
            evicted=self._evicted,
            refused=self._refused,
            last_peer=self._peer,
        )
        self._told_at_s = now
        self._evicted = self._refused = 0


def _socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` at `host`; on all addresses it uses both IPv4 and
    IPv6. Raises `OSError`.
    """
    dualstack = host == EVERYWHERE and socket.has_dualstack_ipv6()
    if host == EVERYWHERE and not dualstack:
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, dualstack_ipv6=dualstack, backlog=BACKLOG
    )


def _sent(out: bytes) -> dict[int, bool]:
    """Return the ids of the streams with DATA or HEADERS frames in `out`, which contains whole
    frames that were sent.

    The value of a stream is True if its last frame in `out` ended it.
    """
    found: dict[int, bool] = {}
    start, stop = 0, len(out)
    while start < stop:
        high, low, kind, flags, stream_id = _read_head(out, start)
        if kind in (_DATA, _HEADERS):
            found[stream_id] = bool(flags & _END_STREAM)
        start += _FRAME_HEAD_BYTES + (high << 16 | low)
    return found


def _goaway(last_stream_id: int, code: ErrorCode) -> bytes:
    """Return the bytes of an HTTP/2 GOAWAY frame."""
    payload = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return len(payload).to_bytes(3, "big") + bytes([_GOAWAY, 0]) + bytes(4) + payload


def _trailers(status: Status) -> tuple[tuple[bytes, bytes], ...]:
    code = (b"grpc-status", b"%d" % status.code)
    if not status.details:
        return (code,)
    return (code, (b"grpc-message", _percent_encoded(status.details)))


def _percent_encoded(text: str) -> bytes:
    """Return `text` with "%" and all bytes that are not printable ASCII percent-encoded, as gRPC
    specifies.
    """
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in text.encode()
    )


def _timeout_s(text: bytes) -> Seconds | None:
    """Return the seconds in a `grpc-timeout` header: at most eight digits and a unit. Return None
    if it is malformed.
    """
    digits, unit = text[:-1], text[-1:].decode("latin-1")
    if not digits.isdigit() or len(digits) > 8 or unit not in _UNITS_S:
        return None
    return int(digits) * _UNITS_S[unit]


def _peer_of(transport: asyncio.Transport) -> str:
    """Return the address of the connection's gateway as gRPC spells it: "ipv4:10.0.0.1:1234" or
    "ipv6:[fd00::1]:1234"; "unknown" if it has none.
    """
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unknown"
    host, port, *_ = name
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
