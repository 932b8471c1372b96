"""The files of a capture: in pairs, each up to some size, and all together up to another.

What is appended is a whole member of gzip, so that after a crash only the last member may be broken,
and it is the last. What could be written in part, because the disk is full, is cut off again.
"""

import contextlib
import os
import re
import zlib
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(
    r"(?:requests|events)-(\d{8}T\d{6}-[0-9a-f]{8})-(\d{6})\.jsonl\.gz", re.ASCII
)
_PACKING_LEVEL: Final = 1
"""Of gzip: more gains a twentieth, because most of a line is hashes, and takes nearly twice as long."""
_GZIP_FORMAT: Final = 31
"""As zlib is told of it, with the widest window."""
LONG_LINE_BYTES: Final = 8 * 1024
"""Of lines that are longer on average the window of 32 KB holds too few to find anything again: coding
their characters alone makes them as short in a quarter of the time."""
_KINDS: Final = ("requests", "events")
_MODE: Final = 0o600
"""Whoever reads a capture learns how much was asked when."""


class CaptureFolder:
    """Writes one pair at a time. All methods may take as long as the disk does."""

    def __init__(self, folder: Path, origin: str, *, total_bytes_max: int) -> None:
        """`origin` names the process, as "20260131T235959-0123abcd"; older ones sort before it."""
        self._folder = folder
        self._origin = origin
        self._total_bytes_max = total_bytes_max
        self._open: dict[str, tuple[int, int]] = {}
        """Kind -> descriptor and length of what is whole."""
        self._number = -1
        self.total_bytes = 0
        """Of all captures in the folder, those of other processes too, when last looked."""

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def pair_bytes(self) -> int:
        """Length of the pair that is being written."""
        return sum(length for _, length in self._open.values())

    def begin(self, number: int) -> None:
        """Open the pair of this `number`, in place of the one before. Raises `OSError`."""
        self.close()
        self._number = number
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            for kind in _KINDS:
                path = self._folder / f"{kind}-{self._origin}-{number:06d}.jsonl.gz"
                self._open[kind] = os.open(path, flags, _MODE), 0
        except OSError:
            self.close()
            raise

    def append(self, requests: bytes, events: bytes) -> None:
        """Add whole lines. Raises `OSError`; then nothing of them is there, and no file is open."""
        try:
            for kind, lines in zip(_KINDS, (requests, events), strict=True):
                if lines:
                    self._append(kind, packed(lines))
            self._make_room()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pair as it is."""
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
        """Remove the oldest pairs until all that are left take no more than they may."""
        found: dict[tuple[str, str], list[Path]] = {}
        sizes: dict[Path, int] = {}
        for entry in os.scandir(self._folder):
            name = _NAME.fullmatch(entry.name)
            if name is None:
                continue
            # Another process of the same folder may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                path = Path(entry.path)
                sizes[path] = entry.stat(follow_symlinks=False).st_size
                found.setdefault((name[1], name[2]), []).append(path)
        total = sum(sizes.values())
        ours = self._origin, f"{self._number:06d}"
        for pair, paths in sorted(found.items()):
            if total <= self._total_bytes_max:
                break
            if pair != ours:
                for path in paths:
                    path.unlink(missing_ok=True)
                    total -= sizes[path]
        self.total_bytes = total


def packed(lines: bytes) -> bytes:
    """Whole lines as a member of gzip."""
    long = len(lines) > LONG_LINE_BYTES * lines.count(b"\n")
    strategy = zlib.Z_HUFFMAN_ONLY if long else zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(
        _PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT, zlib.DEF_MEM_LEVEL, strategy
    )
    return packer.compress(lines) + packer.flush()
