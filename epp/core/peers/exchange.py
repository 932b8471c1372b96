"""One picker's part in the exchange with its peers, without I/O.

A shell sends the result of `outgoing` to every peer and passes arriving frames to `receive`. It
calls `apply` while there are records to learn, and `tick` now and then. Nothing here raises because
of a peer's message, and nothing waits for a peer: peers may be lost (design D16, D17).

**Sent.** A decision is sent as the keys of the shared indexes and a hash of the endpoint. The load
in flight is sent for endpoints where it changed, as absolute numbers; the end of a request is such
a change. A heartbeat contains the whole load. An origin that is silent for `SILENT_S_MAX`, or that
leaves, counts as having nothing in flight. Its shared prefixes and sessions stay and age like our
own.

**Missed frames.** Frames are numbered. A receiver that sees a gap requests the missing frames with
its heartbeat, also after a silence of up to `KEPT_S_MAX`. The sender repeats those that it still
keeps (`core/peers/retelling`). A receiver that requests in vain, or that missed more frames than it
requests, wants a snapshot (`snapshots_wanted`).

**Limits.** Per origin, the waiting bytes, the records per second and the remembered chains are
limited. So are the records per call, and the number of origins.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Final

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from epp.core.decision.inputs import PeersUnheard
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Floats, Ints
from epp.core.knowledge.index import CHAINED_KEY_BYTES, SharedIndex
from epp.core.peers.chain_book import ChainBook
from epp.core.peers.claims import claims_max
from epp.core.peers.frames import (
    KEYS_MAX,
    LOAD,
    LOADS_MAX,
    ORIGIN_BYTES,
    TOKENS,
    Frame,
    Key,
    Kind,
    OtherVersionError,
    Record,
    UnreadableMessageError,
    decode,
    encode,
    encode_record,
    endpoint_hash,
    index_hashes,
    loads_of,
)
from epp.core.peers.inbox import Inbox, Received
from epp.core.peers.queue_reports import QueueReports
from epp.core.peers.retelling import KEPT_S_MAX, MissedFrames, SentFrames
from epp.core.peers.token_reports import TokenReports
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

OUTGOING_INTERVAL_S: Final = 0.02
"""Interval in seconds at which a shell calls `PeerExchange.outgoing`."""
HEARTBEAT_S: Final = 1.0
SILENT_S_MAX: Final = 3 * HEARTBEAT_S
ORIGINS_MAX: Final = 64
RECORDS_PER_APPLY: Final = 64
"""Maximum number of records of peers processed in one call of `apply`, which takes half a
millisecond.
"""
RECORDS_PER_S_MAX: Final = 5_000
"""Maximum number of records per second that are processed of one peer, on average over several
seconds.
"""
RECORDS_PER_OUTGOING_MAX: Final = 1_000
FRAME_BYTES_TARGET: Final = 64 * 1024
CHAINS_BYTES_MAX: Final = 96 * 1024
"""Maximum size in bytes of the hash chains in one record for peers, which leaves space for short
keys below `RECORD_BYTES_MAX`.
"""
BOOK_BYTES_MAX: Final = 512 * 1024
FRAMES_LOST_MAX: Final = 1_000
"""Maximum number of frames of a peer that are counted as lost at one gap in their numbers, because
a peer may send any number.
"""
WANTED_MAX: Final = 1_024
"""Maximum number of frame ranges that a peer may request in one of its frames; more are ignored."""
CHANGES_MAX: Final = 2 * ORIGINS_MAX
BOOK_AGE_S: Final = 30.0
"""Time in seconds between two generations of the book of sent chains. After one to two of them, a
chain is sent whole again.
"""
RETELL_S_MIN: Final = 1.0
"""Minimum time in seconds between two resets of the book of sent chains that peers request."""


class Taken(StrEnum):
    """The result of receiving a frame from a peer: accepted, or the reason why not."""

    TAKEN = "taken"
    OWN = "own"
    """The frame names this picker as its origin, so that the picker sent it itself."""
    UNREADABLE = "unreadable"
    OTHER_VERSION = "other version"
    FOREIGN = "another origin"
    """The frame names another origin than that of the peer whose connection it came by."""
    AGAIN = "again"
    """The frame was received before, or was not missed here; it was repeated for other peers."""
    TOO_MANY = "too many origins"


class Peer(Struct):
    """The state of one other picker, which is identified by its origin, a random id."""

    origin: bytes
    inbox: Inbox
    heard_at_s: Seconds
    first_heard_at_s: Seconds
    uptime_s: Seconds = 0.0
    """Number of seconds for which the peer had been running when it sent its last frame."""
    number: int = 0
    """Number that the peer gave its last live frame."""
    frames: int = 0
    lost: int = 0
    """Number of frames of the peer that did not come in time, by the gaps in the numbers of its
    frames. Each gap counts as at most `FRAMES_LOST_MAX`.
    """
    claims_cut: int = 0
    """Number of the peer's load reports for one endpoint that exceeded the limits of
    `core/peers/claims` and were reduced to them.
    """
    allowance: float = RECORDS_PER_S_MAX
    """Number of the peer's records that may be processed now without exceeding `RECORDS_PER_S_MAX`."""
    allowed_at_s: Seconds = 0.0
    missed: MissedFrames = field(default_factory=MissedFrames)
    understood: bool = True
    """True if the peer has the same shared indexes as this picker; records of other indexes are
    ignored.
    """


class Change(Struct, frozen=True):
    """An event: a peer joined or left."""

    origin: bytes
    kind: str
    """Kind of change: "heard" if the peer is new, "returned", "left" with a goodbye, or "lost"
    after a silence.
    """
    silent_s: Seconds = 0.0
    """Time in seconds since the last frame of the peer at the time of the event."""


class PeerExchange:
    """The exchange of one picker with its peers: it creates frames to send and processes received
    ones.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        origin: bytes,
        now: Seconds,
        replicas: int = 1,
        has_peers: bool = True,
    ) -> None:
        """Create the exchange of the process `origin`, which is identified by 8 random bytes.

        `replicas` is the expected number of pickers; the scheduler is notified while fewer are
        known. Without `has_peers`, the exchange serves only snapshots, and collects nothing to
        send. Raises `ValueError` if `origin` has another length.
        """
        if len(origin) != ORIGIN_BYTES:
            raise ValueError(f"the origin has {len(origin)} bytes; it must have {ORIGIN_BYTES}")
        self.origin = origin
        self.peers: dict[bytes, Peer] = {}
        self._silent: dict[bytes, Peer] = {}
        """Peers that are silent and may return, by origin; the peer that fell silent last comes
        last.
        """
        self._sent = SentFrames()
        self.received = Received()
        self.restored = Received()
        """Numbers of the records of snapshots, by result, as `received` has them for the records of
        live frames.
        """
        self.records_sent = 0
        self.frames_lost = 0
        """Number of lost frames of all peers, including those that left; see `Peer.lost`."""
        self.frames_asked = 0
        """Number of missed frames that were requested again; a frame counts each time that it is
        requested.
        """
        self.frames_recovered = 0
        """Number of missed frames that came late, mostly because they were requested."""
        self.snapshots_wanted: set[bytes] = set()
        """Origins of peers that no longer store frames that were missed here, or of which too many
        frames were missed to request all. The caller removes an origin when it requests a snapshot.
        """
        self.changes: list[Change] = []
        """Peers that joined and left, oldest first, at most `CHANGES_MAX`. The caller empties the
        list after reading it.
        """
        self.claims_cut = 0
        """Number of reduced load reports of all peers, including those that left; see
        `Peer.claims_cut`.
        """
        self.replicas = replicas
        self._scheduler = scheduler
        self._queue = QueueReports(scheduler.state.shares)
        self._tokens = TokenReports()
        self._started_at_s = self._sent_at_s = now
        self._number = self._turn = 0
        self._beat_at_s: Seconds = -math.inf
        self._snapshot = Inbox(self.restored)
        self._book = ChainBook(BOOK_BYTES_MAX)
        self._book_aged_at_s = now
        self._book_cleared_at_s: Seconds = -math.inf
        self._generation = -1
        self._slots: dict[int, int] = {}
        """Slot of each endpoint of the pool, by the hash that stands for the endpoint in frames."""
        self._hashes: dict[int, int] = {}
        """Hash that stands for each endpoint of the pool in frames, by its slot."""
        self._shared: Mapping[str, SharedIndex] | None = None
        """The scheduler's shared indexes from which `_index_names`, `_index_hashes` and `_by_hash`
        were made; None before they are.
        """
        self._index_names: tuple[str, ...] = ()
        self._index_hashes: tuple[int, ...] = ()
        self._by_hash: dict[int, str] = {}
        self._sent_requests: Ints = np.zeros(0, dtype=np.int64)
        self._sent_tokens: Floats = np.zeros(0)
        if has_peers:
            scheduler.placements.tell_peers()
        self._count(now)

    @property
    def unheard(self) -> int:
        """Return how many of the other pickers that are expected in the pool send nothing at
        present.
        """
        return max(0, self.replicas - 1 - len(self.peers))

    def expect(self, replicas: int, now: Seconds) -> None:
        """Set the expected number of pickers of the pool, this one included, and report to the
        scheduler how many of them send nothing.
        """
        self.replicas = replicas
        self._count(now)

    # Sending.

    def outgoing(self, now: Seconds) -> list[bytes]:
        """Return the encoded frames to send to every peer now; often there are none.

        The call counts them as sent, and takes their records and requested repetitions from the
        queues. Call this every `OUTGOING_INTERVAL_S`.
        """
        beat = now >= self._beat_at_s + HEARTBEAT_S
        frames: list[Frame] = []
        records: list[bytes] = []
        size = 0
        self._read_indexes()
        indexes = self._index_hashes
        for record in self._records(now):
            if size + len(record) > FRAME_BYTES_TARGET and records:
                frames.append(self._frame(Kind.LIVE, now, indexes=indexes, records=records))
                records, size = [], 0
            records.append(record)
            size += len(record)
        load = tokens = b""
        if beat or self.peers:
            load = self._load(now, whole=beat)
            self._read_pool()
            columns = self._scheduler.pool.columns
            tokens = self._tokens.collect(columns, self._hashes, whole=beat)
        if records and size + len(load) + len(tokens) > FRAME_BYTES_TARGET:
            frames.append(self._frame(Kind.LIVE, now, indexes=indexes, records=records))
            records = []
        if self._queue.collect(whole=beat) or records or load or tokens or beat:
            last = self._frame(
                Kind.LIVE,
                now,
                indexes=indexes,
                records=records,
                load=load,
                whole=beat,
                unread=self._unread() if beat else (),
                wanted=self._wanted() if beat else (),
            )
            frames.append(replace(self._queue.added_to(last), tokens=tokens))
        if beat:
            self._beat_at_s = now
            frames += self._rest_of(frames[-1], now)
        if self.peers or self._silent:
            for frame in frames:
                self._sent.keep(frame, now)
        return [encode(frame) for frame in (*frames, *self._sent.again(now))]

    def _rest_of(self, beat: Frame, now: Seconds) -> Iterator[Frame]:
        """Yield frames with the load and tokens for which the heartbeat `beat` has no space, because
        peers count what a heartbeat does not contain as nothing.
        """
        columns = self._scheduler.pool.columns
        while (
            len(beat.load) == LOADS_MAX * LOAD.itemsize
            or len(beat.tokens) == LOADS_MAX * TOKENS.itemsize
        ):
            load = self._load(now, whole=False)
            frame = self._frame(Kind.LIVE, now, indexes=self._index_hashes, load=load)
            tokens = self._tokens.collect(columns, self._hashes, whole=False)
            beat = replace(frame, tokens=tokens)
            yield beat

    def goodbye(self, now: Seconds) -> bytes:
        """Return the encoded frame that tells peers that this picker leaves and has nothing in
        flight.
        """
        return encode(self._frame(Kind.GOODBYE, now))

    def snapshot(self, now: Seconds) -> Iterator[bytes]:
        """Yield encoded frames with all content of the shared indexes, oldest first within each
        index; each takes about 1 ms.

        Live frames may be sent in between.
        """
        self._read_pool()
        self._read_indexes()
        for name, hashed in zip(self._index_names, self._index_hashes, strict=True):
            hashes = (hashed,)
            book = ChainBook(BOOK_BYTES_MAX)
            records: list[bytes] = []
            size = 0
            for slot, stamp, keys in self._scheduler.indexes.shared_entries(name):
                endpoint = self._hashes.get(slot)
                if endpoint is None:
                    continue
                age_ms = max(0, round((now - stamp) * 1000))
                spelt = _spelt(keys, book, CHAINS_BYTES_MAX)
                record = encode_record(Record(endpoint, age_ms, (spelt,)))
                records.append(record)
                size += len(record)
                if size > FRAME_BYTES_TARGET or len(records) == RECORDS_PER_APPLY:
                    frame = self._frame(Kind.SNAPSHOT, now, indexes=hashes, records=records)
                    yield encode(frame)
                    records, size = [], 0
            if records:
                frame = self._frame(Kind.SNAPSHOT, now, indexes=hashes, records=records)
                yield encode(frame)

    # Receiving.

    def receive(self, message: bytes, now: Seconds, origin: bytes) -> Taken:
        """Process a frame of a peer, and return whether it was accepted, or why not.

        A live frame updates the peer's load and queue reports, and its records are queued for
        `apply`; an unknown sender becomes a peer. Of a live frame that comes late, only the records
        count. A goodbye removes the peer. A snapshot frame is unreadable here. `origin` is the
        origin that may use the connection by which the frame came.
        """
        frame = _read(message)
        if isinstance(frame, Taken):
            return frame
        if frame.origin == self.origin:
            return Taken.OWN
        if frame.origin != origin:
            return Taken.FOREIGN
        if frame.kind == Kind.GOODBYE:
            self._leave(frame.origin, now)
            return Taken.TAKEN
        return self._take(frame, now) if frame.kind == Kind.LIVE else Taken.UNREADABLE

    def _take(self, frame: Frame, now: Seconds) -> Taken:
        peer = self._peer(frame.origin, now)
        if peer is None:
            return Taken.TOO_MANY
        peer.heard_at_s = now
        peer.uptime_s = frame.uptime_s
        peer.frames += 1
        self._read_indexes()
        peer.understood = set(self._index_hashes) == set(frame.indexes)
        if frame.number > peer.number:
            gap = frame.number - peer.number - 1 if peer.number else 0
            if gap:
                peer.missed.add(peer.number + 1, frame.number - 1)
            lost = min(gap, FRAMES_LOST_MAX)
            peer.lost += lost
            self.frames_lost += lost
            peer.number = frame.number
            peer.inbox.put(frame, now)
            # A late frame reports a past load.
            self._take_load(peer, frame, now)
            self._take_tokens(peer, frame, now)
            if self._queue.take(frame) and self._scheduler.changed is not None:
                # Requests of the peer may have ended, which makes room for waiting ones.
                self._scheduler.changed()
        elif peer.missed.came(frame.number):
            self.frames_recovered += 1
            peer.inbox.put(frame, now, _age_s(frame))
        else:
            return Taken.AGAIN
        for origin, first, last in frame.wanted[:WANTED_MAX]:
            if origin == self.origin:
                self._sent.want(first, last)
        if self.origin in frame.unread and now >= self._book_cleared_at_s + RETELL_S_MIN:
            self._book_cleared_at_s = now
            self._book.clear()
        return Taken.TAKEN

    def receive_snapshot_frame(self, message: bytes, now: Seconds, age_s: Seconds) -> Taken:
        """Queue the records of a snapshot frame for `apply`. Any peer made the snapshot `age_s`
        seconds ago. Return whether the frame was accepted, or why not.
        """
        frame = _read(message)
        if isinstance(frame, Taken):
            return frame
        if frame.kind != Kind.SNAPSHOT:
            return Taken.UNREADABLE
        self._snapshot.put(frame, now, age_s)
        return Taken.TAKEN

    def pending(self) -> bool:
        """Return whether received records are queued, so that `apply` must be called."""
        return bool(self._snapshot) or any(peer.inbox for peer in self.peers.values())

    def apply(self, now: Seconds) -> None:
        """Process at most `RECORDS_PER_APPLY` queued records of one origin; the next call continues
        with the next origin.

        If the origin exceeds `RECORDS_PER_S_MAX`, its oldest queued frame is dropped instead. Live
        records come before those of a snapshot.
        """
        waiting = [peer for peer in self.peers.values() if peer.inbox]
        if not waiting:
            self._learn_from(self._snapshot, RECORDS_PER_APPLY, now)
            return
        self._turn += 1
        peer = waiting[self._turn % len(waiting)]
        elapsed_s = max(0.0, now - peer.allowed_at_s)
        peer.allowed_at_s = now
        peer.allowance = min(RECORDS_PER_S_MAX, peer.allowance + elapsed_s * RECORDS_PER_S_MAX)
        if peer.allowance < 1.0:
            peer.inbox.drop_first()
            self.received.over_rate += 1
            return
        records_max = min(RECORDS_PER_APPLY, int(peer.allowance))
        peer.allowance -= self._learn_from(peer.inbox, records_max, now)

    def _learn_from(self, inbox: Inbox, records_max: int, now: Seconds) -> int:
        self._read_pool()
        self._read_indexes()
        return inbox.apply(records_max, self._scheduler, self._slots, self._by_hash, now)

    def tick(self, now: Seconds) -> None:
        """Remove peers that sent nothing for `SILENT_S_MAX`, with their load and queue reports.
        Forget them after `KEPT_S_MAX`, or if more than `ORIGINS_MAX` are silent. Forget old chains
        that were sent to peers. Call this about once a second.
        """
        for peer in tuple(self.peers.values()):
            if now - peer.heard_at_s > SILENT_S_MAX:
                self._forget(peer.origin, now)
                self._silent[peer.origin] = peer
                self._note(peer, "lost", now)
        for peer in tuple(self._silent.values()):
            if now - peer.heard_at_s > KEPT_S_MAX or len(self._silent) > ORIGINS_MAX:
                del self._silent[peer.origin]
        if now - self._book_aged_at_s > BOOK_AGE_S:
            self._book_aged_at_s = now
            self._book.age()
            if not self._snapshot:
                # A new inbox also drops the book of chains, which is no longer needed.
                self._snapshot = Inbox(self.restored)

    def _peer(self, origin: bytes, now: Seconds) -> Peer | None:
        peer = self.peers.get(origin)
        if peer is None:
            if len(self.peers) >= ORIGINS_MAX:
                return None
            peer = self._silent.pop(origin, None)
            if peer is None:
                peer = Peer(
                    origin,
                    Inbox(self.received),
                    heard_at_s=now,
                    first_heard_at_s=now,
                    allowed_at_s=now,
                )
                self._note(peer, "heard", now)
            else:
                self._note(peer, "returned", now)
            self.peers[origin] = peer
            # The new peer knows none of the chains that were sent before.
            self._book.clear()
            self._count(now)
        return peer

    def _count(self, now: Seconds) -> None:
        self._queue.count(len(self.peers))
        self._scheduler.take(PeersUnheard(self.unheard), now)

    def _note(self, peer: Peer, kind: str, now: Seconds) -> None:
        self.changes.append(Change(peer.origin, kind, now - peer.heard_at_s))
        del self.changes[:-CHANGES_MAX]

    def _leave(self, origin: bytes, now: Seconds) -> None:
        """Remove a peer that sent a goodbye, and its load in flight."""
        peer = self.peers.get(origin) or self._silent.pop(origin, None)
        if peer is not None:
            self._forget(origin, now)
            self._note(peer, "left", now)

    def _forget(self, origin: bytes, now: Seconds) -> None:
        self.peers.pop(origin, None)
        self._count(now)
        loads = self._scheduler.pool.columns.peers
        if loads is not None:
            loads.forget(origin)
        self._queue.forget(origin)

    def _take_load(self, peer: Peer, frame: Frame, now: Seconds) -> None:
        loads = self._scheduler.pool.columns.peers
        if loads is None or not (frame.load or frame.whole):
            return
        self._read_pool()
        told = loads_of(frame.load)
        found = [self._slots.get(endpoint, -1) for endpoint in told["endpoint"].tolist()]
        at = np.array(found, dtype=np.int64)
        known = at >= 0
        slots = at[known]
        requests = told["requests"][known].astype(np.int64)
        tokens = np.nan_to_num(told["prefill_tokens"][known].astype(np.float64))
        requests_max, tokens_max = claims_max(self._scheduler.pool.columns, slots, now)
        cut = int(((requests > requests_max) | (tokens > tokens_max)).sum())
        peer.claims_cut += cut
        self.claims_cut += cut
        loads.tell(
            frame.origin,
            slots,
            np.minimum(requests, requests_max),
            np.minimum(tokens, tokens_max),
            now,
            whole=frame.whole,
            size=len(self._scheduler.pool.columns),
        )

    def _take_tokens(self, peer: Peer, frame: Frame, now: Seconds) -> None:
        if frame.tokens or frame.whole:
            self._read_pool()
            columns = self._scheduler.pool.columns
            cut = self._tokens.take(columns, self._slots, frame, now)
            peer.claims_cut += cut
            self.claims_cut += cut

    # Content of frames.

    def _frame(
        self,
        kind: Kind,
        now: Seconds,
        *,
        indexes: tuple[int, ...] = (),
        records: list[bytes] | None = None,
        load: bytes = b"",
        whole: bool = False,
        unread: tuple[bytes, ...] = (),
        wanted: tuple[tuple[bytes, int, int], ...] = (),
    ) -> Frame:
        number = 0
        if kind is Kind.LIVE:
            number = self._number = self._number + 1
        uptime_s = now - self._started_at_s
        blob = b"".join(records or ())
        return Frame(
            origin=self.origin,
            number=number,
            kind=kind,
            uptime_s=uptime_s,
            indexes=indexes,
            records=blob,
            load=load,
            whole=whole,
            unread=unread,
            wanted=wanted,
        )

    def _records(self, now: Seconds) -> Iterator[bytes]:
        """Yield the encoded records of the decisions that were not sent yet, at most
        `RECORDS_PER_OUTGOING_MAX`. Decisions are dropped while no peer is present or may return.
        """
        sent = self._scheduler.placements.sent
        if not sent:
            return
        if not self.peers and not self._silent:
            # No peer is present or may return; a new peer requests a snapshot.
            sent.clear()
            return
        self._read_pool()
        bytes_max = CHAINS_BYTES_MAX // max(1, len(self._index_names))
        for _ in range(min(len(sent), RECORDS_PER_OUTGOING_MAX)):
            decided = sent.popleft()
            endpoint = self._hashes.get(decided.slot)
            if endpoint is None:
                continue
            keys = tuple(
                ()
                if name in decided.left_out
                else _spelt(
                    self._scheduler.indexes.share(name, decided.request), self._book, bytes_max
                )
                for name in self._index_names
            )
            if not any(keys):
                continue
            age_ms = max(0, round((now - decided.at_s) * 1000))
            self.records_sent += 1
            yield encode_record(Record(endpoint, age_ms, keys))

    def _load(self, now: Seconds, *, whole: bool) -> bytes:
        """Return the load that this picker has in flight, as an array of `LOAD`: at each endpoint
        where it differs from the load last sent or, if `whole`, at each endpoint where there is
        any, up to `LOADS_MAX` endpoints. Their load then counts as sent.
        """
        scheduler = self._scheduler
        columns = scheduler.pool.columns
        n = len(columns)
        speed = columns.prefill_drain_tokens_per_s[:n]
        if len(self._sent_requests) < n:
            more = n - len(self._sent_requests)
            self._sent_requests = np.concatenate((self._sent_requests, np.zeros(more, np.int64)))
            self._sent_tokens = np.concatenate((self._sent_tokens, np.zeros(more)))
        requests = columns.inflight_requests[:n]
        elapsed_s = now - columns.prefill_drained_at_s[:n]
        tokens = np.maximum(columns.prefill_backlog_tokens[:n] - elapsed_s * speed, 0.0)
        expected = np.maximum(self._sent_tokens[:n] - (now - self._sent_at_s) * speed, 0.0)
        self._sent_at_s = now
        if whole:
            # Peers forget what is not in a whole load.
            self._sent_requests[:n] = expected[:] = 0
            told = (requests > 0) | (tokens > 0)
        else:
            told = (requests != self._sent_requests[:n]) | (np.abs(tokens - expected) > 1.0)
        slots = told.nonzero()[0][:LOADS_MAX]
        self._sent_tokens[:n] = expected
        self._sent_requests[slots] = requests[slots]
        self._sent_tokens[slots] = tokens[slots]
        if not len(slots):
            return b""
        self._read_pool()
        found = np.zeros(len(slots), dtype=LOAD)
        found["endpoint"] = [self._hashes.get(slot, 0) for slot in slots.tolist()]
        found["requests"] = requests[slots]
        found["prefill_tokens"] = tokens[slots]
        return found.tobytes()

    def _wanted(self) -> tuple[tuple[bytes, int, int], ...]:
        """Return the frames of peers that were missed here and must be requested now, as (origin,
        first number, last number), and count these requests.

        A peer of which frames were given up is added to `snapshots_wanted`.
        """
        found: list[tuple[bytes, int, int]] = []
        for peer in self.peers.values():
            if not peer.missed:
                continue
            asked, given_up = peer.missed.asked()
            if given_up:
                self.snapshots_wanted.add(peer.origin)
            self.frames_asked += sum(last - first + 1 for first, last in asked)
            found += [(peer.origin, first, last) for first, last in asked]
        return tuple(found)

    def _unread(self) -> tuple[bytes, ...]:
        """Return the origins of peers that sent a part of an unknown chain since the last call,
        which is that of the last heartbeat.
        """
        lost = [peer for peer in self.peers.values() if peer.inbox.chain_lost]
        for peer in lost:
            peer.inbox.chain_lost = False
        return tuple(peer.origin for peer in lost)

    def _read_pool(self) -> None:
        pool = self._scheduler.pool
        if pool.generation != self._generation:
            self._generation = pool.generation
            self._hashes = {slot: endpoint_hash(at) for slot, at in pool.endpoints()}
            self._slots = {found: slot for slot, found in self._hashes.items()}

    def _read_indexes(self) -> None:
        """Read the signature of each shared index again if the indexes changed. An index that fails
        to return its signature is not shared.
        """
        indexes = self._scheduler.indexes
        if indexes.shared is self._shared:
            return
        self._shared = indexes.shared
        signatures = indexes.signatures()
        self._index_names = tuple(signatures)
        self._index_hashes = index_hashes(signatures.values())
        self._by_hash = dict(zip(self._index_hashes, self._index_names, strict=True))


def _read(message: bytes) -> Frame | Taken:
    """Return the decoded frame in `message` of a peer, or the reason why it cannot be read."""
    try:
        return decode(message)
    except OtherVersionError:
        return Taken.OTHER_VERSION
    except UnreadableMessageError:
        return Taken.UNREADABLE


def _age_s(frame: Frame) -> Seconds:
    """Return the age in seconds of `frame` if it is a repeated frame, and 0 for another frame. An
    invalid age counts as the largest possible one.
    """
    return frame.age_s if 0.0 <= frame.age_s <= KEPT_S_MAX else KEPT_S_MAX


def _spelt(keys: Iterable[bytes], book: ChainBook, bytes_max: int) -> tuple[Key, ...]:
    """Return the first `KEYS_MAX` of `keys` as they are sent to peers: without the beginnings of
    hash chains that `book` contains. The new parts are cut to `bytes_max` in total, and added to
    `book`.
    """
    found: list[Key] = []
    for key in islice(keys, KEYS_MAX):
        if len(key) <= CHAINED_KEY_BYTES:
            found.append(key)
            continue
        known = book.known(key)
        if len(key) - known > bytes_max:
            key = key[: known + bytes_max // HASH_BYTES * HASH_BYTES]  # noqa: PLW2901  the head of a chain is valid too
        bytes_max -= len(key) - known
        book.note(key, known)
        found.append((key[known - HASH_BYTES : known], key[known:]) if known else key)
    return tuple(found)
