"""Reading of a journal's files, even while a picker is writing them.

Files of the formats before the journal are read as if they were its segments (`old_captures`,
`old_histories`).
"""

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct, structs

from epp.core.expectation import misfit
from epp.core.journal.events import JOURNAL_FORMAT, JOURNAL_VERSION, Event, Level, Lost, Opened
from epp.core.journal.requests import request_lines
from epp.journal.frames import (
    FRAME_BYTES_MAX,
    LENGTH,
    PACKED,
    SEGMENT_NAME,
    record_of_frame,
)
from epp.journal.old_captures import (
    EVENTS_NAME,
    REQUESTS_NAME,
    CapturedRequests,
    capture_records,
    header_block_sizes,
    request_texts,
)
from epp.journal.old_histories import HISTORY_NAME, history_records
from epp.journal.problem import JournalError
from epp.journal.records import Record, ToldApplied, ToldRefused, ToldSetting, ToldStates

FLAGS: Final[Mapping[Level, str]] = {Level.DECISIONS: "--decisions-dir", Level.INPUTS: "--capture"}

Read: TypeAlias = bytes | Record
"""A record of a journal: bytes for a packed decision, refusal, endpoint that served instead, or end
of a request, or else a struct.
"""
_encode: Final = msgspec.json.Encoder().encode
_CUT: Final = b""
"""Stand-in for the last record of a journal file whose end is missing or broken."""
FILE_NAMES: Final[Mapping[Level, tuple[re.Pattern[str], ...]]] = {
    Level.DECISIONS: (SEGMENT_NAME[Level.DECISIONS], HISTORY_NAME),
    Level.INPUTS: (SEGMENT_NAME[Level.INPUTS], EVENTS_NAME, REQUESTS_NAME),
}
"""Regular expressions for the names of all files that hold a level of a journal, by level.

Their groups are origin and number.
"""


class Segments(Struct, frozen=True, kw_only=True):
    """The journal files of one picker process at one level (decisions or inputs), in order."""

    origin: str
    level: Level
    files: tuple[Path, ...]
    requests: tuple[Path, ...] = ()
    """Files with the requests of a capture in the old format; empty otherwise."""

    def records(self, since_s: float = -math.inf, until_s: float = math.inf) -> Iterator[Read]:
        """Yield the journal's records in order, each file's after its `Opened`. A `Lost` follows
        that `Opened` if records before the file are missing.

        The state that a file repeats is left out if the file before was read completely. Files last
        written before `since_s` are skipped, and reading ends at the first file that began after
        `until_s`, both in Unix time. Raises `JournalError`.
        """
        requests = CapturedRequests(self.requests)
        last, cut = -2, False
        for path in self.files:
            found = _records_in(path, requests, since_s)
            first = next(found, None)
            opened = _opened(first, path, self.level)
            if opened is None:
                last, cut = -2, cut or first is _CUT
                continue
            if opened.began_s > until_s:
                return
            yield opened
            missing = opened.missing + cut
            if missing:
                yield Lost(events=missing)
            goes_on = opened.segment == last + 1 and not missing
            last, cut = opened.segment, False
            for at, record in enumerate(found):
                # The number of records after the place where a file is broken is unknown.
                cut = record is _CUT
                if not cut and (at >= opened.context or not goes_on):
                    yield record

    def newest_records(self) -> Iterator[Read]:
        """Yield the records of the last journal file, including the state that it repeats from
        earlier files.
        """
        return structs.replace(self, files=self.files[-1:]).records()

    def block_sizes(self) -> set[int]:
        """Return the sizes in tokens of the blocks in which the journal's requests are recorded;
        each file has one size.
        """
        if self.requests:
            return header_block_sizes(self.requests)
        firsts = [next(_records_in(path), None) for path in self.files]
        return {first.block_tokens for first in firsts if isinstance(first, Opened)}

    def request_lines(self) -> Iterator[bytes]:
        """Yield a JSON line of a trace for each request of the journal, at most `BEHIND_MAX`
        requests late.
        """
        if self.requests:
            yield from request_texts(self.requests)
        else:
            for line in request_lines(self.events()):
                yield _encode(line) + b"\n"

    def events(self, since_s: float = -math.inf, until_s: float = math.inf) -> Iterator[Event]:
        """Yield the records of a journal of inputs, like `records`, without packed records and
        records about configurations and states, which only a journal of decisions has.
        """
        for record in self.records(since_s, until_s):
            if not isinstance(record, bytes | ToldSetting | ToldStates | ToldApplied | ToldRefused):
                yield record


def journals(folder: Path, *levels: Level) -> list[Segments]:
    """Return the journal files in `folder` and in the folders directly inside it, one `Segments`
    per picker process, oldest process first.

    A process may have files of several levels; the first of `levels` that it has is returned.
    Raises `JournalError` if one of these folders cannot be read or no process has files.
    """
    try:
        within = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        places = [folder, *sorted(Path(entry.path) for entry in within)]
        paths = [Path(entry.path) for place in places for entry in os.scandir(place)]
    except OSError as error:
        raise JournalError(
            f"{error.filename or folder} cannot be read: {error.strerror}"
        ) from error
    requests = _by_origin(paths, (REQUESTS_NAME,))
    found: dict[str, Segments] = {}
    for level in levels:
        files = _by_origin(paths, FILE_NAMES[level][:2])
        asked = requests if level is Level.INPUTS else {}
        for origin in files | asked:
            segments = Segments(
                origin=origin,
                level=level,
                files=files.get(origin, ()),
                requests=asked.get(origin, ()),
            )
            found.setdefault(origin, segments)
    if not found:
        flags = " or ".join(FLAGS[level] for level in levels)
        raise JournalError(f"{folder} contains no journal, expected files of `epp serve {flags}`")
    return [found[origin] for origin in sorted(found)]


def _by_origin(
    paths: Iterable[Path], names: Iterable[re.Pattern[str]]
) -> dict[str, tuple[Path, ...]]:
    found: dict[str, dict[int, Path]] = {}
    for path in paths:
        for pattern in names:
            if name := pattern.fullmatch(path.name):
                found.setdefault(name[1], {}).setdefault(int(name[2]), path)
    return {origin: tuple(files[at] for at in sorted(files)) for origin, files in found.items()}


def _records_in(
    path: Path, requests: CapturedRequests | None = None, since_s: float = -math.inf
) -> Iterator[Read]:
    """Yield the records of a journal file, then `_CUT` if its end is missing; the missing end of an
    old capture is not noticed.

    It yields nothing for a file last written before `since_s`, and for one that was removed
    meanwhile. Raises `JournalError`.
    """
    try:
        if path.stat().st_mtime < since_s:
            return
        if EVENTS_NAME.fullmatch(path.name):
            yield from capture_records(path, requests or CapturedRequests(()))
        elif HISTORY_NAME.fullmatch(path.name):
            yield from history_records(path, frames_of(path))
        else:
            for frame in frames_of(path):
                yield frame if frame[:1] in PACKED else _record(frame, path)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        # The writer was killed or is still writing.
        yield _CUT
    except FileNotFoundError:
        # The writer has just removed its oldest file.
        return
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def frames_of(path: Path) -> Iterator[bytes]:
    """Yield the complete frames of a journal file.

    Raises `JournalError` for a frame that is too long, and `EOFError`, `zlib.error` or
    `gzip.BadGzipFile` where the file is cut off or broken.
    """
    with gzip.open(path) as file:
        while length := file.read(LENGTH.size):
            count = LENGTH.unpack(length)[0] if len(length) == LENGTH.size else 0
            if count > FRAME_BYTES_MAX:
                raise JournalError(
                    f"{path} is broken: it has a frame of {count} bytes, expected at "
                    f"most {FRAME_BYTES_MAX}"
                )
            frame = file.read(count)
            if not count or len(frame) < count:
                raise EOFError
            yield frame


def _record(frame: bytes, path: Path) -> Record:
    try:
        return record_of_frame(frame)
    except msgspec.DecodeError as error:
        raise JournalError(misfit(str(path), error, Record)) from None


def _opened(first: Read | None, path: Path, level: Level) -> Opened | None:
    """Return the first record of a journal file, or None if the file has no complete record.

    Raises `JournalError` if it does not describe a journal of this version and level.
    """
    if first is None or first == _CUT:
        return None
    if not isinstance(first, Opened):
        raise JournalError(f"{path} does not begin with an `opened` record")
    if (first.format, first.version) != (JOURNAL_FORMAT, JOURNAL_VERSION):
        raise JournalError(
            f"{path}: expected {JOURNAL_FORMAT} version {JOURNAL_VERSION}, got {first.format} "
            f"{first.version}"
        )
    if first.level is not level:
        raise JournalError(f"{path} has the level {first.level}, expected {level}")
    return first
