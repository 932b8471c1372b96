"""What a run or a comparison has shown, for people: tables as text and as Markdown."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from msgspec import UNSET, UnsetType

from sim.engine.profiles import estimate_warning
from sim.measurement.assumptions import NOT_MODELLED
from sim.measurement.summaries import (
    AssumptionSummary,
    Conditions,
    Goodput,
    NamedRun,
    PeerSummary,
    PoolSummary,
    RepeatedSummary,
    ReplaySummary,
    RunSummary,
    TokenGapSummary,
    WindowSummary,
)
from sim.measurement.token_gaps import STALL_MEDIANS

CONSTANTS: Final = (
    "Elsewhere they may be anywhere in their range, or outside; a profile of your own says others "
    "(--profile)."
)
_NOTHING_SAID: Final = {
    "trace_format": "found by content",
    "block_tokens": "as the trace or its format says",
    "requests_max": "all",
    "config_hashes": "a baseline",
    "warm_up_s": "by how long requests arrive",
    "peer_delay_s": "they tell each other nothing",
    "peer_partitions": "none",
    "peer_slow": "none",
    "pickers_away": "none",
    "scenario": "none",
    "autoscaler": "none",
}
"""What it means that a condition is not there."""


_CONDITIONS: Final = {
    "trace_format": "format of the trace",
    "block_tokens": "tokens in a block of the trace",
    "rate_per_s": "arrivals a second, if the trace has no times",
    "skip_bad": "malformed lines are skipped",
    "requests_max": "requests at most",
    "jitter_s": "arrivals are spread over",
    "speed": "arrivals are sped up by",
    "through": "prompts go through",
    "config_hashes": "hash of the configuration",
    "profiles": "pods by profile",
    "max_loras": "adapter slots of a pod",
    "caches": "how pods keep prompts",
    "engines": "pods by what engines do besides",
    "estimated": "estimated profiles",
    "engine_evidence": "what that was checked against",
    "replicas": "pickers",
    "assignment": "requests reach pickers",
    "peer_delay_s": "one picker hears another after",
    "peer_loss": "share of the frames between them that are lost",
    "peer_interval_s": "decisions are told together every",
    "peer_snapshot": "who starts asks another for what it knows",
    "peer_partitions": "pickers that are parted from the others",
    "peer_slow": "pickers that are heard and hear later",
    "pickers_away": "pickers that die and come back",
    "fallback_endpoints_max": "endpoints that pickers name besides the first",
    "scrape_interval_s": "time between scrapes",
    "scrape_delay_s": "age of a scraped page",
    "tokenize_us_per_token": "a renderer makes a token in µs",
    "tokenize_timeout_s": "requests wait for it at most",
    "kv_events_delay_s": "engines tell what they hold after",
    "kv_events_loss": "share of what they tell that is lost",
    "network_delay_s": "network delay, one way",
    "discovery_delay_s": "delay of pod changes",
    "response_chunks": "the picker sees first tokens",
    "abort_share": "share of impatient clients",
    "abort_after_s": "their mean patience",
    "faults_per_hour": "faults an hour",
    "scenario": "what happens when",
    "warm_up_s": "warm-up that is left out",
    "check": "invariants are checked",
}
"""How people read the names of conditions; those that are words already are not here."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Plain columns, the first to the left, the others to the right.

    The first row is the head; its cells may have several lines, which stand on the column.
    """
    head, *body = rows
    raised = [cell.split("\n")[::-1] for cell in head]
    lines = [*zip_longest(*raised, fillvalue="")][::-1]
    rows = [*lines, *body]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    told = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        told.append("  ".join(cells).rstrip())
    return "\n".join(told)


def on_one_line(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The same with every cell of the head on one line."""
    head, *body = rows
    return [[cell.replace("\n", " ") for cell in head], *map(list, body)]


def markdown_table(rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return a Markdown table; the first row is the head.

    The first `text_columns` columns are aligned as text, the others as numbers.
    """
    head, *body = on_one_line(rows)
    rule = ["---" if at < text_columns else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def seconds(value: float | None) -> str:
    """Measured: three significant digits, in ms below one second; a dash for nothing."""
    if value is None:
        return "-"
    shown, unit = (value * 1000, "ms") if abs(value) < 1 else (value, "s")
    # Zeros at the end too: in a column they tell that the digits are known.
    places = max(0, 2 - math.floor(math.log10(abs(shown)))) if shown else 0
    return f"{shown:,.{places}f} {unit}"


def limit(value_s: float) -> str:
    """Asked for, not measured: as few digits as it has."""
    return f"{value_s * 1000:g} ms" if 0 < value_s < 1 else f"{value_s:,g} s"


def share(value: float | None) -> str:
    """A percentage; a dash for nothing."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Four significant digits, and whole above; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def latency_rows(run: RunSummary) -> list[list[str]]:
    """TTFT, TPOT, E2E and queue, a row each."""
    ranks = ("mean", "p50", "p90", "p95", "p99")
    rows = [["", *ranks]]
    for label, found in (
        ("TTFT", run.ttft_s),
        ("TPOT", run.tpot_s),
        ("E2E", run.e2e_s),
        ("queue", run.queue_s),
    ):
        rows.append([label, *(seconds(getattr(found, rank)) for rank in ranks)])
    return rows


def itl_row(itl: TokenGapSummary) -> list[str]:
    """The gaps between tokens, in words: their percentiles are those of tokens, not of requests."""
    told = f"mean {seconds(itl.mean)}, p99 {seconds(itl.p99)}"
    if itl.p50 is not None:
        told += (
            f", {share(itl.stall_share)} stalls (longer than {STALL_MEDIANS} medians, "
            f"{seconds(STALL_MEDIANS * itl.p50)})"
        )
    return ["time between tokens", told]


def window_row(window: WindowSummary) -> list[str]:
    """What the figures are of, and what was left out."""
    start, end = seconds(window.start_s), seconds(window.end_s)
    warm_up = window.warm_up_s
    left_out = f"{seconds(warm_up)} of warm-up" if warm_up else "no warm-up"
    return [
        "throughput over",
        f"{start} to {end}; left out: {left_out}, {seconds(window.drain_s)} of drain",
    ]


def fact_rows(run: RunSummary) -> list[list[str]]:
    """Everything else that is one number."""
    ended = ", ".join(f"{count:,} {fate}" for fate, count in run.requests.ended.items() if count)
    loads, goodput = run.imbalance, run.goodput
    return [
        ["requests", f"{run.requests.sent:,}: {ended}"],
        *([["refused", _reasons(run.refusals)]] if run.refusals else []),
        *([["failed", _reasons(run.failures)]] if run.failures else []),
        *([["sent again", f"{run.retries:,} times"]] if run.retries is not UNSET else []),
        *(
            [["served by another pod than the first named", f"{run.rescheduled:,}"]]
            if run.rescheduled is not UNSET
            else []
        ),
        ["hit rate", f"{share(run.hit_rate)} of prompt tokens"],
        *([] if run.tier_hit_tokens is UNSET else [["found by tier", _tiers(run.tier_hit_tokens)]]),
        itl_row(run.itl_s),
        window_row(run.window),
        ["output", f"{number(run.output_tokens_per_s)} tokens/s"],
        ["input", f"{number(run.input_tokens_per_s)} tokens/s"],
        [
            "goodput",
            (f"{share(goodput.share)} with {targets(goodput)}"),
        ],
        ["requests, most loaded pod over mean", number(loads.requests.max_over_mean)],
        ["uncached tokens, likewise", number(loads.uncached_tokens.max_over_mean)],
        *_estimate_rows(run.prediction.mean_absolute_error_tokens),
        ["age of metrics at a decision", seconds(run.metrics_age_s)],
        *_peer_rows(run.peers),
        *_pool_rows(run.pool),
        ["preemptions", f"{run.preemptions:,}"],
        *([["malformed lines skipped", f"{run.bad_lines:,}"]] if run.bad_lines else []),
        ["digest", run.digest],
    ]


def targets(goodput: Goodput) -> str:
    """What makes a request good."""
    ttft, tpot = limit(goodput.ttft_target_s), limit(goodput.tpot_target_s)
    return f"TTFT up to {ttft} and TPOT up to {tpot}"


def _estimate_rows(error_tokens: float | None) -> list[list[str]]:
    """None for a policy that estimates nothing."""
    if error_tokens is None:
        return []
    return [["the picker's estimate of the cache", f"off by {number(error_tokens)} tokens"]]


def _peer_rows(peers: PeerSummary | UnsetType) -> list[list[str]]:
    """None where pickers tell each other nothing."""
    if peers is UNSET:
        return []
    told = f"{peers.frames:,} frames, {peers.bytes / 1e6:.3g} MB, {peers.frames_lost:,} lost"
    learnt = f"{peers.records_applied:,}"
    if unknown := peers.records_unknown_chain:
        learnt += f", {unknown:,} went on from a chain that was lost"
    return [["told to other pickers", told], ["decisions learnt of others", learnt]]


def _pool_rows(pool: PoolSummary | UnsetType) -> list[list[str]]:
    """None of a summary that is not of a whole run."""
    if pool is UNSET:
        return []
    told = f"{pool.pods_min:,}"
    if pool.pods_min != pool.pods_max:
        told += f" to {pool.pods_max:,}, mean {number(pool.pods_mean)}"
    return [["pods", told], ["pod-hours", number(pool.pod_hours)]]


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _tiers(tokens: Mapping[str, int]) -> str:
    """Tokens found, in the words of the page that tells them."""
    return ", ".join(f"{tier} {found:,}" for tier, found in tokens.items())


def run_table(run: RunSummary) -> str:
    """For the terminal."""
    rows = fact_rows(run)
    width = max(len(name) for name, _ in rows)
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    warnings = "".join(f"{warning}\n\n" for warning in run.warnings)
    return f"{warnings}{table(latency_rows(run))}\n\n{facts}\n"


def warnings_of(summary: RepeatedSummary) -> list[str]:
    """What would mislead whoever reads a comparison, a sweep or a sizing, each once.

    Estimated profiles come first, also those of options without a run; the others are of the first seed.
    """
    estimated: dict[str, str] = summary.conditions.get("estimated", {})
    estimates = [estimate_warning(name, said) for name, said in estimated.items()]
    told: dict[str, dict[str, None]] = {}
    configs = {run.config: None for run in summary.runs}
    for run in summary.runs:
        if run.seed == summary.first_seed:
            for warning in run.run.warnings:
                told.setdefault(warning, {})[run.config] = None
    return estimates + [
        warning if names == configs else f"{', '.join(names)}: {warning}"
        for warning, names in told.items()
        if warning not in estimates
    ]


def run_report(summary: ReplaySummary) -> str:
    """report.md of one run."""
    run = summary.run
    notes = "" if summary.complete else "**Interrupted: only what had ended is counted.**\n\n"
    notes += "".join(f"**{warning}**\n\n" for warning in run.warnings)
    conditions = summary.conditions
    rows = [["", ""], *fact_rows(run)]
    pods = [["pod", "requests", "hit rate", "output tokens"]]
    for name, load in sorted(run.pods.items(), key=lambda item: (len(item[0]), item[0])):
        requests, tokens = f"{load.requests:,}", f"{load.output_tokens:,}"
        pods.append([name, requests, share(load.hit_rate), tokens])
    return (
        f"# {summary.config} on {conditions['trace']}\n\n{notes}"
        f"Seed {summary.seed}, {conditions['pods']} pods.\n\n"
        f"{markdown_table(latency_rows(run))}\n\n{markdown_table(rows)}\n\n"
        f"{markdown_table(pods)}\n\n## What was run\n\n"
        f"{markdown_table([['', ''], *condition_rows(conditions)])}\n\n{foot(summary.assumptions)}"
    )


def varied_sentences(summary: RepeatedSummary) -> str:
    """What was varied between the seeds of a comparison or a sweep, and what intervals mean."""
    first, seeds = summary.first_seed, summary.seeds
    alike = "the same for every configuration"
    if seeds == 1:
        return (
            f"Seed {first}, one seed: nothing was varied, and how far other traffic would differ is "
            "not known (--seeds)."
        )
    if summary.generated:
        return (
            f"Seeds {first} to {first + seeds - 1}: each draws the traffic anew, and scrapes and "
            f"ties, {alike}. Figures are means over {summary.varied}; a 95 % interval holds the "
            "mean over ever more of them, 19 times out of 20."
        )
    return (
        f"Seed {first} replays the trace as it was recorded: its figures are shown. Each other one "
        f"replays a resample of it, with scrapes and ties of its own, {alike}. A 95 % interval, over "
        f"{summary.varied}, says how far the figure may be off for such traffic at large; what "
        "never happens in this trace it does not know."
    )


def assumption_rows(assumptions: Sequence[AssumptionSummary]) -> list[list[str]]:
    """The constants that come from one set-up, with their ranges; the first row is the head."""
    rows = [["constant", "here", "range", "source"]]
    for one in assumptions:
        unit = f" {one.unit}" if one.unit else ""
        values = ", ".join(dict.fromkeys(f"{value:g}{unit}" for value in one.values.values()))
        between = f"{one.low:g} to {one.high:g}{unit}"
        rows.append([f"{one.says}, {one.constant}", values, between, one.source])
    return rows


def foot(assumptions: Sequence[AssumptionSummary]) -> str:
    """The end of a report.md: what no figure of it holds."""
    left_out = "\n".join(f"- {sentence}" for sentence in NOT_MODELLED)
    return (
        f"## What is not modelled\n\n{left_out}\n\n## Constants from one set-up\n\n{CONSTANTS}\n\n"
        f"{markdown_table(assumption_rows(assumptions))}\n"
    )


def windows_sentence(runs: Sequence[NamedRun]) -> str:
    """What was left out of the figures of a comparison or a sweep."""
    warm_up = max(one.run.window.warm_up_s for one in runs)
    drain = max(one.run.window.drain_s for one in runs)
    first = f"The first {seconds(warm_up)} are" if warm_up else "Nothing is"
    return (
        f"{first} left out as warm-up; of throughput and ITL also the drain after the last arrival, "
        f"up to {seconds(drain)}. ITL is the time between two tokens, a stall one of more than "
        f"{STALL_MEDIANS} medians."
    )


def condition_rows(conditions: Conditions) -> list[list[str]]:
    """What was run, in words: name and value."""
    return [
        [_CONDITIONS.get(name, name), _words(name, value)] for name, value in conditions.items()
    ]


def _words(name: str, value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{key}: {_words(name, item)}" for key, item in value.items())
        case [_, *_]:
            return "; ".join(_words(name, item) for item in value)
        case _:
            return _word(name, value)


def _word(name: str, value: object) -> str:
    match value:
        case None | []:
            return _NOTHING_SAID.get(name, "-")
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.endswith("_s") and not name.endswith("_per_s"):
            return limit(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)
