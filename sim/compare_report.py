"""How a comparison is told: a table, report.md, and a page with the curves of all."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sim.charts import cdf_chart, figure, html_table, page
from sim.measures import Series
from sim.report import markdown_table, number, seconds, share, table

_LABELS: Final = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT mean",
    "e2e_mean_s": "E2E mean",
    "hit_rate": "hit rate",
    "output_tokens_per_s": "output tokens/s",
}


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["", *summary["configs"]]]
    for measure, label in _LABELS.items():
        values = [
            _shown(measure, config["mean"][measure]) for config in summary["configs"].values()
        ]
        rows.append([label, *values])
    return rows


def _difference_rows(summary: dict[str, Any]) -> list[list[str]]:
    first = next(iter(summary["configs"]))
    rows = [[f"against {first}", "difference", "95 % interval", "verdict"]]
    for name, config in summary["configs"].items():
        for measure, found in config["difference"].items():
            low, high = _shown(measure, found["low"]), _shown(measure, found["high"])
            value = _shown(measure, found["value"])
            label = f"{name}: {_LABELS[measure]}"
            rows.append([label, value, f"{low} to {high}", found["verdict"]])
    return rows


def _shown(measure: str, value: float | None) -> str:
    if measure == "hit_rate":
        return share(value)
    return seconds(value) if measure.endswith("_s") and "tokens" not in measure else number(value)


def comparison_table(summary: dict[str, Any]) -> str:
    """For the terminal."""
    if not summary["configs"]:
        return "interrupted before every configuration had run once"
    return f"{table(_rows(summary))}\n\n{table(_difference_rows(summary))}\n\n{_basis(summary)}\n"


def comparison_report(summary: dict[str, Any]) -> str:
    """report.md of a comparison."""
    heading = f"# {' against '.join(summary['configs']) or 'Comparison'}\n\n"
    if not summary["configs"]:
        return heading + "Not every configuration has run once yet.\n"
    notes = "" if summary["complete"] else "**Not complete: only whole seeds are counted.**\n\n"
    told = [["", ""], *[[name, str(value)] for name, value in summary["conditions"].items()]]
    return (
        f"{heading}{notes}{markdown_table(_rows(summary))}\n\n"
        f"{markdown_table(_difference_rows(summary))}\n\n{_basis(summary)}\n\n"
        f"## What was run\n\n{markdown_table(told)}\n"
    )


def comparison_page(summary: dict[str, Any], columns: Sequence[Sequence[Series]]) -> str:
    """report.html. `columns`: of each configuration of the summary, the runs of all its seeds."""
    names = list(summary["configs"])
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
    conditions = [(name, str(value)) for name, value in summary["conditions"].items()]
    note = "" if summary["complete"] else " Not complete: only whole seeds are counted."
    return page(
        " against ".join(names),
        f"{_basis(summary)}{note}",
        figure("Differences", html_table(_difference_rows(summary)))
        + f'<div class="pair">{"".join(figures)}</div>'
        + figure("Every configuration", html_table(_rows(summary)))
        + figure("What was run", html_table(conditions)),
    )


def _basis(summary: dict[str, Any]) -> str:
    differences = [
        found["over"]
        for config in summary["configs"].values()
        for found in config["difference"].values()
    ]
    over = differences[0] if differences else "nothing"
    bad_lines = summary["runs"][0]["bad_lines"]
    skipped = f" {bad_lines:,} malformed lines of the trace were skipped." if bad_lines else ""
    return (
        f"Seeds from {summary['first_seed']}, {summary['seeds']} of them, the same requests at "
        f"the same times for every configuration. Intervals are paired over {over}.{skipped}"
    )
