"""Implement `--capture`: write requests and their routing to files, without delaying decisions.

The event loop adds notes to a queue with limited number and bytes. A note that does not fit is
dropped, counted, and reported as missing in the files. A thread takes notes from the queue in
slices, hashes what clients wrote, and writes. Slices are so small that the event loop never waits
longer than for a garbage collection. A full, slow or read-only disk only loses notes.
"""

import secrets
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

from epp.configuration.live import LiveConfiguration
from epp.core.capture.events import Decided, Lost, Note, Replaced, Seen
from epp.core.capture.lines import SALT_BYTES_MAX, SALT_BYTES_MIN, Salt
from epp.core.capture.transcript import Origin, Transcript
from epp.core.capture.witness import Sample
from epp.core.types import Seconds
from epp.shell.files.segment_folder import SegmentFolder, packed
from epp.shell.files.writing_thread import beside_the_loop
from epp.shell.starting import StartError

NOTES_MAX: Final = 16_384
"""Maximum number of queued notes: four seconds at 1,000 requests a second."""
NOTES_BYTES_MAX: Final = 32 * 2**20
"""Maximum size of queued notes in bytes, as estimated by `_size_of`."""
_NOTE_BYTES: Final = 400
_ADAPTER_BYTES: Final = 100
_MEMBER_BYTES: Final = 500
SLICE_S: Final = 0.000_5
"""Time in seconds for which notes are converted to lines before the thread yields."""
SLICE_PAUSE_S: Final = 0.005
"""Pause in seconds between slices; switching threads takes more time than a few notes."""
BACKLOG_NOTES: Final = NOTES_MAX // 4
"""Number of queued notes above which pauses are a tenth as long, so that a burst fits."""
FLUSH_BYTES: Final = 256 * 1024
FLUSH_S: Final = 1.0
POLL_S: Final = 0.1
RETRY_S: Final = 10.0
"""Time in seconds after a failure of the disk until the next attempt."""
CLOSE_S_MAX: Final = 3.0
"""Maximum time in seconds to wait for the disk at shutdown."""

_log = structlog.get_logger(__name__)


class CaptureLimits(Struct, frozen=True, kw_only=True):
    """Limits of the files; a pair of files counts as one."""

    file_bytes_max: int = 64 * 2**20
    file_age_max_s: Seconds = 600.0
    total_bytes_max: int = 2**30


class CaptureSnapshot(Struct, frozen=True, kw_only=True):
    """Figures about the capture for a metrics page."""

    requests: int
    """Number of written request lines."""
    events: int
    dropped: dict[str, int]
    """Number of dropped notes by reason."""
    write_errors: int
    bytes: int
    """Size of all files in the folder."""


def read_salt(path: str) -> bytes:
    """Return the salt in the file at `path` without surrounding blanks. Raises `StartError`."""
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


class Capture:
    """The capture of one process.

    The event loop calls `tell` and `configured`, and `run` is a task.
    """

    def __init__(
        self,
        folder: str,
        *,
        seed: int,
        salt: bytes | None,
        share: float,
        limits: CaptureLimits,
        close_s_max: Seconds = CLOSE_S_MAX,
    ) -> None:
        """A random salt is used until the process ends if `salt` is None."""
        self._close_s_max = close_s_max
        salted = Salt(secrets.token_bytes(32) if salt is None else salt)
        started = datetime.now(UTC)
        name = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        unix_s = time.time() - time.monotonic()
        self.sample = Sample(share, salted.secret())
        self._transcript = Transcript(
            Origin(name=name, seed=seed, share=share, unix_s=unix_s), salted
        )
        self._folder = SegmentFolder(
            Path(folder),
            name,
            kinds=("requests", "events"),
            ending="jsonl.gz",
            total_bytes_max=limits.total_bytes_max,
            pack=packed,
        )
        self._limits = limits
        self._queue: deque[tuple[Note, int]] = deque()
        # Only one thread writes each of these attributes.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._lost = 0
        self._dropped_by_queue = 0
        self._dropped_by_disk = 0
        self._unwritten = 0
        """Number of notes in lines that are not in a file yet."""
        self._missing = 0
        """Number of notes that are missing before the next file."""
        self._write_errors = 0
        self._healthy = True
        self._retry_at_s: Seconds = 0.0
        self._file_began_s: Seconds = 0.0
        self._flushed_s: Seconds = 0.0
        self._stopping = threading.Event()

    def tell(self, note: Note) -> None:
        """Queue or drop a note without blocking."""
        size = _size_of(note)
        queue = self._queue
        if len(queue) >= NOTES_MAX or self._bytes_put - self._bytes_taken + size > NOTES_BYTES_MAX:
            self._lost += 1
            self._dropped_by_queue += 1
            return
        if self._lost:
            queue.append((Lost(events=self._lost), 0))
            self._lost = 0
        queue.append((note, size))
        self._bytes_put += size

    def configured(self, live: LiveConfiguration, endpoints: int) -> None:
        """Record the configuration in force for a pool of `endpoints`."""
        self.tell(live.told(endpoints))

    def failed(self, error: Exception) -> None:
        """Stop capturing after a defect of the witness."""
        _log.error("capture failed and has ended, requests continue", exc_info=error)
        self._write_errors += 1

    def snapshot(self) -> CaptureSnapshot:
        return CaptureSnapshot(
            requests=self._transcript.requests,
            events=self._transcript.events,
            dropped={"queue": self._dropped_by_queue, "disk": self._dropped_by_disk},
            write_errors=self._write_errors,
            bytes=self._folder.total_bytes,
        )

    async def run(self) -> None:
        """Write until cancelled, then write the rest if the disk is fast enough."""
        await beside_the_loop("capture", self._work, self._stopping, self._close_s_max)

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            while not self._stopping.wait(POLL_S):
                self.write_queued()
            self.write_queued()
            self.end_files()
        except Exception as error:  # noqa: BLE001  the boundary of a thread
            self._write_errors += 1
            _log.error("capture failed and has ended, requests continue", exc_info=error)

    def write_queued(self) -> None:
        """Convert queued notes to lines, and write lines that are due."""
        queue, clock = self._queue, time.monotonic
        while queue:
            now = clock()
            until_s = now + SLICE_S
            while queue and now < until_s:
                note, size = queue.popleft()
                self._bytes_taken += size
                self._take(note, now)
                now = clock()
            # The pause lets the event loop use the interpreter before all notes are converted.
            time.sleep(SLICE_PAUSE_S if len(queue) < BACKLOG_NOTES else SLICE_PAUSE_S / 10)
        now = clock()
        if now >= self._flushed_s + FLUSH_S:
            self._flush(now)

    def end_files(self) -> None:
        """Write requests that have not ended, and close the pair of files."""
        now = time.monotonic()
        if not self._folder.is_open:
            self._begin(now)
        self._transcript.finish()
        self._flush(now)
        self._folder.close()

    def _take(self, note: Note, now: Seconds) -> None:
        transcript = self._transcript
        if transcript.changes_blocks(note):
            self.end_files()
        if not self._folder.is_open:
            self._begin(now)
        transcript.note(note)
        self._unwritten += 1
        if transcript.pending_bytes >= FLUSH_BYTES:
            self._flush(now)

    def _begin(self, now: Seconds) -> None:
        """Open the next pair of files if the disk may be tried again."""
        if now < self._retry_at_s:
            return
        self._flush(now)
        number = self._transcript.begin_file(now)
        self._file_began_s = now
        try:
            self._folder.begin(number)
        except OSError as error:
            self._refused(error, now)
            return
        if self._missing:
            self._transcript.note(Lost(events=self._missing))
            self._missing = 0

    def _flush(self, now: Seconds) -> None:
        """Write pending lines; they are lost if no file is open."""
        self._flushed_s = now
        requests, events = self._transcript.take()
        if not (requests or events):
            return
        unwritten, self._unwritten = self._unwritten, 0
        if not self._folder.is_open:
            self._lose(unwritten)
            return
        try:
            self._folder.append(requests, events)
        except OSError as error:
            self._lose(unwritten)
            self._refused(error, now)
            return
        if not self._healthy:
            self._healthy = True
            _log.info("capture is written again")
        limits = self._limits
        old = now >= self._file_began_s + limits.file_age_max_s
        if old or self._folder.segment_bytes >= limits.file_bytes_max:
            self._folder.close()

    def _lose(self, notes: int) -> None:
        self._dropped_by_disk += notes
        self._missing += notes

    def _refused(self, error: OSError, now: Seconds) -> None:
        self._write_errors += 1
        self._retry_at_s = now + RETRY_S
        if self._healthy:
            self._healthy = False
            _log.error(
                "capture cannot be written, requests continue",
                problem=error.strerror,
                retry_s=RETRY_S,
            )


def _size_of(note: Note) -> int:
    """Return the approximate size of a note in bytes, including text from clients and engines."""
    if isinstance(note, Decided):
        asked = note.asked
        return (
            _NOTE_BYTES
            + sum(map(len, asked.chains))
            + len(asked.model)
            + len(asked.session)
            + len(asked.cache_salt)
        )
    if isinstance(note, Seen):
        report = note.metrics.adapters
        names = () if report is None else (report.active, report.gpu, report.cpu, report.pinned)
        return _NOTE_BYTES + _ADAPTER_BYTES * sum(map(len, names))
    if isinstance(note, Replaced):
        return _NOTE_BYTES + _MEMBER_BYTES * len(note.members)
    return _NOTE_BYTES
