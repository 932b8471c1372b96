"""The lean transport, with a client that can do what no gRPC client does, and with a real one."""

import asyncio
import gc
import weakref
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import grpc
import grpc.aio
import ngh2
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from ngh2 import events as h2

from epp.core.protocol.budget import BodyBudget
from epp.shell.gateway.calls import Code, Status
from epp.shell.gateway.http2 import (
    CONNECTION_STREAMS_MAX,
    QUEUED_BYTES_MAX,
    STREAM_WINDOW_BYTES,
    Http2Server,
    Http2Settings,
    _Messages,
    _percent_encoded,
    _RefusedError,
    _timeout_s,
)
from tests.envoy.rig import until
from tests.streams import TIMEOUT_S, channel_to
from tests.transports import carried

PATH = "/a.Service/Method"
HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", PATH.encode()),
    (b":authority", b"picker"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


def framed(message, flag=0):
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


class Asked:
    """A call that answers as it is told by the message, and remembers."""

    def __init__(self, service, peer, wire):
        self.service = service
        self.peer = peer
        self.wire = wire
        self.ended = None
        self.sent_times = 0
        self.made = 0

    def receive(self, message):
        self.service.messages.append(message)
        if message == b"fail":
            raise ZeroDivisionError("a secret")
        if message.startswith(b"many "):
            return self.many(int(message[5:]))
        if message.startswith(b"end "):
            self.ended = Status(Code(int(message[4:])), "as told: 100 % ü")
        return [message]

    def many(self, count):
        for _ in range(count):
            self.made += 1
            yield bytes(10_000)

    def half_close(self):
        self.ended = Status(Code.OK)
        return [b"bye"]

    def sent(self):
        self.sent_times += 1

    def closed(self, status):
        self.service.closed.append(status.code)


class Service:
    def __init__(self):
        self.calls = []
        self.messages = []
        self.closed = []
        self.cut = 0
        self.budget = BodyBudget(100_000_000)

    def open(self, peer, wire):
        call = Asked(self, peer, wire)
        self.calls.append(call)
        return call

    def connection_cut(self):
        self.cut += 1

    def transport(self, **settings):
        return Http2Server(
            {PATH: self.open},
            budget=self.budget,
            settings=Http2Settings(**settings),
            cut=self.connection_cut,
        )


class Client(asyncio.Protocol):
    """HTTP/2 by hand: what it sends and when it reads is its own affair."""

    def __init__(self, **configuration):
        self.engine = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(**configuration))
        self.events = []
        self.closed = asyncio.Event()
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.engine.receive_data(data)
        self.events += self.engine.events()
        self.flush()

    def connection_lost(self, exc):
        self.closed.set()

    def flush(self):
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(self.engine.data_to_send() or b"")

    def open(self, *data, end=False, headers=HEADERS):
        stream = self.engine.send_request(headers)
        if data:
            self.engine.send_data(stream, b"".join(data), end_stream=end)
        elif end:
            self.engine.end_stream(stream)
        self.flush()
        return stream

    def send(self, stream, data, *, end=False):
        self.engine.send_data(stream, data, end_stream=end)
        self.flush()

    def received(self, stream):
        """The bytes of messages that have come."""
        return b"".join(
            e.data for e in self.events if isinstance(e, h2.DataReceived) and e.stream_id == stream
        )

    def headers(self, stream):
        """Of everything that has come: the first headers, and the trailers."""
        found = {}
        for event in self.events:
            if (
                isinstance(event, h2.ResponseReceived | h2.TrailersReceived)
                and event.stream_id == stream
            ):
                found |= dict(event.headers)
        return found

    async def status(self, stream):
        """(code, message) that the stream ended with."""
        await until(lambda: b"grpc-status" in self.headers(stream), f"the end of stream {stream}")
        told = self.headers(stream)
        return int(told[b"grpc-status"]), told.get(b"grpc-message", b"")


@asynccontextmanager
async def connected(port, settings=None, **configuration):
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(**configuration), "127.0.0.1", port)
    client.engine.initiate_connection(settings or {})
    # One stream that is not read must not hold up the others by the window of all.
    client.engine.set_local_window_size(2**31 - 1)
    client.flush()
    try:
        yield client
    finally:
        client.transport.abort()
        await client.closed.wait()


@pytest.fixture
async def service():
    """With `port`, where it is served."""
    service = Service()
    async with carried(service.transport(message_bytes_max=4_000_000)) as port:
        service.port = port
        yield service


# Messages.


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 300), max_size=12))
def test_messages_are_the_same_wherever_their_bytes_are_cut(messages, cuts):
    """Also in the middle of a length, several in one piece, and one byte at a time."""
    whole = b"".join(framed(message) for message in messages)
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    cutter, found = _Messages(1_000), []
    for start, stop in pairwise(places):
        found += cutter.feed(whole[start:stop])
    assert found == messages
    assert cutter.held_bytes == 0


def test_a_message_that_is_compressed_or_too_long_is_refused():
    """Before any of it is kept."""
    with pytest.raises(_RefusedError) as refused:
        _Messages(10).feed(framed(b"x", flag=1))
    assert refused.value.status.code is Code.UNIMPLEMENTED
    with pytest.raises(_RefusedError) as refused:
        _Messages(10).feed(framed(bytes(11))[:5])
    assert refused.value.status.code is Code.RESOURCE_EXHAUSTED
    assert _Messages(10).feed(framed(bytes(10))) == [bytes(10)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9),
        (b"", None), (b"S", None), (b"1", None), (b"123456789S", None), (b"-1S", None), (b"1x", None),
    ],
)  # fmt: skip
def test_the_deadline_of_a_client_is_read(text, expected):
    """As the protocol spells it; what is none is no deadline."""
    assert _timeout_s(text) == pytest.approx(expected)


def test_what_is_told_in_trailers_is_printable():
    """And the percent sign itself is one of those that are spelt out."""
    assert _percent_encoded("a b%ü\n") == b"a b%25%C3%BC%0A"


# Streams.


async def test_answers_come_in_order_and_the_end_tells_the_status(service):
    """Headers once, messages with their lengths, trailers last."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"one"), framed(b"two"))
        await until(lambda: client.received(stream) == framed(b"one") + framed(b"two"), "both")
        client.send(stream, framed(b"end 5"))
        assert await client.status(stream) == (5, b"as told: 100 %25 %C3%BC")
        assert client.headers(stream)[b":status"] == b"200"
        assert client.headers(stream)[b"content-type"] == b"application/grpc"
        half = client.open(framed(b"x"), end=True)
        assert await client.status(half) == (0, b"")
        assert client.received(half) == framed(b"x") + framed(b"bye")
    assert service.closed == [Code.NOT_FOUND, Code.OK]
    assert service.calls[0].peer.startswith("ipv4:127.0.0.1:")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({b":path": b"/a.Service/Other"}, 12),
        ({b":method": b"GET"}, 12),
        ({b"content-type": b"application/json"}, 2),
    ],
    ids=["path", "method", "content type"],
)
async def test_what_nobody_serves_is_told_so(service, change, code):
    """And the connection goes on."""
    async with connected(service.port) as client:
        headers = [(name, change.get(name, value)) for name, value in HEADERS]
        assert (await client.status(client.open(headers=headers)))[0] == code
        assert await client.status(client.open(end=True)) == (0, b"")


async def test_a_defect_costs_one_stream_and_nothing_of_it_is_told(service):
    """Neither to the client; the others go on."""
    async with connected(service.port) as client:
        other = client.open(framed(b"a"))
        with structlog.testing.capture_logs() as lines:
            assert await client.status(client.open(framed(b"fail"))) == (
                13, b"the picker failed",
            )  # fmt: skip
        assert [line["event"] for line in lines] == ["a stream failed"]
        client.send(other, b"", end=True)
        assert await client.status(other) == (0, b"")


async def test_a_deadline_ends_its_stream(service):
    """With its own status."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"a"), headers=[*HEADERS, (b"grpc-timeout", b"50m")])
        assert (await client.status(stream))[0] == 4
    assert service.closed == [Code.DEADLINE_EXCEEDED]


async def test_what_is_pushed_comes_after_what_was_answered(service):
    """At any time, and so does an end."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"a"))
        await until(lambda: client.received(stream) == framed(b"a"), "the answer")
        (call,) = service.calls
        call.wire.push(b"b")
        call.wire.push(b"c")
        call.wire.end(Status(Code.OK))
        assert await client.status(stream) == (0, b"")
        assert client.received(stream) == framed(b"a") + framed(b"b") + framed(b"c")
        call.wire.push(b"too late")
    assert service.closed == [Code.OK]


async def test_a_stream_that_the_client_does_not_close_is_reset_after_a_while(service, monkeypatch):
    """Not at once, or the client would lose the status; what it goes on to send is not read."""
    monkeypatch.setattr("epp.shell.gateway.http2.LINGER_S", 0.1)
    async with connected(service.port) as client:
        stream = client.open(framed(b"end 3"))
        assert (await client.status(stream))[0] == 3
        assert service.closed == [Code.INVALID_ARGUMENT]
        client.send(stream, framed(b"more"))
        await until(lambda: any(isinstance(e, h2.StreamReset) for e in client.events), "the reset")
        assert service.messages == [b"end 3"]
        assert await client.status(client.open(end=True)) == (0, b"")


# What one peer cannot take.


async def test_answers_are_made_only_as_the_client_takes_them(service):
    """A slow reader of 100 MB is not waited for with 100 MB."""
    async with connected(service.port, settings={4: 65_535}, auto_window_update=False) as client:
        stream = client.open(framed(b"many 10000"))
        await until(lambda: len(client.received(stream)) == 65_535, "the first window")
        (call,) = service.calls
        assert call.made * 10_000 < 65_535 + QUEUED_BYTES_MAX + 20_000
        made = call.made
        client.engine.acknowledge_received_data(65_535, stream)
        client.flush()
        await until(lambda: call.made > made, "more of it")
        assert call.sent_times == 0
        # It may still be reset, and another one is served meanwhile.
        other = client.open(end=True)
        client.engine.acknowledge_received_data(0, stream)
        client.engine.reset_stream(stream)
        client.flush()
        await until(lambda: Code.CANCELLED in service.closed, "the end of it")
        assert (await client.status(other))[0] == 0


async def test_a_client_that_takes_no_answers_may_send_no_more_than_a_window(service):
    """Its messages are not read into memory while answers to an earlier one wait."""
    async with connected(service.port, settings={4: 65_535}, auto_window_update=False) as client:
        stream = client.open(framed(b"many 10000"))
        await until(lambda: len(client.received(stream)) == 65_535, "the first window")
        client.send(stream, framed(bytes(3_000_000)))
        await until(
            lambda: client.engine.stream_remote_window_size(stream) == 0, "the end of the window"
        )
        assert client.engine.queued_body_size(stream) > 3_000_000 - 2 * STREAM_WINDOW_BYTES
        assert service.messages == [b"many 10000"]


async def test_bytes_of_messages_that_are_not_whole_count_against_the_budget(service):
    """What does not fit ends its stream; all is given back, however streams end."""
    service.budget.bytes_max = 1_000_000
    async with connected(service.port) as client:
        first = client.open(framed(bytes(3_000_000))[:700_000])
        await until(lambda: service.budget.held_bytes == 700_000, "the piece")
        second = client.open(framed(bytes(3_000_000))[:500_000])
        assert (await client.status(second))[0] == 8
        assert service.budget.held_bytes == 700_000
        client.engine.reset_stream(first)
        client.flush()
        await until(lambda: service.budget.held_bytes == 0, "the reset")
        client.open(framed(bytes(3_000_000))[:400_000])
        await until(lambda: service.budget.held_bytes == 400_000, "another piece")
    await until(lambda: service.budget.held_bytes == 0, "the end of the connection")


async def test_a_whole_message_is_held_by_its_call_alone(service):
    """The budget of the transport is for what is not whole."""
    async with connected(service.port) as client:
        stream = client.open(framed(bytes(2_000_000)), end=True)
        assert (await client.status(stream))[0] == 0
    assert service.budget.held_bytes == 0
    assert [len(message) for message in service.messages] == [2_000_000]


async def test_thousands_of_streams_in_one_read_let_others_have_their_turns(service):
    """The loop is given back between a few events of one connection."""
    turns = 0

    async def ticking():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with connected(service.port, peer_max_concurrent_streams=5_000) as client:
        await until(lambda: client.events, "the settings")
        streams = [client.engine.send_request(HEADERS) for _ in range(2_000)]
        for stream in streams:
            client.engine.send_data(stream, framed(b"x"), end_stream=True)
        seen = asyncio.create_task(ticking())
        client.flush()
        await until(lambda: len(service.closed) == 2_000, "all streams")
        seen.cancel()
    assert turns > 2_000 / 64
    assert set(service.closed) == {Code.OK}


async def test_more_streams_than_a_connection_may_have_are_refused_by_the_protocol(service):
    """And the connection goes on."""
    async with connected(service.port, peer_max_concurrent_streams=10_000) as client:
        await until(lambda: client.events, "the settings")
        assert client.engine.remote_settings[3] == CONNECTION_STREAMS_MAX


async def test_a_connection_that_only_resets_is_closed(service):
    """As many as it may open at once are allowed, and what is answered gives all of it back."""
    service2 = Service()
    async with carried(service2.transport(resets_max=20)) as port, connected(port) as client:
        for _ in range(3):
            for _ in range(20):
                client.engine.reset_stream(client.open())
            client.flush()
            assert await client.status(client.open(end=True)) == (0, b"")
        with structlog.testing.capture_logs() as lines:
            while not service2.cut:
                client.engine.reset_stream(client.open())
                client.flush()
                await asyncio.sleep(0)
            await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
        assert service2.cut == 1
        (line,) = lines
        assert line["event"].startswith("connection cut")
    assert service.cut == 0


async def test_only_so_many_connections_are_taken():
    """The one above the limit is closed, the others go on, and a place that is free is given."""
    service = Service()
    async with carried(service.transport(connections_max=1)) as port, connected(port) as first:
        assert await first.status(first.open(end=True)) == (0, b"")
        async with connected(port) as second:
            await asyncio.wait_for(second.closed.wait(), TIMEOUT_S)
        assert await first.status(first.open(end=True)) == (0, b"")


async def test_a_silent_connection_is_asked_and_then_closed():
    """One that answers pings lives."""
    service = Service()
    transport = service.transport(ping_after_s=0.05, ping_wait_s=0.3)
    async with carried(transport) as port, connected(port) as alive:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        silent = asyncio.StreamReader()
        del silent
        await until(lambda: len(transport._connections) == 2, "both connections")
        await until(lambda: len(transport._connections) == 1, "the end of the silent one")
        assert await alive.status(alive.open(end=True)) == (0, b"")
        writer.close()


# The end.


async def test_streams_that_come_after_the_announcement_are_served(service):
    """Until the connection is told the last one; then it closes when they are over."""
    transport = service.transport()
    async with carried(transport, wait_s=5.0) as port, connected(port) as client:
        open_ = client.open(framed(b"a"))
        await until(lambda: client.received(open_), "the answer")
        transport.announce_end()
        await until(
            lambda: any(isinstance(e, h2.GoAwayReceived) for e in client.events), "the GOAWAY"
        )
        client.send(open_, b"", end=True)
        assert await client.status(open_) == (0, b"")


async def test_stopping_at_once_ends_every_stream(service):
    """Each call is told, and nothing is held."""
    transport = service.transport()
    async with carried(transport) as port, connected(port) as client:
        for _ in range(3):
            client.open(framed(bytes(100))[:50])
        await until(lambda: len(service.calls) == 3, "the streams")
        await transport.stop(None)
        assert service.closed == [Code.CANCELLED] * 3
        assert service.budget.held_bytes == 0


# Nonsense.


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" * 40, b"PRI * HTTP/2.0"],
    ids=["nothing", "HTTP/1.1", "TLS", "half a preface"],
)
async def test_what_is_no_http2_is_closed_without_a_word_in_the_log(service, nonsense):
    """Anybody can reach a port."""
    with structlog.testing.capture_logs() as lines:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(nonsense)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()
    assert lines == []
    assert service.calls == []


async def test_mutated_bytes_harm_nobody_else(service):
    """A hundred connections whose bytes are changed at random; one beside them is served."""
    random = Random(5)
    template = ngh2.Connection(ngh2.Role.CLIENT)
    template.initiate_connection()
    for _ in range(3):
        stream = template.send_request(HEADERS)
        template.send_data(stream, framed(b"hello"), end_stream=True)
    whole = template.data_to_send()
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(about))
    async with connected(service.port) as innocent:
        with structlog.testing.capture_logs() as lines:
            for _ in range(100):
                mutated = bytearray(whole)
                for _ in range(random.randint(1, 6)):
                    mutated[random.randrange(24, len(mutated))] = random.randrange(256)
                cut = random.randrange(24, len(mutated))
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
                writer.write(bytes(mutated[:cut]))
                await asyncio.sleep(0)
                writer.write(bytes(mutated[cut:]))
                writer.write_eof()
                await asyncio.wait_for(reader.read(), TIMEOUT_S)
                writer.close()
        assert lines == []
        assert problems == []
        assert await innocent.status(innocent.open(end=True)) == (0, b"")
    await until(lambda: service.budget.held_bytes == 0, "nothing to be held")
    assert len(service.closed) == len(service.calls)


# A real client.


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_384, 65_535, 1_000_000, 3_999_999])
async def test_a_grpc_client_gets_every_byte_back(service, size):
    """Of messages that fit a frame, a window, or neither."""
    message = Random(size).randbytes(size)
    async with channel_to(f"127.0.0.1:{service.port}") as channel:
        call = channel.stream_stream(PATH)(timeout=TIMEOUT_S)
        for _ in range(3):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() == b"bye"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_that_is_over_needs_no_garbage_collector(service):
    """Whether it was served, ended or reset: its call goes, and the request with it."""
    gc.collect()
    gc.disable()
    try:
        async with connected(service.port) as client:
            served = client.open(framed(b"one"), end=True)
            ended = client.open(framed(b"end 5"))
            reset = client.open(framed(b"one"))
            await until(lambda: client.received(reset), "an answer")
            client.engine.reset_stream(reset)
            client.flush()
            await client.status(served)
            await client.status(ended)
            client.send(ended, b"", end=True)
            await until(lambda: len(service.closed) == 3, "the end of all three")
            calls = [weakref.ref(call) for call in service.calls]
            service.calls.clear()
            # What follows on the connection takes the place of what was last.
            assert (await client.status(client.open(framed(b"one"), end=True)))[0] == 0
            assert [call() for call in calls] == [None] * 3
    finally:
        gc.enable()
