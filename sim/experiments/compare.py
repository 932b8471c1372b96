"""The command `sim compare`: several configurations on the same requests, with confidence
intervals.
"""

import argparse
import sys
from collections.abc import Sequence

from sim.experiments import run_options
from sim.experiments.jobs import Experiment, Result, Results, add_experiment_options
from sim.experiments.repetitions import ended_of, estimate_summary, varied_between
from sim.measurement.assumptions import assumptions_of
from sim.measurement.intervals import Difference, compare_runs, estimated
from sim.measurement.measures import Series, figures_of, rounded
from sim.measurement.summaries import (
    ComparedConfig,
    ComparisonSummary,
    DifferenceSummary,
    NamedRun,
    RunSummary,
)
from sim.output import open_folder
from sim.reports.compare_report import (
    comparison_page,
    comparison_report,
    comparison_table,
    verdict,
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="compare configurations on the same requests, with confidence intervals",
        description="Replay TRACE under several configurations with common random numbers, then "
        "repeat on other traffic like it. A generated TRACE is drawn again for each seed. A recorded "
        "one is replayed as it is for the first seed, and resampled for each other seed.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("Configurations").add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE|NAME",
        help="configuration; give at least two, or several --replicas. The first is the reference. "
        + run_options.POLICY_HELP,
    )
    run_options.add_run_options(parser, several_replicas=True)
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim compare` and return its exit code.

    0: done. 2: wrong command line. 130: interrupted; the results up to then are written. Raises
    errors that `sim` prints.
    """
    counts: tuple[int | None, ...] = options.replicas or (None,)
    if len(options.config) * len(counts) < 2:
        print("sim: give --config at least twice, or --replicas as 1,2", file=sys.stderr)
        return 2
    policies = run_options.named_policies(options.config)
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}", flush=True)
    # The order is seed by seed, so that an interrupted comparison has complete seeds.
    jobs = [
        run_options.run_settings(
            options, policy, options.seed + repetition, repetition, replicas=replicas
        )
        for repetition in range(options.seeds)
        for policy in policies
        for replicas in counts
    ]
    run_options.print_trace_warnings(jobs[0])
    names = [
        policy.name
        if replicas is None or len(counts) == 1
        else f"{policy.name}, {_pickers(replicas)}"
        for policy in policies
        for replicas in counts
    ]
    each = range(len(names))
    what_was_run = run_options.conditions(*jobs[: len(names)])

    def whole(results: Results) -> list[list[Result]]:
        """Return for each configuration its runs, one for each seed that all configurations have
        completed.

        The lists are empty until the first seed, which replays a recorded trace unchanged, is
        completed.
        """
        starts = range(0, len(jobs), len(names))
        ended = [start for start in starts if all(start + at in results for at in each)]
        ended = ended if 0 in ended else []
        return [[results[start + at] for start in ended] for at in each]

    def columns(results: Results) -> list[list[Series]]:
        return [[one.series for one in found] for found in whole(results)]

    def summary(results: Results, complete: bool) -> ComparisonSummary:
        found = [[one.summary for one in of] for of in whole(results)]
        varied = varied_between(found[0])
        return ComparisonSummary(
            complete=complete,
            first_seed=options.seed,
            seeds=len(found[0]),
            conditions=what_was_run,
            assumptions=assumptions_of(kind.profile for kind in jobs[0].cluster.pods),
            varied=varied.over if found[0] else "",
            generated=varied.generated,
            configs=_compared(names, found),
            runs=[
                NamedRun(config=names[at % len(names)], seed=jobs[at].seed, run=results[at].summary)
                for at in sorted(results)
            ],
        )

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


def _compared(
    names: Sequence[str], runs: Sequence[Sequence[RunSummary]]
) -> dict[str, ComparedConfig]:
    """Return the estimate of every measure for every configuration, and its difference from the
    first configuration.

    Empty if no seed is complete.
    """
    if not runs[0]:
        return {}
    figures = [[figures_of(one) for one in found] for found in runs]
    varied = varied_between(runs[0])
    told: dict[str, ComparedConfig] = {}
    for at, name in enumerate(names):
        differences = compare_runs(figures[0], figures[at], varied) if at else {}
        told[name] = ComparedConfig(
            requests=ended_of(runs[at]),
            figures={
                measure: estimate_summary(estimated([run[measure] for run in figures[at]], varied))
                for measure in figures[at][0]
            },
            difference={
                measure: difference_summary(measure, found)
                for measure, found in differences.items()
            },
        )
    return told


def difference_summary(measure: str, found: Difference) -> DifferenceSummary:
    """Return the difference of one measure between two configurations in the form of summary.json,
    with its verdict, such as "better" or "no significant difference".
    """
    difference = found.difference
    estimate = estimate_summary(difference)
    return DifferenceSummary(
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        relative=rounded(difference.value / found.reference) if found.reference else None,
        significant=difference.significant,
        verdict=verdict(measure, difference),
    )
