import socket

import pytest

from epp.shell.peers.admission import NEWCOMERS_MAX, Admission, Newcomer, plain_host
from epp.shell.peers.connection import Connection, Stage
from epp.shell.peers.secret import stranger

KNOWN = frozenset({"10.0.0.7", "fd00::7"})


@pytest.mark.parametrize(
    ("address", "admitted"),
    [
        ("10.0.0.7", True),
        ("::ffff:10.0.0.7", True),
        ("fd00::7", True),
        ("fd00::7%eth0", True),
        ("127.0.0.1", True),
        ("127.0.0.6", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.8", False),
        ("fd00::8", False),
        ("", False),
        ("no address", False),
        ("10.0.0.7\n", False),
    ],
)
def test_in_plaintext_an_address_decides(address, admitted):
    """A replica that is known, or this machine; however IPv4 is spelt."""
    admission = Admission(has_secret=False)
    admission.hosts = KNOWN
    assert admission.admits(address) is admitted


def test_with_a_secret_anybody_may_show_that_it_has_it():
    """A replica may come from an address that was not looked up yet."""
    assert Admission(has_secret=True).admits("192.0.2.1")


@pytest.fixture
def newcomer():
    """Makes newcomers with real sockets, and closes them."""
    opened = []

    def made(host, stage=Stage.GATE):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(ours, stranger(), serving=True, now=0.0)
        connection.stage = stage
        opened.append((connection, theirs))
        return Newcomer(host, connection)

    yield made
    for connection, theirs in opened:
        connection.close()
        theirs.close()


def test_of_too_many_newcomers_those_of_the_busiest_stranger_give_way(newcomer):
    """The one that waits longest; who came from elsewhere stays, and a known address most of all."""
    admission = Admission(has_secret=True)
    admission.hosts = KNOWN
    replica, neighbour = newcomer("10.0.0.7"), newcomer("192.0.2.9")
    assert admission.add(replica) is None
    assert admission.add(neighbour) is None
    flood = [newcomer("192.0.2.1") for _ in range(NEWCOMERS_MAX + 10)]
    gave_way = [admission.add(each) for each in flood]
    assert gave_way == [*[None] * (NEWCOMERS_MAX - 2), *flood[:12]]
    assert len(admission.newcomers) == NEWCOMERS_MAX
    assert {replica, neighbour} < set(admission.newcomers)


def test_who_has_passed_the_gate_gives_way_last(newcomer):
    """It has shown that it knows the secret, from whichever address."""
    admission = Admission(has_secret=True)
    passed = newcomer("192.0.2.1", Stage.TLS)
    admission.add(passed)
    flood = [newcomer("192.0.2.1") for _ in range(NEWCOMERS_MAX)]
    assert [admission.add(each) for each in flood][-1] is flood[0]
    assert passed in admission.newcomers


def test_who_is_through_leaves_its_place(newcomer):
    """The count of its address too: nobody gives way for who is gone."""
    admission = Admission(has_secret=True)
    for _ in range(NEWCOMERS_MAX):
        one = newcomer("192.0.2.1")
        admission.add(one)
        admission.remove(one)
    few, many = newcomer("192.0.2.1"), [newcomer("192.0.2.2") for _ in range(NEWCOMERS_MAX)]
    admission.add(few)
    assert [admission.add(each) for each in many][-1] is many[0]


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.1", "10.0.0.1"), ("FD00::1%2", "fd00::1"), ("x", "None")]
)
def test_an_address_has_one_spelling(address, host):
    assert str(plain_host(address)) == host
