"""How a sizing is told: a table, report.md, and a page with the frontier."""

import math
from typing import Final

from msgspec import UNSET

from sim.measurement.summaries import (
    BoundSummary,
    DemandSummary,
    SizedSummary,
    SizeSummary,
)
from sim.reports.charts import (
    Axis,
    Points,
    facts_table,
    figure,
    html_table,
    line_chart,
    page,
    wide_line_chart,
)
from sim.reports.page_foot import page_foot
from sim.reports.report import (
    condition_rows,
    foot,
    limit,
    markdown_table,
    number,
    seconds,
    share,
    table,
    varied_sentences,
    warnings_of,
    windows_sentence,
)

USED_MAX: Final = 100.0
"""Overrun pools break bounds a thousandfold: how much is no matter."""
_HOUR_S: Final = 3600.0


def size_table(summary: SizeSummary) -> str:
    """For the terminal."""
    warnings = "".join(f"{warning}\n\n" for warning in warnings_of(summary))
    told = (_option_rows(summary), _bound_rows(summary), _headroom_rows(summary))
    parts = [table(rows) for rows in told if len(rows) > 1]
    parts.append("\n".join(_sentences(summary)))
    return warnings + "\n\n".join(parts) + "\n"


def size_report(summary: SizeSummary) -> str:
    """report.md of a sizing."""
    notes = "" if summary.complete else "**Not complete.**\n\n"
    notes += "".join(f"**{warning}**\n\n" for warning in warnings_of(summary))
    parts = [f"# Pods for {summary.conditions['trace']}\n\n{notes}{_conclusion(summary)}"]
    for title, rows in _tables(summary):
        parts.append(f"## {title}\n\n{markdown_table(rows)}")
    parts.append("## What was varied\n\n" + "\n\n".join(_basis(summary)))
    told = [["", ""], *condition_rows(summary.conditions)]
    parts.append(f"## What was run\n\n{markdown_table(told)}")
    parts.append(foot(summary.assumptions))
    return "\n\n".join(parts)


def size_page(summary: SizeSummary) -> str:
    """report.html: the frontier, the trace over time, and all numbers."""
    note = [] if summary.complete else ["Not complete."]
    introduction = [_conclusion(summary), *warnings_of(summary), *_basis(summary), *note]
    figures = [figure(title, html_table(rows)) for title, rows in _tables(summary)]
    return page(
        f"Pods for {summary.conditions['trace']}",
        "\n".join(introduction),
        _frontier(summary)
        + _over_time(summary)
        + "".join(figures)
        + figure("What was run", facts_table(condition_rows(summary.conditions)))
        + page_foot(summary.assumptions),
    )


def _tables(summary: SizeSummary) -> list[tuple[str, list[list[str]]]]:
    """With their titles; none that has only a head."""
    told = [
        ("Options", _option_rows(summary)),
        ("Bounds, with the pods that were found", _bound_rows(summary)),
        ("Headroom", _headroom_rows(summary)),
        ("Under an autoscaler", _autoscaling_rows(summary)),
        ("Every number of pods that was tried", _count_rows(summary)),
    ]
    return [(title, rows) for title, rows in told if len(rows) > 1]


def number_of_pods(pods: int | None) -> str:
    """What was found."""
    return "none" if pods is None else f"{pods:,}"


def name_of(option: SizedSummary) -> str:
    """What tells an option from the others."""
    return f"{option.profile}, {option.config}"


def _option_rows(summary: SizeSummary) -> list[list[str]]:
    checked = any(option.every_count is not UNSET for option in summary.options)
    head = ["option", "pods", "cost\nan hour", "a million\ntokens", "a million\noutput tokens", "of bounds\nused", "front", "runs"]  # fmt: skip
    rows = [head + (["by every\nnumber", "its runs"] if checked else [])]
    for at, option in enumerate(summary.options):
        row = [
            name_of(option) + (" (chosen)" if at == summary.chosen else ""),
            _pods(option, summary),
            number(option.cost_per_hour),
            number(option.cost_per_million_tokens),
            number(option.cost_per_million_output_tokens),
            share(option.used),
            "yes" if option.on_front else "-",
            f"{option.runs:,}",
        ]
        if checked:
            every = option.every_count
            row += ["-", "-"] if every is UNSET else [number_of_pods(every.pods), f"{every.runs:,}"]
        rows.append(row)
    return rows


def _pods(option: SizedSummary, summary: SizeSummary) -> str:
    if option.pods is None:
        return f"more than {summary.pods_max:,}" if summary.complete else "-"
    return f"{option.pods:,}"


def _bound_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["option", "bound", "limit", "figure", "95 % sure of", "used"]]
    for option in summary.options:
        found = next((one for one in option.counts if one.pods == option.pods), None)
        rows += [
            [
                name_of(option),
                bound.name,
                _shown(bound, bound.limit),
                _shown(bound, bound.figure.value),
                _shown(bound, bound.sure),
                share(bound.used),
            ]
            for bound in (found.bounds if found else ())
        ]
    return rows


def _headroom_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["if", "pods", "cost an hour", "in words"]]
    for one in summary.headroom:
        pods = f"{one.pods:,}" if one.pods is not None else f"more than {summary.pods_max:,}"
        rows.append([one.case, pods, number(one.cost_per_hour), one.says])
    return rows


def _autoscaling_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["", ""]]
    found = summary.autoscaling
    if found is None:
        return rows
    saved = None
    if found.pod_hours is not None and found.fixed_pod_hours:
        saved = 1 - found.pod_hours / found.fixed_pod_hours
    kept = "cannot be told of one run" if found.kept is None else "yes" if found.kept else "no"
    broken = [bound.name for bound in found.bounds if not bound.kept_by_figure]
    return [
        *rows,
        ["target of HPA or KEDA", f"{number(found.target)} {found.metric} a pod"],
        ["pods allowed", f"{found.pods_min:,} to {found.pods_max:,}"],
        ["a new pod serves after", limit(found.startup_s)],
        ["replayed", "the whole trace" if found.whole_trace else "what was sized for"],
        ["pods, mean and most", f"{number(found.pods_mean)}, {found.pods_highest or '-'}"],
        ["pod-hours", f"{number(found.pod_hours)}, fixed {number(found.fixed_pod_hours)}"],
        ["saved", share(saved)],
        ["bounds surely kept", kept],
        ["bounds that the figures break", ", ".join(broken) or "none"],
        ["repetitions", f"{found.runs}{f', {found.varied}' if found.varied else ''}"],
    ]


def _count_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["option", "pods", "runs", "cost an hour", "used", "kept"]]
    tried = [(name_of(option), one) for option in summary.options for one in option.counts]
    tried += [(f"with {case.case}", one) for case in summary.headroom for one in case.counts]
    for name, one in tried:
        rows.append(
            [
                name,
                f"{one.pods:,}",
                f"{one.runs:,}",
                number(one.cost_per_hour),
                _at_most(one.used),
                "-" if one.kept is None else "yes" if one.kept else "no",
            ]
        )
    return rows


def _conclusion(summary: SizeSummary) -> str:
    """The answer, in a sentence or two."""
    if summary.chosen is None:
        return summary.why_none or "No option has been searched to its end yet."
    option = summary.options[summary.chosen]
    pods = f"{option.pods:,} pod{'' if option.pods == 1 else 's'}"
    money = ""
    if option.cost_per_hour is not None:
        money = f", for {number(option.cost_per_hour)} an hour"
        if option.cost_per_million_tokens is not None:
            money += f" and {number(option.cost_per_million_tokens)} a million tokens"
    told = (
        f"{pods} of {option.profile} under {option.config} keep{'s' if option.pods == 1 else ''} "
        f"{', '.join(summary.bounds)} with 95 % confidence{money}."
    )
    if option.pods_perhaps is not None:
        told += (
            f" {option.pods_perhaps:,} might do: the figures keep the bounds there, and their "
            "intervals do not; a longer trace or more seeds could tell."
        )
    return told


def _sentences(summary: SizeSummary) -> list[str]:
    return [_conclusion(summary), *_autoscaling_sentence(summary), *_basis(summary)]


def _autoscaling_sentence(summary: SizeSummary) -> list[str]:
    found = summary.autoscaling
    if found is None:
        return []
    shown = (
        "kept the bounds surely"
        if found.kept
        else "broke bounds"
        if any(not bound.kept_by_figure for bound in found.bounds)
        else "kept the bounds, not surely"
    )
    told = (
        f"An autoscaler with a target of {number(found.target)} {found.metric} a pod, "
        f"{found.pods_min:,} to {found.pods_max:,} pods, {shown} and used "
        f"{number(found.pod_hours)} pod-hours instead of {number(found.fixed_pod_hours)}."
    )
    return [told]


def _basis(summary: SizeSummary) -> list[str]:
    """What was replayed, what was varied, and how surely that is known."""
    told = []
    whole, part = summary.trace, summary.sized_for
    if part.requests < whole.requests:
        told.append(
            f"Sized for the busiest {limit(round(part.end_s - part.start_s))} of the trace, from "
            f"{number(part.start_s)} s on: {part.requests:,} of its {whole.requests:,} requests, at "
            f"{number(_rate(part) / _rate(whole))} times its mean rate."
        )
    if summary.runs:
        told.append(f"{varied_sentences(summary)} {windows_sentence(summary.runs)}")
        told.append(
            "A bound is kept if the one-sided 95 % interval of its figure is within it: that is said "
            "of such traffic at large, not of every hour of it, nor of an engine that is unlike its "
            "profile. The answer is the smallest number that keeps all, with the one above it, while "
            "the one below does not."
        )
    return told


def _rate(stretch: DemandSummary) -> float:
    length_s = stretch.end_s - stretch.start_s
    return stretch.requests / length_s if length_s else math.nan


def _frontier(summary: SizeSummary) -> str:
    """How much of the bounds is used over what it costs, a line an option; below 1 is kept."""
    priced = all(option.price_per_hour is not None for option in summary.options)
    lines: dict[str, Points] = {}
    for option in summary.options:
        points = []
        for one in option.counts:
            across = one.cost_per_hour if priced else float(one.pods)
            if one.used is not None and one.used > 0 and across is not None:
                points.append((across, min(one.used, USED_MAX)))
        if points:
            lines[name_of(option)] = points
    if not lines:
        return ""
    flat = [point for line in lines.values() for point in line]
    widest = max(across for across, _ in flat)
    title = "cost" if priced else "pods"
    x = Axis.over([across for across, _ in flat], unit="an hour" if priced else "", title=title)
    y = Axis.over([*(used for _, used in flat), 1.0], title="of the bounds used", logarithmic=True)
    lines["all that is allowed"] = [(0.0, 1.0), (max(widest, x.high), 1.0)]
    caption = f"What is left of the bounds over the {title}"
    drawing = line_chart(lines, x=x, y=y, label=caption, dots=True)
    return figure(caption, drawing, list(lines))


def _over_time(summary: SizeSummary) -> str:
    """The work that arrives, and what was sized for: where an autoscaler would have been."""
    stretches = summary.over_time
    if len(stretches) < 2:
        return ""
    points = [(one.start_s / _HOUR_S, 100 * one.of_busiest) for one in stretches]
    caption = "The work that arrives over time"
    drawing = wide_line_chart(
        {"of the busiest stretch": points},
        x=Axis.over(
            [*(at for at, _ in points), stretches[-1].end_s / _HOUR_S], unit="h", title="time"
        ),
        y=Axis(low=0, high=100, unit="%", title="of the busiest"),
        label=caption,
    )
    return figure(caption, drawing)


def _at_most(used: float | None) -> str:
    if used is None:
        return "-"
    return share(used) if used <= USED_MAX else f"over {share(USED_MAX)}"


def _shown(bound: BoundSummary, value: float | None) -> str:
    if bound.name in ("goodput", "lost"):
        return share(value)
    return seconds(value)
