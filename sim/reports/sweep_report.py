"""The report of `sim sweep`: a table, report.md, and a page with figures over the request rate."""

import math
from collections.abc import Sequence
from typing import Final

from sim.measurement.summaries import EstimateSummary, SweepPoint, SweepSummary
from sim.reports.charts import (
    Axis,
    Points,
    Whiskers,
    facts_table,
    figure,
    html_table,
    line_chart,
    page,
)
from sim.reports.compare_report import not_complete, shown
from sim.reports.page_foot import page_foot
from sim.reports.report import (
    condition_rows,
    foot,
    markdown_table,
    measurement_sentences,
    number,
    table,
    targets,
    varied_sentences,
    warnings_of,
)

_REACHED: Final = 0.95
"""Share of the requested rate from which the sent rate counts as reached. The last turn of a
conversation may be late.
"""


def sweep_table(summary: SweepSummary) -> str:
    """Return the warnings, tables and explanations of `sim sweep` for the terminal."""
    intervals = _interval_rows(summary)
    told = f"{table(intervals)}\n\n" if intervals else ""
    warnings = "".join(f"{warning}\n\n" for warning in warnings_of(summary))
    return f"{warnings}{table(_rows(summary))}\n\n{told}{_basis(summary)}\n"


def sweep_report(summary: SweepSummary) -> str:
    """Return the content of report.md of `sim sweep`."""
    notes = "" if summary.complete else "**Not complete.**\n\n"
    notes += "".join(f"**{warning}**\n\n" for warning in warnings_of(summary))
    told = [["", ""], *condition_rows(summary.conditions)]
    intervals = _interval_rows(summary)
    sure = f"## 95 % confidence intervals\n\n{markdown_table(intervals)}\n\n" if intervals else ""
    return (
        f"# Sweep of {summary.conditions['trace']}\n\n{notes}{_basis(summary)}\n\n"
        f"{markdown_table(_rows(summary))}\n\n{sure}"
        f"## What was run\n\n{markdown_table(told)}\n\n{foot(summary.assumptions)}"
    )


def sweep_page(summary: SweepSummary) -> str:
    """Return the content of report.html of `sim sweep`: latency, throughput and hit rate over the
    request rate, one line per configuration.
    """
    points = summary.points
    names = list(dict.fromkeys(point.config for point in points))
    figures = [
        _over_rate(points, names, "ttft_p90_s", "TTFT p90", "s", logarithmic=True),
        _over_rate(points, names, "ttft_mean_s", "TTFT mean", "s", logarithmic=True),
        _over_rate(points, names, "tpot_mean_s", "TPOT mean", "s"),
        _over_rate(points, names, "itl_p99_s", "time between tokens p99", "s"),
        _over_rate(points, names, "output_tokens_per_s", "output tokens", "tokens/s"),
        _over_rate(points, names, "hit_rate", "prompt tokens from the cache", "%"),
        _over_rate(points, names, "goodput", "requests within targets", "%"),
    ]
    intervals = _interval_rows(summary)
    rows = condition_rows(summary.conditions)
    note = "" if summary.complete else " Not complete."
    return page(
        f"Sweep of {summary.conditions['trace']}",
        "\n".join(
            [*warnings_of(summary), f"All rates use the same requests. {_basis(summary)}{note}"]
        ),
        f'<div class="pair">{"".join(figures)}</div>'
        + figure("In numbers", html_table(_rows(summary)))
        + (figure("95 % confidence intervals", html_table(intervals)) if intervals else "")
        + figure("What was run", facts_table(rows))
        + page_foot(summary.assumptions),
    )


def _rows(summary: SweepSummary) -> list[list[str]]:
    rows = [
        [
            "configuration",
            "requests/s\nrequested",
            "requests/s\nsent",
            "TTFT\nmean",
            "TTFT\np90",
            "TPOT\nmean",
            "ITL\np99",
            "output\ntokens/s",
            "hit\nrate",
            "within\ntargets",
            "not completed",
        ]
    ]
    for point in summary.points:
        value = {name: found.value for name, found in point.figures.items()}
        rows.append(
            [
                point.config,
                f"{point.rate:g}",
                number(point.requests_per_s),
                *(shown(name, value[name]) for name in ("ttft_mean_s", "ttft_p90_s")),
                *(shown(name, value[name]) for name in ("tpot_mean_s", "itl_p99_s")),
                *(shown(name, value[name]) for name in ("output_tokens_per_s", "hit_rate")),
                shown("goodput", value["goodput"]),
                not_complete(point.requests),
            ]
        )
    return rows


def _interval_rows(summary: SweepSummary) -> list[list[str]]:
    """Return the rows of the table of confidence intervals; no rows if there is too little data for
    any interval.
    """
    names = ("ttft_mean_s", "ttft_p90_s", "output_tokens_per_s", "goodput")
    rows = [
        [
            "95 % confidence intervals",
            "requests/s",
            "TTFT mean",
            "TTFT p90",
            "output tokens/s",
            "within targets",
        ]
    ]
    for point in summary.points:
        told = [_between(name, point.figures[name]) for name in names]
        if any(found != "-" for found in told):
            rows.append([point.config, f"{point.rate:g}", *told])
    return rows if len(rows) > 1 else []


def _between(name: str, found: EstimateSummary) -> str:
    low, high = found.low, found.high
    if low is None or high is None:
        return "-"
    # A symmetric interval may extend below 0 or above the maximum.
    highest = 1.0 if name == "goodput" else math.inf
    return f"{shown(name, max(low, 0.0))} to {shown(name, min(high, highest))}"


def _basis(summary: SweepSummary) -> str:
    points = summary.points
    if not points:
        return "No point has run yet."
    told = f"{varied_sentences(summary)} The trace itself has {summary.trace_rate:.3g} requests/s."
    missed = [point for point in points if _sent_per_s(point) < _REACHED * point.rate]
    if missed and summary.waits:
        rates = ", ".join(dict.fromkeys(f"{point.rate:g}" for point in missed))
        told += (
            f" The rates {rates} requests/s were not reached, because requests of the trace wait "
            "for answers to others. Charts show these points at the rate that was sent."
        )
    told += (
        f" A request is within targets with {targets(points[0].goodput)}. "
        f"{measurement_sentences(summary.runs)}"
    )
    lines = max(point.bad_lines for point in points)
    if lines:
        told += f" {lines:,} malformed lines of the trace were skipped."
    return told


def _over_rate(
    points: Sequence[SweepPoint],
    names: Sequence[str],
    figure_name: str,
    what: str,
    unit: str,
    *,
    logarithmic: bool = False,
) -> str:
    """Return a chart of one measure over the request rate, with confidence intervals.

    Values in per cent are shares of 1 in the summary.
    """
    factor = 100 if unit == "%" else 1
    series: dict[str, Points] = {}
    whiskers: dict[str, Whiskers] = {}
    for name in names:
        found = [
            (_sent_per_s(point), point.figures[figure_name])
            for point in points
            if point.config == name
        ]
        series[name] = [(at, factor * one.value) for at, one in found if one.value is not None]
        whiskers[name] = [
            (at, factor * one.low, factor * one.high)
            for at, one in found
            if one.low is not None and one.high is not None
        ]
    known = [value for line in series.values() for _, value in line]
    known += [high for line in whiskers.values() for _, _, high in line]
    caption = f"{what[0].upper()}{what[1:]} over the rate"
    sent = [_sent_per_s(point) for point in points]
    y = Axis.over(known, unit=unit, title=what, logarithmic=logarithmic)
    drawing = line_chart(
        series,
        x=Axis.over(sent, unit="requests/s", title="sent"),
        y=Axis(low=0, high=100, unit=unit, title=what) if unit == "%" else y,
        label=caption,
        dots=True,
        whiskers=whiskers,
    )
    return figure(caption, drawing, names)


def _sent_per_s(point: SweepPoint) -> float:
    """Return the rate at which requests were sent; the requested rate if all requests came at once."""
    return float(point.requests_per_s or point.rate)
