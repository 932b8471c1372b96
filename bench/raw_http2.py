"""An HTTP/2 client for tests that can send what a hostile or hurried gateway sends, at less cost
than a gRPC client.

A `RawConnection` opens thousands of streams, each with the messages of an ext_proc request, or
resets them as soon as they are open (rapid reset). It honours the connection's flow-control window,
and records how each stream ended. Header blocks are literals without indexing and all the same, so
the client takes a few microseconds per stream.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CONTINUATION = 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL: Final = 8
INITIAL_WINDOW_SIZE: Final = 4
WINDOW_BYTES: Final = 65_535
WINDOW_BYTES_MAX: Final = 2**31 - 1
FRAME_BYTES_MAX: Final = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    # Lengths below 127 are one byte.
    return b"".join(
        (b"\x00", bytes((len(name),)), name.encode(), bytes((len(value),)), value.encode())
    )


def header_block(**fields: str) -> bytes:
    """Return the HTTP/2 header block of the headers `fields`.

    Pseudo headers are named without the colon; "_" in other names means "-".
    """
    pseudo = ("method", "scheme", "path", "authority")
    return b"".join(
        _literal(f":{name}" if name in pseudo else name.replace("_", "-"), value)
        for name, value in fields.items()
    )


EXT_PROC: Final = header_block(
    method="POST",
    scheme="http",
    path=PATH,
    authority="picker",
    te="trailers",
    content_type="application/grpc",
)


def grpc_message(message: bytes) -> bytes:
    """Return `message` in gRPC framing, without compression."""
    return struct.pack(">BI", 0, len(message)) + message


class RawConnection:
    """One HTTP/2 connection of the test client.

    `answered` holds the data received on each stream, and `ended` the streams that are over. Those
    of them that the server reset before their end are also in `resets`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: bytes
    ) -> None:
        self._headers = headers
        self._reader = reader
        self._writer = writer
        self._next = 1
        self._window_bytes = WINDOW_BYTES
        self.stream_window_bytes = WINDOW_BYTES
        """Initial flow-control window of each stream in bytes, from the server's settings."""
        self._waiting: deque[bytes] = deque()
        self.answered: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        """Error code of the RST_STREAM frame that the server sent before the end of the stream, by
        number of the stream.
        """
        self.goaways: list[int] = []
        """Number of the last stream that the server will serve, from each GOAWAY frame received."""
        self.answers_pings = True
        self._pings: list[bytes] = []
        self.closed = False
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="raw connection")

    @classmethod
    async def open(
        cls, port: int, headers: bytes = EXT_PROC, *, stream_window_bytes: int = WINDOW_BYTES_MAX
    ) -> "RawConnection":
        """Return a connection without TLS to `port` on the loopback interface.

        Every stream sends the header block `headers`, and lets the server send
        `stream_window_bytes`.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, stream_window_bytes)
        more = struct.pack(">I", WINDOW_BYTES_MAX - WINDOW_BYTES)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))
        return cls(reader, writer, headers)

    async def close(self) -> None:
        """Close the connection without sending a GOAWAY."""
        self._reading.cancel()
        self._writer.close()
        with suppress(asyncio.CancelledError, OSError):
            await self._reading

    def open_streams(self, count: int, messages: Sequence[bytes] = ()) -> list[int]:
        """Open `count` streams at once, and send `messages` and a half-close on each. Return the
        streams.

        The headers of all streams precede the first message of any. Streams without messages stay
        open.
        """
        streams = [self._next + 2 * number for number in range(count)]
        self._next += 2 * count
        self._writer.write(
            b"".join(frame(HEADERS, END_HEADERS, stream, self._headers) for stream in streams)
        )
        for stream in streams if messages else ():
            self.send(stream, messages)
        return streams

    def send(self, stream: int, messages: Sequence[bytes]) -> None:
        """Send `messages` and a half-close on the open stream `stream`."""
        payload = b"".join(map(grpc_message, messages))
        self._waiting.append(frame(DATA, END_STREAM, stream, payload))
        self._send_data()

    def send_open(self, stream: int, messages: Sequence[bytes]) -> None:
        """Send `messages` on the stream `stream`, which stays open."""
        self.pour(stream, b"".join(map(grpc_message, messages)))

    async def changed(self) -> None:
        """Wait until the connection's window has grown, a stream received something, or the
        connection is over.
        """
        self._changed.clear()
        await self._changed.wait()

    def pour(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        """Send `payload` on a stream in full frames, as far as the connection's window allows; the
        rest follows when it grows.

        The caller must observe the window of the stream.
        """
        for start in range(0, len(payload), FRAME_BYTES_MAX):
            piece = payload[start : start + FRAME_BYTES_MAX]
            last = end and start + FRAME_BYTES_MAX >= len(payload)
            self._waiting.append(frame(DATA, END_STREAM if last else 0, stream, piece))
        self._send_data()

    @property
    def stuck(self) -> bool:
        """True if data waits because the flow-control window of the connection is too small."""
        return bool(self._waiting)

    def write(self, frames: bytes) -> None:
        """Send the bytes `frames` unchanged, without regard to windows."""
        self._writer.write(frames)

    def open_and_reset(self, count: int) -> None:
        """Open `count` HTTP/2 streams and reset each immediately."""
        code = struct.pack(">I", CANCEL)
        parts = []
        for _ in range(count):
            parts.append(frame(HEADERS, END_HEADERS, self._next, self._headers))
            parts.append(frame(RST_STREAM, 0, self._next, code))
            self._next += 2
        self._writer.write(b"".join(parts))

    def answer_pings(self) -> None:
        """Acknowledge the PING frames that were received and not yet acknowledged. A server learns
        from an acknowledgement how much the client had read by then.
        """
        self._writer.write(b"".join(frame(PING, ACK, 0, payload) for payload in self._pings))
        self._pings.clear()

    async def flushed(self) -> None:
        """Wait until most of the written data has left for the server. Return at once if less than
        asyncio's limit has not left.
        """
        await self._writer.drain()

    async def all_ended(self, streams: Sequence[int], timeout_s: float) -> None:
        """Wait until all of `streams`, or the connection, are over.

        Raise `TimeoutError` if that takes longer than `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            while not self.closed and not self.ended.issuperset(streams):
                self._changed.clear()
                await self._changed.wait()

    def lost(self, streams: Sequence[int]) -> int:
        """Return how many of `streams` have received no data, have not ended, or were reset before
        their end.
        """
        served = (self.answered.keys() & self.ended) - self.resets.keys()
        return sum(stream not in served for stream in streams)

    def _send_data(self) -> None:
        parts = []
        while self._waiting and len(self._waiting[0]) - 9 <= self._window_bytes:
            data = self._waiting.popleft()
            self._window_bytes -= len(data) - 9
            parts.append(data)
        if parts:
            self._writer.write(b"".join(parts))

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readexactly(9)
                length = int.from_bytes(head[:3], "big")
                payload = await self._reader.readexactly(length)
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        self.closed = True
        self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.answered[stream] = self.answered.get(stream, b"") + payload
        elif kind == RST_STREAM:
            # A server may reset a stream after its end, to say that it reads no more of it.
            if stream not in self.ended:
                self.resets[stream] = int.from_bytes(payload, "big")
            self.ended.add(stream)
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                    self.stream_window_bytes = int.from_bytes(payload[at + 2 : at + 6], "big")
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._pings.append(payload)
            if self.answers_pings:
                self.answer_pings()
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window_bytes += int.from_bytes(payload, "big")
            self._send_data()
            self._changed.set()
        elif kind == GOAWAY:
            self.goaways.append(int.from_bytes(payload[:4], "big"))
        if kind in {DATA, HEADERS} and flags & END_STREAM:
            self.ended.add(stream)
        if kind in {DATA, HEADERS, RST_STREAM}:
            self._changed.set()
