"""Implement `epp decisions`: list and sum up the recorded decisions of a period."""

import heapq
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import msgspec

from epp.core.types import Seconds
from epp.flags.subcommands import DecisionsFlags
from epp.journal.decisions import moment_of, read_past
from epp.journal.past import PastDecision, PastLoss, PastRefusal
from epp.journal.problem import JournalError
from epp.shell.operators.decisions.decision_rows import Row, iso, row_of
from epp.shell.operators.decisions.decision_sums import Stretch, in_words
from epp.shell.operators.decisions.recent_decisions import Wanted
from epp.shell.operators.pages.text_table import table
from epp.shell.printable import printable

SHOWN: Final = 0
NOTHING: Final = 1
UNREADABLE: Final = 2
EXPLAINED_MAX: Final = 5
"""Maximum number of requests with the same id that `epp explain --dir` explains, newest first."""


def show_decisions(
    flags: DecisionsFlags, out: TextIO, err: TextIO, clock: Callable[[], Seconds] = time.time
) -> int:
    """Print sums of the recorded decisions and refusals of a period that fit the flags, and the
    newest `flags.n` of them.

    Return the exit code: 0 if there are some, 1 if there are none, 2 if the journal's files cannot
    be read or the period is invalid.
    """
    wanted = Wanted(endpoint=flags.endpoint, model=flags.model, refused=flags.refused)
    now_s = clock()
    newest: list[tuple[float, int, PastDecision | PastRefusal]] = []
    lost = 0
    try:
        stretch = _stretch(flags, now_s)
        for number, past in enumerate(read_past(Path(flags.dir), stretch.since_s, stretch.until_s)):
            if isinstance(past, PastLoss):
                lost += past.records
            elif isinstance(past, PastDecision | PastRefusal) and wanted.has(past.told):
                stretch.add(past)
                keep = heapq.heappush if len(newest) < flags.n else heapq.heappushpop
                keep(newest, (past.at_s, number, past))
    except JournalError as error:
        print(f"epp decisions: {error}", file=err)
        return UNREADABLE
    shown = [past for _, _, past in sorted(newest, reverse=True, key=lambda one: one[:2])]
    if flags.json:
        rows = [row_of(past, now_s) | {"picker": past.picker} for past in shown]
        told = {"since": iso(stretch.since_s), "until": iso(stretch.until_s), "lost": lost}
        out.write(msgspec.json.encode(told | stretch.row() | {"decisions": rows}).decode() + "\n")
    else:
        out.write(_text(stretch, shown, lost))
    return SHOWN if shown else NOTHING


def _stretch(flags: DecisionsFlags, now_s: float) -> Stretch:
    stretch = Stretch(moment_of(flags.since, now_s), moment_of(flags.until, now_s))
    if stretch.since_s >= stretch.until_s:
        raise JournalError(
            f"--since is {iso(stretch.since_s)[:19]} UTC, expected a time before "
            f"{iso(stretch.until_s)[:19]} UTC"
        )
    return stretch


def explain_past(folder: str, request_id: str, endpoint: str, now_s: Seconds) -> list[Row]:
    """Return explanations of the `EXPLAINED_MAX` newest recorded decisions and refusals of requests
    with the id `request_id`, newest first. If `endpoint` is given, they say why it was not chosen.

    Raises `JournalError` if the journal in `folder` cannot be read.
    """
    wanted = Wanted(request_id=request_id)
    found: list[tuple[float, int, PastDecision | PastRefusal]] = []
    for number, past in enumerate(read_past(Path(folder), 0.0, now_s)):
        if isinstance(past, PastDecision | PastRefusal) and wanted.has(past.told):
            keep = heapq.heappush if len(found) < EXPLAINED_MAX else heapq.heappushpop
            keep(found, (past.at_s, number, past))
    return [
        row_of(past, now_s, endpoint) | {"picker": past.picker}
        for _, _, past in sorted(found, reverse=True)
    ]


def _text(stretch: Stretch, shown: list[PastDecision | PastRefusal], lost: int) -> str:
    sums = stretch.row()
    since, until = iso(stretch.since_s)[:19], iso(stretch.until_s)[:19]
    refused = "".join(f", {count} refused {reason}" for reason, count in sums["refused"].items())
    lines = [
        f"{since} to {until} UTC: {sums['decided']} decisions, {sums['decided_per_s']:g}/s{refused}"
    ]
    if lost:
        lines.append(
            f"{lost} records are missing because the queue was full, the disk failed or a file is "
            "broken"
        )
    rows = [{"endpoint": name} | in_words(row) for name, row in sums["endpoints"].items()]
    if len(rows) > 1:
        rows.append({"endpoint": "all"} | in_words(sums))
    head = "".join(f"{printable(line)}\n" for line in lines)
    parts = [head + table(rows)] if rows else [head]
    if shown:
        staged = any(isinstance(past, PastDecision) and past.told.route for past in shown)
        parts.append(table([_line(past, staged=staged) for past in shown]))
    return "\n".join(parts)


def _line(past: PastDecision | PastRefusal, *, staged: bool) -> Row:
    """Return the row of the table for the recorded decision or refusal `past`; with the route and
    the endpoints of all stages if `staged` is true.
    """
    told = past.told
    line: Row = {
        "at": iso(past.at_s)[:23],
        "picker": past.picker,
        "request": told.request_id,
        "model": told.model,
    }
    if isinstance(past, PastRefusal):
        stages = {"prefill": "", "encode": "", "route": ""} if staged else {}
        return line | {"endpoint": "", **stages, "blocks": "", "status": f"{past.told.status or ''}",
                       "first": "", "why": past.told.reason}  # fmt: skip
    end = past.end
    state = past.states.get(past.told.endpoint)
    stages = {}
    if staged:
        at = {leg.stage: leg.endpoint for leg in past.told.earlier}
        stages = {"prefill": at.get("prefill", ""), "encode": at.get("encode", "")}
        stages["route"] = past.told.route
    return line | {
        "endpoint": past.told.endpoint + (f" ({state.state})" if state else ""),
        **stages,
        "blocks": f"{past.told.matched_blocks}/{past.told.total_blocks}",
        "status": "" if end is None or end.status is None else f"{end.status}",
        "first": "" if end is None else end.first_output_s or end.response_headers_s or "",
        "why": "" if end is None else end.failure or end.ending,
    }
