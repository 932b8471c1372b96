"""`sim sweep`: configurations at rising rates: where each of them leaves the flat part."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from epp.config import ConfigError
from sim.arrivals import mean_rate
from sim.jobs import Result, cores, run_jobs
from sim.measures import SCHEMA
from sim.policies import PolicySource
from sim.report import markdown_table, number, seconds, share, table
from sim.run import RunSettings
from sim.run_options import (
    POLICY_HELP,
    OutputError,
    add_run_options,
    conditions,
    named_policies,
    open_folder,
    run_settings,
)
from sim.sweep_report import sweep_page
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace

INTERRUPTED: Final = 130
_POINTS_MAX: Final = 1_000


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command line of `sim sweep`."""
    parser = subparsers.add_parser(
        "sweep",
        help="configurations at rising rates: latency over load",
        description="Replay TRACE under every configuration at every rate.",
        allow_abbrev=False,
    )
    add_run_options(parser)
    add = parser.add_argument
    add("--config", action="append", required=True, metavar="FILE|NAME", help=POLICY_HELP)
    add(
        "--rates",
        type=_rates,
        required=True,
        metavar="R,R,...",
        help="requests per second; the trace's arrivals are moved closer or further apart",
    )
    add("--seed", type=int, default=1, help="decides everything that is drawn (1)")
    add("--workers", type=int, default=cores(), metavar="N", help="processes (all cores)")
    add("--out", type=Path, metavar="DIR", help="write the results there; must be empty")
    add("--force", action="store_true", help="write into DIR even if it is not empty")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: done. 1: input or folder is no good. 2: usage. 130: interrupted, what is done is kept."""
    if options.speed != 1.0:
        print("sim sweep: --rates says how fast requests arrive, not --speed", file=sys.stderr)
        return 2
    print(f"seed {options.seed}", flush=True)
    try:
        policies = named_policies(options.config)
        folder = open_folder(options.out, force=options.force) if options.out else None
        return sweep(policies, options, folder)
    except (TraceError, ConfigError, OutputError, OSError) as problem:
        print(f"sim sweep: {problem}", file=sys.stderr)
        return 1


def sweep(
    policies: Sequence[PolicySource], options: argparse.Namespace, folder: Path | None
) -> int:
    """Run every configuration at every rate; write what is known after each run."""
    base = run_settings(options, policies[0], options.seed)
    trace_rate = mean_rate(open_trace(Path(base.trace), base.read), base.requests_max)
    points = [(rate, policy) for rate in options.rates for policy in policies]
    jobs = [
        msgspec.structs.replace(base, policy=policy, speed=rate / trace_rate)
        for rate, policy in points
    ]
    results: dict[int, Result] = {}

    def done(result: Result) -> None:
        results[result.number] = result
        if folder is not None:
            write_sweep(folder, told(complete=False))

    def told(*, complete: bool) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "complete": complete,
            "seed": options.seed,
            "trace_rate": trace_rate,
            "conditions": _conditions(base),
            "points": [
                {"rate": points[at][0], "config": points[at][1].name, **results[at].summary}
                for at in sorted(results)
            ],
        }

    complete = run_jobs(jobs, "sweep", done, workers=options.workers)
    summary = told(complete=complete)
    print(table(_rows(summary)))
    if folder is not None:
        write_sweep(folder, summary)
        print(f"results are in {folder}")
    return 0 if complete else INTERRUPTED


def write_sweep(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, report.md and report.html: whole files at every moment."""
    contents = {
        "summary.json": msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n",
        "report.md": _report(summary).encode(),
        "report.html": sweep_page(summary).encode(),
    }
    for name, content in contents.items():
        partial = folder / f".{name}"
        partial.write_bytes(content)
        partial.replace(folder / name)


def _conditions(base: RunSettings) -> dict[str, Any]:
    told = conditions(base)
    del told["speed"]
    return told


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["requests/s", "config", "TTFT mean", "p90", "TPOT mean", "output/s", "hit", "good"]]
    rows.extend(
        [
            f"{point['rate']:g}",
            point["config"],
            seconds(point["ttft_s"]["mean"]),
            seconds(point["ttft_s"]["p90"]),
            seconds(point["tpot_s"]["mean"]),
            number(point["output_tokens_per_s"]),
            share(point["hit_rate"]),
            share(point["goodput"]["share"]),
        ]
        for point in summary["points"]
    )
    return rows


def _report(summary: dict[str, Any]) -> str:
    notes = "" if summary["complete"] else "**Not complete.**\n\n"
    told = [["", ""], *[[name, str(value)] for name, value in summary["conditions"].items()]]
    return (
        f"# Sweep of {summary['conditions']['trace']}\n\n{notes}"
        f"Seed {summary['seed']}; the trace itself has {summary['trace_rate']:.3g} requests/s.\n\n"
        f"{markdown_table(_rows(summary))}\n\n## What was run\n\n{markdown_table(told)}\n"
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not 1 <= len(rates) <= _POINTS_MAX or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 2,4,8")
    return tuple(sorted(set(rates)))
