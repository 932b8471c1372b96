"""Implement `epp changes`: compare the decisions before and after a configuration change or another
moment.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from epp.core.types import Seconds
from epp.flags.subcommands import ChangesFlags
from epp.journal.decisions import changes_in, moment_of, read_past
from epp.journal.past import PastChange, PastDecision, PastLoss, PastRefusal, PastStates
from epp.journal.problem import JournalError
from epp.journal.records import READY, Applied, EndpointState, States
from epp.shell.operators.decisions.decision_rows import iso
from epp.shell.operators.decisions.decision_sums import Stretch, in_words, percent, seconds
from epp.shell.operators.pages.text_table import table
from epp.shell.printable import printable

SHOWN: Final = 0
NOTHING: Final = 1
UNREADABLE: Final = 2
EVENTS_MAX: Final = 12
"""Maximum number of events that `epp changes` prints from the two periods: those nearest to the
moment between them, without those less than a second from it. Further events are only counted.
"""
CHANGES_MAX: Final = 5
"""Maximum number of changed settings that `epp changes` lists for one configuration change, and of
other configuration changes that it lists for a later `--at`.
"""
_ENDPOINTS_MAX: Final = 20
"""Maximum number of endpoints that `epp changes` compares: those whose share of the requests
changed most.
"""


class _Event(msgspec.Struct, frozen=True):
    at_s: float
    what: str


def show_changes(
    flags: ChangesFlags, out: TextIO, err: TextIO, clock: Callable[[], Seconds] = time.time
) -> int:
    """Compare the periods before and after a moment and print the result.

    Return the exit code: 0 if the periods were compared, 1 without `--at` if the configuration
    never changed, 2 if the journal's files cannot be read or `--at` is not a time.
    """
    folder, now_s = Path(flags.dir), clock()
    try:
        known = changes_in(folder)
        at_s = moment_of(flags.at, now_s) if flags.at else _last(known)
        if at_s is None:
            print(
                f"epp changes: {flags.dir} contains no change of the configuration; give a time "
                "with --at",
                file=err,
            )
            return NOTHING
        before = Stretch(at_s - flags.window, at_s)
        after = Stretch(at_s, min(at_s + flags.window, now_s))
        events = _compare(folder, before, after)
    except JournalError as error:
        print(f"epp changes: {error}", file=err)
        return UNREADABLE
    here = [one for one in known if abs(one.at_s - at_s) < 1.0]
    if flags.json:
        told = {
            "at": iso(at_s),
            "changes": [_change(one) for one in known],
            "before": before.row(),
            "after": after.row(),
            "meanwhile": [{"at": iso(one.at_s), "what": one.what} for one in events],
        }
        out.write(msgspec.json.encode(told).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for line in _lines(at_s, here, known, before, after, events))
    return SHOWN


def _last(known: Sequence[PastChange]) -> float | None:
    """Return the Unix time at which the configuration last changed, or None if it never changed.

    A change is a document with another hash than the previous one of the same picker. The first
    document of a picker is a change only if its generation is above 1.
    """
    last: float | None = None
    hashes: dict[str, str] = {}
    for one in known:
        if isinstance(one.change, Applied):
            before = hashes.get(one.picker)
            first = before is None and one.change.generation <= 1
            if not first and one.change.hash != before:
                last = one.at_s
            hashes[one.picker] = one.change.hash
    return last


def _compare(folder: Path, before: Stretch, after: Stretch) -> list[_Event]:
    """Add the recorded decisions and refusals of `folder` to `before` and `after`. If no decision
    is older than the first recorded configuration, and that lies in `before`, `before` begins
    there.

    Return the events of both periods (changes of configuration or endpoint state, missing records)
    in order of time.
    """
    events: list[_Event] = []
    states: dict[str, States] = {}
    first_s, started_s = math.inf, math.inf
    for past in read_past(folder, before.since_s, after.until_s):
        match past:
            case PastDecision() | PastRefusal():
                first_s = min(first_s, past.at_s)
                before.add(past)
                after.add(past)
            case PastStates():
                events += _differences(states.get(past.picker, {}), past)
                states[past.picker] = past.states
            case PastChange():
                started_s = min(started_s, past.at_s)
                events.append(_Event(past.at_s, _told(past)))
            case PastLoss():
                events.append(_Event(past.at_s, f"{past.records} records are missing here"))
    # No picker ran before the first start, so the first period begins there.
    if first_s >= started_s and before.since_s < started_s < before.until_s:
        before.since_s = started_s
    return sorted(events, key=lambda event: event.at_s)


def _differences(was: States, past: PastStates) -> list[_Event]:
    """Return an event for every endpoint whose state in `past` differs from its state in `was`."""
    ready = EndpointState()
    return [
        _Event(past.at_s, f"{name} is {now.state}" + (f": {now.reason}" if now.reason else ""))
        for name in sorted(was.keys() | past.states.keys())
        if (now := past.states.get(name, ready)).state != was.get(name, ready).state
        or (now.state != READY and name not in was)
    ]


def _told(past: PastChange) -> str:
    change = past.change
    who = f" at {past.picker}" if past.picker else ""
    if not isinstance(change, Applied):
        return f"the configuration was refused{who}: {change.problem}"
    if change.generation <= 1:
        return f"the picker started{who} with {change.source}, {change.hash[:12]}"
    what = "; ".join(change.changes[:CHANGES_MAX]) or "no effective change"
    return f"configuration generation {change.generation}{who}: {what}"


def _change(one: PastChange) -> dict[str, Any]:
    return {"at": iso(one.at_s), "picker": one.picker} | msgspec.structs.asdict(one.change)


def _length(stretch: Stretch) -> str:
    length_s = stretch.until_s - stretch.since_s
    return f"{length_s / 60:.3g} min" if length_s >= 60 else f"{length_s:.3g} s"


def _lines(
    at_s: float,
    here: Sequence[PastChange],
    known: Sequence[PastChange],
    before: Stretch,
    after: Stretch,
    events: Sequence[_Event],
) -> list[str]:
    lines = [f"{iso(at_s)[:19]} UTC"]
    lines += [f"  {_told(one)}" for one in here]
    sides = before.row(), after.row()
    head = f"{_length(before)} before", f"{_length(after)} after"
    rows = [
        {"": what, head[0]: one, head[1]: other}
        for what, one, other in zip(
            ("decisions a second", *list(in_words(sides[0]))[2:], "refused", "decided by"),
            _side(sides[0]),
            _side(sides[1]),
            strict=True,
        )
    ]
    lines += ["", *table(rows).splitlines(), "", *_endpoints(sides[0], sides[1])]
    meanwhile = [event for event in events if abs(event.at_s - at_s) >= 1.0]
    if meanwhile:
        lines += ["", "meanwhile"]
        nearest = sorted(meanwhile, key=lambda event: abs(event.at_s - at_s))[:EVENTS_MAX]
        lines += [
            f"  {iso(event.at_s)[11:19]} {event.what}"
            for event in sorted(nearest, key=lambda event: event.at_s)
        ]
        if len(meanwhile) > EVENTS_MAX:
            lines.append(f"and {len(meanwhile) - EVENTS_MAX} more, further from the change")
    others = [one for one in known if one not in here and isinstance(one.change, Applied)]
    if others:
        lines += ["", "other changes that --at can select"]
        lines += [f"  {iso(one.at_s)[:19]} {_told(one)}" for one in others[-CHANGES_MAX:]]
    return list(map(printable, lines))


def _side(row: dict[str, Any]) -> list[str]:
    refused = ", ".join(f"{count} {reason}" for reason, count in row["refused"].items())
    by = sorted(row["decided_by"].items(), key=lambda one: -(one[1] or 0.0))
    decided_by = ", ".join(f"{name} {percent(share)}" for name, share in by)
    numbers = list(in_words(row).values())[2:]
    return [f"{row['decided_per_s']:g}", *numbers, refused, decided_by]


def _endpoints(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return lines of a table of endpoints: share of requests, times, cache hits and failures
    before and after the change.
    """
    was, now = before["endpoints"], after["endpoints"]
    names = sorted(was.keys() | now.keys())

    def changed(name: str) -> float:
        return abs(_of(now, name, "share") or 0.0) - (_of(was, name, "share") or 0.0)

    shown = sorted(names, key=lambda name: -abs(changed(name)))[:_ENDPOINTS_MAX]
    rows = [
        {
            "endpoint": name,
            "share": _pair(was, now, name, "share", percent),
            "TTFT p50": _pair(was, now, name, "ttft_p50_s", seconds),
            "headers p50": _pair(was, now, name, "headers_p50_s", seconds),
            "hits predicted": _pair(was, now, name, "hits_predicted", percent),
            "hits found": _pair(was, now, name, "hits_found", percent),
            "failed": _pair(was, now, name, "failed", percent),
        }
        for name in sorted(shown)
    ]
    lines = table(rows).splitlines() if rows else []
    if len(names) > _ENDPOINTS_MAX:
        lines.append(f"{len(names) - _ENDPOINTS_MAX} more endpoints, whose share changed less")
    return lines


def _of(endpoints: dict[str, Any], name: str, what: str) -> float | None:
    found: float | None = endpoints.get(name, {}).get(what)
    return found


def _pair(
    was: dict[str, Any],
    now: dict[str, Any],
    name: str,
    what: str,
    spelt: Callable[[float | None], str],
) -> str:
    return f"{spelt(_of(was, name, what))} > {spelt(_of(now, name, what))}"
