"""A server that gives a picker's answers through ngh2 and asyncio: `python -m
bench.servers.on_ngh2`.

It prints its port. The server has none of the limits that a server needs, and trusts its one
client.
"""

import asyncio
import struct
import sys
from typing import cast

from ngh2 import (
    Configuration,
    Connection,
    DataReceived,
    RequestReceived,
    Role,
    Setting,
    StreamClosed,
)

from bench.servers.answers import Conversation
from epp.shell.process.event_loop import loop_factory

WINDOW_BYTES = 2**31 - 1
_RESPONSE = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_TRAILERS = ((b"grpc-status", b"0"),)
_PREFIX = struct.Struct(">BI")


class _Stream:
    __slots__ = ("conversation", "received")

    def __init__(self) -> None:
        self.conversation = Conversation()
        self.received = bytearray()


class _Protocol(asyncio.Protocol):
    """One HTTP/2 connection of the server: it takes all received data, then sends all answers."""

    def __init__(self) -> None:
        self._http2 = Connection(Role.SERVER, Configuration())
        self._streams: dict[int, _Stream] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http2.initiate_connection(
            {Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES, Setting.MAX_CONCURRENT_STREAMS: 20_000}
        )
        self._http2.set_local_window_size(WINDOW_BYTES)

    def data_received(self, data: bytes) -> None:
        http2, streams = self._http2, self._streams
        http2.receive_data(data)
        for event in http2.events():
            if isinstance(event, DataReceived):
                stream = streams.get(event.stream_id)
                if stream is not None:
                    self._take(event.stream_id, stream, event.data, last=event.end_stream)
            elif isinstance(event, RequestReceived):
                streams[event.stream_id] = _Stream()
                http2.send_response(event.stream_id, _RESPONSE)
            elif isinstance(event, StreamClosed):
                streams.pop(event.stream_id, None)
        self._transport.write(http2.data_to_send())

    def _take(self, number: int, stream: _Stream, data: bytes, *, last: bool) -> None:
        received = stream.received
        received += data
        start, answers = 0, []
        while len(received) >= start + 5:
            end = start + 5 + _PREFIX.unpack_from(received, start)[1]
            if len(received) < end:
                break
            answers += stream.conversation.answers(bytes(received[start + 5 : end]))
            start = end
        if start:
            del received[:start]
        if answers:
            parts = [part for each in answers for part in (_PREFIX.pack(0, len(each)), each)]
            self._http2.send_data(number, b"".join(parts))
        if last:
            self._http2.send_trailers(number, _TRAILERS)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(
        _Protocol, "127.0.0.1", 0, backlog=1_024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        sys.exit(runner.run(_serve()))
