import socket
from pathlib import Path

import pytest

import epp.shell.gateway.connections as module
from epp.shell.gateway.connections import ALLOWANCE_MAX, Connections, cut


def abandoned(connections, peer, times):
    return [connections.abandoned(peer) for _ in range(times)].count(True)


def test_a_connection_may_reset_so_many_streams_and_no_more():
    """The one too many is told once, and then the count begins anew."""
    connections = Connections()
    assert abandoned(connections, "a", ALLOWANCE_MAX) == 0
    assert connections.abandoned("a")
    assert abandoned(connections, "a", ALLOWANCE_MAX) == 0
    assert connections.abandoned("a")


def test_an_answered_stream_gives_the_whole_allowance_back():
    """A gateway whose clients leave early still serves others."""
    connections = Connections()
    for _ in range(10):
        assert abandoned(connections, "gateway", ALLOWANCE_MAX) == 0
        connections.answered("gateway")


def test_each_connection_has_its_own_allowance():
    """What one does is not another's fault."""
    connections = Connections()
    assert abandoned(connections, "a", ALLOWANCE_MAX) == 0
    assert abandoned(connections, "b", ALLOWANCE_MAX) == 0


def test_few_connections_are_remembered(monkeypatch):
    """The one unheard of for the longest is forgotten."""
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 2)
    connections = Connections()
    abandoned(connections, "a", ALLOWANCE_MAX)
    connections.abandoned("b")
    connections.abandoned("c")
    assert not connections.abandoned("a"), "forgotten, so it begins anew"
    assert len(connections._left) == 2


@pytest.fixture
def connected():
    """Make (our side, the peer's side, the peer as gRPC names it) on a listener of `family`."""
    opened = []

    def connect(family, host):
        listener = socket.create_server(
            ("", 0) if family == socket.AF_INET6 else (host, 0),
            family=family,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        peer = socket.create_connection((host, listener.getsockname()[1]))
        ours, _ = listener.accept()
        opened.extend((listener, peer, ours))
        name, port = peer.getsockname()[:2]
        return ours, peer, f"ipv6:%5B{name}%5D:{port}" if ":" in name else f"ipv4:{name}:{port}"

    yield connect
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("family", "host"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "127.0.0.1"),
        (socket.AF_INET6, "::1"),
    ],
    ids=["ipv4", "ipv4 on a listener of both", "ipv6"],
)
def test_the_connection_of_a_peer_is_cut_and_no_other(connected, family, host):
    """Both sides read its end; a second connection of the same host is as it was."""
    ours, peer, name = connected(family, host)
    other_ours, other, _ = connected(family, host)
    assert cut(name)
    assert ours.recv(1) == b""
    assert peer.recv(1) == b""
    other.sendall(b"x")
    assert other_ours.recv(1) == b"x"


def test_no_file_is_left_open_by_a_search(connected):
    """Each look at a socket is at a copy, which is closed again."""
    connected(socket.AF_INET, "127.0.0.1")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert not cut("ipv4:127.0.0.1:1")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    "peer", ["", "unix:/tmp/picker", "ipv4:nowhere:80", "ipv4:127.0.0.1:", "ipv6:%5B::1%5D:x"]
)
def test_what_is_no_tcp_peer_has_no_connection(peer):
    """Nothing is found, nothing is raised."""
    assert not cut(peer)


def test_where_open_files_cannot_be_listed_nothing_is_cut(connected, monkeypatch):
    """Other systems than Linux have no such folder."""
    _, _, name = connected(socket.AF_INET, "127.0.0.1")
    monkeypatch.setattr(module, "_FILES", Path("/nowhere"))
    assert not cut(name)
