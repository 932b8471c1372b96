"""The inbox for the records of one peer, or of snapshots: a bounded queue from which they are
recorded in the indexes one by one.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from epp.core.decision.inputs import PeerRecorded
from epp.core.decision.scheduler import Scheduler
from epp.core.peers.chain_book import STEP_BYTES, ChainBook
from epp.core.peers.frames import KEYS_MAX, Frame, Key, Record, UnreadableMessageError, records_of
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

WAITING_BYTES_MAX: Final = 1024 * 1024
"""Maximum size in bytes of the queued records of one peer; above it the oldest are dropped."""
BOOK_BYTES_MAX: Final = 1024 * 1024
"""Maximum size in bytes of one generation in the book of a peer's chains: twice that of the
sender's book, so that its references stay valid.
"""
CHAIN_BYTES_MAX: Final = 512 * 1024
"""Maximum size in bytes of one chain: 65,536 blocks, as many as an index looks up."""


class Received(Struct):
    """The numbers of records and frames received from peers, by result."""

    applied: int = 0
    unknown_endpoint: int = 0
    """Number of records for an endpoint that is not in this picker's pool, or restarted since."""
    unknown_chain: int = 0
    """Number of records that continue a chain whose beginning was lost or has been dropped here, or
    in which a chain is malformed or too long.
    """
    unreadable: int = 0
    """Number of frames of peers with an unreadable record."""
    dropped: int = 0
    """Number of frames of peers that were dropped because they arrived faster than they could be
    processed.
    """
    over_rate: int = 0
    """Number of frames that were dropped because their origin exceeded its records per second."""


class _Waiting(Struct, frozen=True, gc=False):
    frame: Frame
    received_at_s: Seconds
    age_s: Seconds
    """Age in seconds of the frame when it was received; it is added to the ages of its records."""


class Inbox:
    """The queue of the records that one peer sent, or that came in snapshots, in order of arrival."""

    def __init__(self, counts: Received) -> None:
        self._counts = counts
        self._book = ChainBook(BOOK_BYTES_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._records: Iterator[Record] | None = None
        """Iterator over those records of the first queued frame that are still encoded, or None if
        none of them was read yet.
        """
        self.lag_s: Seconds = 0.0
        """Seconds between the decision in the last processed record, at its sender, and the
        processing of the record here.
        """
        self.chain_lost = False
        """True if a record continued a chain of hashes that is unknown here. The reader of this
        field resets it.
        """

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, frame: Frame, now: Seconds, age_s: Seconds = 0.0) -> None:
        """Queue the records of `frame`, received at `now`, when the frame was `age_s` seconds old.
        Above `WAITING_BYTES_MAX`, the oldest frames are dropped and counted.
        """
        if not frame.records:
            return
        self._waiting.append(_Waiting(frame, now, age_s))
        self._waiting_bytes += len(frame.records)
        while self._waiting_bytes > WAITING_BYTES_MAX:
            self.drop_first()
            self._counts.dropped += 1

    def apply(
        self,
        records_max: int,
        scheduler: Scheduler,
        slots: Mapping[int, int],
        indexes: Mapping[int, str],
        now: Seconds,
    ) -> int:
        """Process at most `records_max` queued records: record them in the scheduler's indexes.
        Return how many were processed, counting the end of each frame as one more.

        `slots` gives the slot of an endpoint by its hash, `indexes` the name of an index by the
        hash of its signature.
        """
        for looked_at in range(records_max):
            if not self._waiting:
                return looked_at
            first = self._waiting[0]
            if self._records is None:
                self._records = records_of(first.frame.records)
            try:
                record = next(self._records, None)
            except UnreadableMessageError:
                self._counts.unreadable += 1
                record = None
            if record is None:
                self.drop_first()
                continue
            self._learn(record, first, scheduler, slots, indexes, now)
        return records_max

    def _learn(
        self,
        record: Record,
        waiting: _Waiting,
        scheduler: Scheduler,
        slots: Mapping[int, int],
        indexes: Mapping[int, str],
        now: Seconds,
    ) -> None:
        age_s = max(0, record.age_ms) / 1000 + waiting.age_s
        stamp = waiting.received_at_s - age_s
        self.lag_s = now - stamp
        slot = slots.get(record.endpoint)
        counts = self._counts
        whole = True
        for index, keys in zip(waiting.frame.indexes, record.keys, strict=False):
            # Chains are entered in the book even if nothing is learnt, because later ones refer to
            # them.
            known = [self._whole(key) for key in keys[:KEYS_MAX]]
            if not all(known):
                whole = False
                known = [key for key in known if key]
            name = indexes.get(index)
            if known and slot is not None and name is not None:
                scheduler.take(PeerRecorded(name, known, slot, stamp), now)
        if not whole:
            counts.unknown_chain += 1
            self.chain_lost = True
        elif slot is None:
            counts.unknown_endpoint += 1
        else:
            counts.applied += 1

    def _whole(self, key: Key) -> bytes:
        """Return the whole chain that `key` stands for, and add it to the book. Return b"" if the
        book does not contain its beginning, or if the chain is malformed or too long.
        """
        book = self._book
        if isinstance(key, bytes):
            if len(key) > STEP_BYTES:
                book.note(key)
            return key
        last, rest = key
        head = book.head(last)
        if head is None or len(rest) % HASH_BYTES or len(head) + len(rest) > CHAIN_BYTES_MAX:
            return b""
        chain = head + rest
        book.note(chain, len(head))
        return chain

    def drop_first(self) -> None:
        """Drop the first queued frame with the rest of its records."""
        self._waiting_bytes -= len(self._waiting.popleft().frame.records)
        self._records = None
