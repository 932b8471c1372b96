"""How a leaderboard is told: a table, report.md, and a page with the distances from the best."""

import math
from collections.abc import Sequence
from typing import Final

from sim.measurement.assumptions import NOT_MODELLED
from sim.measurement.summaries import (
    Behind,
    CaseSummary,
    LadderSummary,
    LeaderboardSummary,
    StandingSummary,
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
    "output_tokens_per_s": "output\ntokens/s",
    "hit_rate": "hit\nrate",
    "imbalance": "busiest pod\nover mean",
}
_JUDGED: Final = {
    "e2e_mean_s": "E2E mean",
    "ttft_p90_s": "TTFT p90",
    "output_tokens_per_s": "throughput",
}
_HIGHER_IS_BETTER: Final = frozenset({"output_tokens_per_s", "hit_rate"})
_HELD: Final = " (hold-out)"
_NAMES_MAX: Final = 6
_FAR: Final = 2.0
"""So many times as bad as the best is as dark as a cell gets."""
_MARKS: Final = (
    "An asterisk is the best of its case, an equals sign is within its 95 % interval of the best: "
    "the difference of the two, on the same requests, may be nothing."
)


def leaderboard_table(summary: LeaderboardSummary) -> str:
    """For the terminal."""
    if not summary.rows:
        return "no case has run with every strategy yet"
    return f"{table(_total_rows(summary))}\n\n{table(_case_rows(summary))}\n\n{_basis(summary)}\n"


def leaderboard_report(summary: LeaderboardSummary) -> str:
    """report.md of a leaderboard."""
    parts = ["# Leaderboard", _basis(summary)]
    if not summary.complete:
        parts.insert(1, "**Not complete: cells are missing or failed.**")
    if summary.rows:
        behind = _behind_rows(summary)
        parts += [
            "## All in all",
            _TOTALS_SAY,
            markdown_table(_total_rows(summary)),
            f"## Where {_first(summary)} is behind",
            _behind_says(summary, behind),
            *([markdown_table(behind)] if len(behind) > 1 else []),
            "## The best of each case",
            _CASES_SAY,
            markdown_table(_case_rows(summary)),
        ]
    if summary.failed:
        parts += ["## Cells that failed", markdown_table(_failed_rows(summary))]
    parts += ["## Strategies", markdown_table(_strategy_rows(summary))]
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
    """report.html of a leaderboard."""
    if not summary.rows:
        return page("Leaderboard", "No case has run with every strategy yet.", "")
    told = [figure("All in all", _paragraph(_TOTALS_SAY) + html_table(_total_rows(summary)))]
    told += [_bars(summary, measure) for measure in _JUDGED]
    ladders = [_over(summary, ladder) for ladder in summary.ladders if len(ladder.steps) > 1]
    told.append(f'<div class="pair">{"".join(ladders)}</div>')
    told += [_distances(summary, measure) for measure in _JUDGED]
    behind = _behind_rows(summary)
    drawn = _paragraph(_behind_says(summary, behind)) + (
        html_table(behind) if len(behind) > 1 else ""
    )
    told.append(figure(f"Where {_first(summary)} is behind", drawn))
    told.append(
        figure("The best of each case", _paragraph(_CASES_SAY) + html_table(_case_rows(summary)))
    )
    if summary.failed:
        told.append(figure("Cells that failed", html_table(_failed_rows(summary))))
    told.append(figure("Strategies", html_table(_strategy_rows(summary))))
    for case in summary.cases:
        rows = _of_case(summary, case.name)
        if rows:
            said = "".join(map(_paragraph, (_conditions(case), *_warnings(rows))))
            told.append(figure(case.name, said + html_table(_measure_rows(rows))))
    note = "" if summary.complete else "\nNot complete: cells are missing or failed."
    return page("Leaderboard", f"{_basis(summary)} {_MARKS}{note}", "".join(told))


_TOTALS_SAY: Final = (
    "Times the best: how many times as long as the best of each case it takes, or as little as it "
    "gives out, as a geometric mean over the cases. Level: in how many cases it is the best or within "
    "its 95 % interval of the best."
)
_BEHIND: Final = 1.05
_CASES_SAY: Final = "By E2E mean; level with the best is who is within its interval of it."


def _total_rows(summary: LeaderboardSummary) -> list[list[str]]:
    head = ["strategy", "cases"]
    for label in _JUDGED.values():
        head += [f"{label}\ntimes the best", f"{label}\nlevel"]
    head += ["E2E mean\nworst case", "E2E mean\nof hold-outs"]
    rows = [head]
    for total in summary.totals:
        row = [total.strategy, str(total.cases)]
        for measure in _JUDGED:
            found = total.all[measure]
            row += [_times(found.times_the_best), f"{found.level} of {found.cases}"]
        e2e = total.all["e2e_mean_s"]
        worst = f"{_times(e2e.worst_times)} in {e2e.worst}" if e2e.worst else "-"
        held = total.hold_outs["e2e_mean_s"].times_the_best
        rows.append([*row, worst, _times(held)])
    return rows


def _first(summary: LeaderboardSummary) -> str:
    """The strategy in question."""
    name: str = summary.strategies[0].name
    return name


def _behind_says(summary: LeaderboardSummary, behind: Sequence[Sequence[str]]) -> str:
    """What `behind` tells, the rows of that table."""
    cases = {row.case for row in summary.rows}
    which = f"not within the 95 % interval of the best and more than {_BEHIND - 1:.0%} behind it"
    measures = ", ".join(_JUDGED.values())
    if len(behind) == 1:
        return f"In none of the {len(cases)} cases it is {which}, in {measures}."
    return f"Of the {len(cases)} cases these are all in which it is {which}, in {measures}."


def _behind_rows(summary: LeaderboardSummary) -> list[list[str]]:
    first = _first(summary)
    held = {case.name: _HELD if case.hold_out else "" for case in summary.cases}
    rows = [["in", "case", "times the best", "the best"]]
    for measure, label in _JUDGED.items():
        found: list[tuple[float, list[str]]] = []
        for case, mark in held.items():
            told = {row.strategy: row.behind.get(measure) for row in _of_case(summary, case)}
            mine = told.get(first)
            times = _times_as_bad(mine, measure)
            if mine is None or _is_level(mine) or not times > _BEHIND:
                continue
            best = [name for name, behind in told.items() if _is_best(behind)]
            found.append((times, [label, case + mark, f"{times:.2f}", ", ".join(best)]))
        rows += [row for _, row in sorted(found, reverse=True)]
    return rows


def _case_rows(summary: LeaderboardSummary) -> list[list[str]]:
    first = _first(summary)
    rows = [["case", "what", "best", "E2E mean", "level with it", f"{first},\ntimes the best"]]
    for case in summary.cases:
        found = _of_case(summary, case.name)
        behind = {row.strategy: row.behind.get("e2e_mean_s") for row in found}
        best = next((row for row in found if _is_best(behind[row.strategy])), None)
        if best is None:
            continue
        level = [
            row.strategy
            for row in found
            if row is not best and row.in_the_running and _is_level(behind[row.strategy])
        ]
        mine = behind.get(first)
        rows.append(
            [
                case.name + (_HELD if case.hold_out else ""),
                case.says,
                best.strategy,
                shown("e2e_mean_s", best.figures["e2e_mean_s"].value),
                _names(level) if not best.lacking else f"not known: {best.lacking}",
                _times(mine.of_best if mine else None),
            ]
        )
    return rows


def _measure_rows(rows: Sequence[StandingSummary]) -> list[list[str]]:
    """The strategies of one case, the best E2E mean first."""
    told = [["strategy", *_LABELS.values(), "not complete"]]
    for row in sorted(rows, key=_e2e_of):
        cells = [_marked(row, measure) for measure in _LABELS]
        lost = not_complete(row.requests)
        if not row.in_the_running:
            lost += ", out of the running"
        told.append([row.strategy, *cells, lost])
    return told


def _marked(row: StandingSummary, measure: str) -> str:
    """The figure with half of its interval, and whether it is the best or level with it."""
    found = row.figures[measure]
    told = shown(measure, found.value)
    if found.low is not None and found.value is not None:
        told += f" ± {shown(measure, found.value - found.low)}"
    behind = row.behind.get(measure)
    if _is_best(behind):
        return f"{told} *"
    return f"{told} =" if row.in_the_running and _is_level(behind) else told


def _strategy_rows(summary: LeaderboardSummary) -> list[list[str]]:
    return [
        ["strategy", "idea", "configuration"],
        *([one.name, one.idea or "-", one.config_hash or "-"] for one in summary.strategies),
    ]


def _failed_rows(summary: LeaderboardSummary) -> list[list[str]]:
    return [
        ["case", "strategy", "seed", "problem"],
        *([one.case, one.strategy, str(one.seed), one.problem] for one in summary.failed),
    ]


def _bars(summary: LeaderboardSummary, measure: str) -> str:
    times = {total.strategy: total.all[measure].times_the_best for total in summary.totals}
    shares = {name: 1 / value for name, value in times.items() if value}
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return figure(f"{_JUDGED[measure]}: the best of each case over its own", bars(ordered))


def _over(summary: LeaderboardSummary, ladder: LadderSummary) -> str:
    """E2E mean over what the cases of a ladder differ by, of as many strategies as have a colour."""
    names = [total.strategy for total in summary.totals][: len(COLOURS)]
    series: dict[str, Points] = {}
    whiskers: dict[str, Whiskers] = {}
    for name in names:
        found = [
            (number, row.figures["e2e_mean_s"])
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
        caption += f", of the first {len(names)} strategies"
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
    """How far each strategy is behind in each case."""
    names = [total.strategy for total in summary.totals]
    cells: list[list[str]] = [["case", *names]]
    shades: list[list[float]] = []
    for case in summary.cases:
        behind = {row.strategy: row.behind.get(measure) for row in _of_case(summary, case.name)}
        if not behind:
            continue
        times = [_times_as_bad(behind.get(name), measure) for name in names]
        cells.append(
            [
                case.name + (_HELD if case.hold_out else ""),
                *(
                    _shaded_text(behind.get(name), one)
                    for name, one in zip(names, times, strict=True)
                ),
            ]
        )
        shades.append([_shade(one) for one in times])
    drawing = shaded_table(cells, shades)
    return figure(f"{_JUDGED[measure]}: how many times as bad as the best of the case", drawing)


def _shaded_text(behind: Behind | None, times: float) -> str:
    if math.isnan(times):
        return "-"
    mark = " *" if _is_best(behind) else " =" if _is_level(behind) else ""
    return f"{times:.2f}{mark}"


def _shade(times: float) -> float:
    """0 for the best, 1 from `_FAR` times on; of logarithms, as times are."""
    if math.isnan(times):
        return 0.0
    return min(1.0, max(0.0, math.log(times) / math.log(_FAR)))


def _times_as_bad(behind: Behind | None, measure: str) -> float:
    of_best = behind.of_best if behind else None
    if not of_best:
        return math.nan
    return 1 / float(of_best) if measure in _HIGHER_IS_BETTER else float(of_best)


def _is_best(behind: Behind | None) -> bool:
    return behind is not None and behind.best


def _is_level(behind: Behind | None) -> bool:
    return behind is not None and bool(behind.within)


def _e2e_of(row: StandingSummary) -> float:
    value = row.figures["e2e_mean_s"].value
    return math.inf if value is None else float(value)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _names(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_MAX:
        return ", ".join(names) or "nobody"
    return f"{', '.join(names[:_NAMES_MAX])} and {len(names) - _NAMES_MAX} more"


def _of_case(summary: LeaderboardSummary, case: str) -> list[StandingSummary]:
    return [row for row in summary.rows if row.case == case]


def _warnings(rows: Sequence[StandingSummary]) -> list[str]:
    """Each once, with those whom it is about."""
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
        f"scraped each {case.scrape_interval_s:g} s",
    ]
    if case.max_loras:
        told.append(f"{case.max_loras} adapter slots a pod")
    if case.happens:
        told.append(case.happens)
    held = " A hold-out." if case.hold_out else ""
    return f"{what}: {', '.join(told)}.{held}"


def _basis(summary: LeaderboardSummary) -> str:
    first, seeds = summary.first_seed, summary.seeds
    failed = f" {len(summary.failed):,} cells failed." if summary.failed else ""
    return (
        f"{len(summary.strategies)} strategies on {len(summary.cases)} cases, "
        f"{summary.requests:,} requests each, seeds {first} to {first + seeds - 1}: within a case "
        "and a seed all strategies get the same requests at the same times. Hold-outs have parameters "
        f"of their own, on which nothing was tuned.{failed}"
    )


def _paragraph(text: str) -> str:
    return f"<p>{words(text)}</p>"
