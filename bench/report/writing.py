"""Writing of the performance report as Markdown, JSON and a plot."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import msgspec

from bench.report import workloads
from bench.report.contestants import GO, homing, nothing
from bench.report.measuring import Sample
from bench.report.rows import Reported, Row
from bench.report.verdicts import (
    DISTURBED_SHARE_MAX,
    OTHERS_CORES_MAX,
    STOLEN_CORES_MAX,
    Figure,
    Verdict,
    figure,
    is_busy,
    quantile,
    ratios,
)
from sim.reports.charts import COLOURS, Axis

SCHEMA: Final = 1
PLOT: Final = "report.svg"
NONE: Final = "-"


_INTRODUCTION: Final = """\
Figures are medians of rounds, with the least and the greatest round in brackets. G is the CPU of a Go
gRPC server that decodes the JSON of each body and does nothing else, with the same messages, in the same
rounds. Ratios may be compared between machines, times may not. `bench/README.md` explains each number."""
_ABOUT_GENERATOR: Final = """\
The table shows its CPU per request, the maximum share of its core in a round, and the delay of requests
that were due."""


def to_json(reported: Reported, machine: Mapping[str, object]) -> bytes:
    """Return the report as JSON, with the result of each round."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": dict(machine),
        "busy": reported.was_busy,
        "rows": reported.rows,
        "samples": reported.results.samples,
        "readings": reported.results.readings,
        "missing": reported.results.missing,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def to_markdown(reported: Reported, machine: Mapping[str, object]) -> str:
    """Return the report as a Markdown page with medians, and with the least and the greatest round
    in brackets.
    """
    results = reported.results
    parts = [
        "# Performance report",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        _INTRODUCTION,
        *results.missing,
        _noise(reported),
        "## Aims",
        _aims(reported),
        f"This run does not include a soak of two hours: `{workloads.SOAK}`.",
        f"![CPU per request in units of G]({PLOT})",
        "## CPU of the server, µs per request",
        _cpu(results.samples),
        "## Time of a decision, from when a request was due, ms",
        _latency(results.samples),
        "## The generator",
        _ABOUT_GENERATOR,
        _generator(results.samples),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _noise(reported: Reported) -> str:
    results = reported.results
    noise = [each.disturbance for each in results.samples]
    noise += [each.disturbance for each in results.readings]
    others = [each.others_cores for each in noise]
    stolen = [each.stolen_cores for each in noise]
    told = (
        f"Other programs used {quantile(others, 0.5):.2f} cores during this run (median of "
        f"{len(noise)} measurements; at most {max(others, default=0.0):.2f}), and "
        f"{quantile(stolen, 0.5):.2f} were stolen (at most {max(stolen, default=0.0):.2f})."
    )
    if not is_busy(noise) and not reported.was_busy:
        return told
    return (
        f"{told} **The machine was busy**: there is no verdict if other programs used more than "
        f"{OTHERS_CORES_MAX:g} cores, or {STOLEN_CORES_MAX:g} were stolen, in more than "
        f"{DISTURBED_SHARE_MAX:.0%} of the rounds."
    )


def _aims(reported: Reported) -> str:
    head = [
        "workload",
        "measure",
        *(f"Homing, {each}" for each in reported.transports),
        "floor of the transport",
        "aim",
        "verdict",
        "reason",
    ]
    return _table(
        head,
        [
            [
                row.title,
                row.measure,
                *(_told(row.seen.get(each)) for each in reported.transports),
                _told(row.floor.get(row.judged)),
                NONE if row.aim_max is None else f"≤ {row.aim_max:g}",
                _verdict(row),
                row.reason,
            ]
            for row in reported.rows
        ],
    )


def _verdict(row: Row) -> str:
    if row.verdict is None:
        return NONE
    return f"**{row.verdict}**" if row.verdict is Verdict.NOT_MET else str(row.verdict)


def _cpu(samples: Sequence[Sample]) -> str:
    # Each table has the servers of its own workloads as columns.
    compared = ([load for load in workloads.LOADS if load.floors], workloads.OPERATED)
    return "\n\n".join(
        table
        for loads in compared
        if (table := _by_contestant(samples, lambda each: each.cpu_us, loads))
    )


def _latency(samples: Sequence[Sample]) -> str:
    rows = []
    for load in workloads.LOADS:
        if load.floors:
            continue
        for name in _contestants(samples):
            its = [
                each for each in samples if (each.workload, each.contestant) == (load.name, name)
            ]
            if its:
                rows.append(
                    [
                        load.title,
                        name,
                        _told(figure([each.p50_ms for each in its])),
                        _told(figure([each.p99_ms for each in its])),
                        _failed_of(its),
                        _told(figure([each.late_p99_ms for each in its])),
                    ]
                )
    head = ["workload", "server", "p50", "p99", "failed", "generator delay, p99"]
    return _table(head, rows) if rows else ""


def _failed_of(samples: Sequence[Sample]) -> str:
    failed = sum(sum(each.failed.values()) for each in samples)
    return f"{failed:,} of {failed + sum(each.completed for each in samples):,}"


def _generator(samples: Sequence[Sample]) -> str:
    rows = []
    for load in dict.fromkeys(each.workload for each in samples):
        its = [each for each in samples if each.workload == load]
        if its:
            used = [each.generator_cpu_us for each in its if each.generator_cpu_us is not None]
            rows.append(
                [
                    load,
                    f"{_told(figure(used))} µs",
                    f"{max(each.generator_share for each in its):.0%}",
                    f"{max(each.late_p99_ms for each in its):.2f} ms",
                ]
            )
    return _table(["workload", "CPU", "share of its core", "delay, p99"], rows) if rows else ""


def _by_contestant(samples: Sequence[Sample], value: Any, loads: Sequence[Any]) -> str:
    played = {load.name for load in loads}
    names = _contestants([each for each in samples if each.workload in played])
    rows = []
    for load in loads:
        its = [each for each in samples if each.workload == load.name]
        if its:
            cells = [
                [value(each) for each in its if each.contestant == name and value(each) is not None]
                for name in names
            ]
            rows.append([load.title, *(_told(figure(cell)) for cell in cells)])
    return _table(["workload", *names], rows) if rows else ""


def _contestants(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(each.contestant for each in sorted(samples, key=_order)))


def _order(sample: Sample) -> tuple[int, str]:
    name = sample.contestant
    return (0 if name.startswith(GO) else 1 if name.startswith("nothing") else 2, name)


def _told(seen: Figure | None) -> str:
    if seen is None:
        return NONE
    if seen.low == seen.high:
        return _spelt(seen.median)
    return f"{_spelt(seen.median)} ({_spelt(seen.low)} to {_spelt(seen.high)})"


def _spelt(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# The plot.

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 270, 20, 52
_BAR, _GAP = 13, 16


def to_svg(reported: Reported) -> str:
    """Return a bar chart of the CPU per request in units of G, with whiskers from the least round
    to the greatest, as SVG.
    """
    groups = _groups(reported)
    known = [value for group in groups for one in group[2] for value in (one[1].low, one[1].high)]
    x = Axis.over([*known, 1.0], logarithmic=True)
    names = [nothing(each) for each in reported.transports]
    names += [homing(each) for each in reported.transports]
    colours = {name: COLOURS[number % len(COLOURS)][0] for number, name in enumerate(names)}
    parts, y = [], float(_TOP)
    for title, aim_max, bars in groups:
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(_text(_LEFT - 10, middle, title, "end"))
        top = y
        for name, seen in bars:
            parts.append(_bar(x, y, seen, colours[name]))
            y += _BAR
        if aim_max is not None:
            at = _across(x, aim_max)
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 3:.1f}" y2="{y + 1:.1f}" '
                'stroke="#be185d" stroke-width="2"/>'
            )
        y += _GAP
    grid = []
    for mark in x.marks():
        at = _across(x, mark)
        grid.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 8}" y2="{y:.1f}" stroke="#d5dae0"/>'
        )
        grid.append(_text(at, y + 14, x.label(mark), "middle"))
    title = "CPU of the server per request, in units of G; the vertical line is the aim"
    legend = _legend(colours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 24:.0f}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{_text(10, 18, title, "start")}{legend}'
        f"{''.join(grid)}{''.join(parts)}</svg>\n"
    )


_Group = tuple[str, float | None, list[tuple[str, Figure]]]


def _groups(reported: Reported) -> list[_Group]:
    names = [nothing(each) for each in reported.transports]
    names += [homing(each) for each in reported.transports]
    found: list[_Group] = []
    for load in workloads.LOADS:
        cpu: dict[str, dict[int, float]] = {}
        for each in reported.results.samples:
            if each.workload == load.name and each.cpu_us is not None:
                cpu.setdefault(each.contestant, {})[each.round] = each.cpu_us
        bars = [
            (name, seen)
            for name in names
            if (seen := figure(ratios(cpu.get(name, {}), cpu.get(GO, {})))) is not None
        ]
        if bars and load.floors:
            found.append((load.title, load.against_g_max, bars))
    return found


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.share(value) * (_WIDTH - _LEFT - _RIGHT)


def _bar(x: Axis, y: float, seen: Figure, colour: str) -> str:
    end, middle = _across(x, seen.median), y + (_BAR - 3) / 2
    low, high = _across(x, seen.low), _across(x, seen.high)
    return (
        f'<rect x="{_LEFT}" y="{y:.1f}" width="{max(1.0, end - _LEFT):.1f}" height="{_BAR - 3}" '
        f'fill="{colour}"/><line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" '
        f'y2="{middle:.1f}" stroke="#1f2933"/>'
    )


def _legend(colours: Mapping[str, str]) -> str:
    parts, x = [], 10.0
    for name, colour in colours.items():
        parts.append(f'<rect x="{x:.0f}" y="27" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, 36, name, "start"))
        x += 40 + 6.5 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#1f2933">{escape(text)}</text>'
    )
