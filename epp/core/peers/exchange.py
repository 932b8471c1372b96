"""One picker among its peers, without I/O: what it tells them, and what it takes from them.

A shell sends what `outgoing` returns to every peer, hands in what arrives by `receive`, and calls
`apply` while there is something to learn and `tick` now and then. Nothing here raises because of
what a peer says, and nothing waits for one: peers are losable (design D16, D17).

**What is told.** Each decision as the keys of the shared indexes and a hash of the endpoint; and how
much we have in flight at the endpoints where that has changed, as absolute numbers. The end of a
request is such a change. A heartbeat tells all of it. An origin that is silent for `SILENT_S_MAX`,
or says goodbye, has nothing in flight any more; what it told of prefixes and sessions stays, and
grows old like our own.

**What was missed.** Frames are numbered. Who sees a gap asks for it with its heartbeat, also after a
silence of up to `KEPT_S_MAX`, and is told again what is still kept (`core/peers/retelling`); who
asks in vain wants a snapshot (`snapshots_wanted`).

**What is taken.** Bounded: per origin in bytes that wait, in records a second and in chains that are
remembered; per call in records; and in origins.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Final

import numpy as np
from msgspec import Struct, field

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
    Frame,
    Key,
    Kind,
    OtherVersionError,
    Record,
    UnreadableError,
    decode,
    encode,
    encode_record,
    endpoint_hash,
    index_hashes,
    loads_of,
)
from epp.core.peers.inbox import Inbox, Received
from epp.core.peers.retelling import KEPT_S_MAX, MissedFrames, SentFrames
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

OUTGOING_INTERVAL_S: Final = 0.02
"""How often a shell asks for what is to be sent."""
HEARTBEAT_S: Final = 1.0
SILENT_S_MAX: Final = 3 * HEARTBEAT_S
ORIGINS_MAX: Final = 64
RECORDS_PER_APPLY: Final = 64
"""Learnt in one call: half a millisecond."""
RECORDS_PER_S_MAX: Final = 5_000
"""Learnt of one origin."""
RECORDS_PER_OUTGOING_MAX: Final = 1_000
FRAME_BYTES_TARGET: Final = 64 * 1024
CHAINS_BYTES_MAX: Final = 96 * 1024
"""Of the chains in one record, which leaves room for short keys below `RECORD_BYTES_MAX`."""
BOOK_BYTES_MAX: Final = 512 * 1024
FRAMES_LOST_MAX: Final = 1_000
"""Counted at one gap in the numbers of an origin: in `SILENT_S_MAX`, after which it is forgotten,
an honest one sends far fewer."""
WANTED_MAX: Final = 1_024
"""Ranges in one frame that are looked at."""
CHANGES_MAX: Final = 2 * ORIGINS_MAX
BOOK_AGE_S: Final = 30.0
"""A chain is told whole again after one to two of these."""
RETELL_S_MIN: Final = 1.0
"""Chains are told whole at the wish of peers no more often than this."""


class Taken(StrEnum):
    """What became of a frame."""

    TAKEN = "taken"
    OWN = "own"
    """It is our own."""
    UNREADABLE = "unreadable"
    OTHER_VERSION = "other version"
    FOREIGN = "another origin"
    """It came by the connection of another than it names."""
    AGAIN = "again"
    """It was taken before, or was not missed: others asked for it."""
    TOO_MANY = "too many origins"


class Peer(Struct):
    """What is known of one origin."""

    origin: bytes
    inbox: Inbox
    heard_at_s: Seconds
    first_heard_at_s: Seconds
    uptime_s: Seconds = 0.0
    """When it was heard last, for how long it had run."""
    number: int = 0
    """Of its last live frame."""
    frames: int = 0
    lost: int = 0
    """Frames that its numbers say were sent and did not come, or came late."""
    claims_cut: int = 0
    """Of its load at an endpoint: more than can be true by `core/peers/claims`."""
    allowance: float = RECORDS_PER_S_MAX
    """Records that may be learnt of it now."""
    allowed_at_s: Seconds = 0.0
    missed: MissedFrames = field(default_factory=MissedFrames)
    understood: bool = True
    """Its indexes are like ours; of others that it has nothing is learnt."""


class Change(Struct, frozen=True):
    """A peer came, or is gone."""

    origin: bytes
    kind: str
    """ "heard": for the first time; "returned"; "left": it said goodbye; "lost": it fell silent."""
    silent_s: Seconds = 0.0
    """For how long nothing was heard of it."""


class PeerExchange:
    """One picker's side of the talk among peers."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        origin: bytes,
        now: Seconds,
        replicas: int = 1,
        has_peers: bool = True,
    ) -> None:
        """`origin`: 8 random bytes that stand for this process among its peers.

        `replicas`: how many pickers there should be; while fewer are heard, the scheduler knows.
        Without `has_peers` it is for snapshots alone, and nothing is gathered to be told.
        """
        if len(origin) != ORIGIN_BYTES:
            raise ValueError(f"an origin has {ORIGIN_BYTES} bytes, this one {len(origin)}")
        self.origin = origin
        self.peers: dict[bytes, Peer] = {}
        self._silent: dict[bytes, Peer] = {}
        """Those that fell silent and may come back, who was heard last is last."""
        self._sent = SentFrames()
        self.received = Received()
        self.restored = Received()
        """What `received` is for live frames, for those of snapshots."""
        self.records_sent = 0
        self.frames_lost = 0
        """Of all origins, those that left included; see `Peer.lost`."""
        self.frames_asked = 0
        """Frames that were asked for again; more than once, where they did not come."""
        self.frames_recovered = 0
        """Frames that came late, mostly because they were asked for."""
        self.snapshots_wanted: set[bytes] = set()
        """Origins that no longer keep what we missed; whoever takes a snapshot of one removes it."""
        self.changes: list[Change] = []
        """Who came and went, oldest first, at most `CHANGES_MAX`; whoever reads this empties it."""
        self.claims_cut = 0
        """As above; see `Peer.claims_cut`."""
        self.replicas = replicas
        self._scheduler = scheduler
        self._started_at_s = now
        self._number = 0
        self._beat_at_s: Seconds = -math.inf
        self._snapshot = Inbox(self.restored)
        self._book = ChainBook(BOOK_BYTES_MAX)
        self._book_aged_at_s = now
        self._book_cleared_at_s: Seconds = -math.inf
        self._generation = -1
        self._slots: dict[int, int] = {}
        """Hash of an endpoint -> its slot."""
        self._hashes: dict[int, int] = {}
        """The reverse."""
        self._shared: Mapping[str, SharedIndex] | None = None
        """That of the scheduler when the following were read of it."""
        self._index_names: tuple[str, ...] = ()
        self._index_hashes: tuple[int, ...] = ()
        self._by_hash: dict[int, str] = {}
        self._sent_requests: Ints = np.zeros(0, dtype=np.int64)
        self._sent_tokens: Floats = np.zeros(0)
        self._sent_at_s = now
        self._turn = 0
        if has_peers:
            scheduler.tell_peers()
        self._count(now)

    @property
    def unheard(self) -> int:
        """How many of the other pickers that there should be are not heard."""
        return max(0, self.replicas - 1 - len(self.peers))

    def expect(self, replicas: int, now: Seconds) -> None:
        """So many pickers there should be."""
        self.replicas = replicas
        self._count(now)

    # What is told.

    def outgoing(self, now: Seconds) -> list[bytes]:
        """Frames for every peer, to be asked for every `OUTGOING_INTERVAL_S`; often none."""
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
        load = self._load(now, whole=beat) if beat or self.peers else b""
        if records or load or beat:
            frames.append(
                self._frame(
                    Kind.LIVE,
                    now,
                    indexes=indexes,
                    records=records,
                    load=load,
                    whole=beat,
                    unread=self._unread() if beat else (),
                    wanted=self._wanted() if beat else (),
                )
            )
        if beat:
            self._beat_at_s = now
        if self.peers or self._silent:
            for frame in frames:
                self._sent.keep(frame, now)
        return [encode(frame) for frame in (*frames, *self._sent.again(now))]

    def goodbye(self, now: Seconds) -> bytes:
        """The last frame: what we have in flight is ours no more."""
        return encode(self._frame(Kind.GOODBYE, now))

    def snapshot(self, now: Seconds) -> Iterator[bytes]:
        """Frames of all that is known, oldest first within each index; each takes about 1 ms.

        Live frames may be sent between them.
        """
        self._read_pool()
        self._read_indexes()
        for name, hashed in zip(self._index_names, self._index_hashes, strict=True):
            index = self._scheduler.shared.get(name)
            if index is None:
                continue
            hashes = (hashed,)
            book = ChainBook(BOOK_BYTES_MAX)
            records: list[bytes] = []
            size = 0
            known = index.shared_entries()
            while True:
                try:
                    slot, stamp, keys = next(known)
                except StopIteration:
                    break
                except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                    self._scheduler.failures.raised(name, "shared_entries", error)
                    break
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

    # What is taken.

    def receive(self, message: bytes, now: Seconds, origin: bytes) -> Taken:
        """Take a frame of a peer in; its records wait for `apply`.

        `origin`: for whom the connection may speak that it came by.
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
        elif frame.kind == Kind.LIVE:
            return self._take(frame, now)
        return Taken.TAKEN

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
            # A late frame tells of a load that was.
            self._take_load(peer, frame, now)
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
        """Take in a frame of a `snapshot` that was made `age_s` ago, by whomever."""
        frame = _read(message)
        if isinstance(frame, Taken):
            return frame
        if frame.kind != Kind.SNAPSHOT:
            return Taken.UNREADABLE
        self._snapshot.put(frame, now, age_s)
        return Taken.TAKEN

    def pending(self) -> bool:
        """Something was received and not yet learnt."""
        return bool(self._snapshot) or any(peer.inbox for peer in self.peers.values())

    def apply(self, now: Seconds) -> None:
        """Learn at most `RECORDS_PER_APPLY` records of one origin, the next one's with the next call.

        What is told live goes before a snapshot.
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
        """Forget the load of who has been silent for too long; about once a second."""
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
                # With its book, of which nothing is left to be told.
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
            # It knows none of the chains that were told before.
            self._book.clear()
            self._count(now)
        return peer

    def _count(self, now: Seconds) -> None:
        self._scheduler.take(PeersUnheard(self.unheard), now)

    def _note(self, peer: Peer, kind: str, now: Seconds) -> None:
        self.changes.append(Change(peer.origin, kind, now - peer.heard_at_s))
        del self.changes[:-CHANGES_MAX]

    def _leave(self, origin: bytes, now: Seconds) -> None:
        """It said goodbye."""
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

    # Of what frames are made.

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
            self.origin, number, kind, uptime_s, indexes, blob, load, whole, unread, wanted
        )

    def _records(self, now: Seconds) -> Iterator[bytes]:
        """What is to be told of the decisions since the last time."""
        sent = self._scheduler.sent
        if not sent:
            return
        if not self.peers and not self._silent:
            # Nobody is there, nor may come back; who comes asks for a snapshot.
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
                _spelt(self._scheduler.share(name, decided.request), self._book, bytes_max)
                for name in self._index_names
            )
            if not any(keys):
                continue
            age_ms = max(0, round((now - decided.at_s) * 1000))
            self.records_sent += 1
            yield encode_record(Record(endpoint, age_ms, keys))

    def _load(self, now: Seconds, *, whole: bool) -> bytes:
        """What is in flight where that is not what was told last, or, if `whole`, wherever any is."""
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
            told = (requests > 0) | (tokens > 0)
        else:
            told = (requests != self._sent_requests[:n]) | (np.abs(tokens - expected) > 1.0)
        self._sent_requests[:n] = requests
        self._sent_tokens[:n] = np.where(told, tokens, expected)
        slots = told.nonzero()[0][:LOADS_MAX]
        if not len(slots):
            return b""
        self._read_pool()
        found = np.zeros(len(slots), dtype=LOAD)
        found["endpoint"] = [self._hashes.get(slot, 0) for slot in slots.tolist()]
        found["requests"] = requests[slots]
        found["prefill_tokens"] = tokens[slots]
        return found.tobytes()

    def _wanted(self) -> tuple[tuple[bytes, int, int], ...]:
        """What was missed of each peer."""
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
        """Origins of which a chain was not understood since the last heartbeat."""
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
        """Find what stands for each shared index; one that does not say is not shared."""
        scheduler = self._scheduler
        if scheduler.shared is self._shared:
            return
        self._shared = scheduler.shared
        signatures: dict[str, str] = {}
        for name, index in self._shared.items():
            try:
                signatures[name] = index.signature
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                scheduler.failures.raised(name, "signature", error)
        self._index_names = tuple(signatures)
        self._index_hashes = index_hashes(signatures.values())
        self._by_hash = dict(zip(self._index_hashes, self._index_names, strict=True))


def _read(message: bytes) -> Frame | Taken:
    """The frame in `message`, or why there is none."""
    try:
        return decode(message)
    except OtherVersionError:
        return Taken.OTHER_VERSION
    except UnreadableError:
        return Taken.UNREADABLE


def _age_s(frame: Frame) -> Seconds:
    """Of one that is told again; nonsense is as old as any may be."""
    return frame.age_s if 0.0 <= frame.age_s <= KEPT_S_MAX else KEPT_S_MAX


def _spelt(keys: Iterable[bytes], book: ChainBook, bytes_max: int) -> tuple[Key, ...]:
    """`keys` without what `book` says that is known of them; a chain is cut at `bytes_max` in all."""
    found: list[Key] = []
    for key in islice(keys, KEYS_MAX):
        if len(key) <= CHAINED_KEY_BYTES:
            found.append(key)
            continue
        known = book.known(key)
        if len(key) - known > bytes_max:
            key = key[: known + bytes_max // HASH_BYTES * HASH_BYTES]  # noqa: PLW2901  its head is as true
        bytes_max -= len(key) - known
        book.note(key, known)
        found.append((key[known - HASH_BYTES : known], key[known:]) if known else key)
    return tuple(found)
