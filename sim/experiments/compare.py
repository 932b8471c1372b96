"""`sim compare`: configurations on the same requests, with honest uncertainty."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.experiments.jobs import Experiment, Result, Results, add_experiment_options
from sim.experiments.run_options import (
    POLICY_HELP,
    add_run_options,
    conditions,
    count_of_runs,
    named_policies,
    run_settings,
)
from sim.measurement.intervals import Difference, compare_runs, means_of
from sim.measurement.measures import Series, mean, rounded
from sim.output import open_folder
from sim.reports.compare_report import (
    comparison_page,
    comparison_report,
    comparison_table,
    verdict,
)


def measured(series: Series) -> dict[str, float]:
    """What configurations are compared by; NaN where nothing was completed."""
    ttft_s = series.ttft_s[~np.isnan(series.ttft_s)]
    p50, p90, p99 = np.percentile(ttft_s, (50, 90, 99)) if len(ttft_s) else [math.nan] * 3
    prompt_tokens = series.prompt_tokens.sum()
    span_s = math.nan
    if len(series):
        span_s = (series.arrived_s + series.e2e_s).max() - series.arrived_s.min()
    return {
        "ttft_mean_s": mean(ttft_s),
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
        "ttft_p99_s": p99,
        "tpot_mean_s": mean(series.tpot_s),
        "e2e_mean_s": mean(series.e2e_s),
        "hit_rate": series.cached_tokens.sum() / prompt_tokens if prompt_tokens else math.nan,
        "output_tokens_per_s": series.output_tokens.sum() / span_s,
    }


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command line of `sim compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="configurations on the same requests, with confidence intervals",
        description="Replay TRACE under several configurations with common random numbers.",
        allow_abbrev=False,
    )
    add_run_options(parser, several_replicas=True)
    add = parser.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE|NAME",
        help="repeat, or give several --replicas; the others are compared with the first. "
        + POLICY_HELP,
    )
    add(
        "--seeds", type=count_of_runs, default=5, metavar="K", help="how many, each a whole run (5)"
    )
    add("--seed", type=int, default=1, help="the first of them (1)")
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: done. 2: usage. 130: interrupted, what is done is kept. Raises what is told by `sim`."""
    counts: tuple[int, ...] = options.replicas
    if len(options.config) * len(counts) < 2:
        print("sim: --config is needed twice or more, or --replicas as 1,2", file=sys.stderr)
        return 2
    policies = named_policies(options.config)
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}", flush=True)
    seeds = range(options.seed, options.seed + options.seeds)
    # Seed by seed, so that an interrupted comparison has whole seeds.
    jobs = [
        run_settings(options, policy, seed, replicas)
        for seed in seeds
        for policy in policies
        for replicas in counts
    ]
    names = [
        policy.name if len(counts) == 1 else f"{policy.name}, {_pickers(replicas)}"
        for policy in policies
        for replicas in counts
    ]
    each = range(len(names))
    what_was_run = conditions(*jobs[: len(names)])

    def whole(results: Results) -> list[list[Result]]:
        """Of each configuration, all seeds under which every configuration has run."""
        starts = range(0, len(jobs), len(names))
        ended = [start for start in starts if all(start + at in results for at in each)]
        return [[results[start + at] for start in ended] for at in each]

    def columns(results: Results) -> list[list[Series]]:
        return [[one.series for one in found] for found in whole(results)]

    def summary(results: Results) -> dict[str, Any]:
        found = whole(results)
        return {
            "first_seed": options.seed,
            "seeds": len(found[0]),
            "conditions": what_was_run,
            "configs": _compared(names, found),
            "runs": [
                {"config": names[at % len(names)], "seed": jobs[at].seed, **results[at].summary}
                for at in sorted(results)
            ],
        }

    return Experiment(
        title="compare",
        jobs=jobs,
        summary=summary,
        table=comparison_table,
        reports=lambda told, results: {
            "report.md": comparison_report(told),
            "report.html": comparison_page(told, columns(results)),
        },
    ).carry_out(open_folder(options), workers=options.workers)


def _pickers(replicas: int) -> str:
    return "1 picker" if replicas == 1 else f"{replicas} pickers"


def _compared(names: Sequence[str], runs: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Every measure of every configuration, and its difference from the first one."""
    if not runs[0]:
        return {}
    columns = [[one.series for one in found] for found in runs]
    told: dict[str, Any] = {}
    for at, name in enumerate(names):
        differences = compare_runs(columns[0], columns[at], measured) if at else {}
        means = means_of(columns[at], measured)
        told[name] = {
            "requests": _requests(runs[at]),
            "mean": {measure: rounded(value) for measure, value in means.items()},
            "difference": {
                measure: _told(measure, found) for measure, found in differences.items()
            },
        }
    return told


def _requests(runs: Sequence[Result]) -> dict[str, int]:
    """How many were sent, and how they ended, over all runs."""
    counts = [one.summary["requests"] for one in runs]
    return {fate: sum(count[fate] for count in counts) for fate in counts[0]}


def _told(measure: str, found: Difference) -> dict[str, Any]:
    return {
        "value": rounded(found.difference),
        "relative": rounded(found.difference / found.reference) if found.reference else None,
        "low": None if found.low is None else rounded(found.low),
        "high": None if found.high is None else rounded(found.high),
        "over": found.over,
        "significant": found.significant,
        "verdict": verdict(measure, found),
    }
