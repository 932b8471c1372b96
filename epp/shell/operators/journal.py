"""Write the journal: what the picker received and decided, in files, without delaying decisions.

The event loop adds records to a queue. A record that does not fit is dropped, counted, and reported
as missing in the files. One thread takes records from the queue in slices, hashes what clients
wrote, and writes. Slices are so small that the event loop never waits longer than for a garbage
collection. A full, slow or read-only disk only loses records.

Each level of the journal (decisions, inputs) has a folder, limits and counters of its own.
`--decisions-dir` opens `DecisionsFolder`, and `--capture` opens `InputsFolder`.
"""

import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import structlog
from msgspec import Struct, structs

from epp.core.decision.scheduler import Scheduler
from epp.core.journal.events import (
    Configured,
    Decided,
    Heard,
    Level,
    Lost,
    Note,
    Opened,
    Replaced,
    Seen,
)
from epp.core.journal.lines import SALT_BYTES_MAX, SALT_BYTES_MIN, Salt
from epp.core.journal.transcript import Transcript
from epp.core.journal.witness import CaptureWitness, Sample
from epp.core.types import Seconds
from epp.journal.frames import (
    FRAME_BYTES_MAX,
    RECORD,
    frame_of,
    framed,
    packed_frames,
    record_of_frame,
    segment_file,
)
from epp.journal.reading import FILE_NAMES
from epp.journal.records import (
    SETTINGS_MAX,
    STATES_MAX,
    Record,
    ToldApplied,
    ToldSetting,
    ToldStates,
)
from epp.shell.files.segment_folder import SegmentFolder
from epp.shell.files.writing_thread import beside_the_loop
from epp.shell.starting import StartError

SLICE_S: Final = 0.000_5
"""Time in seconds for which the journal's thread converts records before it yields the
interpreter.
"""
SLICE_PAUSE_S: Final = 0.005
"""Pause in seconds between two slices of work of the journal's thread; switching threads takes more
time than a few records.
"""
BACKLOG_RECORDS: Final = 4_096
"""Number of queued journal records from which the pauses of the journal's thread are a tenth as
long, so that a burst fits into the queue.
"""
POLL_S: Final = 0.1
RETRY_S: Final = 10.0
"""Time in seconds after a failed write of the journal until the next attempt."""
CLOSE_S_MAX: Final = 3.0
"""Maximum time in seconds that the shutdown waits for the journal to be written."""
_NOTE_BYTES: Final = 600
_FRAME_BYTES: Final = 120
"""Approximate memory in bytes of a queued frame of the decision history beside its content."""
_ADAPTER_BYTES: Final = 100
_MEMBER_BYTES: Final = 500
_KEY_BYTES: Final = 40
_SEGMENTS: Final = 16
"""Minimum number of files into which the space for decisions is divided. The oldest file is removed
as a whole.
"""
_REPEATED_MAX: Final[dict[type[Record], int]] = {
    ToldSetting: SETTINGS_MAX,
    ToldStates: STATES_MAX,
    ToldApplied: 64,
}
"""Maximum number of context records (settings, states, configurations) that each file of decisions
repeats, by their type.
"""
_REPEATED_BYTES_MAX: Final = 2**20
"""Maximum size in bytes of the context records of one type that each file of decisions repeats.

Half of a large pool may change its state every second.
"""

_log = structlog.get_logger(__name__)


class JournalLimits(Struct, frozen=True, kw_only=True):
    """Limits of one level of the journal: queue, files and writes."""

    queue_bytes_max: int
    """Maximum size in bytes of the journal level's records that wait to be written."""
    segment_bytes_max: int
    segment_age_max_s: Seconds
    total_bytes_max: int
    age_max_s: Seconds = math.inf
    """Age in seconds at which files of the journal level are removed."""
    flush_s: Seconds
    """Interval between writes to disk in seconds. A killed process loses the records of this
    time.
    """
    flush_bytes: int


def decisions_limits(total_bytes_max: int, age_max_s: Seconds) -> JournalLimits:
    """Return the journal's limits for decisions. The queue holds 15 s of records at 1,000 decisions
    a second.
    """
    return JournalLimits(
        queue_bytes_max=16 * 2**20,
        segment_bytes_max=min(16 * 2**20, total_bytes_max // _SEGMENTS),
        segment_age_max_s=3_600.0,
        total_bytes_max=total_bytes_max,
        age_max_s=age_max_s,
        flush_s=5.0,
        flush_bytes=2**20,
    )


def inputs_limits(
    segment_bytes_max: int = 64 * 2**20,
    segment_age_max_s: Seconds = 600.0,
    total_bytes_max: int = 2**30,
) -> JournalLimits:
    """Return the journal's limits for inputs (the capture). The queue holds about 10 s of records
    at 1,000 requests a second.
    """
    return JournalLimits(
        queue_bytes_max=32 * 2**20,
        segment_bytes_max=segment_bytes_max,
        segment_age_max_s=segment_age_max_s,
        total_bytes_max=total_bytes_max,
        flush_s=1.0,
        flush_bytes=256 * 1024,
    )


class JournalSnapshot(Struct, frozen=True, kw_only=True):
    """Counts and sizes of one level of the journal, for a metrics page."""

    requests: int
    """Number of requests written to the capture; 0 for the decision history, which does not count
    them.
    """
    events: int
    """Number of records written to the files of this journal level."""
    dropped: dict[str, int]
    """Number of records that are missing in the files of this journal level, by reason."""
    write_errors: int
    bytes: int
    """Total size in bytes of all files in the folder of this journal level at the last write; 0
    before the first.
    """


def read_salt(path: str) -> bytes:
    """Return the capture's salt from the file at `path`, without surrounding blanks. Raises
    `StartError`.
    """
    try:
        with Path(path).open("rb") as file:
            salt = file.read(SALT_BYTES_MAX + 64).strip()
    except OSError as error:
        raise StartError(f"--capture-salt-file {path} cannot be read: {error.strerror}") from error
    if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
        raise StartError(
            f"--capture-salt-file {path} has {len(salt)} bytes, expected {SALT_BYTES_MIN} to "
            f"{SALT_BYTES_MAX}"
        )
    return salt


class Journal:
    """The journal of one process, with one queue and one thread for all its levels (decisions,
    inputs).
    """

    def __init__(
        self,
        picker: str = "",
        *,
        clock: Callable[[], Seconds] = time.time,
        monotonic: Callable[[], Seconds] = time.monotonic,
        close_s_max: Seconds = CLOSE_S_MAX,
    ) -> None:
        """Create the journal. `picker` is the name of the picker's pod, and `clock` returns Unix
        time.
        """
        self.picker = picker
        self.clock, self.monotonic = clock, monotonic
        started = datetime.now(UTC)
        self.origin = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self.queue: deque[tuple[JournalFolder, Any, int]] = deque()
        """Journal records that wait to be written, each with its folder and its approximate size in
        bytes.
        """
        self.folders: list[JournalFolder] = []
        self._close_s_max = close_s_max
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Write journal records until cancelled, then write the queued ones, for at most
        `CLOSE_S_MAX` seconds.
        """
        await beside_the_loop("the journal", self._work, self._stopping, self._close_s_max)

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            while not self._stopping.wait(POLL_S):
                self.write_queued()
            self.end()
        except Exception as error:  # noqa: BLE001  the boundary of a thread
            for folder in self.folders:
                folder.failed(error)

    def write_queued(self) -> None:
        """Convert all queued records, and write those of each level whose write is due."""
        queue, clock = self.queue, self.monotonic
        while queue:
            now = clock()
            until_s = now + SLICE_S
            while queue and now < until_s:
                folder, record, size = queue.popleft()
                folder.take(record, size, now)
                now = clock()
            # The pause lets the event loop use the interpreter before all records are converted.
            time.sleep(SLICE_PAUSE_S if len(queue) < BACKLOG_RECORDS else SLICE_PAUSE_S / 10)
        for folder in self.folders:
            folder.write_due(clock())

    def end(self) -> None:
        """Write all queued journal records and close the files."""
        self.write_queued()
        for folder in self.folders:
            folder.end(self.monotonic())


class JournalFolder(ABC):
    """One level of a journal in its own folder. The event loop calls `tell`, which never blocks."""

    level: ClassVar[Level]
    name: ClassVar[str]
    """Name of this journal level in log messages."""

    def __init__(self, journal: Journal, folder: str, limits: JournalLimits) -> None:
        self._journal = journal
        self._limits = limits
        self._folder = SegmentFolder(
            Path(folder),
            partial(segment_file, self.level, journal.origin),
            names=FILE_NAMES[self.level],
            total_bytes_max=limits.total_bytes_max,
            age_max_s=limits.age_max_s,
            clock=journal.clock,
        )
        # Only one thread writes each of these attributes.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._lost = 0
        self._dropped_by_queue = 0
        self._dropped_by_size = 0
        self._dropped_by_disk = 0
        self._written: dict[type, int] = {}
        """Number of records written to this journal level, by type."""
        self._write_errors = 0
        self._ended = False
        # Only the writing thread uses the attributes below.
        self._opened = False
        """True if a segment (file) has begun. The file itself exists after its first write."""
        self._number = 0
        self._pending = bytearray()
        self._pending_types: list[type] = []
        self._missing = 0
        """Number of records that were lost because the disk failed, since the last successful
        write; the next segment reports it.
        """
        self._healthy = True
        self._retry_at_s: Seconds = 0.0
        self._began_s: Seconds = 0.0
        self._flushed_s: Seconds = 0.0
        journal.folders.append(self)

    def tell(self, record: Any) -> None:
        """Queue a record to be written, or drop and count it if the queue is full or this level has
        ended after a defect. The call never blocks.
        """
        size = self._size_of(record)
        room = self._limits.queue_bytes_max - self._bytes_put + self._bytes_taken
        if size > room or self._ended:
            self._lost += 1
            self._dropped_by_queue += 1
            return
        queue = self._journal.queue
        if self._lost:
            queue.append((self, Lost(events=self._lost), 0))
            self._lost = 0
        self._bytes_put += size
        queue.append((self, record, size))

    def failed(self, error: Exception) -> None:
        """Log `error`, and end this level of the journal after this defect. Requests and other
        levels continue.
        """
        self._write_errors += 1
        if self._ended:
            return
        self._ended = True
        _log.error(f"{self.name} failed and has ended, requests continue", exc_info=error)

    def snapshot(self) -> JournalSnapshot:
        by_queue = self._dropped_by_queue + self._dropped_by_size
        return JournalSnapshot(
            requests=self._written.get(Decided, 0),
            events=sum(tuple(self._written.values())),
            dropped={"queue": by_queue, "disk": self._dropped_by_disk},
            write_errors=self._write_errors,
            bytes=self._folder.total_bytes,
        )

    # The content of a level.

    @abstractmethod
    def _size_of(self, record: Any) -> int:
        """Return the approximate size in bytes of a queued journal record."""

    @abstractmethod
    def _frame(self, record: Any) -> bytes:
        """Convert a record to a frame for the file, and remember the context in it that later
        segments repeat.
        """

    @abstractmethod
    def _context(self) -> list[bytes]:
        """Return the frames of context records that a new segment repeats."""

    def _head(self, opened: Opened, first: Any) -> Opened:
        """Return `opened`, the first record of a segment, with the fields that only this journal
        level has. `first` is the record after it.
        """
        return opened

    def _needs_segment(self, record: Any) -> bool:
        """Return True if `record` must not be in the current segment but in a new one."""
        return False

    # The methods below run in the thread.

    def take(self, record: Any, size: int, now: Seconds) -> None:
        """Convert a journal record from the queue, and write if enough converted records have
        accumulated. A defect ends this level; later records are ignored.
        """
        self._bytes_taken += size
        if self._ended:
            return
        try:
            if self._opened and self._needs_segment(record):
                self.end(now)
            if not self._opened:
                self._begin(record, now)
            self._add(self._frame(record), type(record))
            if len(self._pending) >= self._limits.flush_bytes:
                self._flush(now)
        except Exception as error:  # noqa: BLE001  the boundary of a level
            self.failed(error)

    def write_due(self, now: Seconds) -> None:
        """Write the converted journal records if the last write was `flush_s` seconds ago or
        earlier.
        """
        if now >= self._flushed_s + self._limits.flush_s:
            self._flush(now)

    def end(self, now: Seconds) -> None:
        """Write the converted journal records and end the segment."""
        self._flush(now)
        self._close()

    def _begin(self, first: Any, now: Seconds) -> None:
        """Begin a segment with the context records that describe the state before the record
        `first`.
        """
        context = [frame for frame in self._context() if len(frame) <= FRAME_BYTES_MAX]
        opened = Opened(
            at_s=now,
            level=self.level,
            origin=self._journal.origin,
            segment=self._number,
            picker=self._journal.picker,
            # Records may have waited in the queue.
            began_s=self._journal.clock() - self._limits.flush_s,
            context=len(context),
            missing=self._missing,
        )
        self._opened = True
        self._began_s = now
        for frame in (frame_of(self._head(opened, first)), *context):
            self._pending += framed(frame)

    def _add(self, frame: bytes, kind: type) -> None:
        if len(frame) > FRAME_BYTES_MAX:
            self._dropped_by_size += 1
            frame = frame_of(Lost(events=1))
        self._pending += framed(frame)
        self._pending_types.append(kind)

    def _flush(self, now: Seconds) -> None:
        """Write the converted records to the file, and end the segment if it is too long or too
        old. The records are lost if the disk fails.
        """
        self._flushed_s = now
        if not self._pending:
            return
        frames, self._pending = bytes(self._pending), bytearray()
        types, self._pending_types = self._pending_types, []
        if now < self._retry_at_s or not self._write(packed_frames(frames, len(types) + 1), now):
            self._dropped_by_disk += len(types)
            self._missing += len(types)
            self._close()
            return
        self._missing = 0
        for kind in types:
            self._written[kind] = self._written.get(kind, 0) + 1
        limits = self._limits
        old = now >= self._began_s + limits.segment_age_max_s
        if old or self._folder.segment_bytes >= limits.segment_bytes_max:
            self._close()

    def _write(self, packed: bytes, now: Seconds) -> bool:
        """Append converted records to the segment's file. Return False if that failed. The first
        failure and the recovery are logged.
        """
        try:
            if not self._folder.is_open:
                self._folder.begin(self._number)
                self._number += 1
            self._folder.append(packed)
        except OSError as error:
            self._write_errors += 1
            self._retry_at_s = now + RETRY_S
            if self._healthy:
                self._healthy = False
                _log.error(
                    f"{self.name} cannot be written, requests continue",
                    problem=error.strerror,
                    retry_s=RETRY_S,
                )
            return False
        if not self._healthy:
            self._healthy = True
            _log.info(f"{self.name} is written again")
        return True

    def _close(self) -> None:
        self._folder.close()
        self._opened = False


class DecisionsFolder(JournalFolder):
    """The journal's level of decisions. `tell` takes the frames of the records that are also stored
    in memory.
    """

    level = Level.DECISIONS
    name = "decision history"

    def __init__(self, journal: Journal, folder: str, limits: JournalLimits) -> None:
        super().__init__(journal, folder, limits)
        self._repeated: dict[type[Record], dict[bytes, None]] = {kind: {} for kind in _REPEATED_MAX}
        """Frames of context records that later segments repeat, by type and oldest first."""

    def _size_of(self, record: bytes) -> int:
        return _FRAME_BYTES + len(record)

    def _frame(self, record: bytes | Lost) -> bytes:
        if isinstance(record, Lost):
            return frame_of(record)
        if record[:1] == RECORD:
            kind = type(record_of_frame(record))
            if kind in self._repeated:
                _remember(self._repeated[kind], record, _REPEATED_MAX[kind])
        return record

    def _context(self) -> list[bytes]:
        return [frame for frames in self._repeated.values() for frame in frames]


class InputsFolder(JournalFolder):
    """The journal's level of inputs, the capture. `tell` takes the notes of a `CaptureWitness`."""

    level = Level.INPUTS
    name = "capture"

    def __init__(
        self,
        journal: Journal,
        folder: str,
        limits: JournalLimits,
        *,
        seed: int,
        salt: bytes | None = None,
        share: float = 1.0,
    ) -> None:
        """Create the capture in `folder`. If `salt` is None, a random salt is used until the
        process ends.
        """
        super().__init__(journal, folder, limits)
        self._salt = Salt(secrets.token_bytes(32) if salt is None else salt)
        self._seed = seed
        self._transcript = Transcript(self._salt)
        self._unix_s = journal.clock() - journal.monotonic()
        self._sample = Sample(share, self._salt.secret())

    def witness(self, scheduler: Scheduler) -> CaptureWitness:
        """Return a witness (observer) of `scheduler` that passes its inputs to this folder; of the
        requests it passes only the sampled share.
        """
        return CaptureWitness(scheduler, sample=self._sample, tell=self.tell, failed=self.failed)

    def _size_of(self, record: Note) -> int:
        return size_of_note(record)

    def _frame(self, record: Note) -> bytes:
        return frame_of(self._transcript.event(record))

    def _context(self) -> list[bytes]:
        return list(map(frame_of, self._transcript.context()))

    def _head(self, opened: Opened, first: Note) -> Opened:
        return structs.replace(
            opened,
            unix_s=self._unix_s,
            seed=self._seed,
            salt=self._salt.identity,
            share=self._sample.share,
            decisions=self._transcript.decisions,
            block_tokens=self._transcript.block_tokens(first),
        )

    def _needs_segment(self, record: Note) -> bool:
        # A segment has blocks of one size.
        return self._transcript.block_tokens(record) != self._transcript.block_tokens()


def size_of_note(note: Note) -> int:
    """Return the approximate size in bytes of a captured note, including text from clients and
    engines.
    """
    match note:
        case Decided(_, asked):
            texts = (asked.model, asked.session, asked.cache_salt)
            hashes = (*asked.chains, *asked.token_chains, *asked.media)
            return _NOTE_BYTES + sum(map(len, texts)) + sum(map(len, hashes))
        case Seen(metrics=metrics):
            report = metrics.adapters
            names = () if report is None else (report.active, report.gpu, report.cpu, report.pinned)
            return _NOTE_BYTES + _ADAPTER_BYTES * sum(map(len, names))
        case Heard(changes=changes):
            return _NOTE_BYTES + _KEY_BYTES * sum(len(changed.keys) for changed in changes)
        case Replaced(members=members):
            return _NOTE_BYTES + _MEMBER_BYTES * len(members)
        case Configured(document=document):
            return _NOTE_BYTES + len(document)
    return _NOTE_BYTES


def _remember(frames: dict[bytes, None], frame: bytes, count_max: int) -> None:
    """Add a frame to the context records that later files repeat. Drop the oldest ones beyond the
    limits, but keep at least one.
    """
    frames[frame] = None
    while len(frames) > 1 and (
        len(frames) > count_max or sum(map(len, frames)) > _REPEATED_BYTES_MAX
    ):
        del frames[next(iter(frames))]
