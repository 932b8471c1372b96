"""One connection between replicas, both ends in this process."""

import socket
import struct

import pytest

from epp.shell.peers.connection import (
    MESSAGE_BYTES_MAX,
    SENT_BYTES_MAX,
    Connection,
    Problem,
    Stage,
)
from epp.shell.peers.secret import identity_of, stranger

SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"


class Ends:
    """Who serves and who asks."""

    def __init__(self, serving, asking):
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        self.serving = Connection(ends[0], serving, serving=True, now=0.0)
        self.asking = Connection(ends[1], asking, serving=False, now=0.0)

    def advance(self):
        for _ in range(20):
            self.asking.advance()
            self.serving.advance()

    def close(self):
        self.serving.close()
        self.asking.close()


@pytest.fixture
def ends():
    opened = []

    def open_ends(serving, asking):
        opened.append(Ends(serving, asking))
        opened[-1].advance()
        return opened[-1]

    yield open_ends
    for each in opened:
        each.close()


@pytest.fixture
def raw():
    """A connection that asks, and the socket of who serves it."""
    mine, other = socket.socketpair()
    mine.setblocking(False)
    connection = Connection(mine, stranger(), serving=False, now=0.0)
    with other:
        yield connection, other
        connection.close()


def greeted(connection, other):
    """Open, without a secret."""
    other.sendall(b"HMT" + bytes([1, 0]) + bytes(32))
    connection.advance()
    assert connection.stage is Stage.OPEN
    assert len(other.recv(32)) == 32


def test_who_shares_the_secret_is_heard_under_its_own_name(ends):
    """Each says by its certificate who it is, and messages pass both ways in their order."""
    one, two = identity_of(SECRET), identity_of(SECRET)
    pair = ends(one, two)
    assert pair.serving.stage is pair.asking.stage is Stage.OPEN
    assert (pair.serving.origin, pair.asking.origin) == (two.origin, one.origin)
    for sender, receiver in ((pair.serving, pair.asking), (pair.asking, pair.serving)):
        assert sender.send(1, b"first")
        assert sender.send(2, b"")
        assert [receiver.read(), receiver.read(), receiver.read()] == [b"\x01first", b"\x02", None]


def test_without_a_secret_nobody_has_a_name(ends):
    pair = ends(stranger(), stranger())
    assert pair.serving.stage is pair.asking.stage is Stage.OPEN
    assert pair.serving.origin == pair.asking.origin == b""


@pytest.mark.parametrize(("serving", "asking"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_who_does_not_know_the_secret_comes_no_further_than_the_gate(ends, serving, asking):
    known = [stranger() if secret is None else identity_of(secret) for secret in (serving, asking)]
    pair = ends(*known)
    assert Problem.SECRET in {pair.serving.problem, pair.asking.problem}
    assert Stage.OPEN not in {pair.serving.stage, pair.asking.stage}
    assert not pair.serving.send(1, b"x")


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(20), b"HMT\x63" + bytes(40)]
)
def test_what_is_no_replica_of_this_version_is_told_apart(raw, greeting):
    connection, other = raw
    other.sendall(greeting)
    connection.advance()
    assert connection.problem is Problem.VERSION


@pytest.mark.parametrize("length", [0, MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_no_message_has_ends_it_and_holds_nothing(raw, length):
    connection, other = raw
    greeted(connection, other)
    other.sendall(struct.pack("<I", length) + b"x" * 1_000)
    assert connection.read() is None
    assert connection.problem is Problem.MESSAGE
    assert not connection.waiting()


def test_a_message_that_comes_in_pieces_is_read_when_it_is_whole(raw):
    connection, other = raw
    greeted(connection, other)
    message = struct.pack("<I", 4) + b"\x01abc"
    for at in range(len(message) - 1):
        other.sendall(message[at : at + 1])
        assert connection.read() is None
    other.sendall(message[-1:])
    assert connection.read() == b"\x01abc"


def test_what_waits_for_who_does_not_read_is_bounded(raw):
    """The rest is refused, and nothing waits for it."""
    connection, other = raw
    greeted(connection, other)
    frame = bytes(256 * 1024)
    sent = 0
    while connection.send(1, frame):
        sent += 1
        assert connection.unsent_bytes <= SENT_BYTES_MAX
    assert sent >= SENT_BYTES_MAX // len(frame) - 1
    assert connection.problem is None
    assert not connection.send(1, bytes(MESSAGE_BYTES_MAX))


def test_who_is_gone_is_lost_and_nothing_raises(raw):
    connection, other = raw
    greeted(connection, other)
    other.sendall(struct.pack("<I", 2) + b"\x01z")
    other.close()
    assert connection.read() == b"\x01z", "what came before is read"
    assert connection.read() is None
    assert connection.problem is Problem.LOST
    assert not connection.send(1, b"x")
    connection.flush()
    connection.advance()
    connection.close()
    assert connection.problem is Problem.LOST, "the first one is told"
