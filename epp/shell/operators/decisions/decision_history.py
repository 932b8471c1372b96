"""`--decisions-dir`: decisions and how they ended, in files, to be asked about tomorrow.

What memory keeps of a decision is bytes, and the same bytes are put into a queue that is bounded; a
thread packs and writes them. A disk that is full, slow or not to be written costs these files alone:
what they miss is counted, told in the log once, and stands in the next file.
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
"""Of what waits to be written: 30 s at 1,000 decisions a second."""
_SEGMENTS: Final = 16
"""At least; the oldest goes as a whole."""
SEGMENT_BYTES_MAX: Final = 16 * 2**20
SEGMENT_AGE_MAX_S: Final = 3_600.0
SLICE_FRAMES: Final = 256
"""Taken before the thread lets go: some 0.1 ms."""
SLICE_PAUSE_S: Final = 0.000_5
FLUSH_BYTES: Final = 2**20
FLUSH_S: Final = 5.0
"""What a process that is killed has not written; a longer one packs no better."""
POLL_S: Final = 0.25
RETRY_S: Final = 10.0
"""After a failure of the disk."""
CLOSE_S_MAX: Final = 3.0
"""At the end the disk gets no longer."""
_STATES_MAX: Final = 256
_SETTINGS_MAX: Final = 64
"""As many as memory knows, and as many changes of the configuration; a file begins with them."""

_REMEMBERED_BYTES_MAX: Final = 2**20
"""Of each: half of a large pool may come and go every second."""

_log = structlog.get_logger(__name__)


class HistorySnapshot(Struct, frozen=True, kw_only=True):
    """For a page of metrics."""

    records: int
    """Written: decisions, refusals and ends."""
    dropped: Mapping[str, int]
    """Why -> records."""
    write_errors: int
    bytes: int
    """Of the folder."""


class DecisionHistory:
    """One process' files. All but `run` and what it runs are for the event loop, and return at once."""

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
        """`picker`: the name of the pod. `clock` tells the time of the day."""
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
        # Each of these is written by one thread only.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._lost = 0
        self._dropped_by_queue = 0
        self._dropped_by_disk = 0
        self._records = 0
        self._write_errors = 0
        # The thread alone has the rest.
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
        """Take the record of a decision or a refusal, or how one ended; or drop it."""
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
        """Decisions name `told` from now on."""
        self.tell(frame_of(SETTING, told))

    def states(self, number: int, states: States) -> None:
        """Decisions name the `states` from now on by their `number`."""
        told = ToldStates(number=number, at_s=self._clock(), states=dict(states))
        frame = frame_of(STATES, told)
        if len(frame) <= FRAME_BYTES_MAX:
            self.tell(frame)

    def changed(self, change: Applied | RefusedDocument) -> None:
        """A document came into force, or did not."""
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
        """Write until cancelled, then what is left, as long as the disk is quick."""
        await beside_the_loop("decisions", self._work, self._stopping, self._close_s_max)

    # The thread.

    def _work(self) -> None:
        try:
            while not self._stopping.wait(POLL_S):
                self.write_queued()
            self.write_queued()
            self.end()
        except Exception as error:  # noqa: BLE001  the boundary of a thread
            self._write_errors += 1
            _log.error("decisions are not kept any more, requests go on", exc_info=error)

    def write_queued(self) -> None:
        """Bring what is in the queue to the disk, as far as it is due."""
        queue = self._queue
        while queue:
            for _ in range(min(SLICE_FRAMES, len(queue))):
                self._take(queue.popleft())
            # The event loop shall not wait for the interpreter until we have done all.
            time.sleep(SLICE_PAUSE_S)
        now = self._monotonic()
        if now >= self._flushed_s + FLUSH_S:
            self._flush(now)

    def end(self) -> None:
        """Write what is left, and leave the file as it is."""
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
        """Write what waits; without a file it is lost."""
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
            _log.info("decisions are kept again")
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
                "decisions cannot be kept, requests go on",
                problem=error.strerror,
                retry_s=RETRY_S,
            )


def _remember(frames: dict[bytes, None], frame: bytes, count_max: int) -> None:
    """The newest `count_max` of `_REMEMBERED_BYTES_MAX` at most, in their order; one in any case."""
    frames[frame] = None
    while len(frames) > 1 and (
        len(frames) > count_max or sum(map(len, frames)) > _REMEMBERED_BYTES_MAX
    ):
        del frames[next(iter(frames))]
