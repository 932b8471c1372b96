"""Records from one origin: kept in bounds until there is time for them, then learnt one by one."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from epp.core.decision.inputs import PeerRecorded
from epp.core.decision.scheduler import Scheduler
from epp.core.peers.chain_book import STEP_BYTES, ChainBook
from epp.core.peers.frames import KEYS_MAX, Frame, Key, Record, UnreadableError, records_of
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

WAITING_BYTES_MAX: Final = 1024 * 1024
"""Of one origin; of more the oldest is not learnt."""
BOOK_BYTES_MAX: Final = 1024 * 1024
"""A generation of the book of one origin: twice that of a sender, who so never refers to what is
gone here already."""
CHAIN_BYTES_MAX: Final = 512 * 1024
"""65,536 blocks, as many as an index looks at."""


class Received(Struct):
    """Records that were received, by what became of them."""

    applied: int = 0
    unknown_endpoint: int = 0
    """The endpoint is not in our pool, or not in this incarnation."""
    unknown_chain: int = 0
    """It goes on from a chain that was lost on the way or has been forgotten."""
    unreadable: int = 0
    """Frames of which not all could be read."""
    dropped: int = 0
    """Frames that came faster than they could be learnt."""
    over_rate: int = 0
    """Records above what one origin may tell in a second."""


class _Waiting(Struct, frozen=True, gc=False):
    frame: Frame
    received_at_s: Seconds
    age_s: Seconds
    """To be added to what its records tell."""


class Inbox:
    """What one origin tells, in the order in which it came."""

    def __init__(self, counts: Received) -> None:
        self._counts = counts
        self._book = ChainBook(BOOK_BYTES_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._records: Iterator[Record] | None = None
        """Of the first that waits, if that was begun."""
        self.lag_s: Seconds = 0.0
        """How old the last record was when it was learnt: its time at the sender and here."""
        self.chain_lost = False
        """A record went on from an unknown chain; whoever reads this sets it back."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, frame: Frame, now: Seconds, age_s: Seconds = 0.0) -> None:
        """Keep the records of `frame` until there is time for them."""
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
        """Learn at most `records_max`; return how many were looked at, 0 if none waits.

        `slots`: hash of an endpoint -> its slot; `indexes`: hash of a signature -> name of the index.
        """
        for looked_at in range(records_max):
            if not self._waiting:
                return looked_at
            first = self._waiting[0]
            if self._records is None:
                self._records = records_of(first.frame.records)
            try:
                record = next(self._records, None)
            except UnreadableError:
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
            # Chains are entered in the book even where nothing is learnt: the next one goes on there.
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
        """The key that was told, from its first hash on; b"" if its head is not known."""
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
        """Do not learn what is left of the first frame."""
        self._waiting_bytes -= len(self._waiting.popleft().frame.records)
        self._records = None
