"""Replicas in one process: a fake of the core's exchange, and meshes on free ports of loopback."""

import asyncio
import contextlib
import os
import socket
import struct
import time
from random import Random

from epp.core.peers.exchange import Taken
from epp.flags.values import IpAddress
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.mesh import Mesh
from epp.shell.peers.pump import Pump
from epp.shell.peers.secret import answer_to, identity_of, stranger
from epp.shell.peers.state import Traffic
from epp.shell.peers.warm_start import SnapshotServer, WarmStart

LOOPBACK = IpAddress("127.0.0.1")
LOOPS = {"asyncio": asyncio.new_event_loop}
with contextlib.suppress(ImportError):
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop


class FakeExchange:
    """Exchange that keeps what it receives.

    It sends `told` at the next beat, and `known` is its snapshot.
    """

    def __init__(self, known=(), origin=None):
        self.origin = origin or os.urandom(8)
        self.told = []
        self.received = []
        self.origins = []
        """Origins of the `received` frames, in the same order."""
        self.snapshot_frames = []
        self.known = list(known)
        self.waiting = 0
        """Calls of `apply` until nothing is pending."""
        self.applied = 0
        self.ticks = 0
        self.beats = 0
        self.outcomes = {}
        """Outcome by frame, for frames that are not taken."""
        self.raises = False
        self.changes = []
        self.snapshots_wanted = set()
        self.peers = {}

    def outgoing(self, now):
        self.beats += 1
        if self.raises:
            raise RuntimeError("a defect of the core")
        told, self.told = self.told, []
        return told

    def receive(self, frame, now, origin):
        self.received.append(frame)
        self.origins.append(origin)
        return self.outcomes.get(frame, Taken.TAKEN)

    def receive_snapshot_frame(self, frame, now, age_s):
        self.snapshot_frames.append((frame, age_s))
        self.waiting += 1
        return Taken.TAKEN

    def goodbye(self, now):
        return b"goodbye"

    def pending(self):
        return self.waiting > 0

    def apply(self, now):
        self.waiting -= 1
        self.applied += 1

    def snapshot(self, now):
        yield from self.known

    def tick(self, now):
        self.ticks += 1


class Picker:
    """One replica: mesh, pump and snapshots, as `Peers` puts them together."""

    def __init__(self, secret=None, *, port=0, known=(), warm=True):
        self.identity = identity_of(secret) if secret else stranger()
        self.exchange = FakeExchange(known, self.identity.origin)
        self.traffic = Traffic()
        complaints = Complaints()
        self.mesh = Mesh(
            self.identity,
            self.traffic,
            address=LOOPBACK,
            port=port,
            complaints=complaints,
        )
        if warm:
            self.mesh.warm_since_s = time.monotonic()
        self.warm_start = WarmStart(self.mesh, random=Random(1))
        self.server = SnapshotServer(self.exchange, self.mesh, complaints)
        self.pump = Pump(
            self.exchange,
            self.mesh,
            self.traffic,
            complaints,
            warm_start=self.warm_start,
            server=self.server,
        )
        self._tasks = []

    @property
    def address(self):
        return f"127.0.0.1:{self.mesh.port}"

    async def __aenter__(self):
        self.mesh.open()
        self._tasks = [asyncio.create_task(run()) for run in (self.pump.run, self.server.run)]
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def stop(self):
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.mesh.close()
        await asyncio.to_thread(self.mesh.wait_closed)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    def knows(self, *others):
        self.mesh.connect({other.address for other in others})


@contextlib.asynccontextmanager
async def pickers(count, secret=None, **options):
    """Yield `count` replicas that know and answer each other."""
    async with contextlib.AsyncExitStack() as opened:
        made = [await opened.enter_async_context(Picker(secret, **options)) for _ in range(count)]
        for picker in made:
            picker.knows(*made)
        yield made


def message(kind, frame=b""):
    """Return a message as a connection carries it.

    `kind` is the letter of a kind of message, or any other bytes.
    """
    return struct.pack("<I", len(kind) + len(frame)) + kind + frame


def admitted(port, *, origin=None, host="127.0.0.1"):
    """Return a blocking socket that has passed the gate of a replica in plaintext.

    No replica is behind it.
    """
    connected = socket.create_connection(("127.0.0.1", port), 20, source_address=(host, 0))
    greeting = connected.recv(37, socket.MSG_WAITALL)
    connected.sendall(answer_to(greeting[5:], b""))
    if origin is not None:
        connected.sendall(message(b"H", origin + bytes(8)))
    return connected


@contextlib.asynccontextmanager
async def speaker(port, **given):
    """Yield a socket that is `admitted` by a replica on the same event loop."""
    with await asyncio.to_thread(admitted, port, **given) as connected:
        yield connected


def on(loop, coroutine):
    """Run `coroutine` on a new event loop of the kind that `loop` names."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(coroutine)
