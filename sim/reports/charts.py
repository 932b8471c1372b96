"""Charts and HTML pages that open offline: inline SVG with inline style and scripts, without
external fonts or addresses.

A chart is complete without its script, so it can be printed. `charts.js`, beside this module, makes
the chart interactive and reads all values from the drawing. `docs/simulator.md` explains why no
library is used.
"""

import math
import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import asdict

from sim.measurement.measures import Floats
from sim.reports.report import on_one_line

LEFT: Final = 56
RIGHT: Final = 16
TOP: Final = 30
BOTTOM: Final = 46


class Size(Struct, frozen=True):
    """The size of a chart in pixels.

    Smaller charts have sizes of their own, because the text of a scaled-down chart is not legible.
    """

    width: int
    height: int

    def across(self, share: float) -> float:
        """Return the x coordinate in pixels of a share of the plot's width; share 0 is its left
        end.
        """
        return LEFT + share * (self.width - LEFT - RIGHT)

    def up(self, share: float) -> float:
        """Return the y coordinate in pixels of a share of the plot's height; share 0 is its bottom."""
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    @property
    def without_title(self) -> "Size":
        """This size of a chart without the space for the title of the x axis."""
        return Size(self.width, self.height - BOTTOM + 26)


FULL: Final = Size(640, 300)
"""Size of a chart that fills the width of the page."""
HALF: Final = Size(400, 270)
"""Size of a chart beside another one, and of a chart that fills the width of a phone."""
SMALL: Final = Size(300, 170)
"""Size of one of many charts in a grid."""

COLOURS: Final = (
    ("#0f766e", "#2dd4bf"), ("#b45309", "#fbbf24"), ("#1d4ed8", "#60a5fa"), ("#be185d", "#f472b6"),
    ("#4d7c0f", "#a3e635"), ("#7c3aed", "#c4b5fd"), ("#475569", "#cbd5e1"), ("#c2410c", "#fb923c"),
)  # fmt: skip
"""Colours of the series of a chart in their order, as (on a light page, on a dark page). They
repeat if there are more series.
"""

_CDF_POINTS: Final = 200
_LOGARITHMIC_STEPS: Final = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,))
_GAP_MIN: Final = 0.11
"""Minimum distance between two marks of a logarithmic axis, as a share of its length, so that their
labels do not touch. Powers of ten may be nearer.
"""
_BAR_LABEL_PX: Final = 44
_CODE: Final = re.compile(r"`([^`]+)`")
_SHADES: Final = (
    ("#fff7ed", "#2b2018"), ("#ffedd5", "#3d2615"), ("#fed7aa", "#572c12"), ("#fdba74", "#6e2f11"),
)  # fmt: skip
"""Background colours of shaded table cells, the lightest first, as (on a light page, on a dark
page). Text on them is legible.
"""

Points = Sequence[tuple[float, float]]
Whiskers = Sequence[tuple[float, float, float]]
"""Confidence intervals in a chart, as (x, lower end, upper end)."""


class Axis(Struct, frozen=True, kw_only=True):
    """One axis of a chart: a range of values, and their positions along one side."""

    low: float
    high: float
    unit: str = ""
    title: str = ""
    """Name of the measured quantity. If it is set, the unit stands behind it; otherwise the unit
    stands at every mark.
    """
    logarithmic: bool = False
    whole: bool = False
    """True if only whole numbers get marks on the axis."""

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        *,
        unit: str = "",
        title: str = "",
        logarithmic: bool = False,
        whole: bool = False,
    ) -> "Axis":
        """Return an axis that contains the finite numbers of at least 0 in `values`, or the positive
        ones if it is logarithmic. It starts at 0 unless it is logarithmic.
        """
        known = [value for value in values if math.isfinite(value)]
        if logarithmic:
            positive = [value for value in known if value > 0] or [1.0]
            low, high = min(positive) * 0.9, max(positive) * 1.1
            high = max(high, low * 1.3)
            return cls(low=low, high=high, unit=unit, title=title, logarithmic=True, whole=whole)
        high = max(known, default=0.0) * 1.05 or 1.0
        return cls(low=0.0, high=high, unit=unit, title=title, whole=whole)

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        if self.logarithmic:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Return round values between the ends of the axis, usually three to nine, where it gets
        marks.
        """
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in _LOGARITHMIC_STEPS:
                every = (step * 10.0**decade for decade in decades for step in steps)
                found = [value for value in every if self._markable(value)]
                shares = [self.share(value) for value in found]
                gaps = [after - before for before, after in pairwise(shares)]
                if len(found) > 2 and (min(gaps) >= _GAP_MIN or steps == (1,)):
                    return found
            # The axis spans less than a factor of about two, where a logarithmic axis is nearly
            # linear.
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step)
        return [at * step for at in range(first, math.floor(self.high / step) + 1)]

    def _markable(self, value: float) -> bool:
        return self.low <= value <= self.high and (not self.whole or value == round(value))

    def label(self, value: float) -> str:
        """Return the text of a mark of the axis, with the unit unless the title contains it."""
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
        return f"{text} {self.unit}" if self.unit and not self.title else text

    @property
    def told(self) -> str:
        """Title of the axis, with the unit of its numbers."""
        return f"{self.title} ({self.unit})" if self.title and self.unit else self.title


class Dots(Struct, frozen=True, kw_only=True):
    """Choice of the points of a line chart that get a dot: all points of all series except those in
    `bare`.
    """

    bare: Collection[str] = ()
    large: Mapping[str, Points] = {}
    """Points of a line chart that get a larger dot, by series."""


def grid_line(y: float, text: str, size: Size = FULL) -> str:
    """Return an SVG horizontal grid line at height `y`, with a label to its left."""
    return (
        f'<line x1="{LEFT}" x2="{size.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def below(x: float, text: str, size: Size = FULL) -> str:
    """Return an SVG label below the plot at the horizontal position `x`."""
    y = size.height - BOTTOM + 18
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def chart(parts: Sequence[str], label: str, size: Size = FULL, about: str = "") -> str:
    """Return an SVG drawing of `parts`, with a label for screen readers.

    `about` is text with further attributes of the element.
    """
    return (
        f'<svg viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(label)}"'
        f"{about}>{''.join(parts)}</svg>"
    )


def series_group(number: int, parts: Iterable[str], name: str = "") -> str:
    """Return the SVG elements `parts` of series `number` of a chart as a group, which a click on
    the legend can hide.
    """
    return f'<g data-series="{number}" data-name="{escape(name)}">{"".join(parts)}</g>'


def line_chart(
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    label: str,
    dots: Dots | bool = False,
    size: Size = HALF,
    first_colour: int = 0,
    whiskers: Mapping[str, Whiskers] | None = None,
) -> str:
    """Return a chart with one line per series, coloured in the order of `COLOURS`.

    `dots` says which points get a dot. `whiskers` are confidence intervals by series; they are cut
    off at the ends of the y axis.
    """
    marked = dots if isinstance(dots, Dots) else Dots() if dots else Dots(bare=series)
    groups = []
    for number, (name, points) in enumerate(series.items(), start=first_colour):
        colour = colour_of(number)
        places = " ".join(_place(at, value, x, y, size) for at, value in points)
        parts = [f'<polyline points="{places}" class="{colour}"/>']
        if name not in marked.bare:
            parts += _dots(points, x, y, colour, size, marked.large.get(name, ()))
        for at, low, high in (whiskers or {}).get(name, ()):
            ends = (min(max(end, y.low), y.high) for end in (low, high))
            places = " ".join(_place(at, end, x, y, size) for end in ends)
            told = f"{y.label(low)} to {y.label(high)}"
            parts.append(f'<polyline points="{places}" class="{colour}" data-told="{told}"/>')
        groups.append(series_group(number, parts, name))
    return _plot(groups, x, y, label, size)


def wide_line_chart(
    series: Mapping[str, Points], *, x: Axis, y: Axis, label: str, dots: Dots | bool = False
) -> str:
    """Return a line chart that fills the width of the page, drawn in two sizes.

    Phones show the narrow one, so that it stays legible.
    """
    wide, narrow = (
        line_chart(series, x=x, y=y, label=label, dots=dots, size=size) for size in (FULL, HALF)
    )
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def scatter_chart(series: Mapping[str, Points], *, x: Axis, y: Axis, label: str) -> str:
    """Return a chart of unconnected points, one colour per series."""
    groups = [
        series_group(number, _dots(points, x, y, colour_of(number), HALF), name)
        for number, (name, points) in enumerate(series.items())
    ]
    return _plot(groups, x, y, label, HALF)


def bar_chart(values: Mapping[str, float], *, y: Axis, label: str, size: Size = HALF) -> str:
    """Return a chart with one bar per name, and its value above it.

    If there are too many bars for all labels, only every n-th has one.
    """
    bottom = size.up(0.0)
    step = (size.width - 2 * RIGHT) / max(1, len(values))
    named = math.ceil(_BAR_LABEL_PX / step)
    parts = []
    for number, (name, value) in enumerate(values.items()):
        middle, top = RIGHT + step * (number + 0.5), size.up(y.share(value))
        width = min(56.0, step * 0.7)
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top:.1f}" rx="{min(3.0, width / 3):.1f}" class="{colour_of(0)}">'
            f"<title>{escape(name)}: {escape(y.label(value))}</title></rect>"
        )
        if number % named == 0:
            parts.append(below(middle, name, size))
            parts.append(
                f'<text x="{middle:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
                f"{escape(y.label(value))}</text>"
            )
    return chart(parts, label, size.without_title)


def bars(shares: Mapping[str, float], colours: Sequence[str] = ()) -> str:
    """Return horizontal bars for shares from 0 to 1.

    They are HTML instead of SVG, so that text has the same size on any screen.
    """
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{share:.1%}</dd>"
        f'<i class="{colour}" style="width:{100 * share:.1f}%"></i></div>'
        for (name, share), colour in zip(
            shares.items(), colours or [colour_of(0)] * len(shares), strict=True
        )
    )
    return f'<dl class="bars">{rows}</dl>'


def cdf_chart(caption: str, series: Mapping[str, Floats]) -> str:
    """Return a figure with the cumulative distribution of times in seconds, one line of at most 200
    points per series.

    NaN values are left out; without other values, the figure has a sentence instead of a chart.
    """
    lines: dict[str, Points] = {}
    for name, values in series.items():
        known = np.sort(values[~np.isnan(values)])
        ranks = np.unique(np.linspace(0, len(known) - 1, _CDF_POINTS).astype(int))
        if len(known):
            lines[name] = [(float(known[rank]), 100 * (rank + 1) / len(known)) for rank in ranks]
    if not lines:
        return figure(caption, "<p>No completed request has this figure.</p>")
    times = [at for line in lines.values() for at, _ in line]
    x = Axis.over(times, unit="s", title="time", logarithmic=True)
    y = Axis(low=0, high=100, unit="%", title="share of requests")
    drawing = line_chart(lines, x=x, y=y, label=caption)
    return figure(caption, drawing, list(lines) if len(series) > 1 else ())


def legend(names: Sequence[str]) -> str:
    """Return the legend of a chart as HTML: the names of the series with their colours."""
    return "".join(
        f'<span data-series="{number}"><i class="{colour_of(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def figure(caption: str, drawing: str, names: Sequence[str] = ()) -> str:
    """Return a chart with its caption as an HTML figure, and with a legend if `names` are given."""
    told = f'<div class="legend">{legend(names)}</div>' if names else ""
    return f"<figure><figcaption>{words(caption)}</figcaption>{told}{drawing}</figure>"


def card(facts: Sequence[tuple[str, str]], *, title: str = "", colour: str = "") -> str:
    """Return an HTML box with a few large numbers; `facts` are pairs of (name, value)."""
    items = "".join(
        f"<div><dt>{words(name)}</dt><dd>{words(value)}</dd></div>" for name, value in facts
    )
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section class="card {colour}">{heading}<dl>{items}</dl></section>'


def words(text: str) -> str:
    """Return `text` as HTML. Text between backticks becomes code, as in Markdown."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of numbers. The first row is the head, and the first cell of each other
    row is its name.
    """
    head, *body = on_one_line(rows)
    columns = "".join(f'<th scope="col">{words(cell)}</th>' for cell in head)
    return scrolling(
        f'<table class="numbers"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{_table_rows(body)}</tbody></table>"
    )


def shaded_table(rows: Sequence[Sequence[str]], shades: Sequence[Sequence[float]]) -> str:
    """Return an HTML table like `html_table`, with cells that are darker the nearer their shade is
    to 1.

    `shades` has one row and one column less than `rows`, with values from 0 to 1.
    """
    head, *body = on_one_line(rows)
    columns = "".join(f'<th scope="col">{words(cell)}</th>' for cell in head)
    lines = []
    for (name, *cells), of_row in zip(body, shades, strict=True):
        told = "".join(
            f'<td class="shaded s{math.ceil(shade * len(_SHADES))}">{escape(cell)}</td>'
            for cell, shade in zip(cells, of_row, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{told}</tr>')
    return scrolling(
        f'<table class="numbers"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def facts_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of names and their values, without a head."""
    return f'<table class="facts">{_table_rows(rows)}</table>'


def scrolling(wide: str) -> str:
    """Return an HTML box that scrolls its content `wide` sideways on narrow screens, also with the
    keyboard.
    """
    return f'<div class="scroll" tabindex="0">{wide}</div>'


def _table_rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f'<tr><th scope="row">{words(row[0])}</th>'
        f"{''.join(f'<td>{words(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )


def page(title: str, introduction: str, body: str, *, script: str = "") -> str:
    """Return a complete HTML document that loads nothing from elsewhere.

    Each line of `introduction` becomes a paragraph.
    """
    paragraphs = "\n".join(f"<p>{words(line)}</p>" for line in introduction.splitlines())
    scripts = [Path(__file__).with_name("charts.js").read_text(encoding="utf-8")]
    scripts += [script] if script else []
    hashes = " ".join(f"'sha256-{_digest(one)}'" for one in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{paragraphs}\n{body}\n</main>\n"
        f"{''.join(f'<script>{one}</script>' for one in scripts)}</body>\n</html>\n"
    )


def _digest(script: str) -> str:
    """Return the SHA-256 of a script in base64, as a Content-Security-Policy needs it."""
    return b64encode(sha256(script.encode()).digest()).decode()


def colour_of(number: int) -> str:
    """Return the CSS class that gives series `number` its colour."""
    return f"c{number % len(COLOURS)}"


def _axes(x: Axis, y: Axis, size: Size) -> list[str]:
    middle, bottom = size.across(0.5), size.height - 6
    return [
        *(grid_line(size.up(y.share(mark)), y.label(mark), size) for mark in y.marks()),
        *(below(size.across(x.share(mark)), x.label(mark), size) for mark in x.marks()),
        f'<text x="4" y="14">{escape(y.told)}</text>',
        f'<text x="{middle:.1f}" y="{bottom}" text-anchor="middle">{escape(x.told)}</text>',
    ]


def _plot(groups: Sequence[str], x: Axis, y: Axis, label: str, size: Size) -> str:
    """Return a chart with axes.

    Its attribute `data-plot` has the axes and their positions, from which `charts.js` reads values.
    """
    ends = {
        "left": size.across(0),
        "right": size.across(1),
        "top": size.up(1),
        "bottom": size.up(0),
    }
    about = encode({"x": asdict(x), "y": asdict(y), **ends}).decode()
    axes = f'<g class="axes">{"".join(_axes(x, y, size))}</g>'
    return chart([axes, *groups], label, size, f' data-plot="{escape(about)}" tabindex="0"')


def _place(at: float, value: float, x: Axis, y: Axis, size: Size) -> str:
    """Return the coordinates of a point as SVG text, precise enough for `charts.js` to compute the
    value from them.
    """
    return f"{size.across(x.share(at)):.2f},{size.up(y.share(value)):.2f}"


def _dots(
    points: Points, x: Axis, y: Axis, colour: str, size: Size, large: Points = ()
) -> list[str]:
    drawn = []
    for at, value in points:
        across, up = _place(at, value, x, y, size).split(",")
        radius = 6.5 if (at, value) in large else 3.5
        drawn.append(f'<circle cx="{across}" cy="{up}" r="{radius}" class="{colour}"/>')
    return drawn


def _colours(dark: int) -> str:
    """Return CSS rules for the colours of series and of shaded cells.

    `dark` is 1 for a dark page and 0 for a light one.
    """
    series = (f".c{number} {{ --colour: {pair[dark]}; }}" for number, pair in enumerate(COLOURS))
    shades = (f".s{number} {{ --shade: {pair[dark]}; }}" for number, pair in enumerate(_SHADES, 1))
    return " ".join((*series, *shades))


STYLE: Final = f"""
:root {{ color-scheme: light dark; --page: #f7f7f4; --card: #fff; --line: #e4e7eb; --text: #1f2933;
  --quiet: #52606d; --chosen: #d9f5ea; }}
{_colours(0)}
@media (prefers-color-scheme: dark) {{
:root {{ --page: #12171d; --card: #1b222b; --line: #35404d; --text: #e8ecf0; --quiet: #aeb9c5;
  --chosen: #16423b; }}
{_colours(1)}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--text); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: 960px; margin: 0 auto; padding: 40px 20px 60px; }}
h1 {{ font-size: 28px; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 0 0 10px; }}
p {{ margin: 0 0 8px; color: var(--quiet); }}
.card, figure {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px; min-width: 0; }}
.card {{ border-color: var(--colour, var(--line)); border-top-width: 4px; }}
figure {{ margin: 16px 0 0; }} figcaption {{ font-weight: 600; margin-bottom: 8px; }}
.cards, .pair, .pods {{ display: grid; gap: 16px; }} main > .card, .cards, .pair {{ margin-top: 16px; }}
.cards {{ grid-template-columns: repeat(auto-fit, minmax(min(280px, 100%), 1fr)); }}
.pair {{ grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); }}
.pods {{ grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr)); margin-top: 8px; }}
.pair > figure {{ margin: 0; }}
.card dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(102px, 1fr)); gap: 12px; }}
dl {{ margin: 0; }} dt {{ font-size: 13px; color: var(--quiet); }} dd {{ margin: 0; }}
.card dd {{ font-size: 20px; font-weight: 600; }}
.bars div {{ display: grid; grid-template-columns: 1fr auto; margin-top: 10px; }}
.bars dt, .bars dd {{ font-size: 15px; }}
.bars i {{ grid-column: 1 / -1; height: 12px; border-radius: 3px; background: var(--colour); }}
.pair .bars i {{ height: 32px; }}
svg {{ width: 100%; height: auto; display: block; }}
svg [hidden], .note[hidden], .back[hidden] {{ display: none; }}
[data-plot]:focus-visible {{ outline: 2px solid var(--line); border-radius: 3px; }}
[data-plot] {{ cursor: crosshair; touch-action: pan-y; user-select: none; }}
.cross {{ pointer-events: none; }} .cross line {{ stroke: var(--quiet); stroke-dasharray: 3 3; }}
.band {{ fill: var(--quiet); opacity: 0.2; pointer-events: none; }}
figure {{ position: relative; }}
.note {{ position: absolute; z-index: 1; pointer-events: none; padding: 6px 10px; font-size: 14px;
  max-width: calc(100% - 8px); background: var(--card); border: 1px solid var(--quiet);
  border-radius: 6px; font-variant-numeric: tabular-nums; }}
button {{ font: inherit; color: inherit; background: none; border: 0; padding: 2px 0;
  text-align: left; cursor: pointer; }}
button[aria-pressed="false"] {{ text-decoration: line-through; }}
.back {{ display: block; margin: 6px 0 0 auto; padding: 2px 10px; font-size: 14px;
  border: 1px solid var(--quiet); border-radius: 6px; }}
svg text {{ font-size: 13px; fill: var(--quiet); }}
polyline {{ fill: none; stroke: var(--colour); stroke-width: 2; stroke-linejoin: round; }}
.pods polyline {{ stroke-width: 1.2; }} .narrow {{ display: none; }}
rect, circle {{ fill: var(--colour); }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 14px; color: var(--quiet); }}
.legend i, .note i {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; background: var(--colour); }}
code {{ font: 0.92em ui-monospace, monospace; }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; }}
table, dd {{ font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px 0; border-bottom: 1px solid var(--line); text-align: left; }}
th {{ font-weight: 500; color: var(--quiet); }}
.facts th, .facts td {{ vertical-align: top; }} .facts th {{ width: 38%; padding-right: 12px; }}
.scroll {{ overflow-x: auto; }}
.numbers th, .numbers td {{ text-align: right; padding-left: 14px; white-space: nowrap; }}
.numbers tr > :first-child {{ text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--card); }}
.numbers tr:first-child th {{ vertical-align: bottom; white-space: normal; overflow-wrap: normal; }}
.numbers .shaded {{ background: var(--shade); }}
.numbers .chosen > :nth-child(n) {{ background: var(--chosen); }}
#candidates {{ font-size: 13px; }}
input {{ font: inherit; width: 8em; }}
@media (max-width: 600px) {{
main {{ padding: 24px 12px 40px; }} h1 {{ font-size: 24px; }}
.card, figure {{ padding: 12px; }}
svg text {{ font-size: 14px; }} .pods text {{ font-size: 12px; }}
.wide {{ display: none; }} .narrow {{ display: block; }}
.numbers {{ font-size: 14px; }} .numbers tr > :first-child {{ white-space: normal; min-width: 7em; }}
}}
@media screen and (min-width: 1000px) {{
figure:has(.scroll) {{ box-sizing: border-box; width: fit-content; min-width: 100%;
  max-width: calc(100vw - 40px); margin-left: 50%; transform: translateX(-50%); }}
}}
@media (min-width: 900px) {{ .wide text {{ font-size: 10.5px; }} }}
@media print {{
body, .card, figure {{ background: none; }} main {{ max-width: none; padding: 0; }}
figure, .card {{ break-inside: avoid; }} .scroll {{ overflow: visible; }}
.note, .back {{ display: none; }}
}}
"""
