"""What a frame between replicas costs by what carries it: ZeroMQ, or asyncio's streams.

Seven senders and one receiver in this process, a frame each every 20 ms; CPU of the whole process,
ZeroMQ's thread included, less what the same beat costs with nothing to send. ZeroMQ is read once a
beat, as `epp/shell/peers/mesh` does; a stream by its callbacks, with a length before each frame.
"""

import asyncio
import datetime as dt
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import zmq

from epp.core.peers.exchange import OUTGOING_INTERVAL_S
from epp.shell.gateway.tls import self_signed
from epp.shell.peers.secret import keys_of

SENDERS = 7
LASTS_S = 4.0
SIZES_BYTES = (1_000, 10_000)
_LENGTH_BYTES = 4


class Line:
    """`send` gives a frame to every connection, `receive` counts those that came."""

    def __init__(self, send: Callable[[bytes], None], receive: Callable[[], int]) -> None:
        self.send = send
        self.receive = receive


@asynccontextmanager
async def _zeromq(*, encrypted: bool) -> AsyncIterator[Line]:
    keys = keys_of(b"x" * 32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def opened(kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = 0
        if encrypted:
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        return socket

    bound = opened(zmq.ROUTER)
    if encrypted:
        bound.curve_server = True
    port = bound.bind_to_random_port("tcp://127.0.0.1")
    sockets = [opened(zmq.DEALER) for _ in range(SENDERS)]
    for socket in sockets:
        if encrypted:
            socket.curve_serverkey = keys.public
        socket.connect(f"tcp://127.0.0.1:{port}")

    def send(frame: bytes) -> None:
        for socket in sockets:
            socket.send(frame, zmq.NOBLOCK)

    def receive() -> int:
        came = 0
        while int(bound.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            bound.recv_multipart()
            came += 1
        return came

    try:
        yield Line(send, receive)
    finally:
        context.destroy()


class _Reader(asyncio.Protocol):
    def __init__(self, came: Callable[[bytes], None]) -> None:
        self._came = came
        self._waiting = bytearray()

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        waiting += data
        at = 0
        while len(waiting) >= at + _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            end = start + int.from_bytes(waiting[at:start], "little")
            if len(waiting) < end:
                break
            self._came(bytes(waiting[start:end]))
            at = end
        del waiting[:at]


def _serving() -> ssl.SSLContext:
    pair = self_signed("localhost", dt.datetime.now(dt.UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as name:
        certificate, key = Path(name, "tls.crt"), Path(name, "tls.key")
        certificate.write_bytes(pair.certificate_chain)
        key.write_bytes(pair.private_key)
        context.load_cert_chain(certificate, key)
    return context


@asynccontextmanager
async def _streams(*, encrypted: bool) -> AsyncIterator[Line]:
    frames: list[bytes] = []
    serving = asking = None
    if encrypted:
        serving = _serving()
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Reader(frames.append), "127.0.0.1", 0, ssl=serving)
    port = server.sockets[0].getsockname()[1]
    transports = [
        (await loop.create_connection(asyncio.Protocol, "127.0.0.1", port, ssl=asking))[0]
        for _ in range(SENDERS)
    ]

    def send(frame: bytes) -> None:
        message = len(frame).to_bytes(_LENGTH_BYTES, "little") + frame
        for transport in transports:
            transport.write(message)

    def receive() -> int:
        came = len(frames)
        frames.clear()
        return came

    try:
        yield Line(send, receive)
    finally:
        for transport in transports:
            transport.abort()
        server.close()


async def _cost_us(line: Line, size_bytes: int) -> float:
    """CPU a frame, at both ends together."""
    frame = bytes(size_bytes)
    spent_s: list[float] = []
    came = 0
    for sends in (False, True):
        # Handshakes, and what the other one left.
        await asyncio.sleep(0.5)
        line.receive()
        began_s = time.process_time()
        for _ in range(round(LASTS_S / OUTGOING_INTERVAL_S)):
            if sends:
                line.send(frame)
            await asyncio.sleep(OUTGOING_INTERVAL_S)
            came += line.receive()
        spent_s.append(time.process_time() - began_s)
    idle_s, busy_s = spent_s
    return 1e6 * (busy_s - idle_s) / came


async def _measured(*, zeromq: bool, encrypted: bool, size_bytes: int) -> float:
    async with (_zeromq if zeromq else _streams)(encrypted=encrypted) as line:
        return await _cost_us(line, size_bytes)


def run() -> Iterator[tuple[str, str]]:
    """What, how much."""
    for size_bytes, encrypted in product(SIZES_BYTES, (False, True)):
        zeromq, streams = (
            asyncio.run(_measured(zeromq=kind, encrypted=encrypted, size_bytes=size_bytes))
            for kind in (True, False)
        )
        yield (
            f"a frame of {size_bytes:,} bytes, {'encrypted' if encrypted else 'plain'}",
            f"ZeroMQ {zeromq:.0f} µs, streams {streams:.0f} µs: {streams / zeromq:.2f} of it",
        )
