"""`sim compare`: configurations on the same requests, with honest uncertainty."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sim.intervals import Difference, Measure, compare_runs
from sim.jobs import Experiment, Result, Results, add_experiment_options
from sim.measures import Series, mean, percentile, rounded
from sim.output import open_folder
from sim.report import markdown_table, number, seconds, share, table
from sim.run_options import (
    POLICY_HELP,
    add_run_options,
    conditions,
    count_of_runs,
    named_policies,
    run_settings,
)

NO_DIFFERENCE: Final = "no significant difference"


def _hit_rate(series: Series) -> float:
    prompt = series.prompt_tokens.sum()
    return float(series.cached_tokens.sum() / prompt) if prompt else float("nan")


def _output_tokens_per_s(series: Series) -> float:
    if not len(series):
        return float("nan")
    span_s = float((series.arrived_s + series.e2e_s).max() - series.arrived_s.min())
    return float(series.output_tokens.sum()) / span_s


MEASURES: Final[Mapping[str, Measure]] = {
    "ttft_mean_s": lambda series: mean(series.ttft_s),
    "ttft_p50_s": lambda series: percentile(series.ttft_s, 50),
    "ttft_p90_s": lambda series: percentile(series.ttft_s, 90),
    "ttft_p99_s": lambda series: percentile(series.ttft_s, 99),
    "tpot_mean_s": lambda series: mean(series.tpot_s),
    "e2e_mean_s": lambda series: mean(series.e2e_s),
    "hit_rate": _hit_rate,
    "output_tokens_per_s": _output_tokens_per_s,
}
_LABELS: Final = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT mean",
    "e2e_mean_s": "E2E mean",
    "hit_rate": "hit rate",
    "output_tokens_per_s": "output tokens/s",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command line of `sim compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="configurations on the same requests, with confidence intervals",
        description="Replay TRACE under several configurations with common random numbers.",
        allow_abbrev=False,
    )
    add_run_options(parser)
    add = parser.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE|NAME",
        help=f"repeat; the others are compared with the first. {POLICY_HELP}",
    )
    add(
        "--seeds", type=count_of_runs, default=5, metavar="K", help="how many, each a whole run (5)"
    )
    add("--seed", type=int, default=1, help="the first of them (1)")
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: done. 2: usage. 130: interrupted, what is done is kept. Raises what is told by `sim`."""
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}", flush=True)
    if len(options.config) < 2:
        print("sim: --config is needed twice or more", file=sys.stderr)
        return 2
    policies = named_policies(options.config)
    seeds = range(options.seed, options.seed + options.seeds)
    # Seed by seed, so that an interrupted comparison has whole seeds.
    jobs = [run_settings(options, policy, seed) for seed in seeds for policy in policies]
    starts = range(0, len(jobs), len(policies))

    def summary(results: Results) -> dict[str, Any]:
        rows = [range(start, start + len(policies)) for start in starts]
        whole = [[results[at] for at in row] for row in rows if all(at in results for at in row)]
        return {
            "first_seed": options.seed,
            "seeds": len(whole),
            "conditions": conditions(jobs[0]),
            "configs": _compared([policy.name for policy in policies], whole),
            "runs": [
                {"config": jobs[at].policy.name, "seed": jobs[at].seed, **results[at].summary}
                for at in sorted(results)
            ],
        }

    return Experiment(
        title="compare",
        jobs=jobs,
        summary=summary,
        table=comparison_table,
        reports={"report.md": comparison_report},
    ).carry_out(open_folder(options), workers=options.workers)


def _compared(names: Sequence[str], runs: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Every measure of every configuration, and its difference from the first one."""
    if not runs:
        return {}
    columns = [[row[at].series for row in runs] for at in range(len(names))]
    told: dict[str, Any] = {}
    for at, name in enumerate(names):
        told[name] = {"mean": {}, "difference": {}}
        for measure, found in compare_runs(columns[0], columns[at], MEASURES).items():
            told[name]["mean"][measure] = rounded(found.value)
            if at:
                told[name]["difference"][measure] = _told(found)
    return told


def _told(found: Difference) -> dict[str, Any]:
    return {
        "value": rounded(found.difference),
        "relative": rounded(found.difference / found.reference) if found.reference else None,
        "low": None if found.low is None else rounded(found.low),
        "high": None if found.high is None else rounded(found.high),
        "over": found.over,
        "significant": found.significant,
        "verdict": verdict(found),
    }


def verdict(found: Difference) -> str:
    """In words: how large the difference is, or that there is none that one could be sure of."""
    if found.low is None:
        return f"not enough to tell from: {found.over}"
    if not found.significant:
        return NO_DIFFERENCE
    relative = found.difference / found.reference if found.reference else float(np.inf)
    return f"{relative:+.1%}"


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["", *summary["configs"]]]
    for measure, label in _LABELS.items():
        values = [
            _shown(measure, config["mean"][measure]) for config in summary["configs"].values()
        ]
        rows.append([label, *values])
    return rows


def _difference_rows(summary: dict[str, Any]) -> list[list[str]]:
    first = next(iter(summary["configs"]))
    rows = [[f"against {first}", "difference", "95 % interval", "verdict"]]
    for name, config in summary["configs"].items():
        for measure, found in config["difference"].items():
            low, high = _shown(measure, found["low"]), _shown(measure, found["high"])
            value = _shown(measure, found["value"])
            label = f"{name}: {_LABELS[measure]}"
            rows.append([label, value, f"{low} to {high}", found["verdict"]])
    return rows


def _shown(measure: str, value: float | None) -> str:
    if measure == "hit_rate":
        return share(value)
    return seconds(value) if measure.endswith("_s") and "tokens" not in measure else number(value)


def comparison_table(summary: dict[str, Any]) -> str:
    """For the terminal."""
    if not summary["configs"]:
        return "interrupted before every configuration had run once"
    return f"{table(_rows(summary))}\n\n{table(_difference_rows(summary))}\n\n{_basis(summary)}\n"


def comparison_report(summary: dict[str, Any]) -> str:
    """report.md of a comparison."""
    heading = f"# {' against '.join(summary['configs']) or 'Comparison'}\n\n"
    if not summary["configs"]:
        return heading + "Not every configuration has run once yet.\n"
    notes = "" if summary["complete"] else "**Not complete: only whole seeds are counted.**\n\n"
    told = [["", ""], *[[name, str(value)] for name, value in summary["conditions"].items()]]
    return (
        f"{heading}{notes}{markdown_table(_rows(summary))}\n\n"
        f"{markdown_table(_difference_rows(summary))}\n\n{_basis(summary)}\n\n"
        f"## What was run\n\n{markdown_table(told)}\n"
    )


def _basis(summary: dict[str, Any]) -> str:
    differences = [
        found["over"]
        for config in summary["configs"].values()
        for found in config["difference"].values()
    ]
    over = differences[0] if differences else "nothing"
    return (
        f"Seeds from {summary['first_seed']}, {summary['seeds']} of them, the same requests at "
        f"the same times for every configuration. Intervals are paired over {over}."
    )
