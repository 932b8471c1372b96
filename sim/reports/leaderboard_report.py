"""The report of `sim leaderboard`: a table, report.md, and a page with the strategies' ratios to
the best.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from sim.measurement.assumptions import NOT_MODELLED
from sim.measurement.ranking import (
    ALL,
    BEHIND,
    HELD_WITHOUT_ADAPTERS,
    RANKED_BY,
    WITHOUT_ADAPTERS,
    is_behind,
    is_level,
    ranked,
    scopes_of,
)
from sim.measurement.summaries import (
    CaseSummary,
    LadderSummary,
    LeaderboardSummary,
    StandingSummary,
    TotalSummary,
)
from sim.reports.charts import (
    COLOURS,
    Axis,
    Points,
    Whiskers,
    bars,
    figure,
    html_table,
    line_chart,
    page,
    shaded_table,
    words,
)
from sim.reports.compare_report import not_complete, shown
from sim.reports.report import markdown_table, table

_LABELS: Final = {
    "ttft_mean_s": "TTFT\nmean",
    "ttft_p50_s": "TTFT\np50",
    "ttft_p90_s": "TTFT\np90",
    "ttft_p99_s": "TTFT\np99",
    "e2e_mean_s": "E2E\nmean",
    "itl_mean_s": "ITL\nmean",
    "itl_p99_s": "ITL\np99",
    "output_tokens_per_s": "output\ntokens/s",
    "hit_rate": "hit\nrate",
    "goodput": "goodput",
    "imbalance": "busiest pod\nover mean",
}
_JUDGED: Final = {
    "e2e_mean_s": "E2E mean",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "itl_p99_s": "ITL p99",
    "output_tokens_per_s": "throughput",
}
_TITLES: Final = {
    WITHOUT_ADAPTERS: "All cases without LoRA",
    HELD_WITHOUT_ADAPTERS: "Hold-outs without LoRA",
    ALL: "All cases with LoRA",
}
_NAMES_MAX: Final = 6
_FAR: Final = 2.0
"""Ratio to the best strategy from which a table cell has the darkest shade."""
_MARKS: Final = (
    "An asterisk marks the best of its case. An equals sign marks a strategy that is level with the "
    "best: the 95 % confidence interval of its difference from the best contains 0."
)


class Explanation(StrEnum):
    """The name of a text without figures that explains a table, the same for every leaderboard."""

    TIMES = "times"
    LEVEL = "level"
    CASES = "cases"
    STRATEGIES = "strategies"


_EXPLANATIONS: Final[Mapping[Explanation, str]] = {
    Explanation.TIMES: (
        "A ratio of 1.2 means that a strategy takes 1.2 times as long as the best strategy of a case in "
        "this figure, or has 1/1.2 of its throughput. Each ratio in the table, except that of the worst "
        "case, is the geometric mean over the cases. Goodput is the mean share of requests within the "
        'latency targets. The number before "out" is the number of cases in which the strategy leaves over '
        "1 % of the requests more unanswered than the strategy that leaves the fewest; its ratio in these "
        "cases counts as 1 or more."
    ),
    Explanation.LEVEL: (
        "The table shows the number of cases in which each strategy is the best, or level with the best: "
        "the 95 % confidence interval of its difference from the best contains 0. A strategy whose figures vary "
        "between random draws has a wide interval, so it may be level with the best although its mean is "
        "far from it."
    ),
    Explanation.CASES: (
        "The best strategy of a case has the lowest mean E2E of the strategies that answer enough "
        "requests. Another strategy is level with the best one if the 95 % confidence interval of their "
        "difference in mean E2E contains 0."
    ),
    Explanation.STRATEGIES: (
        "The third column lists the features of its original that a strategy leaves out or changes; "
        "a dash means that no difference is known."
    ),
}


class Part(Struct, frozen=True, kw_only=True):
    """A section of the leaderboard report: a table with its title and its explanation."""

    title: str
    says: str = ""
    """Sentences with figures about the table."""
    explanation: Explanation | None = None
    """Name of the text that follows these sentences, or None if there is none."""
    rows: list[list[str]] = []
    """Rows of the table, of which the first is the head. If there are no rows, the section has only
    an explanation.
    """

    @property
    def text(self) -> str:
        """Explanation of the table; "" if it has none."""
        if self.explanation is None:
            return self.says
        return f"{self.says} {_EXPLANATIONS[self.explanation]}".lstrip()

    def as_markdown(self, level: int = 2) -> str:
        """Return the section as Markdown below a heading of `level`; level 0 omits the heading."""
        heading = f"{'#' * level} {self.title}" if level else ""
        table_of = markdown_table(self.rows) if self.rows else ""
        return "\n\n".join(part for part in (heading, self.text, table_of) if part)

    def as_html(self) -> str:
        """Return the section as an HTML figure."""
        said = _paragraph(self.text) if self.text else ""
        return figure(self.title, said + (html_table(self.rows) if self.rows else ""))


def leaderboard_table(summary: LeaderboardSummary) -> str:
    """Return the rankings, the cases and the conditions of `sim leaderboard` for the terminal."""
    if not summary.rows:
        return _without_rows(summary)
    told = [f"{part.title}\n{table(part.rows)}" for part in ranking_parts(summary)]
    return "\n\n".join([*told, table(_case_rows(summary)), basis(summary)]) + "\n"


def leaderboard_report(summary: LeaderboardSummary) -> str:
    """Return the content of report.md of `sim leaderboard`."""
    parts = ["# Leaderboard", basis(summary)]
    if not summary.complete:
        parts.insert(1, "**Not complete: some runs are missing or failed.**")
    parts += [part.as_markdown() for part in board_parts(summary)]
    if summary.rows:
        parts += ["## Cases", _MARKS]
    for case in summary.cases:
        rows = _of_case(summary, case.name)
        if rows:
            parts += [f"### {case.name}", _conditions(case), markdown_table(_measure_rows(rows))]
            parts += [f"- {warning}" for warning in _warnings(rows)]
    parts += ["## What is not modelled", "\n".join(f"- {one}" for one in NOT_MODELLED)]
    return "\n\n".join(parts) + "\n"


def leaderboard_page(summary: LeaderboardSummary) -> str:
    """Return the content of report.html of `sim leaderboard`."""
    if not summary.rows:
        parts = "".join(part.as_html() for part in board_parts(summary))
        return page("Leaderboard", _without_rows(summary), parts)
    told = [part.as_html() for part in ranking_parts(summary)]
    told += [_bars(summary, measure) for measure in _JUDGED]
    ladders = [_over(summary, ladder) for ladder in summary.ladders if len(ladder.steps) > 1]
    told.append(f'<div class="pair">{"".join(ladders)}</div>')
    told += [_distances(summary, measure) for measure in _JUDGED]
    told += [part.as_html() for part in board_parts(summary)[len(ranking_parts(summary)) :]]
    for case in summary.cases:
        rows = _of_case(summary, case.name)
        if rows:
            said = "".join(map(_paragraph, (_conditions(case), *_warnings(rows))))
            told.append(figure(case.name, said + html_table(_measure_rows(rows))))
    note = "" if summary.complete else "\nNot complete: some runs are missing or failed."
    return page("Leaderboard", f"{basis(summary)} {_MARKS}{note}", "".join(told))


def board_parts(summary: LeaderboardSummary) -> list[Part]:
    """Return the sections that cover all cases of the leaderboard, the rankings first."""
    parts = []
    if summary.rows:
        parts += [*ranking_parts(summary), behind_part(summary), cases_part(summary)]
    if summary.failed:
        parts.append(Part(title="Runs that failed", rows=_failed_rows(summary)))
    return [*parts, strategies_part(summary)]


def ranking_parts(summary: LeaderboardSummary) -> list[Part]:
    """Return the rankings of the strategies over the cases of each scope.

    The scope without LoRA adapters comes first.
    """
    parts: list[Part] = []
    for scope, cases in _scopes(summary).items():
        title, first = _TITLES[scope], not parts
        says = f"This ranking of the strategies covers {len(cases)} cases"
        says += "." if first else ", with ratios as in the first ranking."
        parts.append(
            Part(
                title=f"{title}: ratio to the best",
                says=says,
                explanation=Explanation.TIMES if first else None,
                rows=_times_rows(summary, scope),
            )
        )
        if scope != HELD_WITHOUT_ADAPTERS:
            parts.append(
                Part(
                    title=f"{title}: level with the best",
                    explanation=Explanation.LEVEL if first else None,
                    rows=_level_rows(summary, scope),
                )
            )
    return parts


def behind_part(summary: LeaderboardSummary) -> Part:
    """Return the section with the cases in which the leaderboard's first strategy is behind the
    best.
    """
    rows = _behind_rows(summary)
    cases = {row.case for row in summary.rows}
    which = (
        f"{_first(summary)} is not level with the best strategy, and more than {BEHIND - 1:.0%} "
        "behind it"
    )
    measures = ", ".join(_JUDGED.values())
    if len(rows) == 1:
        says = f"There is none among the {len(cases)} cases in which {which}, in any of {measures}."
        rows = []
    else:
        says = (
            f"The table lists those of the {len(cases)} cases in which {which}, in at least one of "
            f"{measures}."
        )
        counted = [f"{label} {sum(row[0] == label for row in rows)}" for label in _JUDGED.values()]
        says += f" Number of listed cases by figure: {', '.join(counted)}."
    mine = [row for row in summary.rows if row.strategy == _first(summary)]
    lost = [row.case for row in mine if not row.in_the_running]
    if lost:
        says += f" {_first(summary)} lost too many requests to be eligible in {', '.join(lost)}."
    return Part(title=f"Where {_first(summary)} is behind", says=says, rows=rows)


def cases_part(summary: LeaderboardSummary) -> Part:
    """Return the section with the best strategies of each case."""
    return Part(
        title="The best strategies of each case",
        explanation=Explanation.CASES,
        rows=_case_rows(summary),
    )


def strategies_part(summary: LeaderboardSummary) -> Part:
    """Return the section with the idea of each strategy, and the features of its original that it
    leaves out.
    """
    return Part(
        title="Strategies", explanation=Explanation.STRATEGIES, rows=_strategy_rows(summary)
    )


def _scopes(summary: LeaderboardSummary) -> dict[str, frozenset[str]]:
    """Return the names of the cases of each scope that have run.

    If two scopes have the same cases, only the first is returned.
    """
    ran = {row.case for row in summary.rows}
    told: dict[str, frozenset[str]] = {}
    for scope, cases in scopes_of(case for case in summary.cases if case.name in ran).items():
        if cases not in told.values():
            told[scope] = cases
    return told


def _ranking(summary: LeaderboardSummary) -> tuple[str, list[TotalSummary]]:
    """Return the first scope of the leaderboard, and the strategies ranked by it, the best first."""
    scope = next(iter(_scopes(summary)))
    return scope, ranked(summary.totals, scope)


def _times_rows(summary: LeaderboardSummary, scope: str) -> list[list[str]]:
    worst_label = f"{_JUDGED[RANKED_BY]},\nworst case"
    rows = [["strategy", "cases", *_JUDGED.values(), "goodput", worst_label]]
    for total in ranked(summary.totals, scope):
        over = total.over[scope]
        out = f" ({over.out} out)" if over.out else ""
        worst = over.figures[RANKED_BY]
        rows.append(
            [
                total.strategy,
                f"{over.cases}{out}",
                *(_times(over.figures[measure].times_the_best) for measure in _JUDGED),
                "-" if over.goodput is None else f"{over.goodput:.1%}",
                f"{_times(worst.worst_times)} in {worst.worst}" if worst.worst else "-",
            ]
        )
    return rows


def _level_rows(summary: LeaderboardSummary, scope: str) -> list[list[str]]:
    rows = [["strategy", *_JUDGED.values()]]
    for total in ranked(summary.totals, scope):
        figures = total.over[scope].figures
        told = (figures[measure] for measure in _JUDGED)
        rows.append([total.strategy, *(f"{one.level} of {one.cases}" for one in told)])
    return rows


def _first(summary: LeaderboardSummary) -> str:
    """Return the name of the leaderboard's first strategy, whose weak cases the report lists."""
    name: str = summary.strategies[0].name
    return name


def _behind_rows(summary: LeaderboardSummary) -> list[list[str]]:
    first = _first(summary)
    rows = [["in", "case", "times the best", "the best"]]
    for measure, label in _JUDGED.items():
        found: list[tuple[float, list[str]]] = []
        for case in summary.cases:
            told = _of_case(summary, case.name)
            mine = next((row for row in told if row.strategy == first), None)
            if mine is None or not is_behind(mine, measure):
                continue
            times = _times_of(mine, measure)
            best = _names([row.strategy for row in told if _is_best(row, measure)])
            found.append((times, [label, _marked_case(case), f"{times:.2f}", best]))
        rows += [row for _, row in sorted(found, reverse=True)]
    return rows


def _case_rows(summary: LeaderboardSummary) -> list[list[str]]:
    first = _first(summary)
    rows = [["case", "what", "best", "E2E mean", "level with it", f"{first},\ntimes the best"]]
    for case in summary.cases:
        found = _of_case(summary, case.name)
        best = next((row for row in found if _is_best(row, RANKED_BY)), None)
        if best is None:
            continue
        level = [row.strategy for row in found if row is not best and is_level(row, RANKED_BY)]
        mine = next((row for row in found if row.strategy == first), None)
        rows.append(
            [
                _marked_case(case),
                case.says,
                best.strategy,
                shown(RANKED_BY, best.figures[RANKED_BY].value),
                _names(level) if not best.lacking else f"not known: {best.lacking}",
                "-" if mine is None else _times(_times_of(mine, RANKED_BY)),
            ]
        )
    return rows


def _measure_rows(rows: Sequence[StandingSummary]) -> list[list[str]]:
    """Return the table rows of one case, one for each strategy, sorted by mean E2E."""
    told = [["strategy", *_LABELS.values(), "not complete"]]
    for row in sorted(rows, key=_e2e_of):
        cells = [_marked(row, measure) for measure in _LABELS]
        lost = not_complete(row.requests)
        if not row.in_the_running:
            lost += ", not eligible"
        told.append([row.strategy, *cells, lost])
    return told


def _marked(row: StandingSummary, measure: str) -> str:
    """Return a figure as text with half the width of its confidence interval, and a mark if it is
    the best (*) or level with the best (=).
    """
    found = row.figures[measure]
    told = shown(measure, found.value)
    if found.low is not None and found.value is not None:
        told += f" ± {shown(measure, found.value - found.low)}"
    return told + _mark(row, measure)


def _strategy_rows(summary: LeaderboardSummary) -> list[list[str]]:
    return [
        ["strategy", "idea", "leaves out", "configuration"],
        *(
            [one.name, one.idea or "-", one.omissions or "-", one.config_hash or "-"]
            for one in summary.strategies
        ),
    ]


def _failed_rows(summary: LeaderboardSummary) -> list[list[str]]:
    return [
        ["case", "strategy", "seed", "problem"],
        *([one.case, one.strategy, str(one.seed), one.problem] for one in summary.failed),
    ]


def _bars(summary: LeaderboardSummary, measure: str) -> str:
    scope, ranking = _ranking(summary)
    times = {one.strategy: one.over[scope].figures[measure].times_the_best for one in ranking}
    shares = {name: 1 / value for name, value in times.items() if value}
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    caption = (
        f"{_TITLES[scope]}, {_JUDGED[measure]}: the best of each case divided by the strategy's own"
    )
    return figure(caption, bars(ordered))


def _over(summary: LeaderboardSummary, ladder: LadderSummary) -> str:
    """Return a chart of the mean E2E over the steps of a ladder of cases, for as many strategies as
    there are colours.
    """
    names = [total.strategy for total in _ranking(summary)[1]][: len(COLOURS)]
    series: dict[str, Points] = {}
    whiskers: dict[str, Whiskers] = {}
    for name in names:
        found = [
            (number, row.figures[RANKED_BY])
            for number, case in ladder.steps
            for row in _of_case(summary, case)
            if row.strategy == name
        ]
        series[name] = [(number, one.value) for number, one in found if one.value is not None]
        whiskers[name] = [
            (number, one.low, one.high)
            for number, one in found
            if one.low is not None and one.high is not None
        ]
    numbers = [number for number, _ in ladder.steps]
    known = [value for line in series.values() for _, value in line]
    caption = f"E2E mean over {ladder.title}"
    if len(summary.totals) > len(names):
        caption += f", for the first {len(names)} strategies"
    drawing = line_chart(
        series,
        x=Axis.over(numbers, unit=ladder.unit, title=ladder.title, logarithmic=True),
        y=Axis.over(known, unit="s", title="E2E mean"),
        label=caption,
        dots=True,
        whiskers=whiskers,
    )
    return figure(caption, drawing, names)


def _distances(summary: LeaderboardSummary, measure: str) -> str:
    """Return a shaded table with the ratio of each strategy to the best in each case."""
    names = [total.strategy for total in _ranking(summary)[1]]
    cells: list[list[str]] = [["case", *names]]
    shades: list[list[float]] = []
    for case in summary.cases:
        rows = {row.strategy: row for row in _of_case(summary, case.name)}
        if not rows:
            continue
        of_names = [rows.get(name) for name in names]
        cells.append([_marked_case(case), *(_shaded_text(row, measure) for row in of_names)])
        shades.append([_shade(_times_of(row, measure)) for row in of_names])
    drawing = shaded_table(cells, shades)
    return figure(f"{_JUDGED[measure]}: how many times as bad as the best of the case", drawing)


def _shaded_text(row: StandingSummary | None, measure: str) -> str:
    times = _times_of(row, measure)
    return "-" if row is None or math.isnan(times) else f"{times:.2f}{_mark(row, measure)}"


def _shade(times: float) -> float:
    """Return the shade of a cell from the ratio to the best, on a logarithmic scale: 0 for the
    best or without a ratio, 1 from `_FAR` on.
    """
    if math.isnan(times):
        return 0.0
    return min(1.0, max(0.0, math.log(times) / math.log(_FAR)))


def _times_of(row: StandingSummary | None, measure: str) -> float:
    behind = None if row is None else row.behind.get(measure)
    return math.nan if behind is None or behind.times is None else float(behind.times)


def _is_best(row: StandingSummary, measure: str) -> bool:
    behind = row.behind.get(measure)
    return behind is not None and bool(behind.best)


def _mark(row: StandingSummary, measure: str) -> str:
    """Return the mark of a strategy in a case: " *" if it is the best, " =" if it is level with the
    best, otherwise "".
    """
    if _is_best(row, measure):
        return " *"
    return " =" if is_level(row, measure) else ""


def _marked_case(case: CaseSummary) -> str:
    """Return the name of a case with its marks in parentheses: hold-out, LoRA, or both."""
    marks = [*(["hold-out"] if case.hold_out else []), *(["LoRA"] if case.max_loras else [])]
    return f"{case.name} ({', '.join(marks)})" if marks else case.name


def _e2e_of(row: StandingSummary) -> float:
    value = row.figures[RANKED_BY].value
    return math.inf if value is None else float(value)


def _times(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.3f}"


def _names(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_MAX:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:_NAMES_MAX])} and {len(names) - _NAMES_MAX} more"


def _of_case(summary: LeaderboardSummary, case: str) -> list[StandingSummary]:
    return [row for row in summary.rows if row.case == case]


def _warnings(rows: Sequence[StandingSummary]) -> list[str]:
    """Return each warning of a case once, with the strategies that it concerns unless it concerns
    all.
    """
    told: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.warnings:
            told.setdefault(warning, []).append(row.strategy)
    return [
        warning if len(names) == len(rows) else f"{', '.join(names)}: {warning}"
        for warning, names in told.items()
    ]


def _conditions(case: CaseSummary) -> str:
    what = case.says[:1].upper() + case.says[1:]
    told = [
        f"{case.pods} pods of {case.profile}",
        "one picker" if case.replicas == 1 else f"{case.replicas} pickers",
        f"scraped every {case.scrape_interval_s:g} s",
    ]
    if case.max_loras:
        told.append(f"{case.max_loras} adapter slots per pod")
    told += [one for one in (case.happens, case.engines) if one]
    if case.scrapes:
        told.append(f"scrapes: {case.scrapes}")
    if case.response_chunks:
        told.append("pickers observe first tokens")
    speeds = " or ".join(f"{speed:,.0f}" for speed in case.prefill_tokens_per_s)
    told.append(
        f"prefill at {speeds} tokens/s (pickers assume {case.believed_prefill_tokens_per_s:,.0f})"
    )
    told.append(
        f"goodput: a first token within {case.ttft_target_s:g} s, later ones within "
        f"{1000 * case.tpot_target_s:g} ms each on average"
    )
    held = " This case is a hold-out." if case.hold_out else ""
    return f"{what}: {', '.join(told)}.{held}"


def basis(summary: LeaderboardSummary) -> str:
    """Return a paragraph about the leaderboard's strategies, cases, requests and seeds."""
    first, seeds = summary.first_seed, summary.seeds
    return (
        f"The leaderboard has {len(summary.strategies)} strategies on {len(summary.cases)} cases, "
        f"{summary.requests:,} requests each, seeds {first} to {first + seeds - 1}. All "
        "strategies get the same requests at the same times within a case and a seed. Hold-outs "
        f"are cases with parameters of their own, on which nothing was tuned.{_failures(summary)}"
    )


def _without_rows(summary: LeaderboardSummary) -> str:
    """Return why the leaderboard has no figures, in one or two sentences."""
    return (
        "No case has figures, because in each case all strategies failed or one has not run with "
        f"the first seed.{_failures(summary)}"
    )


def _failures(summary: LeaderboardSummary) -> str:
    return f" {len(summary.failed):,} runs failed." if summary.failed else ""


def _paragraph(text: str) -> str:
    return f"<p>{words(text)}</p>"
