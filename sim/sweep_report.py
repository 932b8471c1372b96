"""The page of a sweep: hockey sticks."""

from collections.abc import Sequence
from typing import Any

from sim.charts import Axis, Points, figure, html_table, line_chart, page


def sweep_page(summary: dict[str, Any]) -> str:
    """report.html: latency, throughput and hit rate over the rate, a line a configuration."""
    points = summary["points"]
    names = list(dict.fromkeys(point["config"] for point in points))
    figures = [
        _over_rate(points, names, ("ttft_s", "p90"), "TTFT p90 over the rate", "s", log=True),
        _over_rate(points, names, ("ttft_s", "mean"), "TTFT mean over the rate", "s", log=True),
        _over_rate(points, names, ("tpot_s", "mean"), "TPOT mean over the rate", "s"),
        _over_rate(points, names, ("output_tokens_per_s",), "Output tokens/s over the rate", ""),
        _over_rate(points, names, ("hit_rate",), "Share of prompt tokens from the cache", ""),
        _over_rate(points, names, ("goodput", "share"), "Share of requests within targets", ""),
    ]
    rows = [(name, str(value)) for name, value in summary["conditions"].items()]
    body = f'<div class="pair">{"".join(figures)}</div>{figure("What was run", html_table(rows))}'
    note = "" if summary["complete"] else " Not complete."
    return page(
        f"Sweep of {summary['conditions']['trace']}",
        f"The same requests at rising rates. Seed {summary['seed']}.{note}",
        body,
    )


def _over_rate(
    points: Sequence[dict[str, Any]],
    names: Sequence[str],
    path: Sequence[str],
    caption: str,
    unit: str,
    *,
    log: bool = False,
) -> str:
    series: dict[str, Points] = {}
    for name in names:
        found = [
            (point["rate"], value)
            for point in points
            if point["config"] == name and (value := _at(point, path)) is not None
        ]
        series[name] = sorted(found)
    known = [value for line in series.values() for _, value in line]
    drawing = line_chart(
        series,
        x=Axis.over([point["rate"] for point in points], unit="/s"),
        y=Axis.over(known, unit=unit, logarithmic=log),
        label=caption,
        dots=True,
    )
    return figure(caption, drawing, names)


def _at(point: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = point
    for name in path:
        value = value[name]
    return None if value is None else float(value)
