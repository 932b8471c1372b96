"""A pod that serves `GET /kv_event_sources`, publishes KV events and tells old ones again, over ZMTP."""

import asyncio
import contextlib
import json

from tests.core.kv_events.publisher import FakeEngine, FakePublisher

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
END = b"\xff" * 8


def frames(*parts):
    """One message."""
    wire = b""
    for number, part in enumerate(parts):
        more = number < len(parts) - 1
        if len(part) > 255:
            wire += bytes([more | 2]) + len(part).to_bytes(8, "big") + part
        else:
            wire += bytes([more, len(part)]) + part
    return wire


async def next_frame(reader):
    """(flags, body)."""
    flags = (await reader.readexactly(1))[0]
    size = int.from_bytes(await reader.readexactly(8 if flags & 2 else 1), "big")
    return flags, await reader.readexactly(size)


async def greet(reader, writer, kind):
    await reader.readexactly(64)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    writer.write(GREETING + bytes([4, len(ready)]) + ready)
    flags, body = await next_frame(reader)
    assert flags & 4
    assert body.startswith(b"\x05READY")


class KVEventPod:
    """`sources`: what it answers when it is asked where it publishes; None: as it is; b"": 404."""

    def __init__(self, *, blocks=40, block_tokens=16, sources=None, replays=True):
        self.host = "127.0.0.1"
        self.engine = FakeEngine(blocks, block_tokens)
        self.publisher = FakePublisher()
        self.sources = sources
        self.replays = replays
        self.away = False
        """It closes what is asked where it publishes, without an answer."""
        self.subscribers = set()
        self.topics = {}
        self.asked = 0
        self.replayed = 0
        self.port = self.live_port = self.replay_port = 0

    async def __aenter__(self):
        self.stack = contextlib.AsyncExitStack()
        for name, serve in (
            ("port", self.http),
            ("live_port", self.live),
            ("replay_port", self.again),
        ):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            self.stack.callback(server.close)
            setattr(self, name, server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_):
        writers = [*self.topics]
        self.cut()
        for writer in writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await self.stack.aclose()

    async def http(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"GET /kv_event_sources ")
            self.asked += 1
            if self.away:
                writer.close()
                return
            body = self.page() if self.sources is None else self.sources
            status = b"200 OK" if body else b"404 Not Found"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            await writer.drain()
        writer.close()

    def page(self, *others):
        """Return the page with the addresses at which it publishes as rank 0, and `others` as later ranks."""
        told = {}
        for rank, pod in enumerate((self, *others)):
            replay = f"tcp://*:{pod.replay_port}" if pod.replays else None
            told[str(rank)] = {"endpoint": f"tcp://*:{pod.live_port}", "replay_endpoint": replay}
        return json.dumps(told).encode()

    async def live(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await greet(reader, writer, b"PUB")
            flags, topic = await next_frame(reader)
            assert (flags, topic[:1]) == (0, b"\x01")
            self.subscribers.add(writer)
            await reader.read()
        self.subscribers.discard(writer)
        writer.close()

    async def again(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await greet(reader, writer, b"ROUTER")
            while True:
                assert (await next_frame(reader))[1] == b""
                _, first = await next_frame(reader)
                self.replayed += 1
                for number, payload in self.publisher.replay(int.from_bytes(first, "big")):
                    writer.write(frames(b"", b"topic", number.to_bytes(8, "big"), payload))
                writer.write(frames(b"", b"", END, b""))
                await writer.drain()
        writer.close()

    def serve(self, tokens, *, lost=False):
        """Cache a prompt and tell it, if it is not `lost` on the way; how much was cached."""
        cached = self.engine.serve(tokens)
        if self.engine.events:
            number, payload = self.publisher.publish(self.engine.step())
            if not lost:
                for writer in self.subscribers:
                    topic = self.topics.get(writer, b"topic")
                    writer.write(frames(topic, number.to_bytes(8, "big"), payload))
        return cached

    def send(self, *parts):
        for writer in self.subscribers:
            writer.write(frames(*parts))

    async def connect(self, port, *, host="127.0.0.1", topic=b"", kind=b"PUB"):
        """Publish to the picker at `port`, from the address `host`; who reads what it says."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        writer.write(GREETING + bytes([4, len(ready)]) + ready)
        self.topics[writer] = topic
        self.subscribers.add(writer)
        return reader

    def cut(self):
        """Close what is connected."""
        for writer in {*self.subscribers, *self.topics}:
            writer.close()
        self.subscribers.clear()
