"""A snapshot of the shared state on disk, which a picker loads at its start before it asks peers.

The file is replaced atomically and synced before it gets its name. A snapshot that is incomplete,
too old or of another version is ignored with one log line. The picker then starts cold, unless a
peer sends it a snapshot.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from epp.core.peers.exchange import PeerExchange
from epp.core.types import Seconds
from epp.shell.peers import snapshots
from epp.shell.peers.complaints import Complaints

WRITE_EVERY_S: Final[Seconds] = 30.0
LAST_WRITE_S_MAX: Final[Seconds] = 5.0
"""Maximum time in seconds to write the snapshot file at shutdown."""
NAME: Final = "peers.snapshot"

_log = structlog.get_logger(__name__)


class SnapshotFile:
    """The file with a snapshot of the shared state. Call `load` once, run `run` as a task, and call
    `save_last` in the end.
    """

    def __init__(
        self,
        folder: str,
        exchange: PeerExchange,
        complaints: Complaints,
        *,
        every_s: Seconds = WRITE_EVERY_S,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """Create the handler of the snapshot file. `clock` returns Unix time in seconds."""
        self.path: Final = Path(folder, NAME)
        self._exchange = exchange
        self._complaints = complaints
        self._every_s = every_s
        self._clock = clock
        self.outcomes = {"loaded": 0, "ignored": 0, "saved": 0, "failed": 0}
        """Number of reads and writes of the snapshot file, by outcome."""

    async def load(self) -> bool:
        """Load the snapshot file into the exchange. Return True if the file had a valid snapshot.

        A missing file is no error. A file that cannot be used is logged, and counted as ignored.
        """
        try:
            content = await asyncio.to_thread(_read, self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._ignore(error.strerror or str(error))
            return False
        try:
            frames, age_s = await snapshots.load(self._exchange, content, self._clock())
        except snapshots.SnapshotError as error:
            self._ignore(str(error))
            return False
        self.outcomes["loaded"] += 1
        _log.info(
            "snapshot of shared state loaded",
            file=str(self.path),
            age_s=round(age_s, 1),
            frames=frames,
        )
        return True

    async def run(self) -> None:
        """Save the snapshot file periodically until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.save()

    async def save(self, beside: str = f".{NAME}") -> bool:
        """Write the current shared state to the snapshot file, first under the temporary name
        `beside`. Return True if it succeeded; a failure is logged and counted.
        """
        try:
            frames = await snapshots.gathered(self._exchange)
            created_s = self._clock()
            # A thread writes the file, because a volume that hangs must not block the event loop.
            await asyncio.to_thread(_write, self.path, beside, frames, created_s)
        except OSError as error:
            self._failed(problem=error.strerror or str(error))
            return False
        except Exception:  # noqa: BLE001  The boundary of a task: the exchange has a defect.
            self._failed(exc_info=True)
            return False
        self.outcomes["saved"] += 1
        return True

    async def save_last(self) -> None:
        """Save the snapshot file at shutdown, within `LAST_WRITE_S_MAX` seconds. A failure is
        logged and counted.
        """
        try:
            async with asyncio.timeout(LAST_WRITE_S_MAX):
                # Another temporary name is used, because a write of `run` may still be in progress.
                await self.save(f".{NAME}.last")
        except TimeoutError:
            self._failed(problem=f"it took more than {LAST_WRITE_S_MAX:g} s")

    def _failed(self, **why: object) -> None:
        self.outcomes["failed"] += 1
        now = time.monotonic()
        self._complaints.say("snapshot of shared state not saved", now, file=str(self.path), **why)

    def _ignore(self, problem: str) -> None:
        self.outcomes["ignored"] += 1
        _log.warning("snapshot file of shared state ignored", file=str(self.path), problem=problem)


def _read(path: Path) -> bytes:
    """Return the content of the snapshot file. Raises `OSError`, also if the file is larger than
    `SNAPSHOT_BYTES_MAX`.
    """
    with path.open("rb") as file:
        content = file.read(snapshots.SNAPSHOT_BYTES_MAX + 1)
    if len(content) > snapshots.SNAPSHOT_BYTES_MAX:
        raise OSError(f"the file is larger than {snapshots.SNAPSHOT_BYTES_MAX} bytes")
    return content


def _write(path: Path, beside_name: str, frames: list[bytes], created_s: Seconds) -> None:
    """Replace the snapshot file at `path` so that it survives a crash of the node. Raises
    `OSError`.
    """
    beside = path.with_name(beside_name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
        file.write(snapshots.pack(frames, created_s))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
