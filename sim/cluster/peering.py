"""The sharing of routing decisions between pickers in simulated time: production's exchange over a
simulated network.

As in production, each picker requests frames from its `PeerExchange` every `interval_s`, at its own
offset. Requests that would find nothing are left out. Each frame reaches each other picker after
`delay_s`, or is lost. A simulated picker applies received frames at once; a real one takes some
milliseconds. Only pickers with the production scheduler share decisions.

Nothing is sent while the cluster rests, because all shared decisions have expired by then.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.decision.scheduler import Scheduler
from epp.core.peers.exchange import HEARTBEAT_S, OUTGOING_INTERVAL_S, PeerExchange
from epp.core.peers.frames import ORIGIN_BYTES
from epp.core.peers.inbox import Received
from epp.core.types import Seconds
from sim.cluster.loop import Loop

SNAPSHOT_S_MAX: Final[Seconds] = 2.0
"""Maximum time in seconds that a starting picker waits for a snapshot of a peer's state. After it,
the picker serves without a snapshot.
"""


class Partition(Struct, frozen=True):
    """A network partition: from `from_s` to `to_s`, no frames pass between the pickers of `side`
    and the other pickers.
    """

    from_s: Seconds
    to_s: Seconds
    side: tuple[int, ...]

    def parts(self, one: int, other: int, now: Seconds) -> bool:
        """Return whether the partition separates the pickers `one` and `other` at the time
        `now`.
        """
        return self.from_s <= now < self.to_s and (one in self.side) != (other in self.side)


class SlowPeer(Struct, frozen=True):
    """A picker whose frames to and from other pickers take `more_s` seconds longer than those
    between the others.
    """

    replica: int
    more_s: Seconds


class PeerSettings(Struct, frozen=True, kw_only=True):
    """Settings of the simulated network over which pickers share decisions."""

    delay_s: Seconds
    """Delay of every frame between pickers in one direction, in seconds."""
    loss: float = 0.0
    """Share of the frames between pickers that are lost, drawn for each receiver."""
    interval_s: Seconds = OUTGOING_INTERVAL_S
    """Interval in seconds at which a picker sends its decisions; those made in between are sent
    together.
    """
    snapshot: bool = True
    """True if a starting picker requests a snapshot of the state of the picker that has run
    longest. Snapshots are not lost.
    """
    partitions: tuple[Partition, ...] = ()
    slow: tuple[SlowPeer, ...] = ()


class _Peer:
    """One process of a picker that shares its decisions."""

    __slots__ = ("beat_at", "exchange", "flush_at", "phase_s", "replica", "scheduler", "started_at")

    def __init__(
        self,
        replica: int,
        scheduler: Scheduler,
        exchange: PeerExchange,
        started_at: Seconds,
        phase_s: Seconds,
    ) -> None:
        self.replica = replica
        self.scheduler = scheduler
        self.exchange = exchange
        self.started_at = started_at
        self.phase_s = phase_s
        """Time at which the picker first looks for decisions to send to its peers. It looks again
        at multiples of the interval after that time, if there may be something to send.
        """
        self.flush_at: Seconds = math.inf
        """Time at which the picker next looks for decisions to send to its peers; infinite if none
        is scheduled.
        """
        self.beat_at: Seconds = -math.inf
        """Time when the picker last sent a heartbeat to its peers."""


class Peering:
    """The exchanges of all pickers, and the frames of decisions between them. `seed` determines all
    random numbers.
    """

    def __init__(
        self, loop: Loop, settings: PeerSettings | None, *, replicas: int, seed: int
    ) -> None:
        """Set up the exchanges of `replicas` pickers. Without `settings`, or with one picker,
        nothing is shared.
        """
        self._loop = loop
        self._settings = settings if replicas > 1 else None
        self._replicas = replicas
        self._seed = seed
        self._random_loss = Random(f"{seed}:peer-loss")
        self._peers: list[_Peer | None] = [None] * replicas
        self._slow_s = [0.0] * replicas
        for slow in self._settings.slow if self._settings is not None else ():
            self._slow_s[slow.replica] += slow.more_s
        self._resting = False
        self._started = 0
        self._received: list[Received] = []
        """Counters of received records, one object for each picker process, ended ones included."""
        self.frames = 0
        """Number of frames that pickers sent to each other, lost ones included; a frame to several
        receivers counts once for each. Frames of `greet` and of snapshots are not counted.
        """
        self.bytes = 0
        """Size in bytes of the frames that `frames` counts, for each receiver."""
        self.frames_lost = 0

    def greet(self) -> None:
        """Make the running pickers known to each other at the start of the run, unless a partition
        separates them, because they ran before the traffic.
        """
        there = [peer for peer in self._peers if peer is not None]
        now = self._loop.now
        for peer in there:
            frames = peer.exchange.outgoing(now)
            peer.beat_at = now
            for other in there:
                if other is not peer and not self._parted(peer, other):
                    self._deliver(peer.exchange.origin, other, frames)
                    # Heartbeats from before the traffic are still on their way. Otherwise peers
                    # would be unknown until the first of these arrives.
                    for beat in range(1, 1 + int(self._delay_s(peer, other) / HEARTBEAT_S)):
                        self._loop.after(
                            beat * HEARTBEAT_S, self._deliver, peer.exchange.origin, other, frames
                        )

    def start(self, replica: int, scheduler: Scheduler | None) -> None:
        """Start the exchange of a new process of picker `replica`. `scheduler` is None for a
        baseline, which shares nothing.
        """
        settings = self._settings
        if settings is None or scheduler is None:
            return
        now = self._loop.now
        random = Random(f"{self._seed}:peer:{replica}:{self._started}")
        self._started += 1
        exchange = PeerExchange(
            scheduler, origin=random.randbytes(ORIGIN_BYTES), now=now, replicas=self._replicas
        )
        self._received.append(exchange.received)
        phase_s = now + random.random() * settings.interval_s
        peer = self._peers[replica] = _Peer(replica, scheduler, exchange, now, phase_s)
        self._flush_from(peer, now)

    def stop(self, replica: int) -> None:
        """End the process of picker `replica` without telling its peers."""
        self._peers[replica] = None

    def warm(self, replica: int, ready: Callable[[], None]) -> None:
        """Make the starting picker `replica` request a snapshot from a peer. Call `ready` when it
        has the snapshot or stops waiting for it, or at once if no snapshot is requested, for
        example because no peer can be reached.

        `ready` may be called twice.
        """
        peer, settings = self._peers[replica], self._settings
        if peer is None or settings is None or not settings.snapshot:
            ready()
            return
        others = [other for other in self._peers if other is not None and other is not peer]
        heard = [other for other in others if not self._parted(peer, other)]
        if not heard:
            ready()
            return
        asked = min(heard, key=lambda other: other.started_at)
        delay_s = self._delay_s(peer, asked)

        def still_there() -> None:
            if self._peers[replica] is peer:
                ready()

        self._loop.after(delay_s, self._send_snapshot, asked, peer, still_there)
        self._loop.after(SNAPSHOT_S_MAX, still_there)

    def touched(self, replica: int) -> None:
        """Schedule the sending of decisions to the peers of picker `replica`, which has just made a
        decision or seen the end of a request.
        """
        peer = self._peers[replica]
        if peer is not None:
            self._flush_from(peer, self._loop.now)

    def tick(self) -> None:
        """Let time pass in the exchanges of all pickers; called about once a second."""
        for peer in self._peers:
            if peer is not None:
                peer.exchange.tick(self._loop.now)

    def rest(self) -> None:
        """Stop all sending between pickers until `wake` is called."""
        self._resting = True

    def wake(self) -> None:
        """Resume the sending between pickers that `rest` stopped."""
        self._resting = False
        for peer in self._peers:
            if peer is not None:
                self._flush_from(peer, self._loop.now)

    def summary(self) -> dict[str, int] | None:
        """Return the numbers of frames and records that pickers sent and received, by name, or None
        if pickers share nothing.
        """
        if not self._received:
            return None
        received = self._received
        return {
            "frames": self.frames,
            "bytes": self.bytes,
            "frames_lost": self.frames_lost,
            "records_applied": sum(one.applied for one in received),
            "records_unknown_chain": sum(one.unknown_chain for one in received),
            "records_unknown_endpoint": sum(one.unknown_endpoint for one in received),
            "frames_dropped": sum(one.dropped + one.over_rate for one in received),
        }

    def _flush_from(self, peer: _Peer, since: Seconds) -> None:
        """Schedule the next time at or after `since` at which `peer` looks for decisions to send.
        Do nothing if an earlier time is scheduled.
        """
        assert self._settings is not None
        interval_s = self._settings.interval_s
        turn = max(0, math.ceil((since - peer.phase_s) / interval_s))
        at = peer.phase_s + turn * interval_s
        if at < since:
            at += interval_s
        if at < peer.flush_at:
            peer.flush_at = at
            self._loop.at(at, self._flush, peer, at)

    def _flush(self, peer: _Peer, due: Seconds) -> None:
        if due != peer.flush_at:
            return
        peer.flush_at = math.inf
        if self._resting or self._peers[peer.replica] is not peer:
            return
        assert self._settings is not None
        now = self._loop.now
        frames = peer.exchange.outgoing(now)
        if now >= peer.beat_at + HEARTBEAT_S:
            peer.beat_at = now
        if frames:
            self._send(peer, frames)
        # One call returns a bounded number of decisions.
        more = bool(peer.scheduler.placements.sent)
        next_at = now + self._settings.interval_s / 2 if more else peer.beat_at + HEARTBEAT_S
        self._flush_from(peer, next_at)

    def _send(self, peer: _Peer, frames: list[bytes]) -> None:
        assert self._settings is not None
        loss = self._settings.loss
        for other in self._peers:
            if other is None or other is peer:
                continue
            self.frames += len(frames)
            self.bytes += sum(map(len, frames))
            kept = frames
            if loss:
                kept = [frame for frame in frames if self._random_loss.random() >= loss]
            if self._parted(peer, other):
                kept = []
            self.frames_lost += len(frames) - len(kept)
            if kept:
                self._loop.after(
                    self._delay_s(peer, other), self._deliver, peer.exchange.origin, other, kept
                )

    def _deliver(self, origin: bytes, peer: _Peer, frames: list[bytes]) -> None:
        if self._peers[peer.replica] is not peer:
            return
        now = self._loop.now
        for frame in frames:
            peer.exchange.receive(frame, now, origin)
        while peer.exchange.pending():
            peer.exchange.apply(now)

    def _send_snapshot(self, asked: _Peer, peer: _Peer, learnt: Callable[[], None]) -> None:
        """Send a snapshot of the state of picker `asked` to picker `peer`, and call `learnt` when
        it is applied. Do nothing if `asked` has ended by now, or if `peer` ends before the snapshot
        arrives.
        """
        if self._peers[asked.replica] is asked:
            frames = list(asked.exchange.snapshot(self._loop.now))
            self._loop.after(self._delay_s(asked, peer), self._apply_snapshot, peer, frames, learnt)

    def _apply_snapshot(self, peer: _Peer, frames: list[bytes], learnt: Callable[[], None]) -> None:
        if self._peers[peer.replica] is not peer:
            return
        now = self._loop.now
        for frame in frames:
            peer.exchange.receive_snapshot_frame(frame, now, 0.0)
            # Frames are applied one by one, because the queue of received records is bounded.
            while peer.exchange.pending():
                peer.exchange.apply(now)
        learnt()

    def _parted(self, one: _Peer, other: _Peer) -> bool:
        assert self._settings is not None
        now = self._loop.now
        return any(
            partition.parts(one.replica, other.replica, now)
            for partition in self._settings.partitions
        )

    def _delay_s(self, one: _Peer, other: _Peer) -> Seconds:
        assert self._settings is not None
        return self._settings.delay_s + self._slow_s[one.replica] + self._slow_s[other.replica]
