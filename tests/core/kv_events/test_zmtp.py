"""A subscriber and a dealer against peers of libzmq, and against bytes that none would send."""

import socket
from contextlib import suppress

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.kv_events import zmtp
from epp.core.kv_events.zmtp import (
    END,
    REPLAY_ENDED,
    SocketType,
    ZmtpConnection,
    ZmtpError,
    ask_replay,
    live_message,
    read_asked,
    read_live,
    read_replayed,
    read_subscription,
    replayed_message,
)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


def number(value):
    return value.to_bytes(8, "big")


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


class Client:
    """A connection over a socket of the system."""

    def __init__(self, port, connection):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.connection = connection

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def hear(self, wanted):
        """Messages until there are `wanted`."""
        found = []
        self.socket.sendall(self.connection.to_send())
        while len(found) < wanted:
            data = self.socket.recv(65_536)
            assert data, "the peer closed"
            found += self.connection.feed(data)
            self.socket.sendall(self.connection.to_send())
        return found

    def get_ready(self):
        while not self.connection.ready:
            self.hear_some()
        self.socket.sendall(self.connection.to_send())

    def hear_some(self):
        self.socket.sendall(self.connection.to_send())
        self.connection.feed(self.socket.recv(65_536))


def test_a_publisher_of_libzmq_is_heard(context):
    """Short frames and long ones, whole topics and some."""
    with context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with Client(port, ZmtpConnection(SocketType.SUB, topic=b"kv@")) as client:
            client.get_ready()
            assert publisher.poll(10_000)
            assert publisher.recv() == b"\x01kv@"
            publisher.send_multipart([b"other", number(0), b"x"])
            publisher.send_multipart([b"kv@a", number(1), b"x" * 10])
            publisher.send_multipart([b"kv@a", number(2), b"y" * 300_000])
            found = client.hear(2)
    assert [read_live(message) for message in found] == [(1, b"x" * 10), (2, b"y" * 300_000)]


def test_a_router_of_libzmq_answers(context):
    """With topic and without, and with an end marker."""
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Client(port, ZmtpConnection(SocketType.DEALER)) as client:
            client.get_ready()
            client.connection.send(ask_replay(7))
            client.socket.sendall(client.connection.to_send())
            assert router.poll(10_000)
            who, *asked = router.recv_multipart()
            assert asked == [b"", number(7)]
            router.send_multipart([who, b"", b"topic", number(7), b"seven"])
            router.send_multipart([who, b"", number(8), b"eight"])
            router.send_multipart([who, b"", b"", END, b""])
            found = [read_replayed(message) for message in client.hear(3)]
    assert found == [(7, b"seven"), (8, b"eight"), True]


def test_a_publisher_that_pings_is_answered(context):
    """Or it would close."""
    with context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.HEARTBEAT_IVL, 20)
        publisher.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with Client(port, ZmtpConnection(SocketType.SUB)) as client:
            client.get_ready()
            assert publisher.poll(10_000)
            publisher.recv()
            publisher.send_multipart([b"", number(0), b"x"])
            assert client.hear(1) == [(b"", number(0), b"x")]


def fed(*pieces, kind=SocketType.SUB):
    connection = ZmtpConnection(kind)
    found = []
    for piece in pieces:
        found += connection.feed(piece)
    return connection, found


def test_bytes_may_come_one_by_one():
    """Frames are put together."""
    wire = GREETING + READY + b"\x01\x01t" + b"\x01\x08" + number(3) + b"\x00\x02ab"
    _, found = fed(*(wire[at : at + 1] for at in range(len(wire))))
    assert found == [(b"t", number(3), b"ab")]


def test_a_ping_is_repeated():
    connection, _ = fed(GREETING + READY)
    connection.to_send()
    connection.feed(b"\x04\x0a\x04PING\x00\x64abc")
    assert connection.to_send() == b"\x04\x08\x04PONGabc"


def talked(one, other):
    """Both say what they have to say, until neither has more; what the second one hears."""
    found = []
    while (said := one.to_send()) or (answer := other.to_send()):
        found += other.feed(said)
        one.feed(other.to_send() if said else answer)
    return found


def test_a_publisher_hears_what_is_wanted():
    """And what is not any more."""
    subscriber, publisher = (
        ZmtpConnection(SocketType.SUB, topic=b"kv@"),
        ZmtpConnection(SocketType.PUB),
    )
    (wish,) = talked(subscriber, publisher)
    assert publisher.ready
    assert read_subscription(wish) == (True, b"kv@")
    assert read_subscription((b"\0kv@",)) == (False, b"kv@")
    for other in ((), (b"",), (b"\2kv@",), (b"\1", b"")):
        assert read_subscription(other) is None
    publisher.send(live_message(b"kv@a", 7, b"x"))
    (message,) = subscriber.feed(publisher.to_send())
    assert read_live(message) == (7, b"x")


def test_a_router_hears_what_is_asked_and_answers():
    dealer, router = ZmtpConnection(SocketType.DEALER), ZmtpConnection(SocketType.ROUTER)
    assert talked(dealer, router) == []
    dealer.send(ask_replay(5))
    (asked,) = router.feed(dealer.to_send())
    assert read_asked(asked) == 5
    for other in ((), (b"",), (b"x", number(1)), (b"", b"short"), (b"", number(1), b"")):
        assert read_asked(other) is None
    router.send(replayed_message(b"t", 5, b"five"))
    router.send(REPLAY_ENDED)
    assert [read_replayed(one) for one in dealer.feed(router.to_send())] == [(5, b"five"), True]


def test_two_of_one_side_do_not_talk():
    with pytest.raises(ZmtpError, match="another type"):
        talked(ZmtpConnection(SocketType.PUB), ZmtpConnection(SocketType.ROUTER))


HOSTILE = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),
    "a mechanism": GREETING.replace(b"NULL\0", b"CURVE"),
    "unknown flags": GREETING + b"\xf0\x00",
    "a frame of exabytes": GREETING + READY + b"\x02" + b"\xff" * 8,
    "a long command": GREETING + b"\x06" + (1 << 20).to_bytes(8, "big"),
    "a message before it is ready": GREETING + b"\x00\x01x",
    "ready twice": GREETING + READY + READY,
    "another type": GREETING + READY.replace(b"PUB", b"REP"),
    "an error": GREETING + b"\x04\x07\x05ERROR\x00",
    "properties cut off": GREETING + b"\x04\x0a\x05READY\x09abc",
    "many parts": GREETING + READY + b"\x01\x00" * 100,
}


@pytest.mark.parametrize("wire", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_understood_ends_the_connection(wire):
    with pytest.raises(ZmtpError):
        fed(wire)


def test_a_message_is_bounded(monkeypatch):
    monkeypatch.setattr(zmtp, "MESSAGE_BYTES_MAX", 100)
    with pytest.raises(ZmtpError, match="parts or 100 bytes"):
        fed(GREETING + READY + (b"\x01\x40" + bytes(64)) * 2)


@settings(deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_messages_or_an_error(data, greeted):
    """Nothing else is raised."""
    with suppress(ZmtpError):
        fed((GREETING + READY if greeted else b"") + data)


@pytest.mark.parametrize(
    "message", [(), (b"",), (b"", b"short", b"x"), (b"", number(1)), (b"",) * 5]
)
def test_what_is_no_message_of_events_is_none(message):
    assert read_live(message) is None
    assert read_replayed(message) is None or len(message) == 3
