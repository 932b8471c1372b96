"""Charts and pages that open offline: inline SVG, one style, no fonts, no addresses."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import Struct

from sim.measurement.measures import Floats

LEFT: Final = 56
RIGHT: Final = 16
TOP: Final = 30
BOTTOM: Final = 46


class Size(Struct, frozen=True):
    """Of a drawing, pixels; what is shown smaller is drawn smaller, or no one could read it."""

    width: int
    height: int

    def across(self, share: float) -> float:
        """From the left end of the plot to its right end."""
        return LEFT + share * (self.width - LEFT - RIGHT)

    def up(self, share: float) -> float:
        """From the bottom of the plot to its top."""
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)


FULL: Final = Size(640, 300)
HALF: Final = Size(400, 270)
"""Of two that stand beside each other."""
SMALL: Final = Size(300, 170)
"""Of many."""
WIDTH: Final = FULL.width
HEIGHT: Final = FULL.height

COLOURS: Final = (
    "#0f766e", "#b45309", "#1d4ed8", "#be185d", "#4d7c0f", "#7c3aed", "#475569", "#c2410c",
)  # fmt: skip
"""Of series, in their order; counted round."""

_CDF_POINTS: Final = 200
_LOGARITHMIC_STEPS: Final = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,))
_GAP_MIN: Final = 0.11
"""Between two marks, of the length of their axis: labels must not touch."""
_BAR_LABEL_PX: Final = 44

Points = Sequence[tuple[float, float]]


class Axis(Struct, frozen=True, kw_only=True):
    """Values to a place along one side of a chart."""

    low: float
    high: float
    unit: str = ""
    title: str = ""
    """What it measures: the unit is told there, else at every mark."""
    logarithmic: bool = False

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        *,
        unit: str = "",
        title: str = "",
        logarithmic: bool = False,
    ) -> "Axis":
        """An axis that holds `values`, from 0 unless it is logarithmic."""
        known = [value for value in values if math.isfinite(value)]
        if logarithmic:
            positive = [value for value in known if value > 0] or [1.0]
            low, high = min(positive) * 0.9, max(positive) * 1.1
            high = max(high, low * 1.3)
            return cls(low=low, high=high, unit=unit, title=title, logarithmic=True)
        return cls(low=0.0, high=max(known, default=0.0) * 1.05 or 1.0, unit=unit, title=title)

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.logarithmic:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Round values between the ends, a handful."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in _LOGARITHMIC_STEPS:
                every = (step * 10.0**decade for decade in decades for step in steps)
                found = [value for value in every if self.low <= value <= self.high]
                shares = [self.share(value) for value in found]
                gaps = [after - before for before, after in pairwise(shares)]
                if len(found) > 2 and (min(gaps) >= _GAP_MIN or steps == (1,)):
                    return found
            # Less than a factor of two or so, which is nearly straight.
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw)
        first = math.ceil(self.low / step)
        return [at * step for at in range(first, math.floor(self.high / step) + 1)]

    def label(self, value: float) -> str:
        """A value, with its unit if no title tells that."""
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
        return f"{text} {self.unit}" if self.unit and not self.title else text

    @property
    def told(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.title and self.unit else self.title


def grid_line(y: float, text: str, size: Size = FULL) -> str:
    """A horizontal line with a label to its left."""
    return (
        f'<line x1="{LEFT}" x2="{size.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def below(x: float, text: str, size: Size = FULL) -> str:
    """A label under the chart."""
    y = size.height - BOTTOM + 18
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def chart(parts: Sequence[str], label: str, size: Size = FULL) -> str:
    """The drawing, with a label for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def line_chart(
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    label: str,
    dots: bool = False,
    size: Size = HALF,
    first_colour: int = 0,
) -> str:
    """One line a series, in the order of `COLOURS`; `dots` marks every point."""
    parts = _axes(x, y, size)
    for number, points in enumerate(series.values(), start=first_colour):
        colour = colour_of(number)
        places = " ".join(
            f"{size.across(x.share(at)):.1f},{size.up(y.share(value)):.1f}" for at, value in points
        )
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" '
            'stroke-width="2" stroke-linejoin="round"/>'
        )
        if dots:
            parts += _dots(points, x, y, colour, size)
    return chart(parts, label, size)


def scatter_chart(series: Mapping[str, Points], *, x: Axis, y: Axis, label: str) -> str:
    """Dots only: points without an order."""
    parts = _axes(x, y, HALF)
    for number, points in enumerate(series.values()):
        parts += _dots(points, x, y, colour_of(number), HALF)
    return chart(parts, label, HALF)


def bar_chart(values: Mapping[str, float], *, y: Axis, label: str, size: Size = HALF) -> str:
    """One bar a name, with its value above it; of very many bars, names and values of some."""
    bottom = size.up(0.0)
    step = (size.width - 2 * RIGHT) / max(1, len(values))
    named = math.ceil(_BAR_LABEL_PX / step)
    parts = []
    for number, (name, value) in enumerate(values.items()):
        middle, top = RIGHT + step * (number + 0.5), size.up(y.share(value))
        width = min(56.0, step * 0.7)
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top:.1f}" rx="{min(3.0, width / 3):.1f}" fill="{COLOURS[0]}"/>'
        )
        if number % named == 0:
            parts.append(below(middle, name, size))
            parts.append(
                f'<text x="{middle:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
                f"{escape(y.label(value))}</text>"
            )
    return chart(parts, label, size)


def cdf_chart(caption: str, series: Mapping[str, Floats]) -> str:
    """A figure: the share of seconds up to each value, a line a series; NaN is not counted."""
    lines: dict[str, Points] = {}
    for name, values in series.items():
        known = np.sort(values[~np.isnan(values)])
        ranks = np.unique(np.linspace(0, len(known) - 1, _CDF_POINTS).astype(int))
        if len(known):
            lines[name] = [(float(known[rank]), 100 * (rank + 1) / len(known)) for rank in ranks]
    if not lines:
        return figure(caption, "<p>Nothing was completed.</p>")
    times = [at for line in lines.values() for at, _ in line]
    x = Axis.over(times, unit="s", title="time", logarithmic=True)
    y = Axis(low=0, high=100, unit="%", title="share of requests")
    drawing = line_chart(lines, x=x, y=y, label=caption)
    return figure(caption, drawing, list(lines) if len(series) > 1 else ())


def legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    return "".join(
        f'<span><i style="background:{colour_of(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def figure(caption: str, drawing: str, names: Sequence[str] = ()) -> str:
    """A chart with its caption, and a legend if it has several series."""
    told = f'<div class="legend">{legend(names)}</div>' if names else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{told}{drawing}</figure>"


def cards(facts: Sequence[tuple[str, str]]) -> str:
    """A few numbers, large."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    return f'<section class="card"><dl>{items}</dl></section>'


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows without a head; the first cell names the row."""
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f"<table>{body}</table>"


def page(title: str, introduction: str, body: str, *, script: str = "") -> str:
    """A whole document."""
    scripts = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(introduction)}</p>\n{body}\n</main>\n{scripts}"
        "</body>\n</html>\n"
    )


def colour_of(number: int) -> str:
    """The colour of series `number`."""
    return COLOURS[number % len(COLOURS)]


def _axes(x: Axis, y: Axis, size: Size) -> list[str]:
    middle, bottom = size.across(0.5), size.height - 6
    return [
        *(grid_line(size.up(y.share(mark)), y.label(mark), size) for mark in y.marks()),
        *(below(size.across(x.share(mark)), x.label(mark), size) for mark in x.marks()),
        f'<text x="4" y="14">{escape(y.told)}</text>',
        f'<text x="{middle:.1f}" y="{bottom}" text-anchor="middle">{escape(x.told)}</text>',
    ]


def _dots(points: Points, x: Axis, y: Axis, colour: str, size: Size) -> list[str]:
    return [
        f'<circle cx="{size.across(x.share(at)):.1f}" cy="{size.up(y.share(value)):.1f}" r="3.5" '
        f'fill="{colour}"/>'
        for at, value in points
    ]


STYLE: Final = """
:root { color-scheme: light; }
body { margin: 0; background: #f7f7f4; color: #1f2933; line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 60px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
p { margin: 0 0 20px; color: #52606d; }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); }
.card, figure { background: #fff; border: 1px solid #e4e7eb; border-radius: 10px; padding: 18px; }
.card { border-top-width: 4px; }
dl { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin: 0; }
dt { font-size: 13px; color: #7b8794; } dd { margin: 0; font-size: 20px; font-weight: 600; }
figure { margin: 16px 0 0; } figcaption { font-weight: 600; margin-bottom: 8px; }
.pair { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 13px; fill: #52606d; }
.grid { stroke: #e4e7eb; stroke-width: 1; }
.legend span { margin-right: 18px; font-size: 14px; color: #52606d; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { text-align: left; padding: 6px 0; border-bottom: 1px solid #edf0f2; vertical-align: top; }
th { font-weight: 500; color: #52606d; width: 34%; }
.decisions td, .decisions th { width: auto; padding-right: 12px; font-size: 13px; }
.decisions td:first-child { white-space: nowrap; } .pods polyline { stroke-width: 1.2; }
.decisions .chosen { background: #ecfdf5; } input { font: inherit; width: 8em; }
.pods { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
"""
