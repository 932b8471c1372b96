"""A pod's sockets of KV events, heard by the picker's side of ZMTP and by libzmq."""

import asyncio
import contextlib

import msgspec
import pytest

from epp.core.kv_events.zmtp import (
    SocketType,
    ZmtpConnection,
    ask_replay,
    read_live,
    read_replayed,
)
from epp.shell.engines.kv_event_places import Place, places_of
from sim.pods import kv_event_sockets as module
from sim.pods.kv_event_sockets import publishing
from sim.pods.kv_events import KVEvents, TokenChain
from sim.pods.server import listen

TOPIC = "kv@127.0.0.1:8000@m"


def tell(events, number, blocks=1):
    """One frame."""
    chain = TokenChain(
        bytes([number % 256]) * 64 * blocks, block_size_tokens=16, adapter="", cache_salt=""
    )
    events.stored(chain, range(1, blocks + 1), 0, blocks)
    events.end_step(float(number))


class Client:
    """A connection of a picker."""

    def __init__(self, kind, **fields):
        self.connection = ZmtpConnection(kind, **fields)

    async def open(self, port):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        while not self.connection.ready:
            await self.hear()
        self.flush()
        return self

    def flush(self):
        self.writer.write(self.connection.to_send())

    async def hear(self):
        self.flush()
        data = await self.reader.read(65_536)
        if not data:
            raise ConnectionError
        return self.connection.feed(data)

    async def messages(self, wanted):
        found = []
        while len(found) < wanted:
            found += await self.hear()
        return found


@contextlib.asynccontextmanager
async def published(**fields):
    """Events, their source, and what opens clients."""
    events = KVEvents(16, **fields)
    live, replay = listen("127.0.0.1", 0, 2)
    clients = []

    async def client(kind, port, **members):
        one = Client(kind, **members)
        clients.append(one)
        return await one.open(port)

    async with publishing(events, live, replay, TOPIC) as source:
        try:
            yield events, source, client
        finally:
            for one in clients:
                one.writer.close()


async def first_heard(events, client):
    """The first frame that a subscriber hears: it is not known when its wish has arrived."""
    number = 0
    pending = asyncio.ensure_future(client.messages(1))
    while not pending.done():
        tell(events, number)
        number += 1
        await asyncio.sleep(0)
    return pending.result()


async def test_who_subscribes_hears_each_frame():
    async with published() as (events, source, client):
        subscriber = await client(SocketType.SUB, source.port)
        (first, *_) = await first_heard(events, subscriber)
        assert first[0] == TOPIC.encode()
        number, payload = read_live(first)
        assert (number, payload) in events.kept_from(0)


async def test_old_frames_are_told_again():
    """From the first that is asked for, with an end; as often as it is asked."""
    async with published(kept_max=50) as (events, source, client):
        for number in range(80):
            tell(events, number, blocks=100)
        dealer = await client(SocketType.DEALER, source.replay_port)
        for first, expected in ((70, range(70, 80)), (0, range(30, 80)), (80, range(0))):
            dealer.connection.send(ask_replay(first))
            found = [read_replayed(one) for one in await dealer.messages(len(expected) + 1)]
            assert found == [*events.kept_from(first), True]
            assert [one[0] for one in found[:-1]] == list(expected)


async def test_who_speaks_otherwise_is_let_go():
    """Wishes that are none, questions that are none, and another protocol."""
    async with published() as (_, source, client):
        subscriber = await client(SocketType.SUB, source.port)
        subscriber.connection.send((b"\x07",))
        with pytest.raises(ConnectionError):
            await subscriber.messages(1)
        dealer = await client(SocketType.DEALER, source.replay_port)
        dealer.connection.send((b"", b"short"))
        with pytest.raises(ConnectionError):
            await dealer.messages(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", source.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while await reader.read(1_024):
                pass
        writer.close()


async def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    async with published() as (_, source, client):
        await client(SocketType.SUB, source.port)
        with pytest.raises(ConnectionError):
            await client(SocketType.SUB, source.port)


class Pipe:
    """A transport to a subscriber, of which `unsent` bytes wait."""

    def __init__(self, topic=b""):
        self.unsent = 0
        self.peer = module._Subscriber(set())
        self.connection = ZmtpConnection(SocketType.SUB, topic=topic)
        self.found = []
        self.peer.connection_made(self)
        while not self.connection.ready:
            self.peer.data_received(self.connection.to_send())
        self.peer.data_received(self.connection.to_send())

    def get_write_buffer_size(self):
        return self.unsent

    def is_closing(self):
        return False

    def write(self, data):
        self.found += self.connection.feed(data)


def test_only_wanted_topics_are_sent():
    every, some, other = Pipe(), Pipe(b"kv@"), Pipe(b"another")
    message = (b"kv@a", bytes(8), b"x")
    for pipe in (every, some, other):
        pipe.peer.publish(message)
    assert (every.found, some.found, other.found) == ([message], [message], [])


def test_what_is_not_fetched_is_dropped():
    """For that subscriber alone, until it goes on."""
    slow, other = Pipe(), Pipe()
    slow.unsent = module.UNSENT_BYTES_MAX + 1
    for number in range(3):
        message = (b"kv@a", number.to_bytes(8, "big"), b"x")
        slow.peer.publish(message)
        other.peer.publish(message)
        slow.unsent = 0 if number else slow.unsent
    assert [read_live(one)[0] for one in slow.found] == [2]
    assert [read_live(one)[0] for one in other.found] == [0, 1, 2]


async def test_libzmq_hears_and_asks():
    """The binding of libzmq, which only this test needs."""
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    running = pytest.importorskip("zmq.asyncio")
    async with published() as (events, source, _):
        with running.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{source.replay_port}")
            tell(events, 1)
            await dealer.send_multipart(ask_replay(0))
            found = [read_replayed(tuple(await dealer.recv_multipart())) for _ in range(2)]
            assert found == [*events.kept_from(0), True]


def test_the_source_is_told_as_vllm_does():
    source = module.KVEventSource(port=5_557, replay_port=5_558, topic=TOPIC)
    page = msgspec.json.encode({"0": source.config()})
    found = places_of(page, "10.0.0.1", 0, 1, ranks_chosen=False)
    assert found == (Place("10.0.0.1", 5_557, 5_558),)
