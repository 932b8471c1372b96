"""What pickers tell each other, in simulated time: production's exchange, and a network between.

Each picker asks its `PeerExchange` for frames as a shell does, every `interval_s` with a phase of its
own; asking where there is nothing to tell would find nothing and is left out. Each frame reaches
each other picker `delay_s` later or not at all. What arrives is learnt at once: a shell takes some
milliseconds for it. Policies other than the scheduler have nothing to tell.

Nobody is told anything while the cluster rests: by then all has expired.
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
"""A picker that has not got one by then serves without."""


class Partition(Struct, frozen=True):
    """From `from_s` to `to_s` nothing passes between the pickers of `side` and the others."""

    from_s: Seconds
    to_s: Seconds
    side: tuple[int, ...]

    def parts(self, one: int, other: int, now: Seconds) -> bool:
        """Whether nothing passes between these two now."""
        return self.from_s <= now < self.to_s and (one in self.side) != (other in self.side)


class SlowPeer(Struct, frozen=True):
    """What `replica` sends and what is sent to it takes `more_s` longer."""

    replica: int
    more_s: Seconds


class PeerSettings(Struct, frozen=True, kw_only=True):
    """The network between pickers."""

    delay_s: Seconds
    """One way, of every frame."""
    loss: float = 0.0
    """Share of the frames that do not arrive, drawn for each receiver."""
    interval_s: Seconds = OUTGOING_INTERVAL_S
    """What is decided meanwhile is told together."""
    snapshot: bool = True
    """A picker that starts asks the one that has run longest for all that it knows, without loss."""
    partitions: tuple[Partition, ...] = ()
    slow: tuple[SlowPeer, ...] = ()


class _Peer:
    """One picker from its start to its end."""

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
        """It asks for frames at this instant and every interval after it."""
        self.flush_at: Seconds = math.inf
        """When it does so next; infinite if that is not known."""
        self.beat_at: Seconds = -math.inf
        """Of its last heartbeat."""


class Peering:
    """The exchanges of all pickers, and the frames between them. `seed` decides all that is drawn."""

    def __init__(
        self, loop: Loop, settings: PeerSettings | None, *, replicas: int, seed: int
    ) -> None:
        """Without `settings`, or with one picker, nobody is told anything."""
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
        """Counts of every picker that ever was."""
        self.frames = 0
        """Sent, counted for each receiver."""
        self.bytes = 0
        """Of those."""
        self.frames_lost = 0

    def greet(self) -> None:
        """The pickers were there before the traffic: each has heard of the others."""
        there = [peer for peer in self._peers if peer is not None]
        now = self._loop.now
        for peer in there:
            frames = peer.exchange.outgoing(now)
            peer.beat_at = now
            for other in there:
                if other is not peer and not self._parted(peer, other):
                    self._deliver(peer.exchange.origin, other, frames)
                    # Heartbeats of before the traffic are still on their way, or nobody would be
                    # heard until the first of these arrives.
                    for beat in range(1, 1 + int(self._delay_s(peer, other) / HEARTBEAT_S)):
                        self._loop.after(
                            beat * HEARTBEAT_S, self._deliver, peer.exchange.origin, other, frames
                        )

    def start(self, replica: int, scheduler: Scheduler | None) -> None:
        """`replica` is there from now on, a new process; None: its policy has nothing to tell."""
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
        """`replica` is gone, and did not say goodbye."""
        self._peers[replica] = None

    def warm(self, replica: int, ready: Callable[[], None]) -> None:
        """Have `replica` ask for a snapshot; `ready` is called when it is not waited for any more.

        It may be called twice.
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

        self._loop.after(delay_s, self._tell_all, asked, peer, still_there)
        self._loop.after(SNAPSHOT_S_MAX, still_there)

    def touched(self, replica: int) -> None:
        """`replica` has decided something, or something that it has decided has ended."""
        peer = self._peers[replica]
        if peer is not None:
            self._flush_from(peer, self._loop.now)

    def tick(self) -> None:
        """About once a second."""
        for peer in self._peers:
            if peer is not None:
                peer.exchange.tick(self._loop.now)

    def rest(self) -> None:
        """Nobody tells anything until `wake`."""
        self._resting = True

    def wake(self) -> None:
        """All go on telling."""
        self._resting = False
        for peer in self._peers:
            if peer is not None:
                self._flush_from(peer, self._loop.now)

    def summary(self) -> dict[str, int] | None:
        """What was sent, and what became of it; None if nobody is told anything."""
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
        """Have `peer` ask for frames the first time from `since` on, if it would not do so before."""
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
        # One call tells a bounded number of decisions.
        more = bool(peer.scheduler.sent)
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

    def _tell_all(self, asked: _Peer, peer: _Peer, learnt: Callable[[], None]) -> None:
        """`peer` will know what `asked` knows now, unless one of them is gone by then."""
        if self._peers[asked.replica] is asked:
            frames = list(asked.exchange.snapshot(self._loop.now))
            self._loop.after(self._delay_s(asked, peer), self._learn_all, peer, frames, learnt)

    def _learn_all(self, peer: _Peer, frames: list[bytes], learnt: Callable[[], None]) -> None:
        if self._peers[peer.replica] is not peer:
            return
        now = self._loop.now
        for frame in frames:
            peer.exchange.receive_snapshot_frame(frame, now, 0.0)
            # Frame by frame: what waits is bounded.
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
