"""Reading of past decisions with their outcomes, and of changes between them, from the files of a
journal.
"""

import struct
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from epp.configuration.build import plugin_tables
from epp.configuration.config import ConfigError
from epp.configuration.document import decode
from epp.core.decision.plugin import TellsCost
from epp.core.duration import parse_duration
from epp.core.journal.events import Level, Lost, Opened
from epp.journal.decision_record import (
    DECIDED,
    PACKED_FROM,
    REFUSED,
    Served,
    end_of,
    kept_at_s,
    unpack_decided,
    unpack_number,
    unpack_refused,
    unpack_served,
)
from epp.journal.derived import derived
from epp.journal.frames import ENDED, ended_of
from epp.journal.past import (
    NO_SETTING,
    OPEN_MAX,
    Past,
    PastChange,
    PastDecision,
    PastLoss,
    PastRefusal,
    PastStates,
    Setting,
)
from epp.journal.problem import JournalError
from epp.journal.reading import Read, journals
from epp.journal.records import (
    States,
    ToldApplied,
    ToldPlugin,
    ToldRefused,
    ToldSetting,
    ToldStates,
)

ENDS_S: Final = 900.0
"""Time in seconds after the end of a requested period in which ends of its requests are
searched.
"""
SLACK_S: Final = 60.0
"""Tolerance in seconds for differences between clocks, and between a decision and its record."""
_DAY: Final = timedelta(days=1)


class Context:
    """The configurations and endpoint states to which packed records refer by number."""

    def __init__(self) -> None:
        self.settings: dict[int, Setting] = {}
        """Recorded scorers and weights by the number to which decisions refer, oldest first."""
        self.states: dict[int, States] = {0: {}}
        """Recorded endpoint states by the number to which decisions refer, oldest first."""

    def past(self, record: bytes, picker: str = "") -> "PastDecision | PastRefusal":
        """Return the decision or refusal in a packed record.

        Raises `msgspec.DecodeError` or `struct.error`.
        """
        packed = memoryview(record)[PACKED_FROM:]
        if record[:1] == REFUSED:
            refused = unpack_refused(packed)
            return PastRefusal(
                at_s=kept_at_s(record),
                picker=picker,
                told=refused,
                states=self.states.get(refused.states, {}),
            )
        told = unpack_decided(packed)
        return PastDecision(
            at_s=kept_at_s(record),
            picker=picker,
            told=told,
            setting=self.settings.get(told.setting, NO_SETTING),
            states=self.states.get(told.states, {}),
            leg_settings=tuple(
                [self.settings.get(leg.setting, NO_SETTING) for leg in told.earlier]
            ),
            end=end_of(record),
        )


def moment_of(text: str, now_s: float) -> float:
    """Return the Unix time that `text` names: a time of day like "02:10" (its last occurrence), a
    date with or without a time, or an age like "30m".

    Times are in UTC unless they have another zone. Raises `JournalError` for any other text.
    """
    now = datetime.fromtimestamp(now_s, UTC)
    try:
        if "-" in text.partition(":")[0][1:]:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if ":" in text:
            of_day = time.fromisoformat(text)
            zone = of_day.tzinfo or UTC
            moment = datetime.combine(now.astimezone(zone).date(), of_day, zone)
            return (moment if moment <= now else moment - _DAY).timestamp()
        return now_s - parse_duration(text)
    except ValueError as error:
        raise JournalError(
            f"{text!r} is not a time such as 02:10 or 2026-03-02T02:10, or an age such as 30m"
        ) from error


def read_past(folder: Path, since_s: float, until_s: float) -> Iterator[Past]:
    """Yield past events from `since_s` until `until_s`, in Unix time. A decision follows when its
    end is found; a decision without an end follows after many later ones, or last.

    Pickers are read one after another, so the events of several pickers are not in order of time. A
    picker's recorded decisions are read; if it has none, they are derived from its capture of
    inputs. Raises `JournalError`.
    """
    period = since_s - SLACK_S, until_s + ENDS_S + SLACK_S
    for journal in journals(folder, Level.DECISIONS, Level.INPUTS):
        if journal.level is Level.INPUTS:
            found = derived(journal.events(*period))
        else:
            found = _Reader(since_s, until_s).read(journal.records(*period))
        yield from (past for past in found if since_s <= past.at_s <= until_s)


def changes_in(folder: Path) -> list[PastChange]:
    """Return the recorded configuration changes of all pickers, oldest first.

    Raises `JournalError`.
    """
    changes: list[PastChange] = []
    for journal in journals(folder, Level.DECISIONS, Level.INPUTS):
        if journal.level is Level.INPUTS:
            found = derived(journal.events())
        else:
            # Each segment starts with the changes before it.
            found = _Reader(0.0, 0.0).read(journal.newest_records())
        changes += [past for past in found if isinstance(past, PastChange)]
    return sorted(changes, key=lambda one: one.at_s)


class _Reader:
    """A reader of the journal records of one picker process, in order."""

    def __init__(self, since_s: float, until_s: float) -> None:
        """Prepare to read; decisions before `since_s` and after `until_s`, in Unix time, are left
        out.
        """
        self._since_s, self._until_s = since_s, until_s
        self._picker = ""
        self._now_s = 0.0
        """Lower bound of the present Unix time: that of the last decision, refusal or served
        endpoint that was read, or of the beginning of a later file.
        """
        self._context = Context()
        self._changes: set[tuple[float, int]] = set()
        self._open: dict[int, bytes] = {}
        """Records of decisions whose end was not read yet, by the decision's number,
        oldest first.
        """
        self._served: dict[int, Served] = {}

    def read(self, records: Iterable[Read]) -> Iterator[Past]:
        """Yield the past events in `records`. Decisions whose end is missing come last, or once
        `OPEN_MAX` later ones have no end either. Raises `JournalError`.
        """
        for record in records:
            try:
                yield from self._packed(record) if isinstance(record, bytes) else self._told(record)
            except (msgspec.DecodeError, struct.error) as error:
                raise JournalError(
                    f"a journal of {self._picker or 'a picker'} contains records that this version "
                    "does not understand"
                ) from error
        yield from map(self._decision, self._open.values())

    def _packed(self, record: bytes) -> Iterator[Past]:
        if record[:1] == ENDED:
            number, head = ended_of(record)
            decided = self._open.pop(number, None)
            if decided is not None:
                yield self._decision(head + decided[len(head) :])
            return
        self._now_s = kept_at_s(record)
        if self._since_s <= self._now_s <= self._until_s:
            yield from self._record(record)

    def _record(self, record: bytes) -> Iterator[Past]:
        packed = memoryview(record)[PACKED_FROM:]
        if record[:1] == DECIDED:
            self._open[unpack_number(packed).number] = record
            if len(self._open) > OPEN_MAX:
                yield self._decision(self._open.pop(next(iter(self._open))))
        elif record[:1] == REFUSED:
            yield self._context.past(record, self._picker)
        else:
            served = unpack_served(packed)
            if served.number in self._open:
                self._served[served.number] = served

    def _decision(self, record: bytes) -> Past:
        past = self._context.past(record, self._picker)
        assert isinstance(past, PastDecision), "the record is a decision"
        served = self._served.pop(past.told.number, None)
        return past if served is None else structs.replace(past, served=served)

    def _told(self, record: Read) -> Iterator[Past]:
        picker = self._picker
        match record:
            case Opened():
                self._picker, self._now_s = record.picker, record.began_s
            case ToldSetting():
                self._context.settings[record.number] = Setting(
                    record.generation,
                    record.scorers,
                    record.weights,
                    record.by_blocks,
                    tuple(map(_teller, record.costs)),
                )
            case ToldStates(number=number, at_s=at_s, states=states):
                if number not in self._context.states:
                    self._context.states[number] = states
                    yield PastStates(at_s=at_s, picker=picker, states=states)
            case ToldApplied(document=applied):
                if (applied.at_s, applied.generation) not in self._changes:
                    self._changes.add((applied.at_s, applied.generation))
                    yield PastChange(at_s=applied.at_s, picker=picker, change=applied)
            case ToldRefused(document=document):
                yield PastChange(at_s=document.at_s, picker=picker, change=document)
            case Lost(events=records):
                yield PastLoss(at_s=self._now_s, picker=picker, records=records)


def _teller(told: ToldPlugin | None) -> TellsCost | None:
    """Return the stored scorer plugin, or None if none was stored, or if it is not installed, has
    other parameters or reports no costs.
    """
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
