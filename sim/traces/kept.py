"""A cache on disk for parsed traces; reading a big trace from it takes an eighth of the time.

The name of an entry is a hash of the trace file, the reading options and the source code of the
parsers, so an entry is never stale. An entry is written to a temporary file and then renamed, so
several processes may write the same one. A damaged entry is ignored, and the trace file is read
again. If the folder grows too large, the least recently used entries are deleted.

An entry consists of MessagePack frames, each a list of `Arrival`, then a frame of length 0 and the
XXH3-128 of all bytes before it. msgspec turns the rows into checked arrivals without further code.
A column format would need code that assembles them.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from struct import Struct, error
from typing import BinaryIO, Final, Self

import msgspec
import xxhash

import epp.core.prompt
from sim.sentences import sentence_of
from sim.traces.arrival import Arrival

KEPT_BYTES_MAX: Final = 2 * 1024**3
"""Maximum size in bytes of all cached traces together, and of one cached trace."""
FRAME_ARRIVALS_MAX: Final = 4096
_FRAME_BLOCKS_MAX: Final = 1_000_000
_LENGTH: Final = Struct("<Q")
_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 1024 * 1024
_ENDING: Final = ".arrivals"
_UNFINISHED: Final = ".part"
_UNFINISHED_S_MAX: Final = 3600.0
"""Age in seconds above which an unfinished cache file is deleted, because its process must have
died.
"""


class NotCached(Exception):  # noqa: N818  an answer, not an error
    """The requested trace is not in the cache on disk or cannot be cached, or its entry is damaged."""


def kept_folder() -> str:
    """Return the path of this user's folder for cached traces, or "" if the home directory is
    unknown.

    The path follows the XDG base directory specification.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return str(Path(named) / "homing" / "traces")
    try:
        return str(Path.home() / ".cache" / "homing" / "traces")
    except RuntimeError:
        # The home directory of this user is unknown.
        return ""


class CachedTraces:
    """The traces that are cached in one folder.

    A new folder is created so that only this user may read it, because traces contain session
    names.
    """

    def __init__(self, folder: Path, *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        """Create a cache of parsed traces in `folder`. The folder is created when the first trace
        is cached.

        `bytes_max` limits the size of all entries together, and of each entry.
        """
        self._folder = folder
        self._bytes_max = bytes_max

    def name_of(self, path: Path, how: Sequence[object]) -> str:
        """Return the name of the cache entry for the trace file `path`, read with the options
        `how`.

        Raises `OSError`, and `NotCached` if the source code of the parsers cannot be read.
        """
        version = _version_of_reading()
        if not version:
            raise NotCached
        digest = xxhash.xxh3_128(repr((version, *how)).encode())
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
        return digest.hexdigest()

    def holds(self, name: str) -> bool:
        """Return whether the cache has an entry called `name`; the entry may be damaged."""
        return self._path(name).is_file()

    def read(self, name: str) -> Iterator[Arrival]:
        """Yield the arrivals of a cached trace. Its entry counts as used now.

        Raises `NotCached` if the entry is missing or damaged, possibly after some arrivals.
        """
        path = self._path(name)
        try:
            with path.open("rb") as file:
                _check(file)
                with contextlib.suppress(OSError):
                    # The entry becomes the most recently used one, if the folder is writable.
                    os.utime(path)
                decode = msgspec.msgpack.Decoder(list[Arrival]).decode
                while length := _LENGTH.unpack(file.read(_LENGTH.size))[0]:
                    yield from decode(file.read(length))
        except (OSError, msgspec.DecodeError, error) as problem:
            if not isinstance(problem, FileNotFoundError | NotADirectoryError):
                _tell(path, f"{sentence_of(problem)}; the trace file is read instead")
            raise NotCached from problem

    def keeping(
        self, name: str, arrivals: Iterator[Arrival], as_named: Callable[[], bool]
    ) -> Iterator[Arrival]:
        """Yield `arrivals` unchanged, and store them as the cache entry `name` after the last one.
        The least recently used entries beyond the size limit are then deleted.

        Nothing is stored if an arrival has a body (users' texts are not copied), if the entry would
        exceed the size limit, or if `as_named` returns False at the end. Write errors are reported
        on stderr and have no other effect.
        """
        with contextlib.ExitStack() as files:
            writer: _Writer | None = None
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                writer = files.enter_context(_Writer(self._folder, self._bytes_max))
            except OSError as problem:
                _tell(self._folder, sentence_of(problem))
            for arrival in arrivals:
                if writer is not None and not writer.takes(arrival):
                    writer.discard()
                    writer = None
                yield arrival
            if writer is not None and as_named():
                writer.finish(self._path(name))
                self._evict(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"

    def _evict(self, last: Path) -> None:
        """Delete the least recently used entries until the folder is within its size limit, but
        never `last`, the new one. Delete unfinished files older than `_UNFINISHED_S_MAX`. Other
        processes may delete entries at the same time.
        """
        entries: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            now = last.stat().st_mtime
            for path in self._folder.iterdir():
                # Another process may have deleted the entry.
                with contextlib.suppress(OSError):
                    told = path.stat()
                    if path.suffix == _ENDING:
                        entries.append((told.st_mtime, told.st_size, path))
                    elif path.suffix == _UNFINISHED and told.st_mtime < now - _UNFINISHED_S_MAX:
                        path.unlink()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._bytes_max:
                break
            if path != last:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size


class _Writer:
    """A writer of one entry of the cache of parsed traces, into a temporary file with a unique
    name.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Create the temporary file in `folder`. Raises `OSError`."""
        handle, name = tempfile.mkstemp(suffix=_UNFINISHED, dir=folder)
        self._file: BinaryIO = os.fdopen(handle, "wb")
        self._path = Path(name)
        self._left_bytes = bytes_max
        self._digest = xxhash.xxh3_128()
        self._frame: list[Arrival] = []
        self._frame_blocks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def takes(self, arrival: Arrival) -> bool:
        """Append an arrival to the cache entry.

        Return False if the entry cannot be stored: the arrival has a body, writing failed, or the
        size limit is exceeded.
        """
        if arrival.body:
            return False
        self._frame.append(arrival)
        self._frame_blocks += len(arrival.blocks)
        if len(self._frame) < FRAME_ARRIVALS_MAX and self._frame_blocks < _FRAME_BLOCKS_MAX:
            return True
        try:
            self._write_frame()
        except OSError as problem:
            _tell(self._path, sentence_of(problem))
            return False
        return self._left_bytes >= 0

    def finish(self, place: Path) -> None:
        """Write the remaining arrivals and the checksum, and rename the temporary file to `place`
        unless the entry exceeds the size limit.

        Write errors are reported on stderr.
        """
        try:
            if self._frame:
                self._write_frame()
            self._write(_LENGTH.pack(0))
            self._file.write(self._digest.digest())
            self._file.close()
            if self._left_bytes >= 0:
                self._path.replace(place)
        except OSError as problem:
            _tell(self._path, sentence_of(problem))

    def discard(self) -> None:
        """Delete the temporary file, unless it has been moved to its place."""
        with contextlib.suppress(OSError):
            # Closing writes buffered data, for which there may be no space.
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write_frame(self) -> None:
        frame = msgspec.msgpack.encode(self._frame)
        self._frame.clear()
        self._frame_blocks = 0
        self._write(_LENGTH.pack(len(frame)))
        self._write(frame)

    def _write(self, part: bytes) -> None:
        self._digest.update(part)
        self._left_bytes -= len(part)
        if self._left_bytes >= 0:
            self._file.write(part)


def _check(file: BinaryIO) -> None:
    """Raise `msgspec.DecodeError` unless the checksum of the cache entry is right; then rewind the
    file to its beginning.
    """
    left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
    digest = xxhash.xxh3_128()
    while left > 0 and (part := file.read(min(left, _READ_BYTES))):
        digest.update(part)
        left -= len(part)
    if left or file.read() != digest.digest():
        raise msgspec.DecodeError("Expected the checksum of the cache entry to match")
    file.seek(0)


@cache
def _version_of_reading() -> str:
    """Return a hash of the source code of the trace parsers, or "" if the source files cannot be
    read.
    """
    folders = [Path(__file__).parent, *map(Path, epp.core.prompt.__path__)]
    digest = xxhash.xxh3_128()
    try:
        sources = sorted(path for folder in folders for path in folder.glob("*.py"))
        for path in sources:
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest() if sources else ""


def _tell(path: Path, problem: str) -> None:
    sys.stderr.write(f"sim: the trace is not cached in {path}: {problem}\n")
