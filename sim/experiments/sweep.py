"""The command `sim sweep`: latency of configurations at rising request rates."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from sim.cluster.arrivals import pace_of
from sim.experiments import run_options
from sim.experiments.jobs import Experiment, Results, add_experiment_options
from sim.experiments.repetitions import ended_of, estimate_summary, varied_between
from sim.measurement.assumptions import assumptions_of
from sim.measurement.intervals import estimated
from sim.measurement.measures import figures_of, rounded
from sim.measurement.summaries import NamedRun, RunSummary, SweepPoint, SweepSummary
from sim.output import open_folder
from sim.reports.sweep_report import sweep_page, sweep_report, sweep_table
from sim.traces.formats import open_trace


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim sweep`."""
    parser = subparsers.add_parser(
        "sweep",
        help="measure latency of configurations at rising request rates",
        description="Replay TRACE under every configuration at every rate, then repeat on other "
        "traffic like it, as sim compare does.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("Configurations and rates").add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE|NAME",
        help="configuration; repeat to compare. " + run_options.POLICY_HELP,
    )
    add(
        "--rates",
        type=_rates,
        required=True,
        metavar="R,R,...",
        help="request rates to run, in requests per second; the trace is replayed faster or slower",
    )
    run_options.add_run_options(parser)
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim sweep` and return its exit code.

    0: done. 2: wrong command line. 130: interrupted; the results up to then are written. Raises
    errors that `sim` prints.
    """
    if options.speed != 1.0:
        print("sim: --rates sets how fast requests arrive; leave out --speed", file=sys.stderr)
        return 2
    policies = run_options.named_policies(options.config)
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}", flush=True)
    folder = open_folder(options)
    base = run_options.run_settings(options, policies[0], options.seed)
    run_options.print_trace_warnings(base)
    pace = pace_of(open_trace(Path(base.trace), base.read), base.requests_max)
    what_was_run = run_options.conditions(*(replace(base, policy=policy) for policy in policies))
    del what_was_run["speed"]
    points = [(rate, policy) for rate in options.rates for policy in policies]
    # The order is seed by seed, so that an interrupted sweep has all points under equally many
    # seeds.
    jobs = [
        replace(
            run_options.run_settings(options, policy, options.seed + repetition, repetition),
            speed=rate / pace.requests_per_s,
        )
        for repetition in range(options.seeds)
        for rate, policy in points
    ]

    def summary(results: Results, complete: bool) -> SweepSummary:
        told: list[SweepPoint] = []
        for at, (rate, policy) in enumerate(points):
            mine = range(at, len(jobs), len(points))
            found = [results[job].summary for job in mine if job in results]
            # The first run of a point is the trace as it is.
            if at in results:
                told.append(_point(rate, policy.name, found))
        return SweepSummary(
            complete=complete,
            first_seed=options.seed,
            seeds=max((point.seeds for point in told), default=0),
            varied=max((point.varied for point in told), key=len, default=""),
            generated=varied_between([one.summary for one in results.values()]).generated,
            trace_rate=pace.requests_per_s,
            waits=pace.waits,
            conditions=what_was_run,
            assumptions=assumptions_of(kind.profile for kind in jobs[0].cluster.pods),
            points=told,
            runs=[
                NamedRun(
                    rate=points[at % len(points)][0],
                    config=jobs[at].policy.name,
                    seed=jobs[at].seed,
                    run=results[at].summary,
                )
                for at in sorted(results)
            ],
        )

    return Experiment(
        title="sweep",
        jobs=jobs,
        summary=summary,
        table=sweep_table,
        reports=lambda told, _: {"report.md": sweep_report(told), "report.html": sweep_page(told)},
    ).carry_out(folder, workers=options.workers)


def _point(rate: float, config: str, runs: Sequence[RunSummary]) -> SweepPoint:
    """Return the results of one configuration at one request rate, over the seeds that have
    completed.
    """
    varied = varied_between(runs)
    figures = [figures_of(one) for one in runs]
    sent = [one.requests_per_s or math.nan for one in runs]
    return SweepPoint(
        rate=rate,
        config=config,
        seeds=len(runs),
        varied=varied.over,
        requests=ended_of(runs),
        requests_per_s=rounded(estimated(sent, varied).value),
        bad_lines=runs[0].bad_lines or 0,
        goodput=runs[0].goodput,
        figures={
            name: estimate_summary(estimated([run[name] for run in figures], varied))
            for name in figures[0]
        },
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not 1 <= len(rates) <= run_options.RUNS_MAX or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of rates such as 2,4,8: expected 1 to {run_options.RUNS_MAX} "
            "rates, each above 0 and below 10^6"
        )
    return tuple(sorted(set(rates)))
