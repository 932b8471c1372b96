"""What the demo found: numbers for machines, a table's worth for people, one page to look at.

The page is one HTML file without scripts, fonts or addresses: it opens offline, charts are SVG.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np
from msgspec import Struct

from sim.demo.client import RequestOutcome
from sim.reports.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    STYLE,
    TOP,
    WIDTH,
    below,
    chart,
    grid_line,
)

SCHEMA: Final = 1

_COLOURS: Final = {"round_robin": "#b45309", "homing": "#0f766e"}
_TITLES: Final = {"round_robin": "Round robin", "homing": "Homing"}


class ArmSummary(Struct, kw_only=True):
    """One arm in numbers; `ttft_ms` and the rate are over requests with a whole answer."""

    requests: int
    errors: int
    ttft_ms: dict[str, float | None]
    """"p50" and "p90"; None when nothing was answered."""
    prefix_hit_rate: float
    """Cached prompt tokens / prompt tokens, as the servers' usage says."""
    requests_per_pod: list[int]
    """As the pods counted them, in the order of the pods."""


class Summary(Struct, kw_only=True):
    """demo/summary.json."""

    schema: int
    seed: int
    arms: dict[str, ArmSummary]


def title_of(arm: str) -> str:
    """How people read the name of an arm."""
    return _TITLES[arm]


def summarise(outcomes: Sequence[RequestOutcome], requests_per_pod: Sequence[int]) -> ArmSummary:
    """The numbers of one arm."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
    cached_tokens = sum(outcome.cached_tokens for outcome in answered)
    ttft_ms: dict[str, float | None] = {"p50": None, "p90": None}
    if answered:
        ttfts = [outcome.ttft_s * 1000 for outcome in answered]
        ttft_ms = {f"p{rank}": round(float(np.percentile(ttfts, rank)), 1) for rank in (50, 90)}
    return ArmSummary(
        requests=len(outcomes),
        errors=len(outcomes) - len(answered),
        ttft_ms=ttft_ms,
        prefix_hit_rate=round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        requests_per_pod=list(requests_per_pod),
    )


def render_report(
    summary: Summary,
    outcomes: Mapping[str, Sequence[RequestOutcome]],
    conditions: Sequence[tuple[str, str]],
) -> str:
    """The page. `conditions`: what was run, as (name, value)."""
    ttfts = {
        arm: sorted(outcome.ttft_s * 1000 for outcome in found if not outcome.error)
        for arm, found in outcomes.items()
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in conditions
    )
    return _PAGE.format(
        style=STYLE,
        seed=summary.seed,
        cards="".join(_card(arm, numbers) for arm, numbers in summary.arms.items()),
        legend=_legend(summary.arms),
        ttft=_distribution(ttfts),
        pods=_pod_bars({arm: numbers.requests_per_pod for arm, numbers in summary.arms.items()}),
        hits=_hit_bars({arm: numbers.prefix_hit_rate for arm, numbers in summary.arms.items()}),
        conditions=rows,
    )


def milliseconds(value: float | None) -> str:
    """For tables: no decimals, a dash for nothing."""
    return "-" if value is None else f"{value:,.0f} ms"


def _card(arm: str, numbers: ArmSummary) -> str:
    facts = (
        ("TTFT p50", milliseconds(numbers.ttft_ms["p50"])),
        ("TTFT p90", milliseconds(numbers.ttft_ms["p90"])),
        ("prefix hit rate", f"{numbers.prefix_hit_rate:.0%}"),
        ("requests", f"{numbers.requests:,}"),
        ("errors", f"{numbers.errors:,}"),
    )
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return (
        f'<section class="card" style="border-color:{_COLOURS[arm]}">'
        f"<h2>{_TITLES[arm]}</h2><dl>{items}</dl></section>"
    )


def _legend(arms: Mapping[str, Any]) -> str:
    return "".join(
        f'<span><i style="background:{_COLOURS[arm]}"></i>{_TITLES[arm]}</span>' for arm in arms
    )


def _distribution(ttfts: Mapping[str, Sequence[float]]) -> str:
    """Share of requests (up) that had their first token within so many milliseconds (log)."""
    values = [value for found in ttfts.values() for value in found]
    if not values:
        return "<p>No request was answered.</p>"
    lowest = math.log10(min(values) * 0.9)
    highest = max(math.log10(max(values) * 1.1), lowest + 0.1)

    def x(value: float) -> float:
        share = (math.log10(value) - lowest) / (highest - lowest)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [grid_line(y(share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 0.9, 1)]
    marks = (step * 10**decade for decade in range(6) for step in (1, 2, 5))
    parts.extend(
        below(x(mark), f"{mark:,} ms") for mark in marks if 10**lowest <= mark <= 10**highest
    )
    for arm, found in ttfts.items():
        if not found:
            continue
        points = [f"{x(found[0]):.1f},{y(0):.1f}"]
        for index, value in enumerate(found):
            points.append(f"{x(value):.1f},{y((index + 1) / len(found)):.1f}")
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{_COLOURS[arm]}" '
            'stroke-width="2.5" stroke-linejoin="round"/>'
        )
    return chart(parts, "Time to first token: share of requests within a time, for both arms")


def _pod_bars(counts: Mapping[str, Sequence[int]]) -> str:
    """Requests each pod served, the arms beside each other."""
    pods = max((len(found) for found in counts.values()), default=0)
    highest = max((max(found, default=0) for found in counts.values()), default=0) or 1
    groups = [
        (f"pod {pod}", [(arm, float(found[pod]), str(found[pod])) for arm, found in counts.items()])
        for pod in range(pods)
    ]
    return _bars(groups, highest, "Requests that each pod served, for both arms")


def _hit_bars(rates: Mapping[str, float]) -> str:
    groups = [(_TITLES[arm], [(arm, rate, f"{rate:.1%}")]) for arm, rate in rates.items()]
    return _bars(groups, 1.0, "Share of prompt tokens that came from the cache, for both arms")


def _bars(
    groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], highest: float, label: str
) -> str:
    parts = [grid_line(HEIGHT - BOTTOM, "")]
    step = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for number, (name, bars) in enumerate(groups):
        width = min(56.0, step * 0.7 / len(bars))
        middle = LEFT + step * (number + 0.5)
        parts.append(below(middle, name))
        for index, (arm, value, text) in enumerate(bars):
            height = value / highest * (HEIGHT - TOP - BOTTOM - 18)
            left = middle + (index - len(bars) / 2) * width
            top = HEIGHT - BOTTOM - height
            parts.append(
                f'<rect x="{left + 2:.1f}" y="{top:.1f}" width="{width - 4:.1f}" '
                f'height="{height:.1f}" rx="3" fill="{_COLOURS[arm]}"/>'
                f'<text x="{left + width / 2:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
    return chart(parts, label)


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Homing against round robin, seed {seed}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Homing against round robin</h1>
<p>The same conversations, word for word and at the same moments, through the same Envoy to four
fresh simulated pods: once in turn, once where Homing sends them. Seed {seed}.</p>
<div class="cards">{cards}</div>
<figure><figcaption>Time to first token, as the client saw it</figcaption>
<div class="legend">{legend}</div>{ttft}</figure>
<div class="pair">
<figure><figcaption>Requests a pod</figcaption>{pods}</figure>
<figure><figcaption>Prompt tokens served from the cache</figcaption>{hits}</figure>
</div>
<figure><figcaption>What was run</figcaption><table>{conditions}</table></figure>
</main>
</body>
</html>
"""
