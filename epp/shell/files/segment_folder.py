"""Write files one after another, each limited in size, and all together limited in size.

Each appended piece is a complete member of gzip. After a crash only the last member can be broken.
If a disk fills up, the part of a member that was written is cut off again.
"""

import contextlib
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from epp.core.types import Seconds

_PACKING_LEVEL: Final = 1
"""Compression level of gzip.

A higher level saves a twentieth, because most of a line is hashes, and takes nearly twice as long.
"""
_GZIP_FORMAT: Final = 31
"""Value of zlib's `wbits` for the gzip format with the widest window."""
LONG_LINE_BYTES: Final = 8 * 1024
"""Mean length of lines from which only Huffman coding is used.

The window of 32 KB holds too few longer lines to find repetitions. Huffman coding alone makes them
as short in a quarter of the time."""
_MODE: Final = 0o600
"""Mode of the files: their contents reveal the number and time of requests to the owner only."""


class SegmentFolder:
    """A folder of segments. A segment has one file of each kind, and one segment is open at a time.

    Every method may block as long as the disk does.
    """

    def __init__(
        self,
        folder: Path,
        origin: str,
        *,
        kinds: Sequence[str],
        ending: str,
        total_bytes_max: int,
        pack: Callable[[bytes], bytes],
        age_max_s: Seconds = math.inf,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """`origin` identifies the process, like "20260131T235959-0123abcd"; older ones sort first.

        Files are named `KIND-ORIGIN-NUMBER.ENDING`. The oldest files are removed while all of them
        exceed `total_bytes_max`. Files last written more than `age_max_s` ago are removed too.
        `clock` returns Unix time, and `pack` returns a member of gzip.
        """
        self._folder = folder
        self._origin = origin
        self._kinds = kinds
        self._ending = ending
        self._total_bytes_max = total_bytes_max
        self._pack = pack
        self._age_max_s = age_max_s
        self._clock = clock
        self._name = segment_name(kinds, ending)
        self._open: dict[str, tuple[int, int]] = {}
        """Descriptor and length of complete data, by kind."""
        self._number = -1
        self.total_bytes = 0
        """Size of all segments in the folder in bytes, including those of other processes."""

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def segment_bytes(self) -> int:
        """Size of the open segment in bytes."""
        return sum(length for _, length in self._open.values())

    def begin(self, number: int) -> None:
        """Close the current segment and open the one with this `number`. Raises `OSError`."""
        self.close()
        self._number = number
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            for kind in self._kinds:
                path = self._folder / f"{kind}-{self._origin}-{number:06d}.{self._ending}"
                self._open[kind] = os.open(path, flags, _MODE), 0
        except OSError:
            self.close()
            raise

    def append(self, *contents: bytes) -> None:
        """Append one content per kind, in the order of the kinds; b"" appends nothing.

        If it raises `OSError`, nothing was appended and no file is open.
        """
        try:
            for kind, content in zip(self._kinds, contents, strict=True):
                if content:
                    self._append(kind, self._pack(content))
            self._make_room()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the segment without changing it."""
        opened, self._open = self._open, {}
        for descriptor, _ in opened.values():
            os.close(descriptor)

    def _append(self, kind: str, member: bytes) -> None:
        descriptor, length = self._open[kind]
        try:
            left = memoryview(member)
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, length)
            raise
        self._open[kind] = descriptor, length + len(member)

    def _make_room(self) -> None:
        """Remove the oldest segments until the rest is within the limits of size and age."""
        found: dict[tuple[str, str], list[Path]] = {}
        sizes: dict[Path, int] = {}
        written_s: dict[tuple[str, str], float] = {}
        for entry in os.scandir(self._folder):
            name = self._name.fullmatch(entry.name)
            if name is None:
                continue
            # Another process with the same folder may remove the file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                path = Path(entry.path)
                stat = entry.stat(follow_symlinks=False)
                sizes[path] = stat.st_size
                segment = name[1], name[2]
                found.setdefault(segment, []).append(path)
                written_s[segment] = max(stat.st_mtime, written_s.get(segment, -math.inf))
        total = sum(sizes.values())
        ours = self._origin, f"{self._number:06d}"
        kept_since_s = self._clock() - self._age_max_s
        for segment, paths in sorted(found.items()):
            fits = total <= self._total_bytes_max and written_s[segment] >= kept_since_s
            if segment != ours and not fits:
                for path in paths:
                    path.unlink(missing_ok=True)
                    total -= sizes[path]
        self.total_bytes = total


def segment_name(kinds: Sequence[str], ending: str) -> re.Pattern[str]:
    """Return a pattern of file names whose groups are origin and number."""
    kind = "|".join(map(re.escape, kinds))
    named = rf"(?:{kind})-(\d{{8}}T\d{{6}}-[0-9a-f]{{8}})-(\d{{6}})\.{re.escape(ending)}"
    return re.compile(named, re.ASCII)


def packed(lines: bytes) -> bytes:
    """Compress complete lines into a member of gzip."""
    long = len(lines) > LONG_LINE_BYTES * lines.count(b"\n")
    strategy = zlib.Z_HUFFMAN_ONLY if long else zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(
        _PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT, zlib.DEF_MEM_LEVEL, strategy
    )
    return packer.compress(lines) + packer.flush()
