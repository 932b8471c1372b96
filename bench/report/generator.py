"""The load generator: an HTTP/2 client with as little work per stream as possible in Python.

It plays a script (`bench.report.script`) on some connections of one thread. In a closed loop, a
stream begins when another has ended. In an open loop, streams begin when they are due, whatever the
server does. A stream's time in an open loop starts when it was *due*, so a wait for the generator
or the server counts: every request that would have met a stall shows it (coordinated omission).

The generator reads only the kind of an answer and whether it ends the body. `serve` is its process:
it reads `Load` and writes `Measured` on a pipe.
"""

import gc
import os
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from random import Random
from typing import Final

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from hpack import Decoder, HeaderTuple
from msgspec import Struct

from bench.raw_http2 import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    frame,
)
from bench.report.script import (
    FRAME_BYTES_MAX,
    Opening,
    Script,
    Shape,
    framed,
    nonces,
    payload,
    script,
)

_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS = 1, 3
_HEAD: Final = struct.Struct(">HBBBI")
_PREFIX: Final = struct.Struct(">BI")
_RECEIVE_BYTES: Final = 2**18
_WINDOW_RENEWED_BYTES: Final = 2**30
_GRACE_S: Final = 60.0
"""Seconds after the load's duration until a stream that has not ended counts as failed."""
_WAIT_S_MAX: Final = 1.0

REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, IMMEDIATE = (
    0x0A,
    0x12,
    0x1A,
    0x22,
    0x3A,
)
"""Tags of the fields of `ProcessingResponse`, one of which begins each answer of a picker."""
_END_OF_STREAM: Final = b"\x10\x01"


class Load(Struct, frozen=True, kw_only=True):
    """The traffic that the load generator must send to one server: `streams` at a time for
    `duration_s`, or `rate_per_s` for `duration_s`, or `at_once`.
    """

    port: int
    shape: Shape
    connections: int = 2
    streams: int = 16
    duration_s: float = 2.0
    rate_per_s: float = 0.0
    at_once: int = 0
    seed: int = 1


class Measured(Struct, frozen=True, kw_only=True):
    """The results of the traffic of one `Load`, which the load generator has sent to a server."""

    completed: int
    failed: dict[str, int]
    """Number of failed streams, by kind of failure."""
    latencies_s: list[float]
    """Seconds of each decision, from the time when its stream was due until the server had returned
    the request body.
    """
    late_s: list[float]
    """Seconds from the time when each stream was due until the generator began it."""
    duration_s: float
    generator_cpu_s: float


class _Stream:
    """One HTTP/2 stream of the load generator.

    `step` is -1 before the server has returned the request, n while `later[n]` waits for its
    answer, and None after the last message.
    """

    __slots__ = (
        "body_bytes",
        "due_s",
        "echoed_bytes",
        "left",
        "number",
        "received",
        "step",
        "window_bytes",
    )

    def __init__(self, number: int, due_s: float, body_bytes: int, window_bytes: int) -> None:
        self.number = number
        self.due_s = due_s
        self.body_bytes = body_bytes
        self.echoed_bytes = 0
        self.step: int | None = -1
        self.received = bytearray()
        self.left: memoryview | None = None
        self.window_bytes = window_bytes


class _Connection:
    """One HTTP/2 connection of the load generator to the measured server, and its open streams."""

    def __init__(self, port: int, run: "_Run") -> None:
        self._run = run
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.streams: dict[int, _Stream] = {}
        self.streams_max = 100
        self.out: list[bytes | bytearray] = []
        self.unsent: memoryview | None = None
        self.closed = self.lost = False
        self._next = 1
        self._window_bytes = WINDOW_BYTES
        self._stream_window_bytes = WINDOW_BYTES
        self._taken_bytes = 0
        self._buffer = b""
        self._stalled: deque[_Stream] = deque()
        self._decoder = Decoder()
        self._settled = False
        settings = struct.pack(
            ">HIHI", _HEADER_TABLE_SIZE, 0, INITIAL_WINDOW_SIZE, WINDOW_BYTES_MAX
        )
        more = struct.pack(">I", WINDOW_BYTES_MAX - WINDOW_BYTES)
        self.socket.sendall(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more)
        )
        # The peer's limits apply from the first stream on, as with Envoy.
        while not self._settled:
            self.receive()
        self.socket.setblocking(False)

    def open(self, opening: Opening, due_s: float, nonce: bytes) -> None:
        number = self._next
        self._next += 2
        stream = _Stream(number, due_s, opening.body_bytes, self._stream_window_bytes)
        self.streams[number] = stream
        size = len(opening.payload)
        if not self._stalled and size <= min(self._window_bytes, stream.window_bytes):
            self._window_bytes -= size
            stream.window_bytes -= size
            self.out.append(framed(opening, number, nonce))
            return
        head = 9 + int.from_bytes(opening.framed[:3], "big")
        self.out.append(opening.framed[:5] + number.to_bytes(4, "big") + opening.framed[9:head])
        self._send(stream, payload(opening, nonce))

    def _send(self, stream: _Stream, data: bytes) -> None:
        """Send `data` on a stream in as many frames as the flow-control windows allow; the rest
        follows when they grow.
        """
        size = len(data)
        if size <= min(self._window_bytes, stream.window_bytes, FRAME_BYTES_MAX):
            self._window_bytes -= size
            stream.window_bytes -= size
            self.out.append(frame(DATA, 0, stream.number, data))
            return
        stream.left = memoryview(data)
        if not self._push(stream):
            self._stalled.append(stream)

    def _push(self, stream: _Stream) -> bool:
        """Send as much of a stream's remaining data as the flow-control windows allow; return True
        if nothing is left.
        """
        left = stream.left
        assert left is not None
        while left:
            size = min(len(left), FRAME_BYTES_MAX, self._window_bytes, stream.window_bytes)
            if size <= 0:
                stream.left = left
                return False
            self._window_bytes -= size
            stream.window_bytes -= size
            self.out.append(frame(DATA, 0, stream.number, bytes(left[:size])))
            left = left[size:]
        stream.left = None
        return True

    def _push_stalled(self) -> None:
        for _ in range(len(self._stalled)):
            stream = self._stalled.popleft()
            if stream.number in self.streams and not self._push(stream):
                self._stalled.append(stream)

    def flush(self) -> None:
        """Send the pending frames of this connection; the rest follows when the socket
        accepts it.
        """
        if self.unsent is None:
            if not self.out:
                return
            parts = self.out
            self.unsent = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
            self.out = []
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            return
        except OSError:
            self.lose()
            return
        self.unsent = self.unsent[sent:] if sent < len(self.unsent) else None

    def lose(self) -> None:
        self.closed = self.lost = True
        for stream in list(self.streams.values()):
            self._end(stream, "connection lost")

    def receive(self) -> None:
        """Read the socket and process the received frames."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.lose()
            return
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        while size - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(buffer, at)
            end = at + 9 + (high << 8 | low)
            if end > size:
                break
            if kind == DATA:
                stream = self.streams.get(number)
                self._taken_bytes += end - at - 9
                if stream is not None:
                    self._data(stream, buffer[at + 9 : end])
                    if flags & END_STREAM:
                        self._end(stream, "no trailers")
            else:
                self._control(kind, flags, number, buffer[at + 9 : end])
            at = end
        self._buffer = buffer[at:]
        if self._taken_bytes > _WINDOW_RENEWED_BYTES:
            more = struct.pack(">I", self._taken_bytes)
            self.out.append(frame(WINDOW_UPDATE, 0, 0, more))
            self._taken_bytes = 0

    def _data(self, stream: _Stream, data: bytes) -> None:
        received = stream.received
        waited = bool(received)
        if waited:
            received += data
        whole = received if waited else data
        at, size = 0, len(whole)
        while size - at >= 5:
            end = at + 5 + _PREFIX.unpack_from(whole, at)[1]
            if end > size:
                break
            self._answer(stream, whole, at + 5, end)
            at = end
        if waited:
            del received[:at]
        elif at < size:
            received += data[at:]

    def _answer(self, stream: _Stream, data: bytes | bytearray, start: int, end: int) -> None:
        kind, step = data[start] if end > start else 0, stream.step
        if kind == IMMEDIATE:
            self._end(stream, "immediate response")
            self.out.append(frame(RST_STREAM, 0, stream.number, b"\x00\x00\x00\x08"))
        elif step == -1:
            if kind == REQUEST_BODY:
                stream.echoed_bytes += end - start
                if _ends_body(data, start, end):
                    if stream.echoed_bytes < stream.body_bytes:
                        stream.step = None
                        self._end(stream, "body cut short")
                        return
                    self._run.latencies_s.append(time.monotonic() - stream.due_s)
                    self._go_on(stream, 0)
        elif step is not None and kind == (RESPONSE_BODY if step else RESPONSE_HEADERS):
            self._go_on(stream, step + 1)

    def _go_on(self, stream: _Stream, step: int) -> None:
        later = self._run.script.later
        if step < len(later):
            stream.step = step
            self._send(stream, later[step])
        else:
            stream.step = None
            self.out.append(frame(DATA, END_STREAM, stream.number))

    def _control(self, kind: int, flags: int, number: int, data: bytes) -> None:
        if kind == HEADERS:
            # Every block is decoded, in order, unless the peer keeps no table.
            status = self._status(data)
            stream = self.streams.get(number)
            if stream is not None and flags & END_STREAM:
                short = "" if stream.step is None else "ended early"
                self._end(stream, short if status == "0" else f"grpc-status {status}")
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(data, "big")
            if number == 0:
                self._window_bytes += more
            elif number in self.streams:
                self.streams[number].window_bytes += more
            if self._stalled:
                self._push_stalled()
        elif kind == RST_STREAM and number in self.streams:
            self._end(self.streams[number], f"reset {int.from_bytes(data, 'big')}")
        elif kind == PING and not flags & ACK:
            self.out.append(frame(PING, ACK, 0, data))
        elif kind == SETTINGS and not flags & ACK:
            self._settings(data)
        elif kind == GOAWAY:
            self.closed = True

    def _settings(self, data: bytes) -> None:
        if not self._settled:
            self.streams_max = 2**31 - 1
        for name, value in struct.iter_unpack(">HI", data):
            if name == _MAX_CONCURRENT_STREAMS:
                self.streams_max = value
            elif name == INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.window_bytes += value - self._stream_window_bytes
                self._stream_window_bytes = value
        self._settled = True
        self.out.append(frame(SETTINGS, ACK, 0))
        if self._stalled:
            self._push_stalled()

    def _status(self, block: bytes) -> str:
        if self._decoder.header_table_size == 0:
            return _status_without_table(block)
        return _status_in(self._decoder.decode(block, raw=True))

    def _end(self, stream: _Stream, failure: str) -> None:
        if self.streams.pop(stream.number, None) is not None:
            self._run.ended(failure)


@lru_cache(256)
def _status_without_table(block: bytes) -> str:
    """Return the gRPC status in a header block of a server without a header table, which always
    encodes it alike.
    """
    decoder = Decoder()
    decoder.header_table_size = 0
    return _status_in(decoder.decode(block, raw=True))


def _status_in(fields: Iterable[HeaderTuple]) -> str:
    told = (value.decode() for name, value in fields if name == b"grpc-status")
    return next(told, "none")


def _ends_body(data: bytes | bytearray, start: int, end: int) -> bool:
    if data[end - 2 : end] == _END_OF_STREAM:
        return True
    answer = ProcessingResponse.FromString(bytes(data[start:end]))
    return bool(answer.request_body.response.body_mutation.streamed_response.end_of_stream)


class _Run:
    """The generation of one load, from its first stream to the end of its last."""

    def __init__(self, load: Load, made: Script, numbers: Iterator[bytes]) -> None:
        self.script = made
        self.latencies_s: list[float] = []
        self._load = load
        self._nonces = numbers
        self._openings = cycle(made.openings)
        self._late_s: list[float] = []
        self._completed = 0
        self._failed: Counter[str] = Counter()
        self._inside = 0
        self._connections = [_Connection(load.port, self) for _ in range(load.connections)]
        self._turn = cycle(self._connections)
        self._due: deque[float] = deque()
        """Times at which the streams of the load that have not begun are due, in order."""
        self._renewed_until_s = float("-inf")

    def ended(self, failure: str) -> None:
        """Record the end of a stream, with its failure or "". Another stream is due at once in a
        closed loop whose duration has not ended.
        """
        self._inside -= 1
        if failure:
            self._failed[failure] += 1
        else:
            self._completed += 1
        if (now := time.monotonic()) < self._renewed_until_s:
            self._due.append(now)

    def run(self) -> Measured:
        """Generate the whole load and return its results."""
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        load, due = self._load, self._due
        if load.rate_per_s:
            due.extend(due_times(load.rate_per_s, load.duration_s, load.seed, started_s))
        else:
            due.extend([started_s] * (load.at_once or load.streams))
            if not load.at_once:
                self._renewed_until_s = started_s + load.duration_s
        give_up_s = started_s + load.duration_s + _GRACE_S
        now = started_s
        while (due or self._inside) and now < give_up_s:
            self._begin_those_due(now)
            for connection in self._connections:
                connection.flush()
            if all(
                connection.closed and not connection.streams for connection in self._connections
            ):
                break
            self._wait(now)
            now = time.monotonic()
        if due:
            self._failed["not begun"] += len(due)
        if self._inside:
            self._failed["not ended"] += self._inside
        for connection in self._connections:
            connection.socket.close()
        return Measured(
            completed=self._completed,
            failed=dict(self._failed),
            latencies_s=self.latencies_s,
            late_s=self._late_s,
            duration_s=time.monotonic() - started_s,
            generator_cpu_s=time.process_time() - started_cpu_s,
        )

    def _begin_those_due(self, now: float) -> None:
        due = self._due
        while due and due[0] <= now:
            connection = self._free()
            if connection is None:
                return
            due_s = due.popleft()
            self._late_s.append(now - due_s)
            self._inside += 1
            connection.open(next(self._openings), due_s, next(self._nonces))

    def _free(self) -> _Connection | None:
        """Return the next connection, round robin, on which the server allows another stream, or
        None if there is none.
        """
        for _ in self._connections:
            connection = next(self._turn)
            if not connection.closed and len(connection.streams) < connection.streams_max:
                return connection
        return None

    def _wait(self, now: float) -> None:
        """Wait until data arrived or can be sent, a stream is due, or `_WAIT_S_MAX` is over; then
        read the data.
        """
        by_socket = {each.socket: each for each in self._connections if not each.lost}
        sending = [each.socket for each in by_socket.values() if each.unsent is not None]
        wait_s = _WAIT_S_MAX
        if self._due and self._due[0] > now:
            wait_s = min(wait_s, max(0.0, self._due[0] - time.monotonic()))
        # The only wait whose limit counts in microseconds.
        readable, _, _ = select.select(list(by_socket), sending, (), wait_s)
        for each in readable:
            by_socket[each].receive()


def due_times(rate_per_s: float, duration_s: float, seed: int, started_s: float) -> Iterator[float]:
    """Yield the arrival times of independent clients at `rate_per_s`, in seconds of the clock of
    `started_s`, with exponential gaps between them, for `duration_s`.
    """
    random = Random(f"report:arrivals:{seed}")
    at_s = random.expovariate(rate_per_s)
    while at_s < duration_s:
        yield started_s + at_s
        at_s += random.expovariate(rate_per_s)


def serve(pipe: Pipe, cores: frozenset[int]) -> None:
    """Run the load generator's process on `cores`: generate each load that arrives on `pipe` and
    send back its results, or the text of an `OSError`, until None arrives.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    made = lru_cache(4)(script)
    numbers = nonces()
    while (load := pipe.recv()) is not None:
        try:
            # The load is prepared before its time counts.
            played = made(load.shape)
            gc.collect()
            gc.freeze()
            pipe.send(_Run(load, played, numbers).run())
        except OSError as error:
            pipe.send(f"{type(error).__name__}: {error}")
