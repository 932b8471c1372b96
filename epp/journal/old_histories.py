"""Reading of decision histories that versions before the journal wrote: `decisions-*.bin.gz`.

They contain frames like those of the journal. Packed decisions, refusals and ends are the same; the
other kinds have letters of their own.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.core.journal.events import Level, Lost, Opened
from epp.journal.frames import PACKED
from epp.journal.problem import JournalError
from epp.journal.records import (
    Applied,
    EndpointState,
    Record,
    RefusedDocument,
    ToldApplied,
    ToldPlugin,
    ToldRefused,
    ToldSetting,
    ToldStates,
)

HISTORY_NAME: Final = re.compile(r"decisions-(\d{8}T\d{6}-[0-9a-f]{8})-(\d{6})\.bin\.gz", re.ASCII)
"""Regular expression for the names of old decision histories.

Its groups are the origin and the number of the file.
"""
_FORMAT: Final = "homing-decisions"
_VERSION: Final = 1


class _Head(Struct):
    format: str
    version: int
    origin: str
    picker: str
    began_s: float


class _Setting(Struct):
    number: int
    generation: int
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...]
    costs: tuple[ToldPlugin | None, ...] = ()

    def record(self) -> ToldSetting:
        return ToldSetting(**msgspec.structs.asdict(self))


class _States(Struct):
    number: int
    at_s: float
    states: dict[str, EndpointState]

    def record(self) -> ToldStates:
        return ToldStates(**msgspec.structs.asdict(self))


class _Refused(Struct):
    document: RefusedDocument

    def record(self) -> ToldRefused:
        return ToldRefused(document=self.document)


_KINDS: Final[Mapping[bytes, type[Any]]] = {
    b"c": _Setting,
    b"t": _States,
    b"a": Applied,
    b"x": _Refused,
    b"l": int,
}


def history_records(path: Path, frames: Iterator[bytes]) -> Iterator[bytes | Record]:
    """Yield the records of the old decision history at `path`, whose frames are `frames`.

    Raises `JournalError`.
    """
    number = int(path.name.split(".")[0].rpartition("-")[2])
    first = next(frames, None)
    if first is None:
        return
    yield _opened(first, path, number)
    for frame in frames:
        yield frame if frame[:1] in PACKED else _record(frame, path)


def _opened(frame: bytes, path: Path, number: int) -> Opened:
    try:
        head = msgspec.msgpack.decode(memoryview(frame)[1:], type=_Head)
    except msgspec.DecodeError:
        head = _Head("", 0, "", "", 0.0)
    if frame[:1] != b"h" or (head.format, head.version) != (_FORMAT, _VERSION):
        raise JournalError(f"{path} does not begin like a decision history of version {_VERSION}")
    return Opened(
        level=Level.DECISIONS,
        origin=head.origin,
        segment=number,
        picker=head.picker,
        began_s=head.began_s,
    )


def _record(frame: bytes, path: Path) -> Record:
    try:
        found = msgspec.msgpack.decode(memoryview(frame)[1:], type=_KINDS[frame[:1]])
    except (KeyError, msgspec.DecodeError) as error:
        raise JournalError(
            f"{path} contains records that this version does not understand"
        ) from error
    match found:
        case int(records):
            return Lost(events=records)
        case Applied():
            return ToldApplied(document=found)
    record: Record = found.record()
    return record
