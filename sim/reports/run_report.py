"""The report.html page of `sim replay`: latencies, states of pods, and the reason for each routing
decision.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import UNSET
from msgspec.json import decode, encode

from sim.cluster.simulated_request import Fate
from sim.measurement.measures import Series
from sim.measurement.summaries import (
    PodLoadSummary,
    ReplaySummary,
    RunSummary,
    TimelineSummary,
)
from sim.reports.charts import (
    SMALL,
    Axis,
    Points,
    bar_chart,
    bars,
    card,
    cdf_chart,
    facts_table,
    figure,
    line_chart,
    page,
    scatter_chart,
    scrolling,
)
from sim.reports.page_foot import page_foot
from sim.reports.report import condition_rows, fact_rows, number, seconds, share

_WINDOWS: Final = 40
_DECISIONS_SHOWN: Final = 2_000
"""Maximum number of routing decisions (lines of decisions.jsonl) on the page, spread evenly over
the run.
"""
_CANDIDATES_SHOWN: Final = 16
_PODS_SHOWN: Final = 32
_SPANS: Final = 36
"""Number of parts into which a pod's small chart is divided. The chart draws the lowest and the
highest value of each part.
"""
_ENDED: Final = {
    Fate.FAILED: ", which could not serve it",
    Fate.ABORTED: ", and its client disconnected before the end",
}


def run_page(summary: ReplaySummary, series: Series, decisions: Path | None) -> str:
    """Return the content of report.html of `sim replay`.

    `decisions` is the path of decisions.jsonl, or None if it was not written.
    """
    conditions, run = summary.conditions, summary.run
    rows = condition_rows(conditions)
    body = [
        card(_facts(run)),
        '<div class="pair">',
        cdf_chart("Time to first token: share of requests within a time", {"": series.ttft_s}),
        cdf_chart("Time per output token: share of requests within a time", {"": series.tpot_s}),
        cdf_chart("Whole answer: share of requests within a time", {"": series.e2e_s}),
        _ttft_over_rate(series),
        "</div>",
        _hit_rates(summary),
        '<div class="pair">',
        _requests(run),
        _uncached(run),
        "</div>",
        _pod_count(summary.timeline),
        _timelines(summary.timeline),
        _explorer(decisions),
        figure("In numbers", facts_table(fact_rows(run))),
        figure("What was run", facts_table(rows)),
        page_foot(summary.assumptions),
    ]
    note = "" if summary.complete else " Interrupted: the page shows only requests that had ended."
    said = f"{conditions['pods']} simulated pods, seed {summary.seed}.{note}"
    return page(
        f"{summary.config} on {conditions['trace']}",
        "\n".join([*run.warnings, said]),
        "\n".join(body),
        script=_SCRIPT if decisions is not None else "",
    )


def _facts(run: RunSummary) -> list[tuple[str, str]]:
    return [
        ("TTFT mean", seconds(run.ttft_s.mean)),
        ("TTFT p90", seconds(run.ttft_s.p90)),
        ("ITL p99", seconds(run.itl_s.p99)),
        ("TPOT mean", seconds(run.tpot_s.mean)),
        ("hit rate", share(run.hit_rate)),
        ("requests", f"{run.requests.sent:,}"),
        ("output tokens/s", number(run.output_tokens_per_s)),
    ]


def _ttft_over_rate(series: Series) -> str:
    """Return a chart of TTFT over the rate of completed requests, with the mean and p90 of each of
    40 equally long windows of the run.
    """
    caption = "TTFT over the arrival rate, by window of the run"
    if len(series) < _WINDOWS:
        return figure(caption, "<p>Too few requests.</p>")
    arrived_s, ttft_s = series.arrived_s, series.ttft_s
    edges = np.linspace(0, float(arrived_s.max()) + 1e-9, _WINDOWS + 1)
    window = np.digitize(arrived_s, edges) - 1
    means, worst = [], []
    for at in range(_WINDOWS):
        ttfts = ttft_s[window == at]
        if len(ttfts):
            rate = len(ttfts) / float(edges[1])
            means.append((rate, float(ttfts.mean())))
            worst.append((rate, float(np.percentile(ttfts, 90))))
    lines: dict[str, Points] = {"mean": sorted(means), "p90": sorted(worst)}
    x = Axis.over([rate for rate, _ in means], unit="requests/s", title="arrival rate")
    y = Axis.over([at for _, at in worst + means], unit="s", title="TTFT", logarithmic=True)
    return figure(caption, scatter_chart(lines, x=x, y=y, label=caption), list(lines))


def _hit_rates(summary: ReplaySummary) -> str:
    rates = {"this run": summary.run.hit_rate or 0.0}
    ceilings = None if summary.ceilings is UNSET else summary.ceilings
    if ceilings:
        rates |= {
            "one infinite cache": ceilings.one_cache,
            "infinite, affinity": ceilings.affinity,
            "this size, affinity": ceilings.affinity_at_capacity,
            "this size, random": ceilings.random_at_capacity,
        }
    caption = "Share of prompt tokens served from the cache"
    if ceilings:
        caption += ", its upper limit (one infinite cache), and estimates for other placements"
    return figure(caption, bars(rates))


def _by_pod(run: RunSummary) -> list[tuple[str, PodLoadSummary]]:
    return sorted(run.pods.items(), key=lambda item: (len(item[0]), item[0]))


def _requests(run: RunSummary) -> str:
    caption = "Requests that each pod completed"
    values = {name: float(load.requests) for name, load in _by_pod(run)}
    return figure(caption, bar_chart(values, y=Axis.over(list(values.values())), label=caption))


def _uncached(run: RunSummary) -> str:
    caption = "Prompt tokens that each pod had to compute, in thousands"
    tokens = {name: load.prompt_tokens - load.cached_tokens for name, load in _by_pod(run)}
    legs = {} if run.stages is UNSET else run.stages.prefill_pods
    for name, load in legs.items():
        tokens[name] = tokens.get(name, 0) + load.prompt_tokens - load.cached_tokens
    values = {
        name: round(tokens[name] / 1000, 1)
        for name in sorted(tokens, key=lambda name: (len(name), name))
    }
    return figure(caption, bar_chart(values, y=Axis.over(list(values.values())), label=caption))


def _pod_count(timeline: TimelineSummary) -> str:
    """Return a chart of the number of pods over time, or "" if the number never changed."""
    counts = timeline.pod_count
    if len(set(counts)) < 2:
        return ""
    caption = "Number of pods that start, serve, drain or restart, over time"
    points = list(zip(timeline.time_s, map(float, counts), strict=True))
    x = Axis.over([at for at, _ in points], unit="s", title="time")
    y = Axis.over([0.0, *(count for _, count in points)], title="pods")
    return figure(caption, line_chart({"pods": points}, x=x, y=y, label=caption))


def _timelines(timeline: TimelineSummary) -> str:
    """Return two small charts over time for each of at most `_PODS_SHOWN` pods: running and waiting
    requests, and KV-cache usage and hit rate in per cent.
    """
    times = timeline.time_s
    if not times:
        return ""
    pods = dict(list(timeline.pods.items())[:_PODS_SHOWN])
    counts = [value for pod in pods.values() for value in (*pod.running, *pod.waiting)]
    x = Axis.over(times, unit="s", title="time")
    requests = Axis.over([*counts, 1.0], title="requests")
    shares = Axis(low=0, high=100, unit="%", title="share")
    drawn = []
    for name, pod in pods.items():
        load = {
            "running": thinned(zip(times, map(float, pod.running), strict=True)),
            "waiting": thinned(zip(times, map(float, pod.waiting), strict=True)),
        }
        cache = {
            "KV cache in use": _per_cent(times, pod.kv_cache_usage),
            "hit rate so far": _per_cent(times, pod.hit_rate),
        }
        label = f"{name} over time"
        drawn.append(
            f"<div><b>{name}</b>"
            f"{line_chart(load, x=x, y=requests, label=label, size=SMALL)}"
            f"{line_chart(cache, x=x, y=shares, label=label, size=SMALL, first_colour=2)}</div>"
        )
    caption = "Every pod over time"
    if len(drawn) < len(timeline.pods):
        caption = f"The first {len(drawn)} of {len(timeline.pods):,} pods over time"
    return figure(caption, f'<div class="pods">{"".join(drawn)}</div>', [*load, *cache])


def _per_cent(times: Sequence[float], shares: Iterable[float]) -> Points:
    return thinned((at, 100 * value) for at, value in zip(times, shares, strict=True))


def thinned(points: Iterable[tuple[float, float]]) -> Points:
    """Return the lowest and the highest point of each of `_SPANS` parts of a line, so that peaks
    remain; all points if they are few.
    """
    line = list(points)
    if len(line) <= 2 * _SPANS:
        return line
    kept: list[tuple[float, float]] = []
    for span in np.array_split(np.arange(len(line)), _SPANS):
        by_value = sorted(span, key=lambda at: line[at][1])
        kept += [line[at] for at in sorted({by_value[0], by_value[-1]})]
    return kept


def _explorer(decisions: Path | None) -> str:
    """Return the page's explorer of routing decisions: a search field, an empty table, and the
    decisions as JSON. Return "" if there is no decisions file.
    """
    if decisions is None:
        return ""
    with decisions.open("rb") as file:
        total = sum(1 for _ in file)
        file.seek(0)
        every = max(1, math.ceil(total / _DECISIONS_SHOWN))
        kept = [explained(decode(line)) for at, line in enumerate(file) if at % every == 0]
    which = f"All {total:,} requests are on this page"
    if every > 1:
        first = ", ".join(str(one["request"]) for one in kept[:3])
        which = (
            f"{len(kept):,} of {total:,} requests are on this page, one in {every} ({first}, …); "
            "decisions.jsonl has all of them"
        )
    candidates = '<table class="numbers" id="candidates"></table>'
    # A "<" in the data could end the element that contains it.
    data = encode(kept).decode().replace("<", "\\u003c")
    return (
        f"<figure><figcaption>Why this pod?</figcaption><p>{which}. Line of the trace, starting "
        "from 0: "
        '<input id="wanted" type="number" min="0" value="0"></p>'
        f'<p id="missing"></p><p id="said"></p>{scrolling(candidates)}'
        f'</figure><script type="application/json" id="decisions">{data}</script>'
    )


def explained(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of decisions.jsonl in the form that the page shows, with the keys `request`,
    `said`, `rows` and `chosen`.

    `said` is a sentence about the decision. `rows` is the table of at most 16 candidates, the best
    ones first; its first row is the head, and a last row counts the candidates that are left out.
    Without candidates it is empty. `chosen` is the index of the chosen candidate's row, or None if
    it is not shown.
    """
    scored = sorted(line["candidates"], key=lambda candidate: -candidate["score"])
    rows: list[list[str]] = []
    chosen = None
    if scored:
        total = line["total_blocks"]
        rows.append(["pod", "score", f"matched blocks of {total:,}", *scored[0]["parts"]])
    for candidate in scored[:_CANDIDATES_SHOWN]:
        if candidate["endpoint"] == line["endpoint"]:
            chosen = len(rows)
        parts = [f"{part:.4f}" for part in candidate["parts"].values()]
        score, matched = f"{candidate['score']:.4f}", f"{candidate['matched_blocks']:,}"
        rows.append([candidate["endpoint"], score, matched, *parts])
    if len(scored) > _CANDIDATES_SHOWN:
        rows.append([f"and {len(scored) - _CANDIDATES_SHOWN:,} more"])
    return {"request": line["request"], "said": _said(line), "rows": rows, "chosen": chosen}


def _said(line: dict[str, Any]) -> str:
    request = f"Request {line['request']}"
    if line["time_s"] is None:
        why = (
            "no picker was running"
            if line["outcome"] == Fate.FAILED
            else "its client disconnected earlier"
        )
        return f"{request} did not reach a picker: {why}."
    request += f" at {line['time_s']:.3f} s"
    if line["endpoint"] is None:
        return f"{request} was refused: {line['refusal'].rstrip('.')}."
    found = f"{line['cached_tokens']:,} prompt tokens were in the cache"
    ended = _ENDED.get(line["outcome"], f"; {found}")
    expected = f"The picker expected {line['predicted_cached_tokens']:,} cached tokens."
    if not line["candidates"]:
        expected = "This policy scores no pods, so there are no scores to compare."
    where = f"was routed to {line['endpoint']}"
    if line["served"] is not None:
        where = f"was routed to {line['endpoint']} and rerouted to {line['served']}"
    return f"{request} {where}{ended}. {expected}"


_SCRIPT: Final = """
const decisions = JSON.parse(document.getElementById("decisions").textContent);
const wanted = document.getElementById("wanted");
const table = document.getElementById("candidates");
function show() {
  const line = Number(wanted.value);
  let found = decisions[0];
  for (const one of decisions)
    if (Math.abs(one.request - line) < Math.abs(found.request - line)) found = one;
  if (!found) return;
  document.getElementById("missing").textContent = found.request === line ? "" :
    "Request " + line + " is not on this page; this is the nearest one:";
  document.getElementById("said").textContent = found.said;
  table.replaceChildren();
  found.rows.forEach((cells, at) => {
    const row = table.insertRow();
    if (at === found.chosen) row.className = "chosen";
    for (const text of cells) {
      const cell = document.createElement(at && row.cells.length ? "td" : "th");
      cell.textContent = text;
      row.appendChild(cell);
    }
  });
}
wanted.addEventListener("input", show);
show();
"""
