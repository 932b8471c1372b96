"""Write record files (segments) one after another, limited in their total size and in age.

Each appended piece is a complete gzip member. After a crash only the last member can be broken. If
a disk fills up, the part of a member that was written is cut off again.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from epp.core.types import Seconds

_MODE: Final = 0o600
"""Permissions of the segment files. Only the owner may read them, because their contents reveal the
number and time of requests.
"""


class SegmentFolder:
    """A folder of segments. A segment is a file of records, and at most one segment is open at a
    time.

    Every method may block as long as the disk does.
    """

    def __init__(
        self,
        folder: Path,
        name_of: Callable[[int], str],
        *,
        names: Sequence[re.Pattern[str]],
        total_bytes_max: int,
        age_max_s: Seconds = math.inf,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """Create the writer. `name_of` returns the file name of a segment by its number.

        `names` are patterns that match the file names of all segments. The first group of a pattern
        is the origin, an id of the process that wrote the segment; origins sort by the start of
        their process. The second group is the segment's number. The oldest segments are removed
        while all together exceed `total_bytes_max`, and those that were last written more than
        `age_max_s` seconds ago. `clock` returns Unix time.
        """
        self._folder = folder
        self._name_of = name_of
        self._names = names
        self._total_bytes_max = total_bytes_max
        self._age_max_s = age_max_s
        self._clock = clock
        self._descriptor: int | None = None
        self._open_name = ""
        self.segment_bytes = 0
        """Size in bytes of the gzip members that were completely written to the open segment."""
        self.total_bytes = 0
        """Size in bytes of all segments in the folder at the last `append`, including those of
        other processes.
        """

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def begin(self, number: int) -> None:
        """Close the open segment, and open the one with the given `number`. Raises `OSError`."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open_name, self.segment_bytes = self._name_of(number), 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self._folder / self._open_name, flags, _MODE)

    def append(self, member: bytes) -> None:
        """Append `member` to the open segment, then remove old segments beyond the limits.

        Raises `OSError` if either fails, and closes the segment. Of a `member` that could not be
        written completely nothing stays in the file.
        """
        assert self._descriptor is not None, "a segment is open"
        try:
            self._write(self._descriptor, member)
            self._make_room()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the open segment (record file) without changing it."""
        opened, self._descriptor = self._descriptor, None
        if opened is not None:
            os.close(opened)

    def _write(self, descriptor: int, member: bytes) -> None:
        try:
            left = memoryview(member)
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self.segment_bytes)
            raise
        self.segment_bytes += len(member)

    def _make_room(self) -> None:
        """Remove the oldest segments until the rest is within the limits of total size and age. The
        open segment is never removed.
        """
        found: dict[tuple[str, str], list[tuple[Path, os.stat_result]]] = {}
        ours: tuple[str, str] | None = None
        for entry in os.scandir(self._folder):
            name = next(filter(None, (one.fullmatch(entry.name) for one in self._names)), None)
            if name is None:
                continue
            segment = name[1], name[2]
            if entry.name == self._open_name:
                ours = segment
            # Another process with the same folder may remove the file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                found.setdefault(segment, []).append((Path(entry.path), stat))
        total = sum(stat.st_size for files in found.values() for _, stat in files)
        kept_since_s = self._clock() - self._age_max_s
        for segment, files in sorted(found.items(), key=lambda one: one[0]):
            written_s = max(stat.st_mtime for _, stat in files)
            fits = total <= self._total_bytes_max and written_s >= kept_since_s
            if segment != ours and not fits:
                for path, stat in files:
                    path.unlink(missing_ok=True)
                    total -= stat.st_size
        self.total_bytes = total
