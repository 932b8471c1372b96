"""`Peers` as `epp serve` has them: from flags, with real sockets and files."""

import asyncio
import contextlib

import pytest
import structlog

from epp.flags.command_lines import parse_serve
from epp.shell.peers import warm_start
from epp.shell.peers.secret import peer_identity
from epp.shell.peers.service import Peers
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports, until
from tests.shell.peers.rig import FakeExchange

SECRET = "a secret of more than thirty-two bytes\n"


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch):
    monkeypatch.setattr(warm_start, "JITTER_S_MAX", 0.0)


class Replica:
    """One picker's `Peers` and what they called back."""

    def __init__(self, *arguments, known=(), environment=None):
        flags = parse_serve(
            ["--endpoints-file=x", "--peer-bind-address=127.0.0.1", *arguments], environment or {}
        )
        identity = peer_identity(flags.peer_secret_file)
        self.exchange = FakeExchange(known, identity.origin)
        self.ready_calls = 0
        self.snapshots = []
        self.peers = Peers(
            flags,
            self.exchange,
            identity=identity,
            on_ready=self._ready,
            on_snapshot=lambda source, elapsed_s: self.snapshots.append(source),
            seed=1,
        )

    def _ready(self):
        self.ready_calls += 1

    @contextlib.asynccontextmanager
    async def running(self):
        async with self.peers:
            loops = self.peers.loops()
            tasks = [asyncio.create_task(loop(), name=name) for name, loop in loops.items()]
            try:
                yield self
                assert not [task for task in tasks if task.done() and task.exception()]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def mesh_flags(*ports):
    """One set of flags a port: each replica knows all, itself too."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    return [(f"--peers={addresses}", f"--peer-port={port}") for port in ports]


async def test_replicas_find_each_other_and_the_second_starts_warm(tmp_path):
    """Encrypted, itself left out; ready is said once, and what is said live arrives."""
    (tmp_path / "secret").write_text(SECRET)
    secret = f"--peer-secret-file={tmp_path / 'secret'}"
    first_flags, second_flags = mesh_flags(*free_ports(2))
    first = Replica(*first_flags, secret, "--peer-snapshot-timeout=0s", known=[b"a", b"b"])
    second = Replica(*second_flags, secret)
    async with first.running():
        assert not first.peers.ready
        first.peers.endpoints_known()
        await until(lambda: first.peers.ready, "the first to be ready")
        async with second.running():
            await until(lambda: first.peers.rows() and second.peers.known == 1, "each other")
            assert not second.peers.ready
            assert second.exchange.snapshot_frames == []
            second.peers.endpoints_known()
            await until(lambda: second.peers.ready, "the second to be ready")
            assert second.exchange.snapshot_frames == [(b"a", 0.0), (b"b", 0.0)]
            assert (second.snapshots, second.ready_calls) == (["peer"], 1)
            await until(lambda: first.peers.answering == 1, "the peer")
            first.exchange.told.append(b"live")
            await until(lambda: second.exchange.received == [b"live"], "the frame")
            told = second.peers.snapshot()
            assert (second.peers.answering, told.known) == (1, 1)
            assert told.snapshots["taken", "whole"] == 1
            assert first.peers.snapshot().snapshots["given", "sent"] == 1
            assert told.frames["received", "received"] >= 1
            assert told.bytes_received > 0


async def test_readiness_waits_only_so_long():
    """Here for peers that are not there."""
    (flags,) = mesh_flags(*free_ports(1))
    port = flags[1].partition("=")[2]
    alone = Replica(
        f"--peers=127.0.0.1:1,127.0.0.1:{port}", flags[1], "--peer-snapshot-timeout=50ms"
    )
    async with alone.running():
        alone.peers.endpoints_known()
        await until(lambda: alone.peers.ready, "readiness")
        assert alone.peers.answering == 0


async def test_a_lone_replica_does_not_wait():
    """Where there is nobody but itself."""
    (flags,) = mesh_flags(*free_ports(1))
    alone = Replica(*flags, "--peer-snapshot-timeout=1h")
    async with alone.running():
        alone.peers.endpoints_known()
        await until(lambda: alone.peers.ready, "readiness")


async def test_our_own_address_is_left_out_by_name():
    """`$POD_IP`, which spares us to ask ourselves."""
    port, _ = free_ports(2)
    replica = Replica("--peers=x", f"--peer-port={port}", environment={"POD_IP": "10.0.0.7"})
    async with replica.peers:
        replica.peers.discovered(frozenset({f"10.0.0.7:{port}", f"127.0.0.1:{port + 1}"}))
        assert replica.peers.known == 1


async def test_a_lone_picker_keeps_what_it_knows_on_disk(tmp_path):
    """Saved at the end, loaded at the next start once endpoints are known, and not before."""
    flag = f"--snapshot-dir={tmp_path}"
    before = Replica(flag, known=[b"a", b"b"])
    async with before.running():
        before.peers.endpoints_known()
        await until(lambda: before.peers.ready, "readiness")
    after = Replica(flag, "--peer-snapshot-timeout=1h")
    async with after.running():
        assert after.exchange.snapshot_frames == []
        after.peers.endpoints_known()
        await until(lambda: after.peers.ready, "readiness")
        assert [frame for frame, _ in after.exchange.snapshot_frames] == [b"a", b"b"]
        assert after.snapshots == ["file"]
        assert after.peers.snapshot().snapshots["file", "loaded"] == 1
        assert after.peers.rows() == []


async def test_a_picker_that_never_was_ready_keeps_the_file_of_the_one_before(tmp_path):
    """It knows nothing yet."""
    flag = f"--snapshot-dir={tmp_path}"
    before = Replica(flag, known=[b"a"])
    async with before.running():
        before.peers.endpoints_known()
        await until(lambda: before.peers.ready, "readiness")
    content = (tmp_path / "peers.snapshot").read_bytes()
    async with Replica(flag).running():
        pass
    assert (tmp_path / "peers.snapshot").read_bytes() == content


async def test_a_defect_of_the_exchange_is_a_cold_start(tmp_path):
    """It is ready all the same."""
    flag = f"--snapshot-dir={tmp_path}"
    before = Replica(flag, known=[b"a"])
    async with before.running():
        before.peers.endpoints_known()
        await until(lambda: before.peers.ready, "readiness")
    after = Replica(flag)
    after.exchange.receive_snapshot_frame = lambda *_: 1 / 0
    with structlog.testing.capture_logs() as lines:
        async with after.running():
            after.peers.endpoints_known()
            await until(lambda: after.peers.ready, "readiness")
    assert "no snapshot of shared state could be loaded" in [line["event"] for line in lines]


async def test_without_flags_there_is_nothing_to_do():
    """And nobody waits for it."""
    replica = Replica()
    assert replica.peers.ready
    assert replica.peers.loops() == {}
    async with replica.peers:
        assert replica.peers.answering == 0


def test_a_secret_that_cannot_be_read_ends_the_start(tmp_path):
    with pytest.raises(StartError, match=r"--peer-secret-file .* cannot be read"):
        Replica("--peers=x", f"--peer-secret-file={tmp_path / 'none'}")


async def test_what_is_said_last_is_still_sent():
    """A goodbye, when nothing runs any more."""
    first_flags, second_flags = mesh_flags(*free_ports(2))
    first, second = Replica(*first_flags), Replica(*second_flags)
    async with first.running():
        async with second.running():
            await until(lambda: second.peers.answering == 1, "the peer")
        await until(lambda: first.exchange.received == [b"goodbye"], "the goodbye")
