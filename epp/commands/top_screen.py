"""Draw the screen of `epp top` for a terminal of at least 80 columns."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epp.shell.operators.live.live_view import (
    Live,
    LiveDecision,
    LiveEndpoint,
    LiveLatency,
    LiveScore,
)
from epp.shell.operators.pages.endpoint_rows import LIVE_INCOMPLETE
from epp.shell.printable import printable

COLUMNS_MIN: Final = 80
_NAME_COLUMNS_MIN: Final = 13
_POD_COLUMNS: Final = 67
"""Number of terminal columns that a row in the table of pods takes besides the pod's name."""
_STATE_COLUMNS: Final = 13
_DECISION_COLUMNS: Final = 66
"""Number of terminal columns that a decision's line takes besides the names of its two endpoints.
"""
_REQUEST_COLUMNS: Final = 38
_ROOM_COLUMNS: Final = 6
_TTFT_FROM_COLUMNS: Final = 90
_TTFT_COLUMNS: Final = 6
_EVENTS_FROM_COLUMNS: Final = 102
_EVENTS_COLUMNS: Final = 11
_LATE_S: Final = 0.02
"""Mean event-loop lag in seconds from which it is shown in red."""
_WIDE_COLUMNS: Final = 120
"""Width of the terminal in columns from which a decision's line has room for a request id of usual
length.
"""
_FAILED_FROM: Final = 400
_BAR_COLUMNS: Final = 16
_OTHER_LINES: Final = 16
"""Number of terminal lines that the screen always takes besides those of pods and decisions."""
_DECISIONS_MAX: Final = 8
_PODS_MIN: Final = 4
_REASONS_MAX: Final = 4
"""Maximum number of endpoints for which the screen shows the reason why they are not ready, full,
slow, failing or ejected.
"""
_COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "white")
"""Colours of scorers in the bar of a decision, in the order of the scorers; their names distinguish
them too.
"""
_BANDS_MAX: Final = 4
"""Maximum number of bands of the queue that the screen shows, highest priority first."""
_FLOWS_MAX: Final = 4
"""Maximum number of flows that the screen shows of each band."""
_LATENCIES_MAX: Final = 6
"""Maximum number of endpoints whose predicted latencies the screen shows, worst errors first."""
_PREFILLS_SHOWN_MAX: Final = 3
"""Maximum number of pairs of endpoints whose prefills in flight the screen shows."""
_FULL: Final = 0.9
_UNHEARD: Final = frozenset({"none", "stale", "silent"})
"""States of KV events in which the cached blocks of the endpoint are not known from events."""


def top_screen(live: Live, *, columns: int, lines: int | None, problem: str = "") -> RenderableType:
    """Draw the live view `live` for a terminal of the given size.

    `lines` is None if the output may have any length. `problem` is a sentence about the view, or
    "".
    """
    columns = max(columns, COLUMNS_MIN)
    reasons = min(sum(bool(one.reason) for one in live.endpoints), _REASONS_MAX + 1)
    bands, latencies = [*_queue(live)], [*_latencies(live)]
    others = _OTHER_LINES + _DECISIONS_MAX + reasons + any(map(_is_unheard, live.endpoints))
    others += len(bands) + len(latencies)
    others += bool(live.prefills)
    room = None if lines is None else max(_PODS_MIN, lines - others)
    parts: list[RenderableType] = [_head(live), *_picker(live), *_problem(problem), Text()]
    parts.append(_pods(live, columns, room))
    parts += [
        *bands,
        *latencies,
        Text(),
        *_legend(live, columns),
        *_decisions(live, columns),
        Text(),
        *_configuration(live),
    ]
    return Group(*parts)


def _head(live: Live) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("homing", "bold")
    if live.pool:
        line.append(f" {printable(live.pool)}")
    per_s = live.decided / max(1.0, live.window_s)
    line.append(f"  {_clock(live.at_s)} UTC  {per_s:.1f}/s in {live.window_s:.0f} s")
    ready = f"  {live.endpoints_ready} of {live.endpoints_total} ready"
    line.append(ready, "" if live.endpoints_ready == live.endpoints_total else "red")
    refused = sum(live.refused.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in live.refused.items())
    line.append(f"  {refused} refused", "red" if refused else "")
    if live.shed_total:
        line.append(f"  {live.shed_total} shed", "red")
    if live.unparsed_total:
        each = ", ".join(f"{count} {reason}" for reason, count in live.unparsed_total.items())
        line.append(f"\nunparsed: {printable(each)}", "yellow")
    if reasons:
        line.append(f"\n{printable(reasons)}", "red")
    return line


def _picker(live: Live) -> Iterable[Text]:
    """Yield a line about the picker's process and one about its capture with lost records, as far
    as the picker reports them.
    """
    process, capture = live.process, live.capture
    line = Text(no_wrap=True, overflow="ellipsis")
    if process is not None:
        late = process.lag_mean_s >= _LATE_S
        line.append(f"loop late {_seconds(process.lag_mean_s)}", "red" if late else "")
        line.append(f" on average, {_seconds(process.lag_most_s)} at most in a minute")
        if live.process_at:
            line.append(f", at {printable(live.process_at.removeprefix('http://'))}")
        if process.cpu_cores is not None:
            line.append(f"  {process.cpu_cores:.2f} CPU")
        line.append(f"  {process.resident_bytes / 1e6:.0f} MB")
    if line:
        yield line
    if capture is not None:
        lost = ", ".join(f"{count} by its {by}" for by, count in capture.dropped.items() if count)
        told = f"capture {capture.bytes / 1e6:.0f} MB"
        if lost or capture.write_errors:
            told += f", lost {lost or 0}, {capture.write_errors} writes failed since the start"
        yield Text(told, "red" if lost or capture.write_errors else "", no_wrap=True)


def _problem(problem: str) -> Iterable[Text]:
    if problem:
        yield Text(printable(problem), "red bold")


def _pods(live: Live, columns: int, room: int | None) -> RenderableType:
    limited = any(one.room_load is not None for one in live.endpoints)
    # The room is shown rather than the age of the metrics if there is no space for both.
    aged = not limited or columns >= COLUMNS_MIN + _ROOM_COLUMNS
    if limited and aged:
        columns -= _ROOM_COLUMNS
    wide = columns >= _TTFT_FROM_COLUMNS
    heard = columns >= _EVENTS_FROM_COLUMNS and any(one.kv_events for one in live.endpoints)
    beside = _POD_COLUMNS + (_TTFT_COLUMNS if wide else 0) + (_EVENTS_COLUMNS if heard else 0)
    name_columns = max(_NAME_COLUMNS_MIN, columns - beside)
    shown = list(live.endpoints)
    if room is not None and len(shown) > room:
        shown.sort(key=lambda one: (_state(one) == "ready", -one.requests))
        shown = sorted(shown[:room], key=lambda one: one.name)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("pod", width=name_columns, no_wrap=True)
    table.add_column("state", width=_STATE_COLUMNS, no_wrap=True)
    titles = ["share", "wait", "run", "infl", "KV", "pred", "found", "fail"]
    titles += ["age"] * aged + ["room"] * limited + ["ttft"] * wide
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    if heard:
        table.add_column("events", width=_EVENTS_COLUMNS - 1, no_wrap=True)
    for one in shown:
        cells = [*_pod(one, name_columns)]
        if aged:
            cells.append(_age(one))
        if limited:
            cells.append(_room(one))
        if wide:
            cells.append(Text("-" if one.engine_ttft_s is None else _seconds(one.engine_ttft_s)))
        if heard:
            cells.append(_events(one))
        table.add_row(*cells)
    shown_parts: list[RenderableType] = [table]
    left_out = live.endpoints_total - len(shown)
    if left_out > 0:
        shown_parts.append(Text(f"{left_out} more, with fewer requests", "dim"))
    return Group(*shown_parts, *_reasons(live), *_unheard(live), *_prefills(live))


def _prefills(live: Live) -> Iterable[Text]:
    """Yield the screen's line with the number of prefills in flight for each of at most
    `_PREFILLS_SHOWN_MAX` pairs of prefill and decode endpoint; further pairs are only counted.
    Yield nothing if no prefill is in flight.
    """
    if live.prefills:
        line = Text("prefills in flight: ", no_wrap=True, overflow="ellipsis")
        half = _NAME_COLUMNS_MIN
        told = [
            f"{one.requests} {_tail(one.prefill, half)} → {_tail(one.decode, half)}"
            for one in live.prefills[:_PREFILLS_SHOWN_MAX]
        ]
        line.append(", ".join(told))
        left_out = len(live.prefills) - len(told)
        yield line.append(f" and {left_out} more pairs", "dim") if left_out > 0 else line


def _age(one: LiveEndpoint) -> Text:
    return Text("never" if one.metrics_age_s is None else f"{one.metrics_age_s:.1f}s")


def _room(one: LiveEndpoint) -> Text:
    """Return the room of an endpoint as text: the number of further requests, or its load if that
    number is unknown, "full", or "-" if no load is known.
    """
    if one.room_load is None:
        return Text("-")
    if one.room_load >= 1.0:
        return Text("full", "red")
    more = one.room_requests
    return Text(_share(one.room_load) if more is None else f"+{max(1, more)}")


def _queue(live: Live) -> Iterable[Text]:
    """Yield a line for each of at most `_BANDS_MAX` bands with waiting requests, with its flows,
    after a line with the number of evicted requests, if there are some.

    Without waiting requests, the line says so. Yield nothing if the picker has no queue.
    """
    if live.queue is None:
        return
    if live.evicted_total:
        yield Text(f"{live.evicted_total} evicted since the start", "yellow")
    for band in live.queue[:_BANDS_MAX]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"queue {band.priority:+d} " if band.priority else "queue 0 ", "bold")
        line.append(f"{band.requests} wait in {band.flows} flows, ")
        line.append(f"oldest {_seconds(band.oldest_wait_s)}", "red" if band.requests else "")
        flows = [
            f"{printable(one.flow) or 'no flow'} {one.requests} ({_seconds(one.oldest_wait_s)})"
            for one in band.most[:_FLOWS_MAX]
        ]
        line.append(f": {', '.join(flows)}", "dim")
        yield line
    if not live.queue:
        yield Text("queue 0 wait", "dim")


def _latencies(live: Live) -> Iterable[Text]:
    """Yield a line for each of at most `_LATENCIES_MAX` endpoints whose predictions were compared,
    worst errors first: predicted and observed latencies with the median error. Further endpoints
    are only counted.
    """
    told = [one for one in live.endpoints if any(map(_is_known, one.latencies.values()))]
    told.sort(key=lambda one: -max(each.error or 0.0 for each in one.latencies.values()))
    for one in told[:_LATENCIES_MAX]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{_tail(one.name, _NAME_COLUMNS_MIN * 2)} predicted")
        for name, each in one.latencies.items():
            if _is_known(each):
                line.append(f"  {name} {_seconds(each.predicted_s or 0.0)}")
                line.append(f", observed {_seconds(each.observed_s or 0.0)}")
                unused = each.used == "none"
                error = f", error {_share(each.error)}{', unused' if unused else ''}"
                line.append(error, "red" if unused else "")
        yield line
    if len(told) > _LATENCIES_MAX:
        yield Text(f"predictions of {len(told) - _LATENCIES_MAX} more, with smaller errors", "dim")


def _is_known(latency: LiveLatency) -> bool:
    return latency.predicted_s is not None and latency.observed_s is not None


def _events(one: LiveEndpoint) -> Text:
    """Return the state of an endpoint's KV-cache events; "partly" means that some of its cached
    blocks are unknown.
    """
    told = printable(one.kv_events or "-")
    return Text("partly" if told == LIVE_INCOMPLETE else told, "red" if _is_unheard(one) else "")


def _is_unheard(one: LiveEndpoint) -> bool:
    return one.kv_events in _UNHEARD


def _unheard(live: Live) -> Iterable[Text]:
    """Yield a line with the number of endpoints without KV-cache events, and the reason of one of
    them; nothing if there are none.
    """
    unheard = [one for one in live.endpoints if _is_unheard(one)]
    if unheard:
        first = next((one for one in unheard if one.kv_events_problem), unheard[0])
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"KV events missing from {len(unheard)}", "red")
        line.append(
            f": {_tail(first.name, _NAME_COLUMNS_MIN * 2)} {printable(first.kv_events or '')}"
        )
        if first.kv_events_problem:
            line.append(f", {printable(first.kv_events_problem)}")
        yield line


def _reasons(live: Live) -> Iterable[Text]:
    """Yield a line for each of at most `_REASONS_MAX` endpoints that are not ready, full or
    outliers, with the reason, newest first. Further endpoints are only counted.
    """
    told = sorted((one for one in live.endpoints if one.reason), key=lambda one: one.since)
    for one in told[: -_REASONS_MAX - 1 : -1]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{_tail(one.name, _NAME_COLUMNS_MIN * 2)} ")
        line.append(f"{printable(_state(one))} since {printable(one.since[11:19])}", "red")
        line.append(f": {printable(one.reason)}")
        yield line
    if len(told) > _REASONS_MAX:
        yield Text(f"and {len(told) - _REASONS_MAX} more, since longer", "dim")


def _pod(one: LiveEndpoint, name_columns: int) -> Iterable[Text]:
    usage = one.kv_cache_usage
    yield Text(_tail(one.name, name_columns))
    state = _state(one)
    yield Text(printable(state)[:_STATE_COLUMNS], "green" if state == "ready" else "red")
    yield Text(_share(one.share))
    yield Text(_count(one.waiting))
    yield Text(_count(one.running))
    yield Text(_count(one.inflight_requests))
    yield Text(_share(usage), "red" if usage is not None and usage > _FULL else "")
    yield Text(_share(one.predicted_hits))
    # Responses report cache hits only for some engines; the engine's counters are the fallback.
    yield Text(_share(one.engine_hits if one.actual_hits is None else one.actual_hits))
    yield Text(_count(one.failed), "red" if one.failed else "")


def _state(one: LiveEndpoint) -> str:
    """Return why an endpoint is not ready, or else its outlier status, or "ready"."""
    if one.state != "ready" or one.outlier is None:
        return one.state
    if one.ejected:
        return "ejected"
    return one.outlier if one.slowness is None else f"{one.outlier} x{one.slowness:g}"


def _legend(live: Live, columns: int) -> Iterable[Text]:
    """Yield the legend: the colour, name and weight of each scorer, on as many lines as needed."""
    line = Text("decisions", "bold")
    for at, (name, weight) in enumerate(live.configuration.weights.items()):
        told = f"{_scorer(name)} x{weight:g}"
        if line.cell_len + cell_len(told) + 4 > columns:
            yield line
            line = Text("         ")
        line.append("  █ ", _COLOURS[at % len(_COLOURS)])
        line.append(told, "not bold dim")
    line.no_wrap, line.overflow = True, "ellipsis"
    yield line


def _decisions(live: Live, columns: int) -> Iterable[Text]:
    # With several stages, the weights are named after stages. The scores are those of decode.
    scorers = [name.removeprefix("decode ") for name in live.configuration.weights]
    names = columns - _DECISION_COLUMNS - (_REQUEST_COLUMNS if columns >= _WIDE_COLUMNS else 0)
    name_columns = max(8, names // 2)
    for one in live.decisions[:_DECISIONS_MAX]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{one.at[11:19]} ", "dim")
        if one.score is None:
            line.append(f"refused {one.status} {printable(one.refused or '')}", "red")
        else:
            _choose(line, one, one.score, scorers, name_columns)
            for stage, endpoint in (("prefill", one.prefill), ("encode", one.encode)):
                if endpoint is not None:
                    line.append(f"  {stage} {_tail(endpoint, name_columns)}", "dim")
        # `epp explain` needs the whole request id, so it is shown completely or not at all.
        name = f"  {printable(one.request_id)}"
        if line.cell_len + cell_len(name) <= columns:
            line.append(name, "dim")
        yield line
    if not live.decisions:
        yield Text("none yet", "dim")


def _choose(
    line: Text,
    one: LiveDecision,
    score: LiveScore,
    scorers: Sequence[str],
    name_columns: int,
) -> None:
    next_best = one.runner_up
    most = max(score.total, next_best.total if next_best else 0.0, 1e-9)
    name = _tail(score.endpoint, name_columns).ljust(name_columns)
    line.append(name, "" if score.state == "ready" else "red")
    line.append(f" {_sum(score):>6} ")
    line.append_text(_bar(score, most, scorers))
    if one.served_by is not None or (one.status or 0) >= _FAILED_FROM:
        status = "" if one.status is None else f"  {one.status}"
        went = "" if one.served_by is None else f"  served by {printable(one.served_by)}"
        line.append(f"{status}{went}", "red")
    elif next_best is None:
        line.append("  the only one")
    else:
        line.append(f" {_tail(next_best.endpoint, name_columns):>{name_columns}}", "dim")
        line.append(f" {_sum(next_best):>6}", "dim" if next_best.state == "ready" else "red")
        line.append(f"  {' and '.join(map(_scorer, one.decided_by)) or 'a tie'}")


def _sum(score: LiveScore) -> str:
    """Return an endpoint's cost with its unit, or its total score if there is no cost.

    Costs are preferred because one bad endpoint compresses the scores of all others.
    """
    if score.cost is None:
        return f"{score.total:.3g}"
    return f"{score.cost:.2g}{printable(score.unit)[:2]}"


def _bar(score: LiveScore, most: float, scorers: Sequence[str]) -> Text:
    """Return a bar with one piece per scorer, as long as the scorer's part of `score`; the total
    `most` fills the bar.
    """
    bar = Text()
    so_far, drawn = 0.0, 0
    for name, part in score.parts.items():
        so_far += max(0.0, part)
        until = min(_BAR_COLUMNS, round(_BAR_COLUMNS * so_far / most))
        at = scorers.index(name) if name in scorers else 0
        bar.append("█" * (until - drawn), _COLOURS[at % len(_COLOURS)])
        drawn = until
    bar.append("·" * (_BAR_COLUMNS - drawn), "dim")
    return bar


def _configuration(live: Live) -> Iterable[Text]:
    now = live.configuration
    line = Text("configuration ", "bold", no_wrap=True, overflow="ellipsis")
    line.append(
        f"generation {now.generation} since {_clock(now.at_s)} UTC, {printable(now.hash)[:12]}, "
        f"{printable(now.source)}",
        "not bold",
    )
    yield line
    for change in now.changes[:2]:
        yield Text(printable(change), no_wrap=True, overflow="ellipsis")
    refused = live.configuration_refused
    if refused is not None:
        told = f"refused at {_clock(refused.at_s)} UTC: {printable(refused.problem)}"
        yield Text(told, "red", no_wrap=True, overflow="ellipsis")


def _scorer(name: str) -> str:
    """Return the scorer's name without the suffix `-scorer`."""
    return printable(name).removesuffix("-scorer")


def _tail(name: str, columns: int) -> str:
    """Return an endpoint's name without its namespace, in at most `columns` columns.

    A long name keeps its end, where pods of a set differ.
    """
    short = printable(name).rpartition("/")[2]
    return short if len(short) <= columns else f"…{short[len(short) - columns + 1 :]}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}s" if value >= 1.0 else f"{1e3 * value:.0f}ms"


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")
