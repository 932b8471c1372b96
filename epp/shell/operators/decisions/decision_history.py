"""Implement `--decisions-dir`: write decisions and their outcomes to files.

The bytes of a decision in memory are also added to a bounded queue. A thread compresses and writes
them. A full, slow or read-only disk affects only these files: missing records are counted, logged
once and noted in the next file.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.files.segment_folder import SegmentFolder
from epp.shell.files.writing_thread import beside_the_loop
from epp.shell.operators.decisions.configuration_changes import Applied, RefusedDocument
from epp.shell.operators.decisions.endpoint_states import States
from epp.shell.operators.decisions.history_format import (
    APPLIED,
    ENDING,
    FRAME_BYTES_MAX,
    HEAD,
    KIND,
    LOST,
    REFUSED_DOCUMENT,
    SETTING,
    STATES,
    Head,
    ToldRefused,
    ToldSetting,
    ToldStates,
    frame_of,
    framed,
    packed_frames,
)

QUEUE_BYTES_MAX: Final = 16 * 2**20
"""Maximum size of queued records in bytes: 30 s at 1,000 decisions a second."""
_SEGMENTS: Final = 16
"""Minimum number of segments; the oldest is removed completely."""
SEGMENT_BYTES_MAX: Final = 16 * 2**20
SEGMENT_AGE_MAX_S: Final = 3_600.0
SLICE_FRAMES: Final = 256
"""Number of frames processed before the thread yields, in about 0.1 ms."""
SLICE_PAUSE_S: Final = 0.000_5
FLUSH_BYTES: Final = 2**20
FLUSH_S: Final = 5.0
"""Interval of writes in seconds, which a killed process loses; longer ones compress no better."""
POLL_S: Final = 0.25
RETRY_S: Final = 10.0
"""Time in seconds after a failure of the disk until the next attempt."""
CLOSE_S_MAX: Final = 3.0
"""Maximum time in seconds to wait for the disk at shutdown."""
_STATES_MAX: Final = 256
_SETTINGS_MAX: Final = 64
"""Maximum number of remembered states and settings, as in memory; each file starts with them."""

_REMEMBERED_BYTES_MAX: Final = 2**20
"""Maximum size in bytes of the remembered states, and of the settings.

Half of a large pool may change every second."""

_log = structlog.get_logger(__name__)


class HistorySnapshot(Struct, frozen=True, kw_only=True):
    """Figures about the files for a metrics page."""

    records: int
    """Number of written decisions, refusals and ends."""
    dropped: Mapping[str, int]
    """Number of missing records by reason."""
    write_errors: int
    bytes: int
    """Size of all files in the folder."""


class DecisionHistory:
    """The decision files of one process.

    The event loop calls all methods except `run` and its parts; none of them blocks.
    """

    def __init__(
        self,
        folder: str,
        *,
        picker: str = "",
        total_bytes_max: int,
        age_max_s: Seconds,
        clock: Callable[[], Seconds] = time.time,
        monotonic: Callable[[], Seconds] = time.monotonic,
        close_s_max: Seconds = CLOSE_S_MAX,
    ) -> None:
        """`picker` is the name of the pod, and `clock` returns Unix time."""
        started = datetime.now(UTC)
        self._origin = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self._picker = picker
        self._clock = clock
        self._monotonic = monotonic
        self._close_s_max = close_s_max
        self._segment_bytes_max = min(SEGMENT_BYTES_MAX, total_bytes_max // _SEGMENTS)
        self._folder = SegmentFolder(
            Path(folder),
            self._origin,
            kinds=(KIND,),
            ending=ENDING,
            total_bytes_max=total_bytes_max,
            pack=packed_frames,
            age_max_s=age_max_s,
            clock=clock,
        )
        self._queue: deque[bytes] = deque()
        # Only one thread writes each of these attributes.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._lost = 0
        self._dropped_by_queue = 0
        self._dropped_by_disk = 0
        self._records = 0
        self._write_errors = 0
        # Only the thread uses the attributes below.
        self._settings: dict[bytes, None] = {}
        self._states: dict[bytes, None] = {}
        self._applied: dict[bytes, None] = {}
        self._pending = bytearray()
        self._pending_frames = 0
        self._missing = 0
        self._number = 0
        self._healthy = True
        self._retry_at_s: Seconds = 0.0
        self._began_s: Seconds = 0.0
        self._flushed_s: Seconds = 0.0
        self._stopping = threading.Event()

    def tell(self, frame: bytes) -> None:
        """Queue or drop the record of a decision, a refusal or an end."""
        if self._bytes_put - self._bytes_taken + len(frame) > QUEUE_BYTES_MAX:
            self._lost += 1
            self._dropped_by_queue += 1
            return
        if self._lost:
            self._queue.append(frame_of(LOST, self._lost))
            self._lost = 0
        self._bytes_put += len(frame)
        self._queue.append(frame)

    def setting(self, told: ToldSetting) -> None:
        """Record a setting that later decisions refer to."""
        self.tell(frame_of(SETTING, told))

    def states(self, number: int, states: States) -> None:
        """Record the states that later decisions refer to by `number`."""
        told = ToldStates(number=number, at_s=self._clock(), states=dict(states))
        frame = frame_of(STATES, told)
        if len(frame) <= FRAME_BYTES_MAX:
            self.tell(frame)

    def changed(self, change: Applied | RefusedDocument) -> None:
        """Record that a document came into force or was rejected."""
        if isinstance(change, Applied):
            self.tell(frame_of(APPLIED, change))
        else:
            self.tell(frame_of(REFUSED_DOCUMENT, ToldRefused(document=change)))

    def snapshot(self) -> HistorySnapshot:
        return HistorySnapshot(
            records=self._records,
            dropped={"queue": self._dropped_by_queue, "disk": self._dropped_by_disk},
            write_errors=self._write_errors,
            bytes=self._folder.total_bytes,
        )

    async def run(self) -> None:
        """Write until cancelled, then write the rest if the disk is fast enough."""
        await beside_the_loop("decisions", self._work, self._stopping, self._close_s_max)

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            while not self._stopping.wait(POLL_S):
                self.write_queued()
            self.write_queued()
            self.end()
        except Exception as error:  # noqa: BLE001  the boundary of a thread
            self._write_errors += 1
            _log.error("decision history failed and has ended, requests continue", exc_info=error)

    def write_queued(self) -> None:
        """Process queued records, and write those that are due."""
        queue = self._queue
        while queue:
            for _ in range(min(SLICE_FRAMES, len(queue))):
                self._take(queue.popleft())
            # The pause lets the event loop use the interpreter before all records are processed.
            time.sleep(SLICE_PAUSE_S)
        now = self._monotonic()
        if now >= self._flushed_s + FLUSH_S:
            self._flush(now)

    def end(self) -> None:
        """Write the rest and close the file."""
        self._flush(self._monotonic())
        self._folder.close()

    def _take(self, frame: bytes) -> None:
        self._bytes_taken += len(frame)
        kind = frame[:1]
        if kind == SETTING:
            _remember(self._settings, frame, _SETTINGS_MAX)
        elif kind == STATES:
            _remember(self._states, frame, _STATES_MAX)
        elif kind == APPLIED:
            _remember(self._applied, frame, _SETTINGS_MAX)
        self._pending += framed(frame)
        self._pending_frames += 1
        if len(self._pending) >= FLUSH_BYTES:
            self._flush(self._monotonic())

    def _flush(self, now: Seconds) -> None:
        """Write pending records; they are lost if no file can be opened."""
        self._flushed_s = now
        if not self._pending:
            return
        frames, self._pending = bytes(self._pending), bytearray()
        count, self._pending_frames = self._pending_frames, 0
        try:
            if not self._folder.is_open:
                if now < self._retry_at_s:
                    self._lose(count)
                    return
                self._folder.begin(self._number)
                self._number += 1
                self._began_s = now
                frames = self._beginning() + frames
            self._folder.append(frames)
        except OSError as error:
            self._lose(count)
            self._refused(error, now)
            return
        self._records += count
        self._missing = 0
        if not self._healthy:
            self._healthy = True
            _log.info("decision history is written again")
        old = now >= self._began_s + SEGMENT_AGE_MAX_S
        if old or self._folder.segment_bytes >= self._segment_bytes_max:
            self._folder.close()

    def _beginning(self) -> bytes:
        head = Head(origin=self._origin, picker=self._picker, began_s=self._clock() - FLUSH_S)
        frames = [frame_of(HEAD, head), *self._settings, *self._states, *self._applied]
        if self._missing:
            frames.append(frame_of(LOST, self._missing))
        return b"".join(map(framed, frames))

    def _lose(self, records: int) -> None:
        self._dropped_by_disk += records
        self._missing += records

    def _refused(self, error: OSError, now: Seconds) -> None:
        self._write_errors += 1
        self._retry_at_s = now + RETRY_S
        if self._healthy:
            self._healthy = False
            _log.error(
                "decision history cannot be written, requests continue",
                problem=error.strerror,
                retry_s=RETRY_S,
            )


def _remember(frames: dict[bytes, None], frame: bytes, count_max: int) -> None:
    """Add a frame and keep the newest ones within the limits, but at least one."""
    frames[frame] = None
    while len(frames) > 1 and (
        len(frames) > count_max or sum(map(len, frames)) > _REMEMBERED_BYTES_MAX
    ):
        del frames[next(iter(frames))]
