"""`sim sweep`: configurations at rising rates: where each of them leaves the flat part."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from sim.cluster.arrivals import mean_rate
from sim.experiments.jobs import Experiment, Results, add_experiment_options
from sim.experiments.run_options import (
    POLICY_HELP,
    RUNS_MAX,
    add_run_options,
    conditions,
    named_policies,
    run_settings,
)
from sim.output import open_folder
from sim.reports.sweep_report import sweep_page, sweep_report, sweep_table
from sim.traces.formats import open_trace


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
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: done. 2: usage. 130: interrupted, what is done is kept. Raises what is told by `sim`."""
    if options.speed != 1.0:
        print("sim: --rates says how fast requests arrive, not --speed", file=sys.stderr)
        return 2
    policies = named_policies(options.config)
    print(f"seed {options.seed}", flush=True)
    folder = open_folder(options)
    base = run_settings(options, policies[0], options.seed)
    trace_rate = mean_rate(open_trace(Path(base.trace), base.read), base.requests_max)
    runs = [msgspec.structs.replace(base, policy=policy) for policy in policies]
    what_was_run = conditions(*runs)
    del what_was_run["speed"]
    points = [(rate, policy) for rate in options.rates for policy in policies]

    def summary(results: Results) -> dict[str, Any]:
        return {
            "seed": options.seed,
            "trace_rate": trace_rate,
            "conditions": what_was_run,
            "points": [
                {"rate": points[at][0], "config": points[at][1].name, **results[at].summary}
                for at in sorted(results)
            ],
        }

    return Experiment(
        title="sweep",
        jobs=[
            msgspec.structs.replace(base, policy=policy, speed=rate / trace_rate)
            for rate, policy in points
        ],
        summary=summary,
        table=sweep_table,
        reports=lambda told, _: {"report.md": sweep_report(told), "report.html": sweep_page(told)},
    ).carry_out(folder, workers=options.workers)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not 1 <= len(rates) <= RUNS_MAX or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 2,4,8")
    return tuple(sorted(set(rates)))
