"""The lean transport, with a client that can do what no gRPC client does, and with a real one."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack, asynccontextmanager
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
from ngh2.enums import ErrorCode

from bench.raw_http2 import DATA, PREFACE, SETTINGS, WINDOW_UPDATE, frame
from bench.raw_http2 import HEADERS as HEADERS_FRAME
from epp.core.protocol.budget import BodyBudget
from epp.shell.gateway.calls import Code, Cut, Status
from epp.shell.gateway.http2 import (
    AWAY_AGE_S,
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
from epp.shell.gateway.turns import TURN_STEPS_MAX
from tests.envoy.rig import until
from tests.streams import TIMEOUT_S, channel_to
from tests.transports import carried
from tests.turns import counted_turns

CONTINUATION = 9
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
        self.cuts = []
        self.budget = BodyBudget(100_000_000)

    def open(self, peer, wire):
        call = Asked(self, peer, wire)
        self.calls.append(call)
        return call

    def connection_cut(self, reason):
        self.cuts.append(reason)

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
async def connected(port, settings=None, *, host=None, **configuration):
    """`host` is where it comes from, one of 127.0.0.0/8."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: Client(**configuration),
        "127.0.0.1",
        port,
        local_addr=None if host is None else (host, 0),
    )
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
    service.transport_ = service.transport(message_bytes_max=4_000_000)
    async with carried(service.transport_) as port:
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
    ],
    ids=["path", "method"],
)
async def test_what_nobody_serves_is_told_so(service, change, code):
    """And the connection goes on."""
    async with connected(service.port) as client:
        headers = [(name, change.get(name, value)) for name, value in HEADERS]
        assert (await client.status(client.open(headers=headers)))[0] == code
        assert await client.status(client.open(end=True)) == (0, b"")


async def test_who_speaks_no_grpc_is_told_so_in_http(service, monkeypatch):
    """With a body that takes what window there is, and for as long as a stream may linger."""
    monkeypatch.setattr("epp.shell.gateway.http2.LINGER_S", 0.1)
    headers = [field for field in HEADERS if field[0] != b"content-type"]
    async with connected(service.port, settings={4: 0}) as client:
        stalled = client.open(b"what is this", headers=headers)
        await until(lambda: told(client, h2.StreamReset), "the end of one that does not read")
        assert client.headers(stalled)[b":status"] == b"415"
        client.engine.update_settings({4: 65_535})
        client.flush()
        stream = client.open(end=True, headers=headers)
        await until(lambda: client.received(stream), "the body")
        assert b"application/grpc" in client.received(stream)
        assert b"grpc-status" not in client.headers(stream)
        assert await client.status(client.open(end=True)) == (0, b"")
    assert [call.ended.code for call in service.calls] == [Code.OK]


async def test_a_defect_costs_one_stream_and_nothing_of_it_is_told(service):
    """Neither to the client; the others go on."""
    async with connected(service.port) as client:
        other = client.open(framed(b"a"))
        with structlog.testing.capture_logs() as lines:
            assert await client.status(client.open(framed(b"fail"))) == (
                13, b"the picker failed",
            )  # fmt: skip
        assert [line["event"] for line in lines] == [
            "a gRPC stream failed because of a defect of the transport"
        ]
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


async def test_a_stream_that_is_reset_in_the_same_read_is_not_processed(service):
    """Its call receives no message, and its data is returned to the connection's window."""
    async with connected(service.port) as client:
        reset = client.engine.send_request(HEADERS)
        client.engine.send_data(reset, framed(b"reset"))
        sent = client.engine.data_to_send()
        client.engine.reset_stream(reset)
        other = client.engine.send_request(HEADERS)
        client.engine.send_data(other, framed(b"other"), end_stream=True)
        client.transport.write(sent + client.engine.data_to_send())
        assert (await client.status(other))[0] == 0
        (connection,) = service.transport_._connections
        assert connection.unacknowledged_bytes == 0
    assert service.messages == [b"other"]
    assert service.closed == [Code.CANCELLED, Code.OK]


async def test_a_defect_of_one_stream_does_not_stop_the_others_of_a_read(service):
    """The transport itself fails while it carries on with the first of three streams."""
    async with connected(service.port) as client:
        (connection,) = service.transport_._connections
        carry_on, failed = connection.carry_on, []

        def defective(stream):
            if not failed:
                failed.append(stream)
                raise ZeroDivisionError("a secret")
            carry_on(stream)

        connection.carry_on = defective
        streams = []
        for message in (b"first", b"second", b"third"):
            streams.append(client.engine.send_request(HEADERS))
            client.engine.send_data(streams[-1], framed(message), end_stream=True)
        client.flush()
        codes = [(await client.status(stream))[0] for stream in streams]
    assert codes == [Code.INTERNAL.value, 0, 0]
    assert service.messages == [b"second", b"third"]


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
    async with connected(service.port, peer_max_concurrent_streams=5_000) as client:
        await until(lambda: client.events, "the settings")
        streams = [client.engine.send_request(HEADERS) for _ in range(2_000)]
        for stream in streams:
            client.engine.send_data(stream, framed(b"x"), end_stream=True)
        async with counted_turns() as turns:
            client.flush()
            await until(lambda: len(service.closed) == 2_000, "all streams")
    assert turns.count > 2_000 / 64
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
            while not service2.cuts:
                client.engine.reset_stream(client.open())
                client.flush()
                await asyncio.sleep(0)
            await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
        assert service2.cuts == [Cut.RESETS]
        (line,) = lines
        assert line["event"].startswith("connection cut")
    assert service.cuts == []


@pytest.fixture
def brief(monkeypatch):
    """What takes seconds takes none."""
    monkeypatch.setattr("epp.shell.gateway.http2.NOTICE_S", 0.0)
    monkeypatch.setattr("epp.shell.gateway.http2.POLL_S", 0.01)
    monkeypatch.setattr("epp.shell.gateway.http2.TELL_S", 0.0)


def told(client, kind):
    return [event for event in client.events if isinstance(event, kind)]


async def answered(client):
    assert await client.status(client.open(end=True)) == (0, b"")


async def test_above_the_limit_of_an_address_its_idlest_connection_leaves(brief):
    """The newest is served, the others stay, and what is open on the idlest is served to its end."""
    service = Service()
    transport = service.transport(host_connections_max=2)
    async with (
        carried(transport) as port,
        connected(port) as idle,
        connected(port) as busy,
        connected(port, host="127.0.0.2") as elsewhere,
    ):
        open_ = busy.open(framed(b"a"))
        await until(lambda: busy.received(open_), "the answer")
        await answered(idle)
        with structlog.testing.capture_logs() as lines:
            async with connected(port) as newest:
                await answered(newest)
                await asyncio.wait_for(idle.closed.wait(), TIMEOUT_S)
                assert [event.error_code for event in told(idle, h2.GoAwayReceived)] == [0, 0]
                # Whoever is idle leaves before whoever is not, whatever was heard last.
                async with connected(port) as another:
                    await answered(another)
                    await asyncio.wait_for(newest.closed.wait(), TIMEOUT_S)
                await until(lambda: len(lines) == 2, "the second line")
        assert service.cuts == [Cut.EVICTED] * 2
        assert [(line["evicted"], line["refused"]) for line in lines] == [(1, 0), (1, 0)]
        busy.send(open_, b"", end=True)
        assert await busy.status(open_) == (0, b"")
        await answered(elsewhere)
        assert not busy.closed.is_set()
        assert transport.connected().connections == 2


async def test_above_the_limit_of_all_the_address_with_most_gives_up_a_place(brief):
    """However many idle ones there are from elsewhere, a new gateway is served."""
    service = Service()
    async with (
        carried(service.transport(connections_max=3)) as port,
        connected(port) as alone,
        connected(port, host="127.0.0.2") as first,
        connected(port, host="127.0.0.2") as second,
    ):
        for client in (alone, first, second):
            await answered(client)
        async with connected(port, host="127.0.0.3") as newest:
            await answered(newest)
            await asyncio.wait_for(first.closed.wait(), TIMEOUT_S)
            for client in (alone, second, newest):
                await answered(client)


async def test_the_newest_is_refused_where_nobody_can_leave(brief, monkeypatch):
    """An address whose connections all have streams has twice as many as it may, and no more."""
    service = Service()
    async with AsyncExitStack() as opened:
        port = await opened.enter_async_context(carried(service.transport(host_connections_max=2)))
        clients = []
        for _ in range(4):
            client = await opened.enter_async_context(connected(port))
            stream = client.open(framed(b"a"))
            await until(lambda c=client, s=stream: c.received(s), "the answer")
            clients.append((client, stream))
        async with connected(port) as fifth:
            await asyncio.wait_for(fifth.closed.wait(), TIMEOUT_S)
        assert service.cuts == [Cut.EVICTED] * 2 + [Cut.REFUSED]
        async with connected(port, host="127.0.0.2") as elsewhere:
            await answered(elsewhere)
        for client, stream in clients:
            client.send(stream, b"", end=True)
            assert await client.status(stream) == (0, b"")


async def test_lines_about_a_crowd_are_few():
    """However many connections are turned away."""
    service = Service()
    async with AsyncExitStack() as opened:
        port = await opened.enter_async_context(carried(service.transport(host_connections_max=1)))
        with structlog.testing.capture_logs() as lines:
            for _ in range(30):
                await opened.enter_async_context(connected(port))
            await until(lambda: lines and len(service.cuts) == 29, "a line, and all of them")
        (line,) = lines
        assert line["last_peer"].startswith("ipv4:127.0.0.1:")
        assert set(service.cuts) <= {Cut.EVICTED, Cut.REFUSED}


# Flow control is an invariant.

SMALL_WINDOW_BYTES = 200_000
"""Of a connection."""


async def test_refused_streams_do_not_use_up_their_connection():
    """What comes for them is more than the window, and an innocent one is served all the same."""
    service = Service()
    transport = service.transport(connection_window_bytes=SMALL_WINDOW_BYTES)
    async with carried(transport) as port, connected(port) as client:
        for _ in range(30):
            stream = client.open(framed(b"end 8"), bytes(20_000))
            assert (await client.status(stream))[0] == 8
            client.send(stream, bytes(20_000), end=True)
        innocent = client.open(framed(bytes(150_000)), end=True)
        assert await client.status(innocent) == (0, b"")
        await until(lambda: not transport.connected().unacknowledged_bytes, "the acknowledgement")
        assert not told(client, h2.GoAwayReceived)
    assert service.cuts == []


@pytest.mark.parametrize("end", ["reset by the client", "cut by a deadline", "failed"])
async def test_what_was_not_looked_at_when_a_stream_ended_is_acknowledged(service, end):
    """While answers to an earlier message of it wait for its window."""
    async with connected(service.port, settings={4: 65_535}, auto_window_update=False) as client:
        headers = [*HEADERS, (b"grpc-timeout", b"300m")] if end.startswith("cut") else HEADERS
        stream = client.open(framed(b"many 10000"), headers=headers)
        await until(lambda: len(client.received(stream)) == 65_535, "the first window")
        client.send(stream, framed(bytes(300_000)) + framed(b"fail"))
        (connection,) = service.transport_._connections
        if end.startswith("reset"):
            await until(lambda: connection.unacknowledged_bytes > 300_000, "the message")
            client.engine.reset_stream(stream)
            client.flush()
        elif end == "failed":
            await until(lambda: connection.unacknowledged_bytes > 300_000, "the message")
            service.calls[0].wire.end(Status(Code.OK))
            client.engine.reset_stream(stream)
            client.flush()
        await until(lambda: service.closed or end.startswith("cut"), "the end")
        if end.startswith("cut"):
            # Its trailers wait behind what was answered.
            await until(lambda: connection.unacknowledged_bytes > 300_000, "the message")
            client.engine.reset_stream(stream)
            client.flush()
        await until(lambda: not connection.unacknowledged_bytes, "the acknowledgement")
        await until(lambda: not service.budget.held_bytes, "what was held")
        assert (await client.status(client.open(end=True)))[0] == 0


async def test_who_goes_on_sending_on_a_stream_that_is_over_is_reset(service):
    """After a window of it, which is all that can be on its way when the status comes."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"end 3"))
        assert (await client.status(stream))[0] == 3
        client.send(stream, bytes(2 * STREAM_WINDOW_BYTES))
        await until(lambda: told(client, h2.StreamReset), "the reset")
        (reset,) = told(client, h2.StreamReset)
        assert reset.error_code == 0
        assert await client.status(client.open(framed(b"x"), end=True)) == (0, b"")


async def test_what_waits_for_its_window_counts_against_the_budget():
    """Thousands of streams that take no answers hold no more than all may."""
    service = Service()
    service.budget.bytes_max = 500_000
    async with (
        carried(service.transport()) as port,
        connected(port, settings={4: 65_535}, auto_window_update=False) as client,
    ):
        streams = []
        for _ in range(4):
            stream = client.open(framed(b"many 10000"))
            await until(lambda s=stream: len(client.received(s)) == 65_535, "the first window")
            client.send(stream, framed(bytes(200_000)))
            streams.append(stream)
        await until(lambda: len(service.calls) == 4, "the streams")
        await until(lambda: service.budget.held_bytes >= 400_000, "what is held")
        for stream in streams:
            client.engine.acknowledge_received_data(65_535, stream)
        client.engine.reset_stream(streams[0])
        client.flush()
        await until(lambda: service.budget.held_bytes <= 250_000, "what was given back")


async def test_a_connection_whose_window_is_not_given_back_is_retired_in_time(brief):
    """Whoever holds it up: the gateway connects anew, and what is open is served to its end."""
    service = Service()
    transport = service.transport(connection_window_bytes=300_000)
    async with (
        carried(transport) as port,
        connected(port, settings={4: 65_535}, auto_window_update=False) as client,
    ):
        open_ = client.open(framed(b"many 50"))
        await until(lambda: len(client.received(open_)) == 65_535, "the first window")
        with structlog.testing.capture_logs() as lines:
            client.send(open_, framed(bytes(240_000)), end=True)
            await until(lambda: told(client, h2.GoAwayReceived), "the GOAWAY")
        assert [line["event"].partition(":")[0] for line in lines] == ["connection retired"]
        assert service.cuts == [Cut.WINDOW]
        assert client.engine.remote_window_size > 0
        while b"grpc-status" not in client.headers(open_):
            unread = len(client.received(open_))
            client.engine.set_local_window_size(2**31 - 1, stream_id=open_)
            client.flush()
            await until(
                lambda n=unread: (
                    len(client.received(open_)) > n or b"grpc-status" in client.headers(open_)
                ),
                "more of it",
            )
        assert await client.status(open_) == (0, b"")
        await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)


async def test_a_connection_that_is_old_is_retired_and_its_streams_are_served(brief):
    """Each at an age of its own, so that not all gateways connect anew at once."""
    service = Service()
    transport = service.transport(connection_age_max_s=0.2)
    async with (
        carried(transport) as port,
        connected(port) as client,
        connected(port) as idle,
    ):
        stream = client.open(framed(b"a"))
        ages = {connection.age_max_s for connection in transport._connections}
        assert len(ages) == 2
        assert all(0.18 <= age <= 0.22 for age in ages)
        await asyncio.wait_for(idle.closed.wait(), TIMEOUT_S)
        await until(lambda: len(told(client, h2.GoAwayReceived)) == 2, "the second GOAWAY")
        assert told(client, h2.GoAwayReceived)[0].last_stream_id == 2**31 - 1
        client.send(stream, b"", end=True)
        assert await client.status(stream) == (0, b"")
        await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
    assert service.cuts == []


# Turns.


async def test_tiny_messages_in_full_frames_let_others_have_their_turns(service):
    """The loop is given back between a few messages, however many fit a frame."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"x"))
        await until(lambda: client.received(stream), "the first answer")
        async with counted_turns() as turns:
            client.send(stream, framed(b"") * 20_000, end=True)
            await until(lambda: len(service.messages) == 20_001, "all messages")
        assert await client.status(stream) == (0, b"")
        assert client.received(stream) == framed(b"x") + framed(b"") * 20_000 + framed(b"bye")
    assert turns.count > 20_000 / TURN_STEPS_MAX


async def test_tiny_frames_of_one_stream_let_others_have_their_turns(service):
    """Frames that follow each other are taken together, but not more than a turn allows."""
    message = framed(bytes(20_000))
    async with connected(service.port) as client:
        stream = client.open(framed(b"x"))
        await until(lambda: client.received(stream), "the first answer")
        async with counted_turns() as turns:
            client.transport.write(
                b"".join(frame(DATA, 0, stream, message[at : at + 1]) for at in range(len(message)))
            )
            await until(lambda: len(service.messages) == 2, "the message")
    assert service.messages[1] == bytes(20_000)
    assert turns.count > 20_000 / TURN_STEPS_MAX


async def test_bytes_that_wait_for_a_turn_stay_those_of_their_connection(service):
    """All connections are read into one buffer."""
    count = 30_000
    async with AsyncExitStack() as clients:
        streams = []
        for letter in (b"a", b"b", b"c"):
            client = await clients.enter_async_context(connected(service.port))
            streams.append((client, client.open(framed(letter) * count, end=True), letter))
        for client, stream, letter in streams:
            assert await client.status(stream) == (0, b"")
            assert client.received(stream) == framed(letter) * count + framed(b"bye")


async def test_a_stream_ends_while_messages_of_it_wait_for_a_turn(service):
    """By its wire, by its deadline, or with its connection."""
    for end in ("wire", "deadline", "connection"):
        service.messages.clear()
        async with connected(service.port) as client:
            headers = [*HEADERS, (b"grpc-timeout", b"1m")] if end == "deadline" else HEADERS
            stream = client.open(framed(b"") * 20_000, headers=headers)
            await until(lambda: service.messages or service.closed, "the first of them")
            if end == "wire":
                service.calls[-1].wire.end(Status(Code.OK))
            if end != "connection":
                await client.status(stream)
        await until(lambda: len(service.closed) == len(service.calls), "the end")
    assert service.budget.held_bytes == 0


async def test_only_streams_of_which_something_was_sent_are_looked_at(service, monkeypatch):
    """A thousand that wait for their windows cost the others nothing."""
    asked = 0

    class Counting(ngh2.Connection):
        def queued_body_size(self, stream_id=None):
            nonlocal asked
            asked += 1
            return super().queued_body_size(stream_id)

    monkeypatch.setattr("epp.shell.gateway.http2.Connection", Counting)
    async with connected(
        service.port, settings={4: 0}, peer_max_concurrent_streams=2_000
    ) as client:
        await until(lambda: client.events, "the settings")
        waiting = [client.open(framed(b"a")) for _ in range(1_000)]
        await until(lambda: len(service.messages) == 1_000, "all of them")
        asked = 0
        for number in range(20):
            client.engine.set_local_window_size(100, stream_id=waiting[number])
            client.flush()
            await until(lambda n=number: client.received(waiting[n]), "its answer")
        # Windows of the connection concern none of them either.
        for _ in range(20):
            client.engine.ping()
            client.transport.write(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")))
            client.flush()
        await until(lambda: len(told(client, h2.PingAcknowledged)) == 20, "the pings")
    assert asked <= 100


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


async def test_gateways_that_are_sent_away_are_served_to_their_end(brief, service, monkeypatch):
    """Who was connected, and who connects meanwhile because there is nobody else."""
    monkeypatch.setattr("epp.shell.gateway.http2.AWAY_AGE_S", 0.05)
    transport = service.transport()
    async with carried(transport, wait_s=5.0) as port, connected(port) as client:
        open_ = client.open(framed(b"a"))
        await until(lambda: client.received(open_), "the answer")
        transport.send_away(True)
        await until(lambda: told(client, h2.GoAwayReceived), "the GOAWAY")
        async with connected(port) as again:
            assert await again.status(again.open(end=True)) == (0, b"")
            await asyncio.wait_for(again.closed.wait(), TIMEOUT_S)
        client.send(open_, b"", end=True)
        assert await client.status(open_) == (0, b"")


async def test_gateways_are_welcome_again_once_they_are_not_sent_away(brief, service):
    """A standby that leads now keeps whom it has."""
    transport = service.transport()
    async with carried(transport) as port, connected(port) as client:
        assert await client.status(client.open(end=True)) == (0, b"")
        (connection,) = transport._connections
        transport.send_away(True)
        transport.send_away(False)
        connection.look(transport.clock() + 2 * AWAY_AGE_S)
        assert await client.status(client.open(end=True)) == (0, b"")
        assert not told(client, h2.GoAwayReceived)


async def test_a_connection_after_its_last_word_hinders_nobody_who_stops(service):
    """A connection that is terminated can be told nothing any more."""
    transport = service.transport()
    async with carried(transport) as port, connected(port) as client:
        client.open(framed(bytes(100))[:50])
        await until(lambda: service.calls, "the stream")
        (connection,) = transport._connections
        connection._engine.terminate_connection(ErrorCode.NO_ERROR)
        connection.retire(transport.clock())
        await transport.stop(None)
        assert not transport.has_gateway
    assert service.budget.held_bytes == 0


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


async def test_a_flood_of_continuations_ends_its_connection_and_nothing_else(service):
    """With the error that HTTP/2 has for it, counted, and no exception."""
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(about))
    flood = frame(HEADERS_FRAME, 0, 1, b"\x82") + frame(CONTINUATION, 0, 1, b"") * 1_000
    async with connected(service.port) as innocent:
        with structlog.testing.capture_logs() as lines:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + flood)
            answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
            writer.close()
        goaway = answer[-17:]
        assert goaway[3] == 7
        assert int.from_bytes(goaway[-4:], "big") == ErrorCode.ENHANCE_YOUR_CALM
        assert await innocent.status(innocent.open(end=True)) == (0, b"")
    assert service.cuts == [Cut.PROTOCOL]
    assert (problems, lines) == ([], [])


async def test_a_connection_that_fails_takes_its_streams_with_it(service):
    """Also one that does not take the goodbye is closed after a while."""
    async with connected(service.port) as client:
        stream = client.open(framed(b"a"))
        await until(lambda: client.received(stream), "the answer")
        client.transport.write(frame(CONTINUATION, 0, 0, b""))
        await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
        assert [event.error_code for event in told(client, h2.GoAwayReceived)] == [1]
        assert [event.last_stream_id for event in told(client, h2.GoAwayReceived)] == [stream]
    await until(lambda: service.closed == [Code.CANCELLED], "the end of the stream")
    service.calls[0].wire.push(b"too late")
    service.calls[0].wire.end(Status(Code.OK))


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
