"""Draw the pictures of docs/scoring.md and docs/flow-control.md: `python -m docs.diagrams`.

The first two show the formula of `added-time-scorer` with its defaults; tests/test_docs.py compares
the formula with the scorer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from msgspec import Struct

from docs import flow_figures, frontier
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S, prefill_work
from epp.plugins.added_time import DECODE_SHARE, HALF_WEIGHT_S, AddedTime

FOLDER: Final = Path(__file__).parent / "scoring"
WIDTH: Final = 760
COLOURS: Final = ("#2f6fb0", "#7fb2e5", "#e0a030", "#b7791f", "#6b9f71", "#c3daf2")
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#52606d}.name{font-weight:600;fill:#1f2933}"
    ".page{fill:#fff}.axis{stroke:#cbd2d9}polyline{fill:none;stroke-width:2}"
)


class Pod(Struct, frozen=True, kw_only=True):
    """The picker's state of one endpoint, as far as the formula of `added-time-scorer` needs it."""

    name: str
    cached_tokens: int
    """Number of tokens of the new prompt that the endpoint has cached."""
    pending_tokens: float = 0.0
    """Number of prompt tokens that were sent to the endpoint and are not yet prefilled."""
    requests: int = 0
    """Number of requests in flight at the endpoint."""
    context_tokens: int = 0
    """Number of prompt tokens of the requests in flight at the endpoint."""


PROMPT_TOKENS: Final = 6_400
LINE_STEPS: Final = 60
BLOCK_TOKENS: Final = 64
PODS: Final = (
    Pod(
        name="pod-a: holds nine tenths, six requests",
        cached_tokens=5_760,
        pending_tokens=9_000,
        requests=6,
        context_tokens=30_000,
    ),
    Pod(
        name="pod-b: holds half, two requests",
        cached_tokens=3_200,
        requests=2,
        context_tokens=8_000,
    ),
    Pod(name="pod-c: holds nothing, idle", cached_tokens=0),
)


def terms(pod: Pod, prompt_tokens: int, rule: AddedTime) -> dict[str, float]:
    """Return the cost of a new request at `pod` by cause, in prefill tokens.

    The engine is assumed to have no queue, enough memory and no adapter; the formula's terms for
    them are then 0.
    """
    compute = prompt_tokens - pod.cached_tokens
    prefill = prefill_work(prompt_tokens, compute)
    decode = rule.decode_tokens * DECODE_SHARE
    told = {
        "waits for others": pod.pending_tokens,
        "computes its own": prefill,
        "holds up who decodes": rule.prefill_delay * pod.requests * prefill,
        "evicts what comes again": rule.eviction_cost * prefill,
        "decodes beside others": decode * (pod.context_tokens + pod.requests * prompt_tokens),
    }
    if rule.first_token_weight:
        own = pod.pending_tokens + prefill
        half_weight = own + HALF_WEIGHT_S * PREFILL_TOKENS_PER_S
        told["weight of the first token"] = rule.first_token_weight * own**2 / half_weight
    return told


def added_s(pod: Pod, prompt_tokens: int, rule: AddedTime) -> float:
    """Return the cost in seconds of a new request at `pod`."""
    return sum(terms(pod, prompt_tokens, rule).values()) / PREFILL_TOKENS_PER_S


def bars() -> str:
    """Return an SVG picture of the cost of one request at three pods, term by term."""
    rule = AddedTime()
    left, top, high, apart = 20, 70, 24, 62
    most = max(added_s(pod, PROMPT_TOKENS, rule) for pod in PODS)
    least = min(added_s(pod, PROMPT_TOKENS, rule) for pod in PODS)
    scale = (WIDTH - left - 90) / most
    parts = []
    for number, name in enumerate(terms(PODS[0], PROMPT_TOKENS, rule)):
        x = left + (number % 3) * 240
        y = 22 + (number // 3) * 22
        parts.append(
            f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{COLOURS[number]}"/>'
            f'<text x="{x + 18}" y="{y}">{escape(name)}</text>'
        )
    for row, pod in enumerate(PODS):
        y = top + apart * row + 18
        bar_x = float(left)
        parts.append(f'<text class="name" x="{left}" y="{y - 6}">{escape(pod.name)}</text>')
        for colour, tokens in zip(COLOURS, terms(pod, PROMPT_TOKENS, rule).values(), strict=False):
            width = tokens / PREFILL_TOKENS_PER_S * scale
            parts.append(
                f'<rect x="{bar_x:.1f}" y="{y}" width="{width:.1f}" height="{high}" fill="{colour}"/>'
            )
            bar_x += width
        total = added_s(pod, PROMPT_TOKENS, rule)
        chosen = ", chosen" if total == least else ""
        parts.append(f'<text x="{bar_x + 8:.1f}" y="{y + 17}">{total:.2f} s{chosen}</text>')
    return _svg(top + apart * len(PODS) + 10, "Seconds that a request adds at each pod", parts)


def lines() -> str:
    """Return an SVG picture that compares the wait at a pod with the cached prefix with computing
    the prompt elsewhere.
    """
    rule = AddedTime()
    longest = 60_000.0

    def at_holder(prompt: int) -> Callable[[float], float]:
        return lambda pending: added_s(
            Pod(name="", cached_tokens=prompt, pending_tokens=pending), prompt, rule
        )

    idle = {
        prompt: added_s(Pod(name="", cached_tokens=0), prompt, rule) for prompt in (4_000, 12_000)
    }
    drawn: Mapping[str, Callable[[float], float]] = {
        "at the pod that holds the prompt": at_holder(12_000),
        "elsewhere, 4,000 tokens": lambda _: idle[4_000],
        "elsewhere, 12,000 tokens": lambda _: idle[12_000],
    }
    left, right, top, bottom = 60, WIDTH - 40, 40, 250
    most = max(line(longest) for line in drawn.values())
    at_tokens = [longest * step / LINE_STEPS for step in range(LINE_STEPS + 1)]

    def place(tokens: float, seconds: float) -> str:
        x = left + (right - left) * tokens / longest
        return f"{x:.1f},{bottom - (bottom - top) * seconds / most:.1f}"

    parts = [
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>',
        f'<text x="{left}" y="{bottom + 36}">prompt tokens that wait at the pod that holds it</text>',
        f'<text x="4" y="{top}">{most:.1f} s</text><text x="4" y="{bottom}">0 s</text>',
    ]
    for tokens in range(0, int(longest) + 1, 10_000):
        place_x = place(tokens, 0).partition(",")[0]
        parts.append(
            f'<text x="{place_x}" y="{bottom + 18}" text-anchor="middle">{tokens:,}</text>'
        )
    for number, (name, line) in enumerate(drawn.items()):
        name_x = left + 10 + 245 * number
        points = " ".join(place(tokens, line(tokens)) for tokens in at_tokens)
        parts.append(
            f'<polyline stroke="{COLOURS[2 * number]}" '
            f'points="{points}"/>'
            f'<rect x="{name_x}" y="11" width="12" height="12" fill="{COLOURS[2 * number]}"/>'
            f'<text x="{name_x + 18}" y="22">{escape(name)}</text>'
        )
    for prompt, seconds in idle.items():
        worth = _wait_s(seconds, rule.first_token_weight) * PREFILL_TOKENS_PER_S
        x, _, y = place(worth, seconds).partition(",")
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{COLOURS[0]}"/>'
            f'<text x="{float(x) + 8:.1f}" y="{float(y) + 18:.1f}">'
            f"{prompt:,} held: a wait for {worth:,.0f}</text>"
        )
    return _svg(bottom + 48, "How long a wait a held prompt is worth", parts)


def _wait_s(cost_s: float, weight: float) -> float:
    """Return the wait f in seconds whose cost is `cost_s` = f + weight f^2 / (f + `HALF_WEIGHT_S`),
    if there are no other costs.
    """
    over = cost_s - HALF_WEIGHT_S
    root = math.sqrt(over * over + 4 * (1 + weight) * cost_s * HALF_WEIGHT_S)
    return (over + root) / (2 * (1 + weight))


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


DIAGRAMS: Final[Mapping[str, Callable[[], str]]] = {
    "added-time": bars,
    "worth-a-wait": lines,
    "flow": flow_figures.picture,
    "frontier": frontier.picture,
}


def main() -> None:
    """Draw all pictures and write them to docs/scoring."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
