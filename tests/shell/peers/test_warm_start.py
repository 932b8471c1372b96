"""Snapshots over real sockets."""

import time

import pytest

from epp.shell.peers import warm_start
from epp.shell.peers.carrier import Kind
from tests.envoy.rig import until
from tests.shell.peers.rig import Picker, pickers

PARTS = [number.to_bytes(4, "little") * 15_000 for number in range(400)]
"""More than all queues between two replicas hold."""


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch):
    monkeypatch.setattr(warm_start, "JITTER_S_MAX", 0.0)


def start(picker, timeout_s=10.0):
    picker.warm_start.discovered.set()
    return picker.warm_start.run(time.monotonic() + timeout_s)


async def test_a_replica_that_starts_gets_all_that_the_oldest_knows():
    """In order, one part after the other is applied; live frames come in between."""
    async with pickers(2, known=[b"young"]) as (young, other), Picker(known=PARTS) as old:
        old.mesh.warm_since_s = time.monotonic() - 100
        async with Picker(warm=False) as new:
            for each in (young, other, old):
                each.knows(new)
            new.knows(young, other, old)
            await until(lambda: new.mesh.answering == 3 and old.mesh.up, "each other")

            def parts(frame, now, age_s, take=new.exchange.receive_snapshot_frame):
                taken = take(frame, now, age_s)
                if len(new.exchange.snapshot_frames) == 20:
                    old.exchange.told.append(b"live")
                return taken

            new.exchange.receive_snapshot_frame = parts
            assert await start(new)
            assert new.exchange.snapshot_frames == [(part, 0.0) for part in PARTS]
            await until(lambda: not new.exchange.pending(), "the rest to be applied")
            await until(lambda: new.exchange.received == [b"live"], "what was told meanwhile")
            assert old.server.outcomes == {"sent": 1, "cut": 0, "failed": 0, "refused": 0}
            assert young.server.outcomes["sent"] == 0


async def test_a_peer_that_falls_silent_is_given_up_for_another(monkeypatch):
    """And one that is busy is asked again."""
    monkeypatch.setattr(warm_start, "SILENCE_S", 0.1)
    async with pickers(2, known=[b"known"]) as (silent, busy):
        silent.mesh.warm_since_s = time.monotonic() - 100
        silent.server.wanted = lambda source: None
        busy.server._asker = "somebody else"
        async with Picker(warm=False) as new:
            new.knows(silent, busy)
            await until(lambda: new.mesh.answering == 2, "both")
            refused = busy.server.wanted

            def wanted(source):
                refused(source)
                if busy.server._asker == "somebody else" and busy.server.outcomes["refused"] == 2:
                    busy.server._asker = None

            busy.server.wanted = wanted
            assert await start(new)
            assert new.exchange.snapshot_frames == [(b"known", 0.0)]
            assert busy.server.outcomes == {"sent": 1, "cut": 0, "failed": 0, "refused": 2}


async def test_where_nobody_is_warm_nobody_is_waited_for():
    """All have answered and none has anything."""
    async with pickers(3, warm=False) as made:
        await until(lambda: all(each.mesh.answering == 2 for each in made), "each other")
        assert not await start(made[0], timeout_s=3600.0)
    async with Picker(warm=False) as alone:
        assert not await start(alone, timeout_s=3600.0)


@pytest.mark.parametrize("discovered", [True, False])
async def test_the_wait_has_an_end(discovered):
    """Whether a peer does not answer, or discovery does not."""
    async with Picker(warm=False) as new:
        new.mesh.connect({"127.0.0.1:1"})
        if discovered:
            assert not await start(new, timeout_s=0.1)
        else:
            assert not await new.warm_start.run(time.monotonic() + 0.1)


async def test_a_replica_that_is_not_warm_gives_nothing():
    """Whoever asks it is refused."""
    async with pickers(2, warm=False, known=[b"half of it"]) as (asker, asked):
        await until(lambda: asker.mesh.up, "the peer")
        (link,) = asker.mesh.up
        asker.mesh.answer(link, Kind.SNAPSHOT_WANTED)
        await until(lambda: asked.server.outcomes["refused"] == 1, "the refusal")
        assert asker.exchange.snapshot_frames == []


async def test_an_asker_that_leaves_is_given_up(monkeypatch):
    """And the next is served."""
    monkeypatch.setattr(warm_start, "STALL_S", 0.05)
    async with pickers(2, known=PARTS) as (asker, asked):
        await until(lambda: asker.mesh.up, "the peer")
        (link,) = asker.mesh.up
        asker.mesh.answer(link, Kind.SNAPSHOT_WANTED)
        await until(lambda: asked.server._asker, "the question")
        await asker.stop()
        await until(lambda: asked.server.outcomes["cut"] == 1, "the end", timeout_s=30)
        async with Picker(warm=False) as new:
            new.knows(asked)
            await until(lambda: new.mesh.up, "the peer")
            asked.exchange.known = [b"known"]
            assert await start(new)


async def test_a_snapshot_that_cannot_be_made_has_failed():
    """A defect of the core; the server lives on."""
    async with pickers(2) as (asker, asked):
        await until(lambda: asker.mesh.up, "the peer")
        asked.exchange.snapshot = lambda now: 1 / 0
        assert not await start(asker, timeout_s=0.3)
        assert asked.server.outcomes == {"sent": 0, "cut": 0, "failed": 1, "refused": 0}
        asked.exchange.snapshot = lambda now: iter([b"known"])
        assert await start(asker)
