"""Read the files of `DecisionHistory`, with or without a picker that is writing them."""

import gzip
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from epp.configuration.build import plugin_tables
from epp.configuration.config import ConfigError
from epp.configuration.document import decode
from epp.core.decision.plugin import TellsCost
from epp.core.duration import parse_duration
from epp.core.types import Seconds
from epp.shell.files.segment_folder import segment_name
from epp.shell.operators.decisions.configuration_changes import Applied, RefusedDocument
from epp.shell.operators.decisions.decision_record import (
    DECIDED,
    PACKED_FROM,
    REFUSED,
    SERVED,
    Decided,
    Ended,
    Refused,
    Served,
    end_of,
    kept_at_s,
    unpack_decided,
    unpack_number,
    unpack_refused,
    unpack_served,
)
from epp.shell.operators.decisions.decision_rows import NO_SETTING, Setting
from epp.shell.operators.decisions.endpoint_states import States
from epp.shell.operators.decisions.history_format import (
    ENDED,
    ENDING,
    FORMAT,
    FRAME_BYTES_MAX,
    KIND,
    LENGTH_BYTES,
    VERSION,
    Head,
    ToldPlugin,
    ToldRefused,
    ToldSetting,
    ToldStates,
    ended_of,
    length_of,
    told_of,
)

OPEN_MAX: Final = 65_536
"""Maximum number of decisions that wait for their end; the oldest are returned without it."""
ENDS_S: Final = 900.0
"""Time in seconds after the last decision for which ends are searched."""
SLACK_S: Final = 60.0
"""Tolerance in seconds for clocks, and between a decision and its record."""
_NAME: Final = segment_name((KIND,), ENDING)
_BROKEN: Final = (EOFError, gzip.BadGzipFile, zlib.error)
_DAY: Final = timedelta(days=1)


class HistoryError(Exception):
    """Recorded decisions cannot be read, or a query is invalid. The message is one sentence."""


class PastDecision(Struct, frozen=True, kw_only=True):
    """A decision with its outcome."""

    at_s: float
    picker: str
    told: Decided
    setting: Setting
    states: States
    """States of endpoints that were not simply ready."""
    end: Ended | None
    served: Served | None
    """Endpoint that the gateway used instead, or None."""


class PastRefusal(Struct, frozen=True, kw_only=True):
    at_s: float
    picker: str
    told: Refused
    states: States


class PastStates(Struct, frozen=True, kw_only=True):
    """The states of endpoints that were not simply ready for this picker, from this time on."""

    at_s: float
    picker: str
    states: States


class PastChange(Struct, frozen=True, kw_only=True):
    """A document that came into force or was rejected."""

    at_s: float
    picker: str
    change: Applied | RefusedDocument


class PastLoss(Struct, frozen=True, kw_only=True):
    """A number of missing records, from about this time on."""

    at_s: float
    picker: str
    records: int


Past: TypeAlias = PastDecision | PastRefusal | PastStates | PastChange | PastLoss


def moment_of(text: str, now_s: float) -> float:
    """Parse a time: "02:10" (the last one), a date with a time, or an age like "30m".

    Return Unix time. Times are in UTC unless they have another zone. Raises `HistoryError`.
    """
    now = datetime.fromtimestamp(now_s, UTC)
    try:
        if "-" in text[1:]:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if ":" in text:
            moment = datetime.combine(now.date(), time.fromisoformat(text), UTC)
            return (moment if moment <= now else moment - _DAY).timestamp()
        return now_s - parse_duration(text)
    except ValueError as error:
        raise HistoryError(
            f"{text!r} is not a time such as 02:10 or 2026-03-02T02:10, or an age such as 30m"
        ) from error


def read_past(folder: Path, since_s: float, until_s: float) -> Iterator[Past]:
    """Yield the records from `since_s` until `until_s`; a decision follows when its end is found.

    Processes are read one after another, so that records of several are not in order of time.
    Raises `HistoryError`.
    """
    for files in _files(folder).values():
        reader = _Reader(since_s, until_s)
        for path in files:
            yield from reader.read(path)
        yield from reader.rest()


def changes_in(folder: Path) -> list[PastChange]:
    """Return the known configuration changes, oldest first. Raises `HistoryError`."""
    found: list[PastChange] = []
    for files in _files(folder).values():
        reader = _Reader(0.0, 0.0)
        # Each file starts with the changes before it.
        read = reader.read(files[-1], everything=True)
        found += [one for one in read if isinstance(one, PastChange)]
    return sorted(found, key=lambda one: one.at_s)


class _Reader:
    """A reader of the files of one process, in order."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self._since_s, self._until_s = since_s, until_s
        self._picker = ""
        self._now_s = 0.0
        """Time of the last record."""
        self._settings: dict[int, Setting] = {}
        self._states: dict[int, States] = {0: {}}
        self._changes: set[tuple[float, int]] = set()
        self._open: dict[int, bytes] = {}
        """Records of decisions without end by number, oldest first."""
        self._served: dict[int, Served] = {}

    def read(self, path: Path, *, everything: bool = False) -> Iterator[Past]:
        """Yield the records of a file.

        If `everything` is true, records about more than single requests are returned for any time.
        """
        try:
            yield from self._read(path, everything=everything)
        except (msgspec.DecodeError, KeyError, struct.error) as error:
            raise HistoryError(
                f"{path} contains records that this version does not understand"
            ) from error

    def _read(self, path: Path, *, everything: bool) -> Iterator[Past]:
        for frame in _frames(path, self._since_s, self._until_s, everything=everything):
            kind = frame[:1]
            if kind in {DECIDED, REFUSED, SERVED}:
                self._now_s = kept_at_s(frame)
                if self._since_s <= self._now_s <= self._until_s:
                    yield from self._record(kind, frame)
            elif kind == ENDED:
                number, head = ended_of(frame)
                record = self._open.pop(number, None)
                if record is not None:
                    yield self._decision(head + record[len(head) :])
            else:
                for one in self._told(frame):
                    if everything or self._since_s <= one.at_s <= self._until_s:
                        yield one

    def rest(self) -> Iterator[Past]:
        """Yield decisions whose end was not found."""
        opened, self._open = self._open, {}
        yield from map(self._decision, opened.values())

    def _record(self, kind: bytes, record: bytes) -> Iterator[Past]:
        packed = memoryview(record)[PACKED_FROM:]
        if kind == DECIDED:
            self._open[unpack_number(packed).number] = record
            if len(self._open) > OPEN_MAX:
                yield self._decision(self._open.pop(next(iter(self._open))))
        elif kind == REFUSED:
            told = unpack_refused(packed)
            yield PastRefusal(
                at_s=kept_at_s(record),
                picker=self._picker,
                told=told,
                states=self._states.get(told.states, {}),
            )
        else:
            served = unpack_served(packed)
            if served.number in self._open:
                self._served[served.number] = served

    def _decision(self, record: bytes) -> PastDecision:
        told = unpack_decided(memoryview(record)[PACKED_FROM:])
        return PastDecision(
            at_s=kept_at_s(record),
            picker=self._picker,
            told=told,
            setting=self._settings.get(told.setting, NO_SETTING),
            states=self._states.get(told.states, {}),
            end=end_of(record),
            served=self._served.pop(told.number, None),
        )

    def _told(self, frame: bytes) -> Iterator[Past]:
        match told_of(frame):
            case Head() as head:
                self._picker, self._now_s = head.picker, head.began_s
            case ToldSetting() as told:
                self._settings[told.number] = Setting(
                    told.generation,
                    told.scorers,
                    told.weights,
                    told.by_blocks,
                    tuple(map(_teller, told.costs)),
                )
            case ToldStates() as told:
                if told.number not in self._states:
                    self._states[told.number] = told.states
                    yield PastStates(at_s=told.at_s, picker=self._picker, states=told.states)
            case Applied() as applied:
                if (applied.at_s, applied.generation) not in self._changes:
                    self._changes.add((applied.at_s, applied.generation))
                    yield PastChange(at_s=applied.at_s, picker=self._picker, change=applied)
            case ToldRefused(document=document):
                yield PastChange(at_s=document.at_s, picker=self._picker, change=document)
            case int(records):
                yield PastLoss(at_s=self._now_s, picker=self._picker, records=records)


def _teller(told: ToldPlugin | None) -> TellsCost | None:
    """Return the plugin, or None if it is not installed or has other parameters."""
    if told is None:
        return None
    try:
        kind = plugin_tables().scorers.get(told.type_name)
        if kind is None:
            return None
        made: Any = msgspec.msgpack.decode(told.parameters, type=kind, dec_hook=decode)
    except (ConfigError, msgspec.ValidationError, ValueError):
        return None
    return made if kind.abilities.tells_cost else None


def _files(folder: Path) -> Mapping[str, list[Path]]:
    """Return the files by origin in order, in `folder` and its subfolders.

    Raises `HistoryError`.
    """
    found: dict[str, list[Path]] = {}
    try:
        within = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        for place in (folder, *(Path(entry.path) for entry in within)):
            for entry in os.scandir(place):
                if name := _NAME.fullmatch(entry.name):
                    found.setdefault(name[1], []).append(Path(entry.path))
    except OSError as error:
        raise HistoryError(f"--dir {folder} cannot be read: {error.strerror}") from error
    if not found:
        raise HistoryError(
            f"--dir {folder} contains no {KIND}-*.{ENDING}, expected files of `epp serve "
            "--decisions-dir`"
        )
    return {origin: sorted(found[origin]) for origin in sorted(found)}


def _frames(path: Path, since_s: Seconds, until_s: Seconds, *, everything: bool) -> Iterator[bytes]:
    """Yield the complete frames of a file, or nothing if it is outside the period."""
    try:
        if not everything and path.stat().st_mtime < since_s - SLACK_S:
            return
        with gzip.open(path) as file:
            first = True
            while len(length := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
                count = length_of(length)
                if count > FRAME_BYTES_MAX:
                    raise HistoryError(f"{path} is broken: it has a frame of {count} bytes")
                frame = file.read(count)
                if len(frame) < count:
                    return
                if first:
                    head = _head(path, frame)
                    if not everything and head.began_s > until_s + ENDS_S + SLACK_S:
                        return
                    first = False
                yield frame
    except _BROKEN:
        # The process was killed while it wrote, or is still writing.
        return
    except FileNotFoundError:
        # The file was the oldest and has just been removed.
        return
    except OSError as error:
        raise HistoryError(f"{path} cannot be read: {error.strerror}") from error


def _head(path: Path, frame: bytes) -> Head:
    try:
        head = told_of(frame)
    except (msgspec.DecodeError, KeyError):
        head = 0
    if not isinstance(head, Head) or (head.format, head.version) != (FORMAT, VERSION):
        raise HistoryError(f"{path} has another version, expected version {VERSION}")
    return head
