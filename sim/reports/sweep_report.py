"""How a sweep is told: a table, report.md, and a page of hockey sticks."""

from collections.abc import Sequence
from typing import Any, Final

from sim.reports.charts import Axis, Points, facts_table, figure, html_table, line_chart, page
from sim.reports.compare_report import not_complete
from sim.reports.report import (
    condition_rows,
    markdown_table,
    number,
    seconds,
    share,
    table,
    targets,
)

_REACHED: Final = 0.95
"""Share of the asked rate from which on it counts as reached: a last turn may come late."""


def sweep_table(summary: dict[str, Any]) -> str:
    """For the terminal."""
    return f"{table(_rows(summary))}\n\n{_basis(summary)}\n"


def sweep_report(summary: dict[str, Any]) -> str:
    """report.md of a sweep."""
    notes = "" if summary["complete"] else "**Not complete.**\n\n"
    told = [["", ""], *condition_rows(summary["conditions"])]
    return (
        f"# Sweep of {summary['conditions']['trace']}\n\n{notes}{_basis(summary)}\n\n"
        f"{markdown_table(_rows(summary))}\n\n## What was run\n\n{markdown_table(told)}\n"
    )


def sweep_page(summary: dict[str, Any]) -> str:
    """report.html: latency, throughput and hit rate over the rate, a line a configuration."""
    points = summary["points"]
    names = list(dict.fromkeys(point["config"] for point in points))
    figures = [
        _over_rate(points, names, ("ttft_s", "p90"), "TTFT p90", "s", logarithmic=True),
        _over_rate(points, names, ("ttft_s", "mean"), "TTFT mean", "s", logarithmic=True),
        _over_rate(points, names, ("tpot_s", "mean"), "TPOT mean", "s"),
        _over_rate(points, names, ("output_tokens_per_s",), "output tokens", "tokens/s"),
        _over_rate(points, names, ("hit_rate",), "prompt tokens from the cache", "%"),
        _over_rate(points, names, ("goodput", "share"), "requests within targets", "%"),
    ]
    rows = condition_rows(summary["conditions"])
    note = "" if summary["complete"] else " Not complete."
    return page(
        f"Sweep of {summary['conditions']['trace']}",
        f"The same requests at rising rates. {_basis(summary)}{note}",
        f'<div class="pair">{"".join(figures)}</div>'
        + figure("In numbers", html_table(_rows(summary)))
        + figure("What was run", facts_table(rows)),
    )


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            "configuration",
            "requests/s\nasked for",
            "requests/s\nsent",
            "TTFT\nmean",
            "TTFT\np90",
            "TPOT\nmean",
            "output\ntokens/s",
            "hit\nrate",
            "within\ntargets",
            "not complete",
        ]
    ]
    rows.extend(
        [
            point["config"],
            f"{point['rate']:g}",
            number(point["requests_per_s"]),
            seconds(point["ttft_s"]["mean"]),
            seconds(point["ttft_s"]["p90"]),
            seconds(point["tpot_s"]["mean"]),
            number(point["output_tokens_per_s"]),
            share(point["hit_rate"]),
            share(point["goodput"]["share"]),
            not_complete(point["requests"]),
        ]
        for point in summary["points"]
    )
    return rows


def _basis(summary: dict[str, Any]) -> str:
    points = summary["points"]
    told = (
        f"Seed {summary['seed']}, one seed: how far another would differ is not known here "
        f"(sim compare has intervals). The trace itself has {summary['trace_rate']:.3g} requests/s."
    )
    missed = [point for point in points if _sent_per_s(point) < _REACHED * point["rate"]]
    if missed:
        rates = ", ".join(dict.fromkeys(f"{point['rate']:g}" for point in missed))
        told += (
            f" Not reached: {rates} requests/s, because requests of the trace wait for answers to "
            "others; points are drawn at the rate that was sent."
        )
    if points:
        told += f" Within targets: {targets(points[0]['goodput'])}."
    lines = max((point["bad_lines"] for point in points), default=0)
    if lines:
        told += f" {lines:,} malformed lines of the trace were skipped."
    return told


def _over_rate(
    points: Sequence[dict[str, Any]],
    names: Sequence[str],
    path: Sequence[str],
    what: str,
    unit: str,
    *,
    logarithmic: bool = False,
) -> str:
    """A figure; what is told in per cent is a share of one in the summary."""
    factor = 100 if unit == "%" else 1
    series: dict[str, Points] = {}
    for name in names:
        series[name] = [
            (_sent_per_s(point), factor * value)
            for point in points
            if point["config"] == name and (value := _at(point, path)) is not None
        ]
    known = [value for line in series.values() for _, value in line]
    caption = f"{what[0].upper()}{what[1:]} over the rate"
    sent = [_sent_per_s(point) for point in points]
    y = Axis.over(known, unit=unit, title=what, logarithmic=logarithmic)
    drawing = line_chart(
        series,
        x=Axis.over(sent, unit="requests/s", title="sent"),
        y=Axis(low=0, high=100, unit=unit, title=what) if unit == "%" else y,
        label=caption,
        dots=True,
    )
    return figure(caption, drawing, names)


def _sent_per_s(point: dict[str, Any]) -> float:
    """As asked where all requests came at once."""
    return float(point["requests_per_s"] or point["rate"])


def _at(point: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = point
    for name in path:
        value = value[name]
    return None if value is None else float(value)
