"""The command `sim replay`: replay one trace with one configuration and one seed, print the
figures, and write files to a folder.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.progress import Progress

from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.policies import policy_source
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.experiments.check_decisions import check_decisions
from sim.experiments.endless import IdleWatch
from sim.experiments.jobs import JobError
from sim.experiments.request_files import DecisionFile, RequestTable
from sim.experiments.run import Run, RunSettings
from sim.experiments.run_options import POLICY_HELP, add_run_options, conditions, run_settings
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.measurement.assumptions import assumptions_of
from sim.measurement.summaries import ReplaySummary, as_json
from sim.output import (
    DECISIONS,
    REQUESTS,
    add_output_options,
    open_folder,
    progress_bar,
    write_whole,
)
from sim.reports.report import run_report, run_table
from sim.reports.run_report import run_page
from sim.traces.formats import open_trace

DECISIONS_BELOW: Final = 100_000
"""Number of requests from which on decisions.jsonl and the hit ceilings are only written if a flag
requests them.
"""
_SHOWN_EVERY: Final = 64

Listener = Callable[[SimulatedRequest], None]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a trace through the production scheduler, in simulated time",
        description="Replay TRACE through a scheduling configuration over simulated vLLM pods.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("Configuration and records").add_argument
    add(
        "--config",
        metavar="FILE|NAME",
        help=f"configuration: {POLICY_HELP} (default: {DEFAULT_POLICY})",
    )
    add("--seed", type=int, default=1, help="seed of all random draws (default: 1)")
    add(
        "--decisions",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write every routing decision to decisions.jsonl, which takes time (default: if there are "
        f"fewer than {DECISIONS_BELOW:,} requests)",
    )
    add(
        "--inputs",
        action="store_true",
        help="write with every decision each candidate's inputs and its cost by each scorer that "
        "reports costs; the file becomes five times as large",
    )
    add(
        "--ceilings",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="determine the maximum share of the prompts that could be cached, by one more pass over "
        "the trace (default: if decisions are written)",
    )
    add(
        "--check-decisions",
        action="store_true",
        help="do not simulate: TRACE is the directory of a live capture; repeat each of its decisions "
        "with the configuration that made it, or with --config, and compare",
    )
    add_run_options(parser)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim replay` and return its exit code.

    0: done. 130: interrupted; the results up to then are written. Raises errors that `sim` prints.
    With --check-decisions, nothing is simulated: `check_decisions` runs instead.
    """
    if options.check_decisions:
        return check_decisions(options)
    print(f"seed {options.seed}", flush=True)
    policy = policy_source(options.config or DEFAULT_POLICY)
    return replay(run_settings(options, policy, options.seed), options)


def replay(settings: RunSettings, options: argparse.Namespace) -> int:
    """Run the simulation of `settings`, print its figures, write its files if --out is given, and
    return the exit code.
    """
    total = requests_expected(settings)
    folder = open_folder(options)
    progress = progress_bar("replay")
    with contextlib.ExitStack() as files:
        listeners = [_shown(progress, total)]
        decisions = noted = None
        if folder is not None:
            files.push(_removing_unexplained(folder))
            requests = RequestTable(folder / REQUESTS)
            files.callback(requests.close)
            listeners.append(requests.add)
            wanted = options.decisions
            if (total < DECISIONS_BELOW or options.inputs) if wanted is None else wanted:
                decisions = folder / DECISIONS
                lines = DecisionFile(decisions)
                noted = lines.note if options.inputs else None
                files.callback(lines.close)
                listeners.append(lines.add)
        started_s = time.perf_counter()
        one = Run(settings, listeners, noted)
        watch = IdleWatch(one)
        with interrupts_call(one.stop):
            with files, progress:
                one.run()
                if watch.problem:
                    raise JobError(watch.problem)
            wall_s = time.perf_counter() - started_s
            summary = summary_of(one, complete=not one.stopped)
            print(run_table(summary.run))
            print(f"{summary.run.requests.sent:,} requests replayed in {wall_s:.1f} s")
            for problem in one.trace.problems:
                print(f"skipped: {problem}", file=sys.stderr)
            if folder is not None:
                asked = options.ceilings
                if decisions is not None if asked is None else asked:
                    summary = _with_ceilings(one, summary)
                _write(one, summary, folder, decisions)
    if not one.stopped:
        return 0
    print("sim: interrupted", file=sys.stderr)
    return INTERRUPTED


def _removing_unexplained(folder: Path) -> Callable[..., None]:
    """Return an exit callback for a context. After an error, it removes the request table and the
    decision file from `folder`, because no summary explains them.
    """

    def leave(error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for name in (REQUESTS, DECISIONS):
                (folder / name).unlink(missing_ok=True)

    return leave


def _with_ceilings(one: Run, summary: ReplaySummary) -> ReplaySummary:
    """Return the summary with the hit ceilings (highest possible hit rates) added, or unchanged if
    the run was interrupted or completed no request. Print how long the pass over the trace took.
    """
    if not (summary.complete and one.measures.fates[Fate.COMPLETE]):
        return summary
    started_s = time.perf_counter()
    with progress_bar("hit ceilings") as bar:
        sent = summary.run.requests.sent
        ceilings = one.ceilings(lambda given: iter(bar.track(given, total=sent)))
    print(f"hit ceilings took {time.perf_counter() - started_s:.1f} s")
    return replace(summary, ceilings=ceilings)


def _write(one: Run, summary: ReplaySummary, folder: Path, decisions: Path | None) -> None:
    """Write summary.json, report.md and report.html to `folder`; the run has already written its
    other files.
    """
    started_s = time.perf_counter()
    write_run(folder, summary)
    page = run_page(summary, one.measures.steady_series(), decisions)
    write_whole(folder / "report.html", page.encode())
    print(f"reports took {time.perf_counter() - started_s:.1f} s; results are in {folder}")


def summary_of(one: Run, *, complete: bool) -> ReplaySummary:
    """Return the content of summary.json for a run. The same settings and seed give the same
    bytes.
    """
    settings = one.settings
    return ReplaySummary(
        complete=complete,
        seed=settings.seed,
        config=settings.policy.name,
        conditions=conditions(settings),
        run=one.summary(),
        assumptions=assumptions_of(kind.profile for kind in settings.cluster.pods),
        timeline=one.timeline.summary(),
    )


def write_run(folder: Path, summary: ReplaySummary) -> None:
    """Write summary.json and report.md of a run to `folder`."""
    write_whole(folder / "summary.json", as_json(summary))
    write_whole(folder / "report.md", run_report(summary).encode())


def requests_expected(settings: RunSettings) -> int:
    """Return the approximate number of requests that a run will replay, for its progress bar.
    Raises `TraceError` and `OSError`.
    """
    expected = open_trace(Path(settings.trace), settings.read).requests_expected()
    return expected if settings.requests_max is None else min(expected, settings.requests_max)


def _shown(progress: Progress, total: int) -> Listener:
    """Return a function that is called with each request that has ended, and that advances the
    progress bar after every 64 of them. `total` is 0 if the number of requests is unknown.
    """
    task = progress.add_task("replay", total=total or None)
    ended = 0

    def count(request: SimulatedRequest) -> None:
        nonlocal ended
        ended += 1
        if ended % _SHOWN_EVERY == 0:
            progress.update(task, completed=ended)

    return count
