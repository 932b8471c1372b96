"""Cost of a frame between replicas: sockets that are read once every 20 ms, or asyncio's streams.

Seven senders and one receiver run in this process, and each sender sends one frame every 20 ms. The
figure is the CPU of the whole process minus that of the same run with nothing to send. With
asyncio, callbacks read a stream with a length before each frame.
"""

import asyncio
import datetime as dt
import selectors
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

from epp.core.peers.exchange import OUTGOING_INTERVAL_S
from epp.shell.gateway.tls import self_signed
from epp.shell.peers.carrier import Kind
from epp.shell.peers.connection import Connection, Stage
from epp.shell.peers.secret import Identity, identity_of, stranger

SENDERS = 7
LASTS_S = 4.0
SIZES_BYTES = (1_000, 10_000)
_LENGTH_BYTES = 4


class Line:
    """A transport between replicas: `send` sends a frame on every connection, `receive` returns the
    number of frames received since its last call.
    """

    def __init__(self, send: Callable[[bytes], None], receive: Callable[[], int]) -> None:
        self.send = send
        self.receive = receive


@asynccontextmanager
async def _polled(*, encrypted: bool) -> AsyncIterator[Line]:
    """Open connections as `epp/shell/peers/mesh` does, without its housekeeping, and yield them as
    a transport.
    """

    def identity() -> Identity:
        return identity_of(b"x" * 32) if encrypted else stranger()

    bound = socket.create_server(("127.0.0.1", 0))
    serving, pairs = identity(), []
    for _ in range(SENDERS):
        plain = socket.create_connection(bound.getsockname())
        accepted, _ = bound.accept()
        plain.setblocking(False)
        accepted.setblocking(False)
        pairs.append(
            (
                Connection(plain, identity(), serving=False, now=0.0),
                Connection(accepted, serving, serving=True, now=0.0),
            )
        )
    while any(each.stage is not Stage.OPEN for pair in pairs for each in pair):
        for pair in pairs:
            for each in pair:
                each.advance()
    selector = selectors.DefaultSelector()
    for _, receiver in pairs:
        selector.register(receiver, selectors.EVENT_READ, receiver)

    def send(frame: bytes) -> None:
        for sender, _ in pairs:
            sender.send(Kind.FRAME, frame)

    def receive() -> int:
        came = 0
        for key, _ in selector.select(0):
            while key.data.read() is not None:
                came += 1
        return came

    try:
        yield Line(send, receive)
    finally:
        selector.close()
        for each in (each for pair in pairs for each in pair):
            each.close()
        bound.close()


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
    """Return the CPU time in microseconds that one frame of `size_bytes` costs its sender and its
    receiver together.
    """
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


async def _measured(*, polled: bool, encrypted: bool, size_bytes: int) -> float:
    async with (_polled if polled else _streams)(encrypted=encrypted) as line:
        return await _cost_us(line, size_bytes)


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the cost of a frame between replicas."""
    for size_bytes, encrypted in product(SIZES_BYTES, (False, True)):
        polled, streams = (
            asyncio.run(_measured(polled=kind, encrypted=encrypted, size_bytes=size_bytes))
            for kind in (True, False)
        )
        yield (
            f"a frame of {size_bytes:,} bytes, {'encrypted' if encrypted else 'plain'}",
            f"read once a beat {polled:.0f} µs, streams {streams:.0f} µs: {streams / polled:.2f} of it",
        )
