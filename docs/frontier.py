"""Measure what `firstTokenWeight` and `decodeTokens` are worth: `python -m docs.frontier DIR`.

Three boards are run in DIR, and cells that DIR has already are not run again. On the first board,
every second case of the leaderboard without LoRA by name, all variants are compared; the defaults
were chosen on it. The other two boards confirm them: one has the other cases, one has the further
hold-outs. It takes less than an hour on two cores. The figures go to docs/frontier.json; `python -m
docs.reference` makes the tables of docs/scoring.md from them, and `python -m docs.diagrams` the
picture.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from docs.row_lines import row_lines
from epp.plugins.strategy import config_of, step
from sim.experiments.leaderboard.cases import CASES, FURTHER_CASES
from sim.measurement.ranking import WITHOUT_ADAPTERS
from sim.measurement.summaries import LeaderboardSummary
from sim.output import write_whole
from sim.reports.report import markdown_table

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "frontier.json"
VARIANTS: Final = {256: (0, 1, 2, 3, 5), 128: (3,)}
"""Compared values of `firstTokenWeight`, by value of `decodeTokens`."""
CHOSEN: Final = "w3-d256"
BEFORE: Final = "w0-d256"
RIVALS: Final = ("smetric", "lmetric")
"""Strategies of other projects that are the best in TTFT and in E2E on the leaderboard."""
FIRST_SEED: Final = 101
SEEDS: Final = 3
_PLAIN: Final = sorted(name for name, case in CASES.items() if not case.max_loras)
CHOSEN_ON: Final = tuple(_PLAIN[0::2])
CONFIRMED_ON: Final = tuple(_PLAIN[1::2])
FIGURES: Final = {
    "e2e_mean_s": "E2E mean",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "itl_p99_s": "ITL p99",
    "output_tokens_per_s": "throughput",
}
WIDTH: Final = 760
HEIGHT: Final = 330
LEFT: Final = 60
TOP: Final = 40
PANEL_WIDTH: Final = 280
PANEL_HEIGHT: Final = 230
PANEL_APART: Final = 360
COLOURS: Final = {256: "#2f6fb0", 128: "#e0a030"}
STYLE: Final = (
    "text{font:12px sans-serif;fill:#4c5866}.page{fill:#fff}.frame{fill:none;stroke:#c5ccd3}"
    "@media(prefers-color-scheme:dark){text{fill:#c5ccd3}.page{fill:#1c2128}}"
)


class Row(Struct, frozen=True, kw_only=True):
    """The figures of one strategy on one board: geometric means over the cases of the ratio to the best strategy."""

    strategy: str
    times: dict[str, float]
    """Mean ratio to the best strategy, by name of the figure."""
    goodput: float | None
    worst: str
    worst_times: float
    """Ratio of the mean E2E to that of the best strategy in the case `worst`."""


class Comparison(Struct, frozen=True, kw_only=True):
    """The figures of all strategies on one board."""

    cases: list[str]
    requests: int
    rows: list[Row]


Comparisons = dict[str, Comparison]
"""The boards by name: `chosen`, `confirmed` and `further`."""


def plan() -> Mapping[str, tuple[Sequence[str], Sequence[str], int]]:
    """Return for each board, by name, its strategies, its cases, and the requests of a cell."""
    variants = tuple(_name(weight, answers) for answers in VARIANTS for weight in VARIANTS[answers])
    few = (BEFORE, CHOSEN, _name(3, 128), *RIVALS)
    return {
        "chosen": ((*variants, *RIVALS), CHOSEN_ON, 2_000),
        "confirmed": (few, CONFIRMED_ON, 2_000),
        "further": (few, tuple(FURTHER_CASES), 4_000),
    }


def _name(weight: int, answers: int) -> str:
    return f"w{weight}-d{answers}"


def read() -> Comparisons:
    """Return the content of docs/frontier.json from the last measurement."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Comparisons)


def comparison_of(summary: LeaderboardSummary) -> Comparison:
    """Return the totals of a complete board over its cases without LoRA."""
    rows = []
    for total in summary.totals:
        over = total.over[WITHOUT_ADAPTERS]
        e2e = over.figures["e2e_mean_s"]
        times = {name: over.figures[name].times_the_best or 0.0 for name in FIGURES}
        rows.append(
            Row(
                strategy=CHOSEN if total.strategy == "homing" else total.strategy,
                times=times,
                goodput=over.goodput,
                worst=e2e.worst or "",
                worst_times=e2e.worst_times or 0.0,
            )
        )
    names = [case.name for case in summary.cases]
    return Comparison(cases=names, requests=summary.requests, rows=rows)


def table(name: str) -> str:
    """Return one comparison as a table for a page, with a sentence about its basis."""
    told = read()[name]
    rows = [["strategy", *FIGURES.values(), "worst E2E"]]
    for row in told.rows:
        shown = f"**{row.strategy}**" if row.strategy == CHOSEN else row.strategy
        times = [f"{row.times[figure]:.3f}" for figure in FIGURES]
        rows.append([shown, *times, f"{row.worst_times:.3f} in {row.worst}"])
    seeds = f"seeds {FIRST_SEED} to {FIRST_SEED + SEEDS - 1}"
    cases = ", ".join(f"`{case}`" for case in told.cases)
    basis = (
        f"The comparison has {len(told.cases)} cases with {told.requests:,} requests each and {seeds}. "
        f"The cases are {cases}."
    )
    return f"{basis}\n\n{markdown_table(rows)}"


def picture() -> str:
    """Return an SVG that plots TTFT p90 and p99 of the variants over their mean E2E and marks the default."""
    rows = {row.strategy: row for row in read()["chosen"].rows}
    panels = [
        _panel(rows, figure, label, x=LEFT + PANEL_APART * number)
        for number, (figure, label) in enumerate(
            (("ttft_p90_s", "TTFT p90"), ("ttft_p99_s", "TTFT p99"))
        )
    ]
    keys = [
        f'<rect x="{LEFT + 330 * number}" y="{HEIGHT - 14}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 18 + 330 * number}" y="{HEIGHT - 4}">decodeTokens {answers}, '
        f"firstTokenWeight {', '.join(map(str, VARIANTS[answers]))}</text>"
        for number, (answers, colour) in enumerate(COLOURS.items())
    ]
    label = "Mean E2E against TTFT p90 and p99; the default is the large dot"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>{"".join((*panels, *keys))}</svg>\n'
    )


def _panel(rows: Mapping[str, Row], figure: str, label: str, *, x: int) -> str:
    """Return one plot, whose left edge is at `x`. E2E grows to the right and `figure` grows upwards."""
    shown = [rows[_name(weight, answers)] for answers in VARIANTS for weight in VARIANTS[answers]]
    across = _Axis.of([row.times["e2e_mean_s"] for row in shown], x, x + PANEL_WIDTH)
    up = _Axis.of([row.times[figure] for row in shown], TOP + PANEL_HEIGHT, TOP)
    bottom = TOP + PANEL_HEIGHT
    parts = [
        f'<rect x="{x}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" class="frame"/>',
        f'<text x="{x}" y="{TOP - 12}">{label}, times the best</text>',
        f'<text x="{x}" y="{bottom + 36}">mean E2E, times the best</text>',
        *(
            f'<text x="{across.at(value) - 14:.0f}" y="{bottom + 18}">{value:.3f}</text>'
            for value in (across.least, across.most)
        ),
        *(
            f'<text x="{x - 44}" y="{up.at(value) + 4:.0f}">{value:.3f}</text>'
            for value in (up.least, up.most)
        ),
    ]
    for answers, colour in COLOURS.items():
        points = []
        for weight in VARIANTS[answers]:
            row = rows[_name(weight, answers)]
            at_x, at_y = across.at(row.times["e2e_mean_s"]), up.at(row.times[figure])
            points.append(f"{at_x:.1f},{at_y:.1f}")
            radius = 7 if row.strategy == CHOSEN else 3.5
            parts.append(
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}" fill="{colour}"/>'
                f'<text x="{at_x + 8:.1f}" y="{at_y - 6:.1f}">{weight}</text>'
            )
        parts.append(f'<polyline stroke="{colour}" fill="none" points="{" ".join(points)}"/>')
    return "".join(parts)


class _Axis(Struct, frozen=True):
    """An axis that shows the values from `least` to `most` between the pixels `start` and `end`."""

    least: float
    most: float
    start: int
    end: int

    @classmethod
    def of(cls, values: Sequence[float], start: int, end: int) -> "_Axis":
        """Return an axis with some room beside the values."""
        room = 0.08 * (max(values) - min(values)) or 0.001
        return cls(min(values) - room, max(values) + room, start, end)

    def at(self, value: float) -> float:
        """Return the pixel at which `value` is drawn."""
        return self.start + (value - self.least) / (self.most - self.least) * (
            self.end - self.start
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing cells of all boards, store the figures in docs/frontier.json, and return the
    exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.frontier", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the boards")
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for answers, weights in VARIANTS.items():
        for weight in weights:
            scorer = step("added-time-scorer", firstTokenWeight=weight, decodeTokens=answers)
            file = folder / f"{_name(weight, answers)}.yaml"
            file.write_text(config_of(scorer), encoding="utf-8")
    found: Comparisons = {}
    for name, (strategies, cases, requests) in plan().items():
        told = [f"./{one}.yaml" if one.startswith("w") else one for one in strategies]
        # `sim leaderboard` runs only the cells that its folder lacks.
        subprocess.run(  # noqa: S603  our own command
            [sys.executable, "-m", "sim", "leaderboard", "--strategies", ",".join(told),
             "--cases", ",".join(cases), "--seeds", str(SEEDS), "--seed", str(FIRST_SEED),
             "--requests", str(requests), "--out", name],
            cwd=folder,
            check=True,
        )  # fmt: skip
        board = folder / name / "summary.json"
        summary = msgspec.json.decode(board.read_bytes(), type=LeaderboardSummary, strict=False)
        found[name] = comparison_of(summary)
    write_whole(RESULTS, row_lines(msgspec.to_builtins(found)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
