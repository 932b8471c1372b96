"""The demo's results as figures in JSON and as one HTML page.

The page is one file without external fonts or links, with charts as SVG, and opens offline.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from sim.demo.client import RequestOutcome
from sim.reports.charts import (
    HALF,
    RIGHT,
    Axis,
    Points,
    bars,
    below,
    card,
    chart,
    colour_of,
    facts_table,
    figure,
    grid_line,
    page,
    series_group,
    wide_line_chart,
)

SCHEMA: Final = 1

_COLOURS: Final = {"homing": colour_of(0), "round_robin": colour_of(1)}
_TITLES: Final = {"round_robin": "Round robin", "homing": "Homing"}


class ArmSummary(Struct, kw_only=True):
    """Figures of one arm of the demo; `ttft_ms` and the hit rate cover only requests with a
    complete answer.
    """

    requests: int
    errors: int
    ttft_ms: dict[str, float | None]
    """Percentiles "p50" and "p90" of the time to first token in milliseconds, over the requests
    with a complete answer; None if there is none.
    """
    prefix_hit_rate: float
    """Cached prompt tokens as a share of all prompt tokens of the requests with a complete answer,
    from the usage that servers report.
    """
    requests_per_pod: list[int]
    """Number of requests that each pod counted, in the order of the pods."""


class Summary(Struct, kw_only=True):
    """Content of the file summary.json that the demo writes."""

    schema: int
    seed: int
    arms: dict[str, ArmSummary]


def title_of(arm: str) -> str:
    """Return the display name of an arm of the demo."""
    return _TITLES[arm]


def summarise(outcomes: Sequence[RequestOutcome], requests_per_pod: Sequence[int]) -> ArmSummary:
    """Return the figures of one arm of the demo from its requests."""
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
    """Return the HTML page of the demo's results. `conditions` are the parameters of the run as
    (name, value).
    """
    arms = [arm for arm in _COLOURS if arm in summary.arms]
    names = [_TITLES[arm] for arm in arms]
    counts = {arm: summary.arms[arm].requests_per_pod for arm in arms}
    rates = {_TITLES[arm]: summary.arms[arm].prefix_hit_rate for arm in arms}
    numbers = "".join(_card(arm, found) for arm, found in summary.arms.items())
    distribution = _distribution({arm: outcomes[arm] for arm in arms})
    return page(
        "Homing against round robin",
        "The same conversations, word for word and at the same times, through the same Envoy to "
        "four fresh simulated pods: once by round robin, once by Homing. "
        f"Seed {summary.seed}.",
        f'<div class="cards">{numbers}</div>'
        + figure("Time to first token, as the client saw it", distribution, names)
        + '<div class="pair">'
        + figure("Requests a pod", _pod_bars(counts), names)
        + figure(
            "Prompt tokens served from the cache", bars(rates, [_COLOURS[arm] for arm in arms])
        )
        + "</div>"
        + figure("What was run", facts_table(conditions)),
    )


def milliseconds(value: float | None) -> str:
    """Return the text of a time in milliseconds without decimals, or a dash for None."""
    return "-" if value is None else f"{value:,.0f} ms"


def _card(arm: str, numbers: ArmSummary) -> str:
    facts = (
        ("TTFT p50", milliseconds(numbers.ttft_ms["p50"])),
        ("TTFT p90", milliseconds(numbers.ttft_ms["p90"])),
        ("prefix hit rate", f"{numbers.prefix_hit_rate:.0%}"),
        ("requests", f"{numbers.requests:,}"),
        ("errors", f"{numbers.errors:,}"),
    )
    return card(facts, title=_TITLES[arm], colour=_COLOURS[arm])


def _distribution(outcomes: Mapping[str, Sequence[RequestOutcome]]) -> str:
    """Return a chart of the share of completely answered requests that had their first token within
    a time, with one line for each arm of the demo. The time axis is logarithmic. Without such
    requests, a sentence is returned.
    """
    lines: dict[str, Points] = {}
    for arm, found in outcomes.items():
        ttfts_ms = sorted(outcome.ttft_s * 1000 for outcome in found if not outcome.error)
        shares = [(at, 100 * (rank + 1) / len(ttfts_ms)) for rank, at in enumerate(ttfts_ms)]
        lines[arm] = [(at, 0.0) for at in ttfts_ms[:1]] + shares
    times_ms = [at for points in lines.values() for at, _ in points]
    if not times_ms:
        return "<p>No request was answered.</p>"
    return wide_line_chart(
        lines,
        x=Axis.over(times_ms, unit="ms", title="time", logarithmic=True),
        y=Axis(low=0, high=100, unit="%", title="share of requests"),
        label="Time to first token: share of requests within a time, for both arms",
    )


def _pod_bars(counts: Mapping[str, Sequence[int]]) -> str:
    """Return a bar chart of the number of requests that each pod served, with the arms side by
    side.
    """
    pods = max((len(found) for found in counts.values()), default=0)
    highest = max((max(found, default=0) for found in counts.values()), default=0) or 1
    bottom = HALF.up(0.0)
    parts = [grid_line(bottom, "", HALF)]
    step = (HALF.width - 2 * RIGHT) / max(1, pods)
    width = min(56.0, step * 0.7 / max(1, len(counts)))
    middles = [RIGHT + step * (pod + 0.5) for pod in range(pods)]
    parts += [below(middle, f"pod {pod}", HALF) for pod, middle in enumerate(middles)]
    for index, (arm, found) in enumerate(counts.items()):
        bars_of_arm = []
        for pod, (middle, count) in enumerate(zip(middles, found, strict=True)):
            left = middle + (index - len(counts) / 2) * width
            top = HALF.up(count / highest)
            bars_of_arm.append(
                f'<rect x="{left + 2:.1f}" y="{top:.1f}" width="{width - 4:.1f}" '
                f'height="{bottom - top:.1f}" rx="3" class="{_COLOURS[arm]}">'
                f"<title>{_TITLES[arm]}, pod {pod}: {count:,}</title></rect>"
                f'<text x="{left + width / 2:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
                f"{count}</text>"
            )
        parts.append(series_group(index, bars_of_arm, _TITLES[arm]))
    return chart(parts, "Requests that each pod served, for both arms", HALF.without_title)
