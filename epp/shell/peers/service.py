"""The connection of a picker with its other replicas: discovery, transport, warm start and
shutdown.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, Self
from zlib import crc32

import structlog
from msgspec import structs

from epp.core.address import address_of
from epp.core.peers.exchange import PeerExchange
from epp.core.types import Seconds
from epp.flags.serve import ServeFlags
from epp.shell.peers.addresses import Addresses
from epp.shell.peers.broker import Broker, broker_url
from epp.shell.peers.carrier import Carrier
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.mesh import Mesh
from epp.shell.peers.pump import Pump
from epp.shell.peers.secret import Identity
from epp.shell.peers.snapshot_file import SnapshotFile
from epp.shell.peers.state import PeerRow, PeersSnapshot, Traffic
from epp.shell.peers.warm_start import SnapshotServer, WarmStart
from epp.shell.supervision import Loop, forever

CATCH_UP_S: Final[Seconds] = 30.0
"""Interval in seconds at which, after the start, a snapshot is requested from a peer whose frames
were missed.
"""

_log = structlog.get_logger(__name__)


class Peers:
    """An async context manager that shares state with the other replicas and owns the peer port.
    Its `loops` must run as tasks.

    Without a command-line flag of the group "Replicas" it does nothing. `endpoints_known` starts
    the warm start, because state of unknown endpoints would be dropped. `ready` tells when the warm
    start is over.
    """

    def __init__(
        self,
        flags: ServeFlags,
        exchange: PeerExchange,
        *,
        identity: Identity,
        on_ready: Callable[[], None],
        on_snapshot: Callable[[str, Seconds], None],
        seed: int,
    ) -> None:
        """Create the connection with the replicas. The origins of `identity` and `exchange` must be
        equal. `on_ready` is called when the warm start is over.

        `on_snapshot` receives the source of a complete snapshot and its duration in seconds. Raises
        `StartError`.
        """
        self._flags = flags
        self._exchange = exchange
        self._on_ready = on_ready
        self._on_snapshot = on_snapshot
        self._traffic = Traffic()
        self._complaints = Complaints()
        random = Random(f"{seed}:peers")  # noqa: S311  jitter, not secrets
        self._mesh: Mesh | None = None
        self._warm_start: WarmStart | None = None
        self._server: SnapshotServer | None = None
        self._broker: Broker | None = None
        if flags.meshes:
            self._mesh = Mesh(
                identity,
                self._traffic,
                address=flags.peer_bind_address,
                port=flags.peer_port,
                complaints=self._complaints,
            )
            self._warm_start = WarmStart(self._mesh, random=random)
            self._server = SnapshotServer(exchange, self._mesh, self._complaints)
        elif url := broker_url(flags.peer_url, flags.peer_url_file):
            self._broker = Broker(
                url, _pool_name(flags), exchange, self._traffic, self._complaints, random=random
            )
        carrier: Carrier | None = self._mesh or self._broker
        self._carrier = carrier
        self._pump: Pump | None = None
        if carrier is not None:
            self._pump = Pump(
                exchange,
                carrier,
                self._traffic,
                self._complaints,
                warm_start=self._warm_start,
                server=self._server,
            )
        self._file: SnapshotFile | None = None
        if flags.snapshot_dir:
            self._file = SnapshotFile(flags.snapshot_dir, exchange, self._complaints)
        self._endpoints_known = asyncio.Event()
        self._taken = {"whole": 0, "none": 0}
        self._own: Final = address_of(flags.own_address, flags.peer_port)
        self.ready = not self.enabled
        """True once the warm start is over, so that no further state is awaited before the picker
        serves.
        """

    @property
    def enabled(self) -> bool:
        """True if this picker shares state with other replicas or has a snapshot file."""
        return self._carrier is not None or self._file is not None

    @property
    def known(self) -> int:
        """Number of other known replicas, including those that do not answer."""
        return 0 if self._carrier is None else self._carrier.known

    @property
    def answering(self) -> int:
        """Number of other replicas that answer."""
        return 0 if self._carrier is None else self._carrier.answering

    async def __aenter__(self) -> Self:
        """Listen on the peer port. Raises `StartError` if the port is unavailable."""
        if self._mesh is not None:
            self._mesh.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Save the snapshot file if the warm start was over, and send the last frames to peers over
        direct connections. The loops must have ended.
        """
        if self._file is not None and self.ready:
            await self._file.save_last()
        if self._mesh is not None and self._pump is not None:
            self._pump.last()
            self._mesh.close()
            await asyncio.to_thread(self._mesh.wait_closed)

    def loops(self) -> dict[str, Loop]:
        """Return the coroutines that must run until the end, by the names of their tasks."""
        loops: dict[str, Loop] = {}
        if self.enabled:
            loops["peers: warm start"] = self._start_warm
        if self._pump is not None:
            loops["peers: pump"] = self._pump.run
        if self._warm_start is not None:
            loops["peers: catching up"] = partial(self._catch_up, self._warm_start)
        if self._server is not None:
            loops["peers: snapshots"] = self._server.run
        if self._broker is not None:
            loops["peers: broker"] = self._broker.run
        flags = self._flags
        if flags.peers or (flags.peer_service and flags.endpoints_file):
            loops["peers: addresses"] = Addresses(flags.peer_targets, self.discovered).run
        return loops

    def discovered(self, addresses: frozenset[str]) -> None:
        """Replace the addresses of the replicas, "ip:port" each. They may include this replica's
        own address.
        """
        if self._mesh is None or self._warm_start is None:
            return
        self._mesh.connect(addresses - {self._own})
        self._warm_start.discovered.set()
        _log.info("replicas discovered", peers=self._mesh.known)

    def endpoints_known(self) -> None:
        """Note that the endpoints are known now, which begins the warm start."""
        self._endpoints_known.set()

    # The methods below implement the warm start.

    async def _start_warm(self) -> None:
        """Do the warm start, then let other replicas get snapshots from this one and save the
        snapshot file periodically.

        A restart of this task skips the warm start if it is over.
        """
        if not self.ready:
            await self._warm_up()
        if self._mesh is not None and self._mesh.warm_since_s is None:
            self._mesh.warm_since_s = time.monotonic()
        if self._file is not None:
            await self._file.run()
        await forever()

    async def _warm_up(self) -> None:
        await self._endpoints_known.wait()
        if self._pump is not None:
            self._pump.hurries = True
        taking = asyncio.create_task(self._take_snapshots(), name="peers: snapshot")
        try:
            await asyncio.wait({taking}, timeout=float(self._flags.peer_snapshot_timeout))
            self._over()
            await taking
        finally:
            taking.cancel()

    async def _catch_up(self, warm_start: WarmStart) -> None:
        """Periodically request a snapshot from a peer, if frames of that peer were missed and it
        can no longer send them again. Count the result.
        """
        wanted = self._exchange.snapshots_wanted
        while True:
            await asyncio.sleep(CATCH_UP_S)
            if self.ready and wanted:
                began_at_s = time.monotonic()
                whole = await warm_start.again(wanted.pop())
                self._taken["whole" if whole else "none"] += 1
                if whole:
                    self._on_snapshot("peer", time.monotonic() - began_at_s)

    async def _take_snapshots(self) -> None:
        """Do the warm start: load the snapshot file, then a snapshot from a replica or from the
        broker. Count and log the result.
        """
        began_at_s = time.monotonic()
        try:
            if self._file is not None and await self._file.load():
                self._on_snapshot("file", time.monotonic() - began_at_s)
            deadline_s = began_at_s + float(self._flags.peer_snapshot_timeout)
            whole = False
            if self._warm_start is not None:
                whole = await self._warm_start.run(deadline_s)
            elif self._broker is not None:
                whole = await self._broker.first_snapshot()
        except Exception:  # noqa: BLE001  The boundary of a task: the picker then starts cold.
            self._complaints.say(
                "no snapshot of shared state could be loaded", time.monotonic(), exc_info=True
            )
            return
        if self._carrier is None:
            return
        self._taken["whole" if whole else "none"] += 1
        if whole:
            self._on_snapshot(
                "peer" if self._mesh is not None else "broker", time.monotonic() - began_at_s
            )
        _log.info("warm start complete", whole=whole, peers=self._carrier.answering)

    def _over(self) -> None:
        if self._pump is not None:
            self._pump.hurries = False
        self.ready = True
        self._on_ready()

    # The methods below are for operators.

    def rows(self) -> list[PeerRow]:
        """Return one row per peer for operators: the carrier's row with the exchange's counts of
        lost frames and of reduced load reports.
        """
        if self._carrier is None:
            return []
        known = {peer.origin.hex()[:8]: peer for peer in self._exchange.peers.values()}
        return [
            row
            if (peer := known.get(row.origin)) is None
            else structs.replace(row, lost=peer.lost, claims_cut=peer.claims_cut)
            for row in self._carrier.rows(time.monotonic())
        ]

    def snapshot(self) -> PeersSnapshot:
        carrier, traffic = self._carrier, self._traffic
        kept = {
            "taken": self._taken if carrier is not None else {},
            "given": self._server.outcomes if self._server is not None else {},
            "file": self._file.outcomes if self._file is not None else {},
            "broker": self._broker.outcomes if self._broker is not None else {},
        }
        return PeersSnapshot(
            known=0 if carrier is None else carrier.known,
            frames=dict(traffic.frames),
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            failures=dict(traffic.failures),
            snapshots={
                (what, outcome): count
                for what, outcomes in kept.items()
                for outcome, count in outcomes.items()
            },
        )


def _pool_name(flags: ServeFlags) -> str:
    """Return the name under which the replicas of this pool share state: the namespace, and the
    pool's name or a hash of the label selector.
    """
    pool = flags.pool_name or f"{crc32(flags.endpoint_selector.encode()):08x}"
    return f"{flags.own_namespace}/{pool}"
