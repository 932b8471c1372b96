"""The report of `sim tune`: the conclusion, the results on the hold-out half of the trace, and all
trials.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from sim.measurement.summaries import (
    DifferenceSummary,
    JudgedSummary,
    PowerSummary,
    TrialSummary,
    TuneSummary,
)
from sim.reports.charts import (
    Axis,
    Points,
    facts_table,
    figure,
    html_table,
    line_chart,
    page,
    scatter_chart,
)
from sim.reports.compare_report import BETTER, LABELS, WORSE, relative, shown, signed
from sim.reports.page_foot import page_foot
from sim.reports.report import (
    condition_rows,
    foot,
    markdown_table,
    measurement_sentences,
    table,
    varied_sentences,
    warnings_of,
)

TRIALS_SHOWN: Final = 12
"""Maximum number of trials in the report. Trials that ran on a larger share of the tuning half come
first, and among them those with the lowest cost.
"""
_MARGIN: Final = 1.02
"""Factor by which a linear axis of the charts of trials extends beyond its points at both ends."""


def conclusion(summary: TuneSummary) -> str:
    """Return the conclusion of a tuning in a few sentences."""
    tried = _tried(summary)
    present = summary.config
    if not summary.complete:
        return (
            f"Not finished: {tried} tried so far, without a complete judgement on the hold-out half. "
            "Run the same command again to continue."
        )
    if summary.chosen is None:
        return (
            f"Nothing beats {present}: of {tried}, none was better over all seeds without losing "
            f"more than {summary.tolerance:.3g} of an objective, or losing requests. "
            f"{_stopped(summary)}No configuration is written."
        )
    at = summary.hold_out
    first = at[0].differences
    if summary.beats:
        gains = ", ".join(_gain(name, first[name]) for name in first if _is(first[name], BETTER))
        return (
            f"Trial {summary.chosen.trial} beats {present} on the hold-out half, which was not "
            f"used for tuning: {gains}. {_given_up(summary)}"
        )
    return f"Nothing beats {present}: {_why_not(summary)}. No configuration is written."


def _stopped(summary: TuneSummary) -> str:
    """Return a sentence for each of the best trials that a guard stopped although it gained; "" if
    there is none. The text ends with a space.
    """
    told = ""
    for one in summary.finalists:
        gains = [name for name, found in one.differences.items() if _is(found, BETTER)]
        if one.stopped_by and gains and not one.worse and not one.loses_more:
            gained = ", ".join(
                f"{LABELS[name]} {relative(one.differences[name].relative)}" for name in gains
            )
            told += f"Trial {one.trial}, {gained}, was stopped by a guard: {_broken(one)}. "
    return told


def _broken(judged: JudgedSummary) -> str:
    """Return the guards that a trial breaks, as text with the differences in their measures."""
    return ", ".join(_gain(name, judged.guards[name]) for name in judged.stopped_by)


def _guards_told(summary: TuneSummary) -> str:
    """Return all guards of a tuning as text, with their allowed losses."""
    return ", ".join(
        LABELS[name] + (f" (up to {allowed:.3g} of it)" if allowed else "")
        for name, allowed in summary.guards.items()
    )


def _tried(summary: TuneSummary) -> str:
    count = len(summary.trials)
    return f"{count:,} configuration{'' if count == 1 else 's'}"


def _given_up(summary: TuneSummary) -> str:
    """Return a sentence about the significant losses of the chosen trial, all of which are within
    the tolerance or within what a guard allows, or a sentence that there are none.
    """
    at = summary.hold_out
    losses = [
        f"{_gain(name, found)} at {_loads([one])} the load"
        for one in at
        for name, found in (one.differences | one.guards).items()
        if _is(found, WORSE)
    ]
    if losses:
        return f"It loses {'; '.join(losses)}."
    guards = f", nor in its guards ({_guards_told(summary)})" if summary.guards else ""
    return f"It is not worse in either objective at {_loads(at)} the load{guards}."


def _why_not(summary: TuneSummary) -> str:
    at = summary.hold_out
    first = at[0].differences
    best = f"the best of {_tried(summary)}"
    lacking = dict.fromkeys(
        one.verdict.partition(": ")[2] for one in first.values() if one.low is None
    )
    if lacking and not any(_is(one, BETTER) for one in first.values()):
        return f"there is not enough data about {best}: {'; '.join(lacking)}"
    lossy = [one for one in at if one.loses_more]
    if lossy:
        return f"{best} loses more requests at {_loads(lossy)} the load"
    for one in at:
        if one.worse:
            what = ", ".join(_gain(name, one.differences[name]) for name in one.worse)
            return f"{best} is worse at {_loads([one])} the load: {what}"
        if one.stopped_by:
            return f"{best} was stopped by a guard at {_loads([one])} the load: {_broken(one)}"
    measured = "; ".join(
        f"{LABELS[name]} {relative(found.relative)}, 95 % interval {_interval(name, found)}"
        for name, found in first.items()
    )
    return f"{best} does not differ significantly on the hold-out half ({measured})"


def _is(found: DifferenceSummary, word: str) -> bool:
    return bool(found.verdict == word)


def _gain(measure: str, found: DifferenceSummary) -> str:
    return (
        f"{LABELS[measure]} {relative(found.relative)} (95 % interval "
        f"{_interval(measure, found)} of {shown(measure, found.known_reference)})"
    )


def _interval(measure: str, found: DifferenceSummary) -> str:
    if found.low is None:
        return "unknown"
    return f"{signed(measure, found.low)} to {signed(measure, found.high)}"


def _loads(judged: Sequence[JudgedSummary]) -> str:
    loads = ", ".join(f"{one.load:g}" for one in judged)
    return f"{loads} times"


def comment(summary: TuneSummary) -> list[str]:
    """Return comment paragraphs for the tuned configuration: how it was measured, on which traffic,
    and with which result.
    """
    trace = summary.trace
    conditions = summary.conditions
    profiles = ", ".join(f"{count} of {name}" for name, count in conditions["profiles"].items())
    pickers = "1 picker" if conditions["replicas"] == 1 else f"{conditions['replicas']} pickers"
    of_what = (
        f"sim tune of Homing {summary.version}, trace {trace.name}, sha256 "
        f"{trace.sha256[:12]}, {trace.requests:,} requests: tuned on the first "
        f"{trace.tuning:,}, judged on the other {trace.hold_out:,}, against "
        f"{summary.config}, hash {summary.config_hash}; pods: {profiles}; {pickers}."
    )
    what = [of_what, conclusion(summary)]
    for judged in summary.hold_out:
        told = "; ".join(
            f"{LABELS[name]} {shown(name, found.known_reference)} to {_after(name, found)}, "
            f"95 % interval of the difference {_interval(name, found)}, {found.verdict}"
            for name, found in (judged.differences | judged.guards).items()
        )
        what.append(f"At {judged.load:g} times the load of the trace: {told}.")
    if summary.varied:
        what.append(f"The confidence intervals are over {summary.varied}.")
    searched = "; ".join(f"{one.name} {one.span}" for one in summary.space)
    what.append(
        f"The search of {len(summary.trials):,} trials varied {searched}. "
        f"Objectives: {' and '.join(LABELS[name] for name in summary.objective)}. "
        f"Guards: {_guards_told(summary) or 'none'}."
    )
    return what


def _after(measure: str, found: DifferenceSummary) -> str:
    if found.value is None or found.known_reference is None:
        return "-"
    return shown(measure, found.known_reference + found.value)


def tune_table(summary: TuneSummary) -> str:
    """Return the warnings, tables and conclusion of `sim tune` for the terminal."""
    parts = [*warnings_of(summary)]
    if len(rows := _judged_rows(summary)) > 1:
        parts.append(table(rows))
    if len(rows := _value_rows(summary)) > 1:
        parts.append(table(rows))
    parts.append("\n".join([conclusion(summary), *_basis(summary)]))
    return "\n\n".join(parts) + "\n"


def tune_report(summary: TuneSummary) -> str:
    """Return the content of report.md of `sim tune`."""
    parts = [f"# Tuning on {summary.trace.name}", conclusion(summary), *_basis(summary)]
    parts += [f"**{warning}**" for warning in warnings_of(summary)]
    for heading, rows in _tables(summary):
        parts += [f"## {heading}", markdown_table(rows)]
    told = [["", ""], *_condition_rows(summary)]
    parts += ["## What was run", markdown_table(told)]
    return "\n\n".join(parts) + "\n\n" + foot(summary.assumptions)


def tune_page(summary: TuneSummary) -> str:
    """Return the content of report.html of `sim tune`."""
    introduction = [conclusion(summary), *warnings_of(summary), *_basis(summary)]
    return page(
        f"Tuning on {summary.trace.name}",
        "\n".join(introduction),
        _charts(summary)
        + "".join(figure(heading, html_table(rows)) for heading, rows in _tables(summary))
        + figure("What was run", facts_table(_condition_rows(summary)))
        + page_foot(summary.assumptions),
    )


def _tables(summary: TuneSummary) -> list[tuple[str, list[list[str]]]]:
    """Return (heading, rows) of each table of the tuning report that has rows besides its head."""
    tables = [
        ("Results on the hold-out half", _judged_rows(summary)),
        ("What was varied", _value_rows(summary)),
        ("The best trials on the tuning half, with all seeds", _finalist_rows(summary)),
        ("The trials", _trial_rows(summary)),
    ]
    return [(heading, rows) for heading, rows in tables if len(rows) > 1]


def _judged_rows(summary: TuneSummary) -> list[list[str]]:
    present = summary.config
    head = [
        "at times the load",
        present,
        summary.tuned_name,
        "difference",
        "95 % interval",
        "relative",
    ]
    rows = [[*head, "verdict"]]
    for judged in summary.hold_out:
        for name, found in (judged.differences | judged.guards).items():
            stops = name in judged.stopped_by
            guard = " (guard)" if name in judged.guards else ""
            rows.append(
                [
                    f"{judged.load:g}: {LABELS[name]}{guard}",
                    shown(name, found.known_reference),
                    _after(name, found),
                    signed(name, found.value),
                    "-" if found.low is None else _interval(name, found),
                    relative(found.relative),
                    found.verdict.partition(":")[0] + (", stopped by this guard" if stops else ""),
                ]
            )
    return rows


def _value_rows(summary: TuneSummary) -> list[list[str]]:
    chosen = summary.chosen or summary.best_so_far
    values = chosen.values if chosen else {}
    whose = summary.tuned_name if summary.chosen else "best so far"
    head = ["varied", "between", summary.config, whose]
    rows = [head if values else head[:3]]
    for one in summary.space:
        told = [one.name, one.span, _value(one.present)]
        rows.append([*told, _value(values[one.name])] if values else told)
    return rows


def _value(value: float | str | None) -> str:
    if value is None:
        return "other"
    return value if isinstance(value, str) else f"{value:.4g}"


def _finalist_rows(summary: TuneSummary) -> list[list[str]]:
    rows = [["", *(LABELS[name] for name in summary.objective), "verdict"]]
    for one in summary.finalists:
        found = one.differences
        words = [f"{LABELS[name]} {found[name].verdict.partition(':')[0]}" for name in found]
        if one.loses_more:
            words.append("loses more requests")
        words += [
            f"stopped by the guard of {LABELS[name]} {relative(one.guards[name].relative)}"
            for name in one.stopped_by
        ]
        changes = [relative(found[name].relative) for name in found]
        rows.append([f"trial {one.trial}", *changes, "; ".join(words)])
    return rows


def _trial_rows(summary: TuneSummary) -> list[list[str]]:
    """Return the table of the best trials: the relative changes of their objectives against the
    present configuration in the last run of each trial, with penalties as in `_ratios`.
    """
    names = [one.name for one in summary.space]
    head = ["", "share of the half", *(LABELS[name] for name in summary.objective), *names]
    known = [one for one in summary.trials if one.costs]
    known.sort(key=lambda one: (-len(one.costs), one.cost or 0.0, one.trial))
    rows = [head]
    for one in known[:TRIALS_SHOWN]:
        ratios = [relative(change - 1) for change in _ratios(summary, one)]
        share = f"{summary.rungs[len(one.costs) - 1]:.0%}"
        values = [_value(one.values[name]) for name in names]
        rows.append([f"trial {one.trial}", share, *ratios, *values])
    return rows


def _ratios(summary: TuneSummary, trial: TrialSummary) -> list[float]:
    """Return the ratio of each objective of a trial to that of the present configuration, in the
    trial's last run. Penalties for lost requests and broken guards are included as if the objective
    were worse.
    """
    return [
        math.exp(-cost if name in summary.higher_is_better else cost)
        for name, cost in zip(summary.objective, trial.costs[-1], strict=True)
    ]


def _charts(summary: TuneSummary) -> str:
    """Return charts of the trials that ran on the whole tuning half; "" if there are no such
    trials.
    """
    finished = [one for one in summary.trials if len(one.costs) == len(summary.rungs)]
    if not finished:
        return ""
    return f'<div class="pair">{_front_figure(summary, finished)}{_progress_figure(finished)}</div>'


def _progress_figure(finished: Sequence[TrialSummary]) -> str:
    """Return a chart of the best result so far over the trials. If it stays constant, more trials
    are of no use.
    """
    line = [(0.0, 1.0)]  # the present configuration is known from the start
    best = 1.0
    for one in finished:
        best = min(best, math.exp(sum(one.costs[-1])))
        line.append((one.trial, best))
    caption = "The best product of both objectives so far, relative to the present configuration"
    drawing = line_chart(
        {"best": line},
        x=Axis.over([at for at, _ in line], title="trial"),
        y=_axis([value for _, value in line], "both objectives", logarithmic=True),
        label=caption,
        dots=True,
    )
    return figure(caption, drawing)


def _front_figure(summary: TuneSummary, finished: Sequence[TrialSummary]) -> str:
    points = {one.trial: tuple(_ratios(summary, one)) for one in finished}
    chosen = summary.chosen
    series: dict[str, Points] = {
        "tried": _pairs(points, points),
        "not dominated": _pairs(points, summary.front),
        "tuned": _pairs(points, [chosen.trial] if chosen else []),
        "present": [(1.0, 1.0)],
    }
    series = {name: line for name, line in series.items() if line}
    across, up = ([at[side] for line in series.values() for at in line] for side in range(2))
    ttft, other = (LABELS[name] for name in summary.objective)
    caption = f"{ttft} against {other}, relative to the present configuration"
    drawing = scatter_chart(
        series,
        x=_axis(across, ttft, logarithmic=True),
        y=_axis(up, other, logarithmic=False),
        label=caption,
    )
    return figure(caption, drawing, list(series))


def _pairs(points: dict[int, tuple[float, ...]], trials: Sequence[int] | dict[int, Any]) -> Points:
    return [(points[trial][0], points[trial][1]) for trial in trials if trial in points]


def _axis(values: Sequence[float], title: str, *, logarithmic: bool) -> Axis:
    if logarithmic and max(values) > 2 * min(values):
        return Axis.over(values, unit="times", title=title, logarithmic=True)
    return Axis(low=min(values) / _MARGIN, high=max(values) * _MARGIN, unit="times", title=title)


def _condition_rows(summary: TuneSummary) -> list[list[str]]:
    trace = summary.trace
    return [
        ["requests for tuning", f"{trace.tuning:,}"],
        ["requests of the hold-out", f"{trace.hold_out:,}"],
        ["sha256 of the trace", trace.sha256],
        ["guards", _guards_told(summary) or "none"],
        *condition_rows(summary.conditions),
    ]


def _basis(summary: TuneSummary) -> list[str]:
    refused = sum(1 for one in summary.trials if one.refused)
    told = []
    if refused:
        told.append(f"{refused:,} of the trials are invalid configurations and were not run.")
    if summary.runs:
        told.append(f"{varied_sentences(summary)} {measurement_sentences(summary.runs)}")
    if summary.power is not None:
        told.append(power_sentence(summary.power))
    return told


def power_sentence(power: PowerSummary) -> str:
    """Return sentences about the gains that this traffic can confirm, and about the traffic that
    the wanted gain would need.
    """
    if power.lacking:
        return f"With this traffic no gain can be confirmed: {power.lacking}."
    if not power.gains:
        return "A few random draws show no effect of the varied parameters on this traffic."
    gains = ", ".join(
        f"{LABELS[name]} {f'below {_percent(gain)}' if gain < 1 else 'of any size'}"
        for name, gain in power.gains.items()
    )
    told = (
        f"With {power.requests:,} requests and {power.seeds} seeds, a tuning may fail to confirm "
        f"these gains: {gains}."
    )
    for name, requests in power.requests_needed.items():
        seeds = power.seeds_needed.get(name)
        told += (
            f" To confirm {power.wanted:.0%} of {LABELS[name]}, use about "
            f"{float(f'{requests:.2g}'):,.0f} requests" + (f", or --seeds {seeds}" if seeds else "")
        ) + "."
    return told


def _percent(share: float) -> str:
    """Return a share (0 to 1) as a percentage with two significant digits, because it is an
    estimate.
    """
    return f"{float(f'{100 * share:.2g}'):,g}%"
