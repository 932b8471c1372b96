"""A snapshot on disk, for a picker whose peers are gone when it starts, or that has none.

The file is replaced as a whole, on disk before it takes its name. What is not whole, of another
version or too old is ignored with one line of the log: it costs what a start without it costs.
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
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.snapshots import (
    SNAPSHOT_BYTES_MAX,
    SnapshotError,
    feed,
    gathered,
    pack,
    unpack,
)

WRITE_EVERY_S: Final[Seconds] = 30.0
LAST_WRITE_S_MAX: Final[Seconds] = 5.0
"""What writing may take when the picker ends."""
NAME: Final = "peers.snapshot"

_log = structlog.get_logger(__name__)


class SnapshotFile:
    """`load` once, `run` as a task, and `save` in the end."""

    def __init__(
        self,
        folder: str,
        exchange: PeerExchange,
        complaints: Complaints,
        *,
        every_s: Seconds = WRITE_EVERY_S,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """`clock`: Unix time."""
        self.path: Final = Path(folder, NAME)
        self._exchange = exchange
        self._complaints = complaints
        self._every_s = every_s
        self._clock = clock
        self.outcomes = {"loaded": 0, "ignored": 0, "saved": 0, "failed": 0}
        """Of reads and writes."""

    async def load(self) -> bool:
        """Give what the file holds to the exchange; whether it held something."""
        try:
            content = await asyncio.to_thread(_read, self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._ignore(error.strerror or str(error))
            return False
        try:
            # Hashing and taking apart some megabytes is nothing for the loop.
            frames, age_s = await asyncio.to_thread(unpack, content, self._clock())
        except SnapshotError as error:
            self._ignore(str(error))
            return False
        await feed(self._exchange, frames, age_s)
        self.outcomes["loaded"] += 1
        _log.info("snapshot loaded", file=str(self.path), age_s=round(age_s, 1), frames=len(frames))
        return True

    async def run(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.save()

    async def save(self, beside: str = f".{NAME}") -> bool:
        """Write what is known now, first under the name `beside`; whether it could be."""
        try:
            frames = await gathered(self._exchange)
            created_s = self._clock()
            # In a thread: a volume that hangs must not hold the loop.
            await asyncio.to_thread(_write, self.path, beside, frames, created_s)
        except OSError as error:
            self._failed(problem=error.strerror or str(error))
            return False
        except Exception:  # noqa: BLE001  a task's boundary: the exchange has a defect
            self._failed(exc_info=True)
            return False
        self.outcomes["saved"] += 1
        return True

    async def save_last(self) -> None:
        """As `save`, when the picker ends: within `LAST_WRITE_S_MAX`."""
        try:
            async with asyncio.timeout(LAST_WRITE_S_MAX):
                # Under another name: what `run` began may still be writing.
                await self.save(f".{NAME}.last")
        except TimeoutError:
            self._failed(problem=f"it took more than {LAST_WRITE_S_MAX:g} s")

    def _failed(self, **why: object) -> None:
        self.outcomes["failed"] += 1
        now = time.monotonic()
        self._complaints.say("the snapshot is not saved", now, file=str(self.path), **why)

    def _ignore(self, problem: str) -> None:
        self.outcomes["ignored"] += 1
        _log.warning("the snapshot is ignored", file=str(self.path), problem=problem)


def _read(path: Path) -> bytes:
    """Raises `OSError`."""
    with path.open("rb") as file:
        content = file.read(SNAPSHOT_BYTES_MAX + 1)
    if len(content) > SNAPSHOT_BYTES_MAX:
        raise OSError(f"it is larger than {SNAPSHOT_BYTES_MAX} bytes")
    return content


def _write(path: Path, beside_name: str, frames: list[bytes], created_s: Seconds) -> None:
    """Replace the file at `path`, safe from a crash of the node. Raises `OSError`."""
    beside = path.with_name(beside_name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
        file.write(pack(frames, created_s))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
