"""Transfer a snapshot of the shared state from one replica to another.

A starting replica requests it from the peer that has had the shared state for longest. If that peer
is busy or silent, it requests it from another one. A replica that missed frames of a peer requests
it from this peer. A replica sends one snapshot at a time. It
pauses after each frame, and while the receiver accepts no more.
"""

import asyncio
import contextlib
import time
from random import Random
from typing import Final

from epp.core.peers.exchange import PeerExchange
from epp.core.types import Seconds
from epp.shell.peers.carrier import Kind, Source
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.mesh import Link, Mesh

POLL_S: Final[Seconds] = 0.02
JITTER_S_MAX: Final[Seconds] = 0.3
"""Maximum random delay in seconds before the first request for a snapshot, so that replicas
starting together do not all ask at once.
"""
BUSY_S: Final = 0.05, 0.2
"""Bounds of the random delay in seconds before the next request for a snapshot after a peer was
busy.
"""
SILENCE_S: Final[Seconds] = 0.5
"""Time in seconds after which a requested snapshot is abandoned if its sender sends no part of
it.
"""
STALL_S: Final[Seconds] = 5.0
"""Time in seconds after which a snapshot being sent is abandoned if its receiver accepts no part of
it.
"""
PAUSE_SHARE: Final = 4.0
"""Pause after each frame of a snapshot being sent, as a multiple of the time that creating the
frame took.
"""


class WarmStart:
    """The receiver of snapshots from peers. The pump passes on the messages that arrive."""

    def __init__(self, mesh: Mesh, *, random: Random) -> None:
        self._mesh = mesh
        self._random = random
        self.asked: Link | None = None
        """Connection to the peer from which a snapshot is being received, or None."""
        self._heard_at_s: Seconds = 0.0
        self._ended = asyncio.Event()
        self._ending: Kind | None = None
        """Kind of the message that ended the last requested snapshot."""
        self.discovered = asyncio.Event()
        """Event that is set, from outside, once the addresses of the peers are known."""

    def expects(self, source: Source) -> bool:
        """Return True if this replica currently receives a snapshot from `source`."""
        return self.asked is not None and source is self.asked

    def part(self, now: Seconds) -> None:
        self._heard_at_s = now

    def ended(self, ending: Kind) -> None:
        """Record that the requested snapshot has ended: `ending` is `SNAPSHOT_END` or
        `SNAPSHOT_REFUSED`.
        """
        self._ending = ending
        self._ended.set()

    async def run(self, deadline_s: Seconds) -> bool:
        """Request snapshots from one peer after another until one is complete, no peer is left, or
        the time is `deadline_s`. Peers that were busy are asked again.

        Return True if a complete snapshot was received.
        """
        tried: set[str] = set()
        busy: set[str] = set()
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self.discovered.wait()
                await asyncio.sleep(self._random.uniform(0.0, JITTER_S_MAX))
        except TimeoutError:
            return False
        while time.monotonic() < deadline_s:
            warm = [link for link in self._mesh.up if link.warm_s and link.address not in tried]
            if not warm:
                if self._mesh.answering == self._mesh.known:
                    return False
                await asyncio.sleep(POLL_S)
                continue
            # Busy peers are asked again only after those that were not asked yet.
            chosen = min(warm, key=lambda link: (link.address in busy, -link.warm_s))
            told = await self._take_from(chosen)
            if told is Kind.SNAPSHOT_END:
                return True
            if told is Kind.SNAPSHOT_REFUSED:
                busy.add(chosen.address)
                await asyncio.sleep(self._random.uniform(*BUSY_S))
            else:
                tried.add(chosen.address)
        return False

    async def again(self, origin: bytes) -> bool:
        """Request a snapshot from the peer with `origin` after its frames were missed.

        Return True if a complete snapshot was received. Return False if the peer is busy or falls
        silent, and at once if it does not answer or has none.
        """
        for link in self._mesh.up:
            if link.origin == origin and link.warm_s:
                return await self._take_from(link) is Kind.SNAPSHOT_END
        return False

    async def _take_from(self, link: Link) -> Kind | None:
        """Request a snapshot from the peer of `link`. Return the kind of message that ended it, or
        None if the peer fell silent or the request could not be sent.

        The transfer may end after the deadline of the warm start.
        """
        self._ended.clear()
        self._heard_at_s = time.monotonic()
        self.asked = link
        try:
            if not self._mesh.answer(link, Kind.SNAPSHOT_WANTED):
                return None
            while (left_s := self._heard_at_s + SILENCE_S - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), left_s)
                    return self._ending
            return None
        finally:
            self.asked = None


class SnapshotServer:
    """The sender of snapshots to peers that request them, one at a time. Run `run` as a task."""

    def __init__(self, exchange: PeerExchange, mesh: Mesh, complaints: Complaints) -> None:
        self._exchange = exchange
        self._mesh = mesh
        self._complaints = complaints
        self._asker: Source | None = None
        self._asked = asyncio.Event()
        self.outcomes = {"sent": 0, "cut": 0, "failed": 0, "refused": 0}
        """Number of snapshots that peers requested from this replica, by outcome. "cut" means that
        the receiver left or was too slow, "failed" that the snapshot could not be created.
        """

    def wanted(self, source: Source) -> None:
        """Accept the request of the peer `source` for a snapshot. Refuse it if another snapshot is
        being sent, or if this replica has no shared state yet.
        """
        if self._asker is not None or self._mesh.warm_since_s is None:
            self.outcomes["refused"] += 1
            self._mesh.answer(source, Kind.SNAPSHOT_REFUSED)
            return
        self._asker = source
        self._asked.set()

    async def run(self) -> None:
        """Send the snapshots that peers request, one after another, until cancelled. Count each by
        its outcome, and log a failure.
        """
        while True:
            await self._asked.wait()
            self._asked.clear()
            assert self._asker is not None, "a request is pending"
            try:
                outcome = "sent" if await self._serve(self._asker) else "cut"
            except Exception:  # noqa: BLE001  The boundary of a task: the next request may succeed.
                now = time.monotonic()
                self._complaints.say(
                    "snapshot of shared state could not be created", now, exc_info=True
                )
                outcome = "failed"
            finally:
                self._asker = None
            self.outcomes[outcome] += 1

    async def _serve(self, asker: Source) -> bool:
        frames = self._exchange.snapshot(time.monotonic())
        while True:
            began_at_s = time.monotonic()
            frame = next(frames, None)
            made_s = time.monotonic() - began_at_s
            if frame is None:
                return await self._given(asker, Kind.SNAPSHOT_END, b"")
            if not await self._given(asker, Kind.SNAPSHOT_PART, frame):
                return False
            await asyncio.sleep(PAUSE_SHARE * made_s)

    async def _given(self, asker: Source, kind: Kind, frame: bytes) -> bool:
        """Send one message to the peer `asker` as soon as its queue has room. Return False if it
        had none, or if the peer was gone, for `STALL_S` seconds.
        """
        stalls_at_s = time.monotonic() + STALL_S
        while not self._mesh.answer(asker, kind, frame):
            if time.monotonic() >= stalls_at_s:
                return False
            await asyncio.sleep(POLL_S)
        return True
