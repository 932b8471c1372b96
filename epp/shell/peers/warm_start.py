"""A snapshot from one replica to another: who asks, and who answers.

A replica that starts asks the one that has been warm for longest, and if that one is busy or falls
silent another. A replica answers one at a time, a frame a turn of the loop, as fast as it is taken.
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
"""Replicas that start together do not all ask at the same moment."""
BUSY_S: Final = 0.05, 0.2
"""Drawn from evenly: when a peer that serves another is asked again."""
SILENCE_S: Final[Seconds] = 0.5
"""A peer that sends no part of a snapshot for so long is given up."""
STALL_S: Final[Seconds] = 5.0
"""A peer that takes no part of one for so long is given up."""
PAUSE_SHARE: Final = 4.0
"""So many times as long as a frame took to make we wait before the next."""


class WarmStart:
    """Asks; told by the pump what comes."""

    def __init__(self, mesh: Mesh, *, random: Random) -> None:
        self._mesh = mesh
        self._random = random
        self.asked: Link | None = None
        """Whose snapshot is coming."""
        self._heard_at_s: Seconds = 0.0
        self._ended = asyncio.Event()
        self._ending: Kind | None = None
        """How the last one ended."""
        self.discovered = asyncio.Event()
        """It was told once who the peers are; set from outside."""

    def expects(self, source: Source) -> bool:
        """Whether parts of a snapshot from `source` were asked for."""
        return self.asked is not None and source is self.asked

    def part(self, now: Seconds) -> None:
        self._heard_at_s = now

    def ended(self, ending: Kind) -> None:
        """`SNAPSHOT_END` or `SNAPSHOT_REFUSED`."""
        self._ending = ending
        self._ended.set()

    async def run(self, deadline_s: Seconds) -> bool:
        """Ask until somebody gave all, nobody is left, or it is `deadline_s`; whether all came."""
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
            # Who was busy is asked again, but after those who were not asked yet.
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
        """Take a snapshot of `origin`, whose frames we missed; whether it came in whole."""
        for link in self._mesh.up:
            if link.origin == origin and link.warm_s:
                return await self._take_from(link) is Kind.SNAPSHOT_END
        return False

    async def _take_from(self, link: Link) -> Kind | None:
        """How its snapshot ended, which may be after the deadline; None: it fell silent."""
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
    """Answers; `run` as a task."""

    def __init__(self, exchange: PeerExchange, mesh: Mesh, complaints: Complaints) -> None:
        self._exchange = exchange
        self._mesh = mesh
        self._complaints = complaints
        self._asker: Source | None = None
        self._asked = asyncio.Event()
        self.outcomes = {"sent": 0, "cut": 0, "refused": 0}
        """Snapshots that were asked for; "cut": the peer left, or took too long."""

    def wanted(self, source: Source) -> None:
        """`source` asks for a snapshot."""
        if self._asker is not None or self._mesh.warm_since_s is None:
            self.outcomes["refused"] += 1
            self._mesh.answer(source, Kind.SNAPSHOT_REFUSED)
            return
        self._asker = source
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            assert self._asker is not None, "somebody asked"
            try:
                whole = await self._serve(self._asker)
            except Exception:  # noqa: BLE001  a task's boundary: the next may be luckier
                now = time.monotonic()
                self._complaints.say("a snapshot could not be made", now, exc_info=True)
                whole = False
            finally:
                self._asker = None
            self.outcomes["sent" if whole else "cut"] += 1

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
        """Whether the asker took it, as soon as there is room."""
        stalls_at_s = time.monotonic() + STALL_S
        while not self._mesh.answer(asker, kind, frame):
            if time.monotonic() >= stalls_at_s:
                return False
            await asyncio.sleep(POLL_S)
        return True
