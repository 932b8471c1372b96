"""Big traces as they were read, kept on disk: reading one again takes an eighth of the time.

What is kept is known by the bytes of the file, by how it is to be read, and by the code that read
it; so nothing is ever out of date. An entry is written beside its place and moved there whole, so
that several processes may write the same; one that is not as it was written is read anew. Where
the folder grows too large, what was not used for longest goes.

An entry is frames of MessagePack, each a list of `Arrival`, then a frame of length 0 and the
XXH3-128 of all before it. The rows become arrivals, checked, without code of ours: columns on disk
would have to be put together for each of them.
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
"""Of all entries together, and of one."""
FRAME_ARRIVALS_MAX: Final = 4096
_FRAME_BLOCKS_MAX: Final = 1_000_000
_LENGTH: Final = Struct("<Q")
_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 1024 * 1024
_ENDING: Final = ".arrivals"
_UNFINISHED: Final = ".part"
_UNFINISHED_S_MAX: Final = 3600.0
"""So much older than an entry that was begun and finished since: whoever wrote it has died."""


class NotKept(Exception):  # noqa: N818  an answer, not an error
    """There is no such entry, or it is not as it was written."""


def kept_folder() -> str:
    """Where traces of this user are kept, by the XDG base directory specification; "": nowhere."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return str(Path(named) / "homing" / "traces")
    try:
        return str(Path.home() / ".cache" / "homing" / "traces")
    except RuntimeError:
        # Nobody knows who this user is.
        return ""


class KeptTraces:
    """The entries in one folder, which only this user may read: sessions have names."""

    def __init__(self, folder: Path, *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        """The folder is made when the first entry is."""
        self._folder = folder
        self._bytes_max = bytes_max

    def name_of(self, path: Path, how: Sequence[object]) -> str:
        """What the trace in the file `path` is kept under, if it is read as `how` says.

        Raises `NotKept` if the code that reads cannot be told from other code, and `OSError`.
        """
        version = _version_of_reading()
        if not version:
            raise NotKept
        digest = xxhash.xxh3_128(repr((version, *how)).encode())
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
        return digest.hexdigest()

    def holds(self, name: str) -> bool:
        """Whether there is such an entry, whole or not."""
        return self._path(name).is_file()

    def read(self, name: str) -> Iterator[Arrival]:
        """The arrivals of an entry. Raises `NotKept`, after some of them at the worst."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                _check(file)
                with contextlib.suppress(OSError):
                    # Now it is the last that goes, if the folder may be changed.
                    os.utime(path)
                decode = msgspec.msgpack.Decoder(list[Arrival]).decode
                while length := _LENGTH.unpack(file.read(_LENGTH.size))[0]:
                    yield from decode(file.read(length))
        except (OSError, msgspec.DecodeError, error) as problem:
            if not isinstance(problem, FileNotFoundError | NotADirectoryError):
                _tell(path, f"{sentence_of(problem)}; it is read anew")
            raise NotKept from problem

    def keeping(
        self, name: str, arrivals: Iterator[Arrival], as_named: Callable[[], bool]
    ) -> Iterator[Arrival]:
        """The same arrivals, an entry once the last has been taken.

        None if one of them has a body (nobody asked for a copy of what people wrote), if they take
        more room than all entries may, or if they turn out not to be `as_named`. What the folder
        refuses is told on standard error and changes nothing else.
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
        """Make room, for `last` too, which is new; another process may do the same."""
        entries: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            now = last.stat().st_mtime
            for path in self._folder.iterdir():
                # One may be gone by now.
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
    """An entry that is being written, under a name that no other process has."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Raises `OSError`."""
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
        """Append one; False if this one, or what it comes after, cannot be kept."""
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
        """Write the rest, and move the whole to `place`."""
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
        """Nothing of it stays, unless it is finished."""
        with contextlib.suppress(OSError):
            # Closing writes what is buffered, for which there may be no room.
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
    """`msgspec.DecodeError` unless the file is whole; it is then at its beginning."""
    left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
    digest = xxhash.xxh3_128()
    while left > 0 and (part := file.read(min(left, _READ_BYTES))):
        digest.update(part)
        left -= len(part)
    if left or file.read() != digest.digest():
        raise msgspec.DecodeError("Expected an entry as it was written")
    file.seek(0)


@cache
def _version_of_reading() -> str:
    """Of the sources that make arrivals of lines; "" where there are no sources."""
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
    sys.stderr.write(f"sim: the trace is not kept in {path}: {problem}\n")
