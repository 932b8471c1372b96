"""Compare `sim size` with runs of every number of pods: `python -m docs.sizes TRACE... --out DIR`.

The command writes the table between the marks in docs/simulator.md, and the picture docs/sizes.svg.
If it was stopped, the same command continues.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from docs.pictures import svg_file
from sim.__main__ import main as sim
from sim.measurement.summaries import DemandSummary, EveryCountSummary, SizedSummary
from sim.reports.charts import COLOURS, FULL, Axis, Points, line_chart
from sim.reports.report import markdown_table, share
from sim.reports.size_report import USED_MAX, number_of_pods

PAGE: Final = Path(__file__).with_name("simulator.md")
PICTURE: Final = Path(__file__).with_name("sizes.svg")
BEGIN: Final = "<!-- sizes, by `python -m docs.sizes` -->"
END: Final = "<!-- end of sizes -->"
SLO: Final = "ttft-p90=2,itl-p99=0.15"
SPEED: Final = 3.0
"""Factor by which arrivals are sped up, because the published traces have few requests for one GPU."""
STRETCH_S: Final = 90.0
"""Length in seconds of the period that is sized for. Every number of pods takes one run per seed,
so a longer period would take hours.
"""
PODS_MAX: Final = 32
SEEDS: Final = 5


class Sized(Struct, frozen=True, kw_only=True):
    """The parts of a sizing's summary.json that the table and the picture need."""

    conditions: dict[str, Any]
    sized_for: DemandSummary
    options: list[SizedSummary]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sizings, and write the table and the picture. Return 0, or the exit code of a sizing
    that failed.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.sizes", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the results of runs"
    )
    parser.add_argument("--workers", default="1", metavar="N", help="processes (1)")
    options = parser.parse_args(arguments)
    found = []
    for trace in options.traces:
        out = options.out / trace.stem
        code = sim(
            ["size", str(trace), "--slo", SLO, "--speed", f"{SPEED:g}", "--stretch",
             f"{STRETCH_S:g}", "--pods-max", str(PODS_MAX), "--seeds", str(SEEDS),
             "--answer-only", "--every-count", "--workers", options.workers, "--out", str(out)]
        )  # fmt: skip
        if code:
            return code
        found.append(msgspec.json.decode((out / "summary.json").read_bytes(), type=Sized))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    PICTURE.write_text(picture(found), encoding="utf-8")
    return 0


def with_table(page: str, summaries: Sequence[Sized]) -> str:
    """Return the page with the table of sizings between its marks replaced."""
    return with_rows(page, BEGIN, END, rows(summaries))


def with_rows(page: str, begin: str, end: str, table: Sequence[Sequence[str]]) -> str:
    """Return the page with the text between the marks `begin` and `end` replaced by a Markdown
    table.
    """
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{markdown_table(table)}\n\n{end}{after}"


def rows(summaries: Sequence[Sized]) -> list[list[str]]:
    """Return the rows of the table, one for each trace: the number of pods by the search and by
    every number, and the runs that each took.
    """
    found = [["trace", "requests", "`sim size`", "every number", "runs", "runs of every number", "share"]]  # fmt: skip
    for summary in summaries:
        for option in summary.options:
            every = checked(option)
            found.append(
                [
                    str(summary.conditions["trace"]),
                    f"{summary.sized_for.requests:,}",
                    number_of_pods(option.pods),
                    number_of_pods(every.pods),
                    f"{option.runs:,}",
                    f"{every.runs:,}",
                    share(option.runs / every.runs),
                ]
            )
    return found


def picture(summaries: Sequence[Sized]) -> str:
    """Return an SVG file with the used share of the SLO bounds for each number of pods; dots are
    the numbers that the search tried.
    """
    lines: dict[str, Points] = {}
    tried: list[Points] = []
    for summary in summaries:
        for option in summary.options:
            points = [
                (float(one.pods), min(one.used, USED_MAX))
                for one in checked(option).counts
                if one.used is not None and one.used > 0
            ]
            lines[Path(str(summary.conditions["trace"])).stem] = points
            pods = {one.pods for one in option.counts}
            tried.append([point for point in points if point[0] in pods])
    flat = [point for points in lines.values() for point in points]
    x = Axis(low=0.0, high=max(at for at, _ in flat) + 1, title="pods")
    y = Axis.over([*(used for _, used in flat), 1.0], title="bounds used", logarithmic=True)
    dots = "".join(
        f'<circle cx="{FULL.across(x.share(at)):.1f}" cy="{FULL.up(y.share(used)):.1f}" r="4" '
        f'fill="{COLOURS[number][0]}"/>'
        for number, points in enumerate(tried)
        for at, used in points
    )
    allowed = FULL.up(y.share(1.0))
    broken = (
        f'<rect class="while" x="{FULL.across(0.0):.1f}" y="{FULL.up(1.0):.1f}" '
        f'width="{FULL.across(1.0) - FULL.across(0.0):.1f}" height="{allowed - FULL.up(1.0):.1f}"/>'
    )
    label = "How much of the bounds each number of pods uses"
    drawn = line_chart(lines, x=x, y=y, label=label, size=FULL)
    return svg_file(drawn, list(lines), under=broken, over=dots, legend_from=96)


def checked(option: SizedSummary) -> EveryCountSummary:
    """Return the result of running every number of pods of an option, which `sim size
    --every-count` has added.
    """
    assert option.every_count is not UNSET, "asked for by main"
    return option.every_count


if __name__ == "__main__":
    raise SystemExit(main())
