"""The report of `sim size`: a table, report.md, and a page with the frontier of cost and used
bounds.
"""

import math
from typing import Final

from msgspec import UNSET, Struct

from sim.measurement.objectives import GOODPUT, LOST
from sim.measurement.summaries import (
    BoundSummary,
    CountSummary,
    DemandSummary,
    SizedSummary,
    SizeSummary,
    WarmUpSummary,
)
from sim.reports.charts import (
    Axis,
    Dots,
    Points,
    facts_table,
    figure,
    html_table,
    page,
    wide_line_chart,
    words,
)
from sim.reports.page_foot import page_foot
from sim.reports.report import (
    condition_rows,
    foot,
    limit,
    markdown_table,
    measurement_sentences,
    number,
    seconds,
    share,
    table,
    varied_sentences,
    warnings_of,
)

USED_MAX: Final = 50.0
"""Maximum used share of a bound that reports show as a number. Overloaded pools exceed bounds a
thousandfold, and the exact amount does not matter.
"""
_USED_MIN: Final = 0.01
"""Minimum used share of a bound in charts, because a logarithmic axis cannot show 0."""
_EVEN_AXIS_MAX: Final = 10.0
"""Ratio of the highest to the lowest cost (or number of pods) up to which their axis is linear, as it
is with a cost of 0. Above it, the points of the cheap options would overlap.
"""
_FRONT: Final = "the front"
_ALLOWED: Final = "the limit"
_NOT_COMPLETE: Final = "Not complete: run the same command again to continue."
_HOUR_S: Final = 3600.0


class _Table(Struct, frozen=True, kw_only=True):
    """A table of the sizing report, with its title and a note."""

    title: str
    rows: list[list[str]]
    note: str = ""
    """Sentences between the title and the table that explain the table, or "" for none."""
    facts: bool = False
    """True if the rows are pairs of name and value without a head."""

    def markdown(self) -> str:
        """Return the table as Markdown with its title and its note."""
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}{markdown_table(self.rows)}"

    def figure(self) -> str:
        """Return the table as an HTML figure with its title and its note."""
        note = f"<p>{words(self.note)}</p>" if self.note else ""
        told = facts_table(self.rows[1:]) if self.facts else html_table(self.rows)
        return figure(self.title, note + told)


def size_table(summary: SizeSummary) -> str:
    """Return the warnings, tables and conclusions of `sim size` for the terminal."""
    warnings = "".join(f"{warning}\n\n" for warning in _warnings(summary))
    told = (_option_rows(summary), _bound_rows(summary), _headroom_rows(summary))
    parts = [table(rows) for rows in told if len(rows) > 1]
    parts.append("\n".join(_sentences(summary)))
    return warnings + "\n\n".join(parts) + "\n"


def size_report(summary: SizeSummary) -> str:
    """Return the content of report.md of `sim size`."""
    notes = "" if summary.complete else f"**{_NOT_COMPLETE}**\n\n"
    notes += "".join(f"**{warning}**\n\n" for warning in _warnings(summary))
    parts = [f"# Pods for {summary.conditions['trace']}\n\n{notes}{_conclusion(summary)}"]
    parts += [one.markdown() for one in _tables(summary)]
    if basis := _basis(summary):
        parts.append("## What was varied\n\n" + "\n\n".join(basis))
    told = [["", ""], *condition_rows(summary.conditions)]
    parts.append(f"## What was run\n\n{markdown_table(told)}")
    parts.append(foot(summary.assumptions))
    return "\n\n".join(parts)


def size_page(summary: SizeSummary) -> str:
    """Return the content of report.html of `sim size`: the frontier, the trace over time, and all
    tables.
    """
    note = [] if summary.complete else [_NOT_COMPLETE]
    introduction = [*_warnings(summary), _conclusion(summary), *note, *_basis(summary)]
    figures = [one.figure() for one in _tables(summary)]
    return page(
        f"Pods for {summary.conditions['trace']}",
        "\n".join(introduction),
        _frontier(summary)
        + _by_load(summary)
        + _over_time(summary)
        + "".join(figures)
        + figure("What was run", facts_table(condition_rows(summary.conditions)))
        + page_foot(summary.assumptions),
    )


def _warnings(summary: SizeSummary) -> list[str]:
    """Return the warnings of a sizing; the one about the warm-up comes first."""
    told = summary.warm_up.warning
    return [*([f"Warning: {told}"] if told else []), *warnings_of(summary)]


def _tables(summary: SizeSummary) -> list[_Table]:
    """Return those tables of the sizing report that have rows besides their head."""
    told = [
        _Table(title="Options", rows=_option_rows(summary), note=_options_note(summary)),
        _Table(title="Bounds", rows=_bound_rows(summary), note=_bounds_note(summary)),
        _Table(title="Headroom", rows=_headroom_rows(summary), note=_headroom_words(summary)),
        _Table(title="Split or not, by load", rows=_load_rows(summary), note=_loads_note(summary)),
        _Table(title="With an autoscaler", rows=_autoscaling_rows(summary), facts=True),
        _Table(title="Every number of pods that was tried", rows=_count_rows(summary)),
    ]
    return [one for one in told if len(one.rows) > 1]


def _options_note(summary: SizeSummary) -> str:
    told = ""
    if _priced(summary):
        told = "Costs are in the currency of the prices"
        told += (
            "; costs of tokens cover the period for which the pool was sized. "
            if _cut(summary)
            else ". "
        )
    if _fronted(summary):
        told += (
            "No other option is better than an option on the front in both "
            f"{'cost' if _priced(summary) else 'pods'} and remaining room in the bounds."
        )
    return told.rstrip()


def _bounds_note(summary: SizeSummary) -> str:
    if all(option.pods is not None for option in summary.options):
        return ""
    return (
        "Options without a sufficient number of pods are shown with the highest number that was "
        "tried."
    )


def _headroom_words(summary: SizeSummary) -> str:
    told = "; ".join(f"{one.case}: {one.says}" for one in summary.headroom)
    return f"{told[:1].upper()}{told[1:]}." if told else ""


def number_of_pods(pods: int | None) -> str:
    """Return a number of pods as text; "none" for None."""
    return "none" if pods is None else f"{pods:,}"


def promised(summary: SizeSummary) -> str:
    """Return the SLO bounds of a sizing in words."""
    named = (bound.rpartition("=") for bound in summary.bounds)
    return ", ".join(f"{name} {_limit(name, float(limited))}" for name, _, limited in named)


def name_of(option: SizedSummary) -> str:
    """Return the name of an option (profile, configuration and split), which is unique within a
    sizing.
    """
    name = f"{option.profile}, {option.config}"
    if option.prefill_share is UNSET:
        return name
    return f"{name}, {option.prefill_share:.0%} prefill pods"


def _option_rows(summary: SizeSummary) -> list[list[str]]:
    checked = any(option.every_count is not UNSET for option in summary.options)
    priced, fronted = _priced(summary), _fronted(summary)
    head = ["option", "pods"]
    head += (
        ["cost\nper hour", "per million\ntokens", "per million\noutput tokens"] if priced else []
    )
    head += ["of bounds\nused", *(["front"] if fronted else []), "runs"]
    rows = [head + (["by every\nnumber", "its runs"] if checked else [])]
    for at, option in enumerate(summary.options):
        costs = (
            option.cost_per_hour,
            option.cost_per_million_tokens,
            option.cost_per_million_output_tokens,
        )
        row = [
            name_of(option) + (" (chosen)" if at == summary.chosen else ""),
            _pods(option.pods, summary) + _divided(option),
            *([number(cost) for cost in costs] if priced else []),
            _used(option.used),
            *(["yes" if option.on_front else "-"] if fronted else []),
            f"{option.runs:,}",
        ]
        if checked:
            every = option.every_count
            row += ["-", "-"] if every is UNSET else [number_of_pods(every.pods), f"{every.runs:,}"]
        rows.append(row)
    return rows


def _fronted(summary: SizeSummary) -> bool:
    """Return whether the report shows the front: there are several options, and at least one of
    them is on it.
    """
    return len(summary.options) > 1 and any(option.on_front for option in summary.options)


def _priced(summary: SizeSummary) -> bool:
    """Return whether at least one option of the sizing has a price."""
    return any(option.price_per_hour is not None for option in summary.options)


def _pods(pods: int | None, summary: SizeSummary) -> str:
    if pods is None:
        return f"more than {summary.pods_max:,}" if summary.complete else "-"
    return f"{pods:,}"


def _divided(option: SizedSummary) -> str:
    """Return the division of the pods of an option into roles, in brackets; "" without a split."""
    prefill = option.prefill_pods
    if option.pods is None or prefill is UNSET or prefill is None:
        return ""
    return f" ({prefill}P {option.pods - prefill}D)"


def _bound_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["option", "pods", "bound", "limit", "figure", "95 % limit", "used"]]
    for option in summary.options:
        shown = _found(option) or next(reversed(option.counts), None)
        if shown is None:
            continue
        rows += [
            [
                name_of(option),
                f"{shown.pods:,}",
                _part_of(bound),
                _limit(bound.name, bound.limit),
                _shown(bound.name, bound.figure.value),
                _shown(bound.name, bound.sure),
                _used(bound.used),
            ]
            for bound in shown.bounds
        ]
    return rows


def _part_of(bound: BoundSummary) -> str:
    """Return the name of a bound, with ", busiest part" if its figure covers only that part of the
    traffic.
    """
    return f"{bound.name}, busiest part" if bound.busiest else bound.name


def _found(option: SizedSummary) -> CountSummary | None:
    """Return the result for the number of pods that the option needs; None if no number of pods
    suffices.
    """
    return next((one for one in option.counts if one.pods == option.pods), None)


def _headroom_rows(summary: SizeSummary) -> list[list[str]]:
    priced = _priced(summary)
    rows = [["if", "pods", *(["cost\nper hour"] if priced else [])]]
    for one in summary.headroom:
        cost = [number(one.cost_per_hour)] if priced else []
        rows.append([one.case, _pods(one.pods, summary), *cost])
    return rows


def _load_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["load", "option", "used", "TTFT p90", "ITL mean", "E2E mean"]]
    found = () if summary.loads is UNSET else summary.loads
    rows += [
        [
            f"{one.load:g}",
            name_of(summary.options[one.option]),
            _used(one.used),
            seconds(one.ttft_p90_s),
            seconds(one.itl_mean_s),
            seconds(one.e2e_mean_s),
        ]
        for one in found
    ]
    return rows


def _loads_note(summary: SizeSummary) -> str:
    if summary.loads is UNSET or not summary.loads:
        return ""
    pods = summary.loads[0].pods
    return (
        f"Each figure is of one run of {pods:,} pods with the first seed. A load of 1 is the traffic that "
        "was sized for. The used share is that of the figures, without confidence limits."
    )


def _autoscaling_rows(summary: SizeSummary) -> list[list[str]]:
    rows = [["", ""]]
    found = summary.autoscaling
    if found is None:
        return rows
    saved = None
    if found.pod_hours is not None and found.fixed_pod_hours:
        saved = 1 - found.pod_hours / found.fixed_pod_hours
    kept = "unknown after one run" if found.kept is None else "yes" if found.kept else "no"
    broken = [_part_of(bound) for bound in found.bounds if not bound.kept_by_figure]
    return [
        *rows,
        ["target of HPA or KEDA", f"{number(found.target)} {found.metric} per pod"],
        ["pods allowed", f"{found.pods_min:,} to {found.pods_max:,}"],
        ["start-up time of a new pod", limit(found.startup_s)],
        ["replayed", "the whole trace"],
        ["pods, mean and maximum", f"{number(found.pods_mean)}, {found.pods_highest or '-'}"],
        ["pod-hours", f"{number(found.pod_hours)}, fixed {number(found.fixed_pod_hours)}"],
        ["used more" if saved is not None and saved < 0 else "saved", share(saved and abs(saved))],
        ["bounds kept with 95 % confidence", kept],
        ["bounds broken by the figures", ", ".join(broken) or "none"],
        ["repetitions", f"{found.runs}{f', {found.varied}' if found.varied else ''}"],
    ]


def _count_rows(summary: SizeSummary) -> list[list[str]]:
    priced = _priced(summary)
    rows = [["option", "pods", "runs", *(["cost\nper hour"] if priced else []), "used", "kept"]]
    tried = [(name_of(option), one) for option in summary.options for one in option.counts]
    tried += [(f"with {case.case}", one) for case in summary.headroom for one in case.counts]
    for name, one in tried:
        rows.append(
            [
                name,
                f"{one.pods:,}",
                f"{one.runs:,}",
                *([number(one.cost_per_hour)] if priced else []),
                _used(one.used),
                "-" if one.kept is None else "yes" if one.kept else "no",
            ]
        )
    return rows


def _conclusion(summary: SizeSummary) -> str:
    """Return the answer of the sizing in a few sentences."""
    if summary.chosen is None:
        told = summary.why_none or "The search of all options is still incomplete."
        return f"{told}{_nearest(summary)}"
    option = summary.options[summary.chosen]
    pods = f"{option.pods:,} pod{'' if option.pods == 1 else 's'}"
    money = ""
    if option.cost_per_hour is not None:
        money = f", for {number(option.cost_per_hour)} per hour"
        if option.cost_per_million_tokens is not None:
            money += f" and {number(option.cost_per_million_tokens)} per million tokens"
            if _cut(summary):
                whole = _over_whole(summary, option.cost_per_million_tokens)
                money += f" in the period for which the pool was sized, {number(whole)} over the whole trace"
    if (prefill := option.prefill_pods) is not UNSET and prefill is not None:
        pods += f" ({prefill:,} prefill, {(option.pods or 0) - prefill:,} decode)"
    told = (
        f"{pods} of {option.profile} under {option.config} keep{'s' if option.pods == 1 else ''} "
        f"{promised(summary)}, with 95 % confidence{money}."
    )
    if option.pods_perhaps is not None:
        told += (
            f" {option.pods_perhaps:,} might suffice: the figures keep the bounds there, but their "
            "95 % limits do not. A longer trace or more seeds could decide it."
        )
    return told + _other_kind(summary, option)


def _other_kind(summary: SizeSummary, chosen: SizedSummary) -> str:
    """Return a sentence about the best option of the chosen profile with a split if the chosen
    option has none, or the reverse; "" if all options of the profile are of one kind.
    """
    split = chosen.prefill_share is UNSET
    others = [
        one
        for one in summary.options
        if one.profile == chosen.profile and (one.prefill_share is UNSET) is not split
    ]
    if not others:
        return ""
    with_pods = [one for one in others if one.pods is not None]
    how = "Split into prefill and decode pods" if split else "Without a split"
    if not with_pods:
        return f" {how}, no number of pods of this profile up to {summary.pods_max:,} keeps the bounds."
    best = min(with_pods, key=lambda one: one.pods or 0)
    return f" {how}, {best.pods:,} pods{_divided(best)} are needed."


def _cut(summary: SizeSummary) -> bool:
    """Return whether the pool was sized for only a part of the trace."""
    return summary.sized_for.requests < summary.trace.requests


def _over_whole(summary: SizeSummary, cost: float) -> float:
    """Return the cost per million tokens over the whole trace if the pods for its busiest period
    run all the time. `cost` is that of the busiest period.
    """
    rates = [
        (one.prompt_tokens + one.output_tokens) / (one.end_s - one.start_s)
        for one in (summary.sized_for, summary.trace)
    ]
    return cost * rates[0] / rates[1]


def _nearest(summary: SizeSummary) -> str:
    """Return a sentence about how far the best result is from the SLO bounds, or "" if some option
    keeps them or the search is incomplete.
    """
    tried = [
        (one.used, one.pods, name_of(option), one)
        for option in summary.options
        for one in option.counts
        if one.used is not None
    ]
    if not tried or not summary.complete or any(one.pods is not None for one in summary.options):
        return ""
    used, pods, name, nearest = min(tried, key=lambda one: one[:3])
    bound = next(one for one in nearest.bounds if one.used == used)
    sure = "" if bound.sure is None else f" (95 % limit {_shown(bound.name, bound.sure)})"
    return (
        f" The nearest result is {pods:,} pod{'' if pods == 1 else 's'} of {name}: "
        f"{_part_of(bound)} was {_shown(bound.name, bound.figure.value)}{sure}, and must be "
        f"{_limit(bound.name, bound.limit)}."
    )


def _sentences(summary: SizeSummary) -> list[str]:
    headroom = _headroom_words(summary)
    return [
        _conclusion(summary),
        *([headroom] if headroom else []),
        *_autoscaling_sentence(summary),
        *_basis(summary),
    ]


def _autoscaling_sentence(summary: SizeSummary) -> list[str]:
    found = summary.autoscaling
    if found is None:
        return []
    shown = (
        "kept the bounds with 95 % confidence"
        if found.kept
        else "broke bounds"
        if any(not bound.kept_by_figure for bound in found.bounds)
        else "kept the bounds in the figures, but not with 95 % confidence"
    )
    told = (
        f"An autoscaler with a target of {number(found.target)} {found.metric} per pod, "
        f"{found.pods_min:,} to {found.pods_max:,} pods, {shown} and used "
        f"{number(found.pod_hours)} pod-hours instead of {number(found.fixed_pod_hours)}."
    )
    return [told]


def _basis(summary: SizeSummary) -> list[str]:
    """Return paragraphs about the replayed traffic, the varied seeds, and the certainty of the
    result.
    """
    told = []
    whole, part = summary.trace, summary.sized_for
    if _cut(summary):
        told.append(
            f"The sizing covers the busiest {limit(round(part.end_s - part.start_s))} of the "
            f"trace, from {part.start_s / _HOUR_S:,.1f} h on: {part.requests:,} of its "
            f"{whole.requests:,} requests, at {number(_rate(part) / _rate(whole))} times its mean "
            "rate."
        )
    if summary.runs:
        told.append(f"{varied_sentences(summary)} {measurement_sentences(summary.runs)}")
        told.append(_judged(summary))
        told.append(
            "A bound is kept if its 95 % limit is within the bound. One more replay with "
            "other traffic of this kind then keeps it 19 times out of 20. This does not cover traffic that "
            f"differs from the whole trace, or an engine that differs from its profile.{_neighbours(summary)}"
        )
    return told


def _judged(summary: SizeSummary) -> str:
    """Return sentences about the parts of the traffic on which each bound is judged, and about the
    warm-up.
    """
    part = summary.warm_up
    length = limit(round(part.busiest_s))
    told = (
        "Each bound is judged on all of the traffic after the warm-up, and on its busiest "
        f"{length} alone. The busiest part is where the arriving requests have the most work: "
        "uncached prompt tokens, plus ten times the output tokens."
    )
    return f"{told} {_why_excluded(part)}"


def _why_excluded(part: WarmUpSummary) -> str:
    """Return a sentence about the reason for the length of the warm-up."""
    if part.given:
        return "The warm-up was set by --warm-up."
    if not part.needed_s:
        return "Caches need no warm-up for this traffic."
    told = f"The warm-up is the first {seconds(part.seconds)} of the trace at every load"
    if part.seconds >= part.needed_s:
        return f"{told}, as long as caches need."
    return (
        f"{told}. Caches need {seconds(part.needed_s)}, but more would exclude over a fifth of the "
        "requests, or the busiest part."
    )


def _neighbours(summary: SizeSummary) -> str:
    """Return sentences about the next higher and the next lower number of pods, which confirm the
    answer. They begin with a space; "" if there is no answer.
    """
    if summary.chosen is None:
        return ""
    option = summary.options[summary.chosen]
    # A split pool has at least one pod of each role.
    pods, pods_min = option.pods, 1 if option.prefill_share is UNSET else 2
    above = "" if pods == summary.pods_max else ". The next higher number keeps them too"
    below = "" if pods == pods_min else ". The next lower number does not"
    return f" The answer is the smallest number that keeps all bounds{above}{below}."


def _rate(stretch: DemandSummary) -> float:
    length_s = stretch.end_s - stretch.start_s
    return stretch.requests / length_s if length_s else math.nan


def _frontier(summary: SizeSummary) -> str:
    """Return a chart of the used share of the bounds over the cost, or over the number of pods unless
    all options have a price, with one line per option.

    Up to 100 % all bounds are kept.
    """
    priced = all(option.price_per_hour is not None for option in summary.options)

    def place(one: CountSummary | None) -> tuple[float, float] | None:
        across = None if one is None else one.cost_per_hour if priced else float(one.pods)
        if one is None or one.used is None or across is None:
            return None
        return across, 100 * min(max(one.used, _USED_MIN), USED_MAX)

    lines: dict[str, Points] = {}
    found: dict[str, Points] = {}
    front = []
    for option in summary.options:
        points = [point for one in option.counts if (point := place(one))]
        if not points:
            continue
        lines[name_of(option)] = points
        if at := place(_found(option)):
            found[name_of(option)] = [at]
            front += [at] if option.on_front else []
    if not lines:
        return ""
    flat = [point for line in lines.values() for point in line]
    costs = [across for across, _ in flat]
    title = "cost" if priced else "pods"
    x = Axis.over(
        costs,
        unit="per hour" if priced else "",
        title=title,
        logarithmic=min(costs) > 0 and max(costs) > _EVEN_AXIS_MAX * min(costs),
        whole=not priced,
    )
    y = Axis.over(
        [*(used for _, used in flat), 100.0],
        unit="%",
        title="used share of the bounds",
        logarithmic=True,
    )
    if len(front) > 1:
        lines[_FRONT] = sorted(front)
    lines[_ALLOWED] = [(x.low, 100.0), (x.high, 100.0)]
    caption = f"Used share of the bounds over the {title}"
    drawing = wide_line_chart(
        lines, x=x, y=y, label=caption, dots=Dots(bare=(_FRONT, _ALLOWED), large=found)
    )
    told = (
        "A dot is a number of pods that was tried, and a large dot is the number that was found. "
        "A dot above 100 % breaks a bound"
    )
    if any(used >= 100 * USED_MAX for _, used in flat):
        told += f"; {100 * USED_MAX:,.0f} % stands for that share and any larger one"
    told += "."
    return figure(caption, f"<p>{words(told)}</p>{drawing}", list(lines))


def _by_load(summary: SizeSummary) -> str:
    """Return a chart of the used share of the bounds over the load, for the best pool without and
    with a split; "" without a split.
    """
    if summary.loads is UNSET or not summary.loads:
        return ""
    runs: dict[str, list[tuple[float, float]]] = {}
    for one in summary.loads:
        if one.used is not None:
            used = 100 * min(max(one.used, _USED_MIN), USED_MAX)
            runs.setdefault(name_of(summary.options[one.option]), []).append((one.load, used))
    flat = [point for line in runs.values() for point in line]
    if not flat:
        return ""
    x = Axis.over([load for load, _ in flat], title="load")
    y = Axis.over(
        [*(used for _, used in flat), 100.0],
        unit="%",
        title="used share of the bounds",
        logarithmic=True,
    )
    lines: dict[str, Points] = {**runs, _ALLOWED: [(x.low, 100.0), (x.high, 100.0)]}
    pods = summary.loads[0].pods
    caption = f"Used share of the bounds over the load, {pods:,} pods with and without a split"
    drawing = wide_line_chart(lines, x=x, y=y, label=caption, dots=Dots(bare=(_ALLOWED,), large={}))
    return figure(caption, f"<p>{words(_loads_note(summary))}</p>{drawing}", list(lines))


def _over_time(summary: SizeSummary) -> str:
    """Return a chart of the arriving work over time, and of the part for which the pool was sized;
    "" for a trace of a single period.
    """
    stretches = summary.over_time
    if len(stretches) < 2:
        return ""
    points = [(one.start_s / _HOUR_S, 100 * one.of_busiest) for one in stretches]
    caption = "The work that arrives over time"
    lines: dict[str, Points] = {"all of the trace": points}
    part = summary.sized_for
    sized = [at for at in points if part.start_s <= at[0] * _HOUR_S <= part.end_s]
    if _cut(summary) and len(sized) > 1:
        lines["sized for"] = sized
    drawing = wide_line_chart(
        lines,
        x=Axis.over(
            [*(at for at, _ in points), stretches[-1].end_s / _HOUR_S], unit="h", title="time"
        ),
        y=Axis(low=0, high=100, unit="%", title="share of the busiest"),
        label=caption,
    )
    return figure(caption, drawing, list(lines) if len(lines) > 1 else ())


def _used(used: float | None) -> str:
    if used is None:
        return "-"
    return share(used) if used <= USED_MAX else f"over {USED_MAX:,.0%}"


def _limit(name: str, limited: float) -> str:
    if name in (GOODPUT, LOST):
        return f"at {'least' if name == GOODPUT else 'most'} {100 * limited:g} %"
    return f"at most {limit(limited)}"


def _shown(name: str, value: float | None) -> str:
    return share(value) if name in (GOODPUT, LOST) else seconds(value)
