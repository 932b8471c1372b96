"""The report of `sim replay`, and the parts that all reports share: tables as text and as Markdown,
and formats of numbers.
"""

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
    StageSummary,
    TokenGapSummary,
    WindowSummary,
)
from sim.measurement.token_gaps import STALL_MEDIANS

CONSTANTS: Final = (
    "On other set-ups these constants may be anywhere in their range, or outside it. Set them in "
    "a profile of your own (--profile)."
)
_NOTHING_SAID: Final = {
    "trace_format": "detected from the content",
    "block_tokens": "from the trace or its format",
    "requests_max": "all",
    "config_hashes": "none (a baseline)",
    "warm_up_s": "derived from the time over which requests arrive",
    "peer_delay_s": "pickers share nothing",
    "peer_partitions": "none",
    "peer_slow": "none",
    "pickers_away": "none",
    "scenario": "none",
    "autoscaler": "none",
}
"""Text that a report shows for a condition whose value is None or empty, by name of the condition."""


_CONDITIONS: Final = {
    "trace_format": "format of the trace",
    "block_tokens": "tokens per block of the trace",
    "rate_per_s": "arrivals per second, if the trace has no times",
    "skip_bad": "malformed lines are skipped",
    "requests_max": "maximum number of requests",
    "jitter_s": "arrivals are spread over",
    "speed": "arrivals are sped up by",
    "through": "form of prompts",
    "config_hashes": "hash of the configuration",
    "profiles": "pods by profile",
    "max_loras": "adapter slots per pod",
    "caches": "prompt caches of the pods",
    "engines": "pods by engine features",
    "estimated": "estimated profiles",
    "roles": "pods by role",
    "kv_link": "network of KV transfers",
    "kv_nics": "NICs of a pod by role",
    "kv_legs": "legs of a request",
    "kv_push": "layers are pushed when computed",
    "kv_first_contact_s": "first transfer between two pods takes longer by",
    "engine_evidence": "evidence for engine features",
    "replicas": "pickers",
    "assignment": "assignment of requests to pickers",
    "peer_delay_s": "delay between pickers",
    "peer_loss": "share of lost frames between pickers",
    "peer_interval_s": "decisions are shared every",
    "peer_snapshot": "a starting picker requests a snapshot from another",
    "peer_partitions": "pickers partitioned from the others",
    "peer_slow": "pickers with a longer delay to the others",
    "pickers_away": "pickers that stop and restart",
    "fallback_endpoints_max": "maximum number of fallback endpoints that a picker names",
    "scrape_interval_s": "time between scrapes",
    "scrape_delay_s": "age of a scraped page",
    "tokenize_us_per_token": "renderer time per token in µs",
    "tokenize_timeout_s": "maximum wait for the renderer",
    "kv_events_delay_s": "delay of KV events",
    "kv_events_loss": "share of lost KV events",
    "network_delay_s": "network delay, one way",
    "discovery_delay_s": "delay of pod changes",
    "response_chunks": "the picker observes first tokens",
    "abort_share": "share of impatient clients",
    "abort_after_s": "mean patience of impatient clients",
    "faults_per_hour": "faults per hour",
    "scenario": "scenario of incidents",
    "warm_up_s": "excluded warm-up",
    "check": "invariants are checked",
}
"""Labels of a run's conditions in reports, by name of the condition. A condition whose name is
plain words has no entry.
"""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a plain-text table: the first column left-aligned, all others right-aligned.

    The first row is the head. A head cell may have several lines, which are aligned at the bottom.
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
    """Return the rows of a table with line breaks in the head replaced by spaces."""
    head, *body = rows
    return [[cell.replace("\n", " ") for cell in head], *map(list, body)]


def markdown_table(rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return a Markdown table; the first row is the head.

    The first `text_columns` columns are left-aligned, the others right-aligned.
    """
    head, *body = on_one_line(rows)
    rule = ["---" if at < text_columns else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def seconds(value: float | None) -> str:
    """Return a measured time as text with three significant digits (more from 1,000 s on), in ms
    below one second and in s from there; a dash for None.
    """
    if value is None:
        return "-"
    shown, unit = (value * 1000, "ms") if abs(value) < 1 else (value, "s")
    # Trailing zeros show how many digits are known.
    places = max(0, 2 - math.floor(math.log10(abs(shown)))) if shown else 0
    return f"{shown:,.{places}f} {unit}"


def limit(value_s: float) -> str:
    """Return a configured time in seconds as text with as few digits as possible."""
    return f"{value_s * 1000:g} ms" if 0 < value_s < 1 else f"{value_s:,g} s"


def share(value: float | None) -> str:
    """Return a share (0 to 1) as a percentage; a dash for None."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Return a number as text with four significant digits, without decimals from 1,000 on; a dash
    for None.
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def latency_rows(run: RunSummary) -> list[list[str]]:
    """Return the rows of a table with mean and percentiles of TTFT, TPOT, E2E and queue time."""
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
    """Return the report row about the gaps between tokens. Its percentiles are over tokens instead
    of requests.
    """
    told = f"mean {seconds(itl.mean)}, p99 {seconds(itl.p99)}"
    if itl.p50 is not None:
        told += (
            f", {share(itl.stall_share)} stalls (longer than {STALL_MEDIANS} medians, "
            f"{seconds(STALL_MEDIANS * itl.p50)})"
        )
    return ["time between tokens", told]


def window_row(window: WindowSummary) -> list[str]:
    """Return the report row about the part of the run over which throughput is measured, and the
    parts that are excluded.
    """
    start, end = seconds(window.start_s), seconds(window.end_s)
    warm_up = window.warm_up_s
    left_out = f"{seconds(warm_up)} of warm-up" if warm_up else "no warm-up"
    return [
        "throughput over",
        f"{start} to {end}; excluded: {left_out}, {seconds(window.drain_s)} of drain",
    ]


def fact_rows(run: RunSummary) -> list[list[str]]:
    """Return the rows (label, value) of a run's report, except the latencies in `latency_rows`."""
    ended = ", ".join(f"{count:,} {fate}" for fate, count in run.requests.ended.items() if count)
    loads, goodput = run.imbalance, run.goodput
    return [
        ["requests", f"{run.requests.sent:,}: {ended}"],
        *([["refused", _reasons(run.refusals)]] if run.refusals else []),
        *([["failed", _reasons(run.failures)]] if run.failures else []),
        *([["requests sent again", f"{run.retries:,} times"]] if run.retries is not UNSET else []),
        *(
            [["served by another pod than the first named", f"{run.rescheduled:,}"]]
            if run.rescheduled is not UNSET
            else []
        ),
        *([["running requests evicted", f"{run.evicted:,}"]] if run.evicted is not UNSET else []),
        ["hit rate", f"{share(run.hit_rate)} of prompt tokens"],
        *(
            []
            if run.tier_hit_tokens is UNSET
            else [["cached tokens by tier", _tiers(run.tier_hit_tokens)]]
        ),
        itl_row(run.itl_s),
        window_row(run.window),
        ["output", f"{number(run.output_tokens_per_s)} tokens/s"],
        ["input", f"{number(run.input_tokens_per_s)} tokens/s"],
        [
            "goodput",
            (f"{share(goodput.share)} with {targets(goodput)}"),
        ],
        ["requests, most loaded pod over mean", number(loads.requests.max_over_mean)],
        ["uncached tokens, most loaded pod over mean", number(loads.uncached_tokens.max_over_mean)],
        *_estimate_rows(run.prediction.mean_absolute_error_tokens),
        ["age of metrics at a decision", seconds(run.metrics_age_s)],
        *_stage_rows(run.stages),
        *_peer_rows(run.peers),
        *_pool_rows(run.pool),
        ["preemptions", f"{run.preemptions:,}"],
        *([["malformed lines skipped", f"{run.bad_lines:,}"]] if run.bad_lines else []),
        ["digest", run.digest],
    ]


def targets(goodput: Goodput) -> str:
    """Return the latency targets of goodput in words."""
    ttft, tpot = limit(goodput.ttft_target_s), limit(goodput.tpot_target_s)
    return f"TTFT up to {ttft} and TPOT up to {tpot}"


def _estimate_rows(error_tokens: float | None) -> list[list[str]]:
    """Return the report row about the error of the picker's cache estimates; no row for a policy
    that estimates nothing.
    """
    if error_tokens is None:
        return []
    return [
        [
            "the picker's estimate of the cache",
            f"mean absolute error of {number(error_tokens)} tokens",
        ]
    ]


def _stage_rows(stages: StageSummary | UnsetType) -> list[list[str]]:
    """Return the report rows about stages of requests; no rows if no pod has a role."""
    if stages is UNSET:
        return []
    rows = [["routes", _reasons(stages.routes) or "none"]]
    if stages.refusals:
        rows.append(["refused because of a stage", _reasons(stages.refusals)])
    moved = f"{stages.transfers:,} with {stages.transferred_tokens:,} tokens"
    rows.append(["KV transfers", f"{moved}, {stages.transferred_bytes / 1e9:,.4g} GB"])
    rows.append(["prefill legs that ended", f"{stages.prefill_legs:,}"])
    if stages.prefill_s.mean is not None:
        parts = (
            ("prefill", stages.prefill_s),
            ("waiting for decode memory", stages.reservation_s),
            ("transfer", stages.transfer_s),
            ("other", stages.other_s),
        )
        told = ", ".join(f"{name} {seconds(found.mean)}" for name, found in parts)
        rows.append(["TTFT of requests with a prefill leg, mean", told])
    if stages.leases_expired:
        rows.append(["leases that ended before a transfer", f"{stages.leases_expired:,}"])
    return rows


def pod_rows(run: RunSummary) -> list[list[str]]:
    """Return the rows of the table of pods; prefill legs are rows of their own."""
    rows = [["pod", "requests", "hit rate", "output tokens"]]
    legs = {} if run.stages is UNSET else run.stages.prefill_pods
    for of, loads in (("", run.pods), (", prefill legs", legs)):
        for name, load in sorted(loads.items(), key=lambda item: (len(item[0]), item[0])):
            requests, tokens = f"{load.requests:,}", f"{load.output_tokens:,}"
            rows.append([f"{name}{of}", requests, share(load.hit_rate), tokens])
    return rows


def _peer_rows(peers: PeerSummary | UnsetType) -> list[list[str]]:
    """Return the report rows about the exchange between pickers; no rows if pickers share nothing."""
    if peers is UNSET:
        return []
    told = f"{peers.frames:,} frames, {peers.bytes / 1e6:.3g} MB, {peers.frames_lost:,} lost"
    learnt = f"{peers.records_applied:,}"
    if unknown := peers.records_unknown_chain:
        learnt += f", {unknown:,} continued a lost chain"
    return [["sent to other pickers", told], ["decisions received from other pickers", learnt]]


def _pool_rows(pool: PoolSummary | UnsetType) -> list[list[str]]:
    """Return the report rows about the number of pods; no rows if the summary does not have it."""
    if pool is UNSET:
        return []
    told = f"{pool.pods_min:,}"
    if pool.pods_min != pool.pods_max:
        told += f" to {pool.pods_max:,}, mean {number(pool.pods_mean)}"
    return [["pods", told], ["pod-hours", number(pool.pod_hours)]]


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _tiers(tokens: Mapping[str, int]) -> str:
    """Return the number of cached tokens in each cache tier as text. Tiers have their names on the
    metrics page.
    """
    return ", ".join(f"{tier} {found:,}" for tier, found in tokens.items())


def run_table(run: RunSummary) -> str:
    """Return the warnings and tables of a run for the terminal."""
    rows = fact_rows(run)
    width = max(len(name) for name, _ in rows)
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    warnings = "".join(f"{warning}\n\n" for warning in run.warnings)
    return f"{warnings}{table(latency_rows(run))}\n\n{facts}\n"


def warnings_of(summary: RepeatedSummary) -> list[str]:
    """Return each warning of a summary with repeated runs once.

    Warnings about estimated profiles come first, including those of options that were not run. All
    others come from the runs with the first seed; they begin with the names of their configurations
    unless they concern all.
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
    """Return the content of report.md of `sim replay`."""
    run = summary.run
    notes = (
        ""
        if summary.complete
        else "**Interrupted: the figures cover only requests that had ended.**\n\n"
    )
    notes += "".join(f"**{warning}**\n\n" for warning in run.warnings)
    conditions = summary.conditions
    rows = [["", ""], *fact_rows(run)]
    return (
        f"# {summary.config} on {conditions['trace']}\n\n{notes}"
        f"Seed {summary.seed}, {conditions['pods']} pods.\n\n"
        f"{markdown_table(latency_rows(run))}\n\n{markdown_table(rows)}\n\n"
        f"{markdown_table(pod_rows(run))}\n\n## What was run\n\n"
        f"{markdown_table([['', ''], *condition_rows(conditions)])}\n\n{foot(summary.assumptions)}"
    )


def varied_sentences(summary: RepeatedSummary) -> str:
    """Return sentences about what was varied between the seeds, and how the confidence intervals
    are computed.
    """
    first, seeds = summary.first_seed, summary.seeds
    alike = "the same for every configuration"
    if seeds == 1:
        return (
            f"The only seed is {first}: nothing was varied, so the figures have no confidence "
            "intervals. Confidence intervals need at least 3 seeds; pass --seeds 3."
        )
    if summary.generated:
        return (
            f"Seeds {first} to {first + seeds - 1}: each is a random draw of the traffic, of "
            f"scrape times and of plugins' random choices, {alike}. Each figure is the mean of "
            f"{summary.varied}. A 95 % confidence interval, which needs at least 3 seeds, contains "
            "the mean over all possible draws 19 times out of 20."
        )
    return (
        f"Seed {first} replays the recorded trace, and its figures are shown. Each other seed "
        "replays a resample of the trace with its own scrape times and random choices of plugins, "
        f"{alike}. A 95 % confidence interval, over {summary.varied}, shows how far the figure may "
        "be off for such traffic in general. It does not cover events that never occur in this trace."
    )


def assumption_rows(assumptions: Sequence[AssumptionSummary]) -> list[list[str]]:
    """Return the rows of the table of constants that were measured on one set-up, with their
    ranges. The first row is the head.
    """
    rows = [["constant", "here", "range", "source"]]
    for one in assumptions:
        unit = f" {one.unit}" if one.unit else ""
        values = ", ".join(dict.fromkeys(f"{value:g}{unit}" for value in one.values.values()))
        between = f"{one.low:g} to {one.high:g}{unit}"
        rows.append([f"{one.says}, {one.constant}", values, between, one.source])
    return rows


def foot(assumptions: Sequence[AssumptionSummary]) -> str:
    """Return the end of a report.md: effects that the simulator does not model, and constants that
    were measured on one set-up.
    """
    left_out = "\n".join(f"- {sentence}" for sentence in NOT_MODELLED)
    return (
        f"## What is not modelled\n\n{left_out}\n\n## Constants from one set-up\n\n{CONSTANTS}\n\n"
        f"{markdown_table(assumption_rows(assumptions))}\n"
    )


def measurement_sentences(runs: Sequence[NamedRun]) -> str:
    """Return sentences about the parts of the runs that the figures exclude (warm-up and drain), and
    the definitions of ITL and stall.
    """
    warm_up = max(one.run.window.warm_up_s for one in runs)
    drain = max(one.run.window.drain_s for one in runs)
    first = (
        f"The warm-up (first {seconds(warm_up)}) is excluded"
        if warm_up
        else "No warm-up is excluded"
    )
    return (
        f"{first}. Throughput and ITL also exclude the drain after the last arrival, up to "
        f"{seconds(drain)}. ITL is the time between two tokens. A stall is an ITL of more than "
        f"{STALL_MEDIANS} medians."
    )


def condition_rows(conditions: Conditions) -> list[list[str]]:
    """Return the conditions of a run as table rows of (label, value)."""
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
