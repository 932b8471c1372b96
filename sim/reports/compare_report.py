"""The report of `sim compare`: a table, report.md, and a page with the latency distributions of all
configurations.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from sim.measurement.intervals import Estimate
from sim.measurement.measures import Series
from sim.measurement.summaries import (
    ComparedConfig,
    ComparisonSummary,
    DifferenceSummary,
    Requests,
)
from sim.reports import report
from sim.reports.charts import cdf_chart, facts_table, figure, html_table, page
from sim.reports.page_foot import page_foot

LABELS: Final = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT mean",
    "itl_mean_s": "ITL mean",
    "itl_p99_s": "ITL p99",
    "stall_share": "stalls",
    "e2e_mean_s": "E2E mean",
    "hit_rate": "hit rate",
    "output_tokens_per_s": "output tokens/s",
    "goodput": "within targets",
    "pod_hours": "pod-hours",
}
HIGHER_IS_BETTER: Final = frozenset({"hit_rate", "output_tokens_per_s", "goodput"})
"""Measures for which a higher value is better. For all others a lower value is better."""
_SHARES: Final = frozenset({"hit_rate", "goodput", "stall_share"})

_MULTIPLE_MIN: Final = 10
_SHARE_MIN: Final = 0.001
"""Absolute value of a relative difference below which it is shown with three decimal places instead
of one.
"""

BETTER: Final = "better"
WORSE: Final = "worse"
_NO_DIFFERENCE: Final = "no significant difference"
_UNKNOWN: Final = "not enough data"


def verdict(measure: str, found: Estimate) -> str:
    """Return the verdict on a configuration's difference from the reference: better, worse, no
    significant difference, or not enough data with the reason.
    """
    if found.lacking:
        return f"{_UNKNOWN}: {found.lacking}"
    if not found.significant:
        return _NO_DIFFERENCE
    return BETTER if (found.value > 0) == (measure in HIGHER_IS_BETTER) else WORSE


def _rows(summary: ComparisonSummary) -> list[list[str]]:
    rows = [["", *summary.configs]]
    measured = next(iter(summary.configs.values())).figures
    for measure in measured:
        values = [
            shown(measure, config.figures[measure].value) for config in summary.configs.values()
        ]
        rows.append([LABELS[measure], *values])
    lost = [not_complete(config.requests) for config in summary.configs.values()]
    return [*rows, ["not completed", *lost]]


def _difference_rows(summary: ComparisonSummary) -> list[list[str]]:
    """Return the rows of the table of differences from the first configuration. A dash is an
    unknown value; columns of intervals and verdicts are left out if all are unknown.

    `_basis` gives the reason for unknown values once.
    """
    first = next(iter(summary.configs))
    rows = [[f"against {first}", "difference", "95 % interval", "relative", "verdict"]]
    for name, config in summary.configs.items():
        for measure, found in config.difference.items():
            low, high = signed(measure, found.low), signed(measure, found.high)
            rows.append(
                [
                    f"{name}: {LABELS[measure]}",
                    signed(measure, found.value),
                    "-" if found.low is None else f"{low} to {high}",
                    relative(found.relative),
                    "-" if _reason(found) else found.verdict,
                ]
            )
    if not any(found.low is not None for found in _differences(summary)):
        rows = [[name, difference, relative] for name, difference, _, relative, _ in rows]
    return rows


def _differences(summary: ComparisonSummary) -> list[DifferenceSummary]:
    return [found for config in summary.configs.values() for found in config.difference.values()]


def _reason(found: DifferenceSummary) -> str:
    """Return the reason why there is too little data for a verdict, or "" if there is enough."""
    word, _, reason = found.verdict.partition(": ")
    return reason if word == _UNKNOWN else ""


def shown(measure: str, value: float | None) -> str:
    """Return the value of a measure as text with its unit; a dash for None."""
    if measure in _SHARES:
        return report.share(value)
    if measure.endswith("_s") and "tokens" not in measure:
        return report.seconds(value)
    return report.number(value)


def signed(measure: str, value: float | None) -> str:
    """Return a difference in a measure as text with sign and unit; a difference of shares is in
    percentage points.
    """
    if value is None:
        return "-"
    told = f"{100 * value:.1f} points" if measure in _SHARES else shown(measure, value)
    return f"+{told}" if value > 0 else told


def relative(value: float | None) -> str:
    """Return a relative difference as a percentage, or as "N times" if the value is ten times the
    reference or more.
    """
    if value is None:
        return "-"
    if value >= _MULTIPLE_MIN - 1:
        return f"{value + 1:,.3g} times"
    return f"{value:+.1%}" if abs(value) >= _SHARE_MIN or not value else f"{value:+.3%}"


def _conclusions(summary: ComparisonSummary) -> list[str]:
    """Return one sentence for each configuration but the first that says in which measures it is
    better or worse. A configuration with too little data has none. Sentences about lost requests
    follow.
    """
    configs = summary.configs
    first = next(iter(configs))
    told = [
        sentence
        for name, config in configs.items()
        if name != first
        for sentence in _conclusion(name, first, config.difference)
    ]
    return told + _lost(configs)


def _conclusion(name: str, first: str, differences: dict[str, DifferenceSummary]) -> list[str]:
    """Return at most one sentence about how a configuration compares with the first.

    Measures with too little data are not mentioned.
    """
    by_verdict: dict[str, list[str]] = {}
    for measure, found in differences.items():
        word, label = found.verdict, LABELS[measure]
        if word in (BETTER, WORSE):
            known = found.relative is not None
            size = relative(found.relative) if known else signed(measure, found.value)
            label = f"{label} ({size})"
        if not _reason(found):
            by_verdict.setdefault(word, []).append(label)
    sure = [word for word in (BETTER, WORSE) if word in by_verdict]
    parts: list[str] = []
    for word in (*sure, _NO_DIFFERENCE):
        if labels := by_verdict.get(word):
            all_of_them = word not in sure and len(labels) == len(differences)
            where = "any measure" if all_of_them else ", ".join(labels)
            parts.append(f"{word}{'' if parts or not sure else f' than {first}'} in {where}")
    return [f"{name} {'is' if sure else f'against {first}:'} {'; '.join(parts)}."] if parts else []


def _lost(configs: dict[str, ComparedConfig]) -> list[str]:
    """Return a sentence for each configuration that did not complete some requests, because other
    measures do not include them.
    """
    sentences = []
    for name, config in configs.items():
        counts = config.requests
        fates = ", ".join(
            f"{count:,} {fate}"
            for fate, count in counts.ended.items()
            if count and fate != "complete"
        )
        if fates and not counts.complete:
            sentences.append(
                f"{name} completed no request ({fates}), so there is nothing to compare."
            )
        elif fates:
            sentences.append(
                f"{name} did not complete {report.share(counts.share_lost)} of its requests ({fates}). "
                "Except goodput, no other measure includes these requests."
            )
    return sentences


def not_complete(requests: Requests) -> str:
    """Return the number of requests that were not completed, and of all requests, as text."""
    return f"{requests.sent - requests.complete:,} of {requests.sent:,}"


def comparison_table(summary: ComparisonSummary) -> str:
    """Return the tables and conclusions of `sim compare` for the terminal."""
    if not summary.configs:
        return "The comparison was interrupted before every configuration had run once."
    said = "\n".join([_basis(summary), *_conclusions(summary)])
    warnings = "".join(f"{warning}\n\n" for warning in report.warnings_of(summary))
    differences = report.table(_difference_rows(summary))
    return f"{warnings}{report.table(_rows(summary))}\n\n{differences}\n\n{said}\n"


def comparison_report(summary: ComparisonSummary) -> str:
    """Return the content of report.md of `sim compare`."""
    heading = f"# {' against '.join(summary.configs) or 'Comparison'}\n\n"
    if not summary.configs:
        return heading + "Not every configuration has run once yet.\n"
    notes = (
        ""
        if summary.complete
        else "**Not complete: the figures cover only the seeds that every configuration has run.**\n\n"
    )
    notes += "".join(f"**{warning}**\n\n" for warning in report.warnings_of(summary))
    told = [["", ""], *report.condition_rows(summary.conditions)]
    conclusions = "\n".join(f"- {sentence}" for sentence in _conclusions(summary))
    return (
        f"{heading}{notes}{report.markdown_table(_rows(summary))}\n\n"
        f"{report.markdown_table(_difference_rows(summary))}\n\n{conclusions}\n\n{_basis(summary)}\n\n"
        f"## What was run\n\n{report.markdown_table(told)}\n\n{report.foot(summary.assumptions)}"
    )


def comparison_page(summary: ComparisonSummary, columns: Sequence[Sequence[Series]]) -> str:
    """Return the content of report.html of `sim compare`.

    `columns` has, for each configuration, the completed requests of the runs of all seeds.
    """
    names = list(summary.configs)
    if not names:
        return page("Comparison", "Not every configuration has run once yet.", "")
    figures = [
        cdf_chart(
            f"{what}: share of requests within a time",
            {
                name: np.concatenate([getattr(series, field) for series in runs])
                for name, runs in zip(names, columns, strict=True)
            },
        )
        for what, field in (
            ("Time to first token", "ttft_s"),
            ("Time per output token", "tpot_s"),
            ("Whole answer", "e2e_s"),
        )
    ]
    conditions = report.condition_rows(summary.conditions)
    note = (
        ""
        if summary.complete
        else " Not complete: the figures cover only the seeds that every configuration has run."
    )
    return page(
        " against ".join(names),
        "\n".join(
            [*report.warnings_of(summary), *_conclusions(summary), f"{_basis(summary)}{note}"]
        ),
        figure("Differences", html_table(_difference_rows(summary)))
        + f'<div class="pair">{"".join(figures)}</div>'
        + figure("Every configuration", html_table(_rows(summary)))
        + figure("What was run", facts_table(conditions))
        + page_foot(summary.assumptions),
    )


def _basis(summary: ComparisonSummary) -> str:
    reasons = dict.fromkeys(filter(None, map(_reason, _differences(summary))))
    known = any(found.low is not None for found in _differences(summary))
    lacking = ""
    if reasons:
        where = "Where the verdict is a dash, there" if known else "There"
        lacking = f" {where} is {_UNKNOWN}: {'; '.join(reasons)}."
    bad_lines = summary.runs[0].run.bad_lines
    skipped = f" {bad_lines:,} malformed lines of the trace were skipped." if bad_lines else ""
    windows = report.measurement_sentences(summary.runs)
    return f"{report.varied_sentences(summary)}{lacking}{skipped} {windows}"
