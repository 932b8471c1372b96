import asyncio
import contextlib

import structlog

from epp.core.peers.exchange import Taken
from epp.shell.peers.carrier import Kind, Message
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.pump import MESSAGES_PER_BEAT_MAX, MESSAGES_PER_TURN_MAX, Pump
from epp.shell.peers.state import Traffic
from tests.envoy.rig import until
from tests.shell.peers.rig import FakeExchange


class FakeCarrier:
    """Gives what `waiting` holds, and keeps what it is to carry."""

    known = answering = 1

    def __init__(self):
        self.waiting = []
        self.sent = []
        self.answered = []
        self.beats = 0
        self.taken = []
        """How many at each call."""

    def send(self, frame):
        self.sent.append(frame)

    def answer(self, source, kind, frame=b""):
        self.answered.append((source, kind, frame))
        return True

    def receive(self, messages_max, paused=None):
        found, self.waiting = self.waiting[:messages_max], self.waiting[messages_max:]
        self.taken.append(len(found))
        return found, bool(self.waiting)

    def beat(self, now):
        self.beats += 1

    def greeted(self, message, now):
        self.answered.append("hello")

    def rows(self, now):
        return []


class Peer:
    """A source."""

    origin = b"somebody"


PEER = Peer()


class Rig:
    def __init__(self, beat_s=0.001):
        self.exchange = FakeExchange()
        self.carrier = FakeCarrier()
        self.traffic = Traffic()
        self.pump = Pump(self.exchange, self.carrier, self.traffic, Complaints(), beat_s=beat_s)

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.pump.run())
        try:
            yield self
            assert not task.done()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def frames(count):
    return [Message(PEER, Kind.FRAME, b"%d" % number) for number in range(count)]


async def test_what_is_told_is_sent_and_what_comes_is_received():
    """What is not taken is counted."""
    with structlog.testing.capture_logs() as lines:
        await _told_and_received()
    assert [line["event"] for line in lines] == [
        "a replica uses another version; both decide independently"
    ]


async def _told_and_received():
    async with Rig().running() as rig:
        rig.exchange.told = [b"a", b"b"]
        rig.exchange.outcomes = {b"0": Taken.OTHER_VERSION}
        rig.carrier.waiting = [*frames(2), Message(PEER, Kind.HELLO, b"")]
        await until(lambda: rig.carrier.answered, "the answer")
        assert rig.carrier.sent == [b"a", b"b"]
        assert rig.exchange.received == [b"0", b"1"]
        assert rig.traffic.frames["received", "other version"] == 1
        assert rig.traffic.frames["received", "unreadable"] == 0
        assert rig.exchange.ticks == 1


async def test_no_turn_and_no_beat_takes_more_than_it_may():
    """What is more waits where it is; between two turns others have theirs."""
    rig = Rig(beat_s=3600.0)
    rig.carrier.waiting = frames(MESSAGES_PER_BEAT_MAX + 1)
    async with rig.running():
        await until(lambda: len(rig.exchange.received) == MESSAGES_PER_BEAT_MAX, "a beat's worth")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(rig.exchange.received) == MESSAGES_PER_BEAT_MAX
        assert max(rig.carrier.taken) == MESSAGES_PER_TURN_MAX


async def test_what_was_received_is_applied_a_piece_a_turn():
    """Until nothing is pending, though nothing comes."""
    async with Rig().running() as rig:
        rig.exchange.waiting = 50
        await until(lambda: rig.exchange.applied == 50, "the rest")
        assert not rig.exchange.pending()


async def test_a_defect_of_the_exchange_costs_a_turn():
    """It is counted, told once a minute with its place, and the pump goes on."""
    with structlog.testing.capture_logs() as lines:
        async with Rig().running() as rig:
            rig.exchange.raises = True
            await until(lambda: rig.traffic.failures.get("internal", 0) > 3, "failures")
            rig.exchange.raises = False
            rig.exchange.told = [b"after"]
            await until(lambda: rig.carrier.sent == [b"after"], "the frame after it")
    assert [line["event"] for line in lines] == ["exchange with peers failed"]
    assert lines[0]["exc_info"]


async def test_snapshots_that_nobody_asked_for_are_not_taken_in():
    """Where there are none, no question is answered either."""
    async with Rig().running() as rig:
        rig.carrier.waiting = [
            Message(PEER, kind, b"x")
            for kind in (Kind.SNAPSHOT_PART, Kind.SNAPSHOT_END, Kind.SNAPSHOT_REFUSED)
        ] + [Message(PEER, Kind.SNAPSHOT_WANTED, b"")]
        await until(lambda: rig.traffic.frames["received", "unreadable"] == 3, "the count")
        assert rig.exchange.snapshot_frames == rig.carrier.answered == []
