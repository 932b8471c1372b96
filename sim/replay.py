"""`sim replay`: one trace, one policy, one seed; numbers on the screen, everything in a folder."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from epp.config import ConfigError
from sim.cluster import Fate, SimulatedRequest
from sim.measures import SCHEMA
from sim.policies import DEFAULT_POLICY, policy_source
from sim.report import run_report, run_table
from sim.request_files import DecisionFile, RequestTable
from sim.run import Run, RunSettings
from sim.run_options import (
    POLICY_HELP,
    OutputError,
    add_run_options,
    conditions,
    open_folder,
    run_settings,
)
from sim.run_report import run_page
from sim.traces.arrival import TraceError
from sim.traces.reading import open_bytes

DECISIONS_BELOW: Final = 100_000
"""Requests from which on decisions are only written when asked for."""
_SHOWN_EVERY: Final = 64
INTERRUPTED: Final = 130

Listener = Callable[[SimulatedRequest], None]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command line of `sim replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="a trace through the production scheduler, in simulated time",
        description="Replay TRACE through a scheduling configuration over simulated vLLM pods.",
        allow_abbrev=False,
    )
    add_run_options(parser)
    add = parser.add_argument
    add("--config", default=DEFAULT_POLICY, metavar="FILE|NAME", help=POLICY_HELP)
    add("--seed", type=int, default=1, help="decides everything that is drawn (1)")
    add("--out", type=Path, metavar="DIR", help="write the results there; must be empty")
    add("--force", action="store_true", help="write into DIR even if it is not empty")
    add(
        "--decisions",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write every decision, and find the hit ceilings; both cost time (default: below "
        f"{DECISIONS_BELOW:,} requests)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: done. 1: the input or the folder is no good. 130: interrupted, what is done is written."""
    print(f"seed {options.seed}", flush=True)
    try:
        policy = policy_source(options.config)
        return replay(run_settings(options, policy, options.seed), options)
    except (TraceError, ConfigError, OutputError, OSError) as problem:
        print(f"sim replay: {problem}", file=sys.stderr)
        return 1


def replay(settings: RunSettings, options: argparse.Namespace) -> int:
    """Run it, show it, write it."""
    folder = open_folder(options.out, force=options.force) if options.out else None
    total = lines_of(settings)
    files: list[RequestTable | DecisionFile] = []
    if folder is not None:
        files.append(RequestTable(folder / "requests.parquet"))
        wanted = options.decisions
        if total < DECISIONS_BELOW if wanted is None else wanted:
            files.append(DecisionFile(folder / "decisions.jsonl"))
    started_s = time.perf_counter()
    with _progress() as progress:
        one = Run(settings, (*(file.add for file in files), _shown(progress, total)))
        try:
            with _interrupts_call(one.stop):
                one.run()
        finally:
            for file in files:
                file.close()
    complete = not one.stopped
    wall_s = time.perf_counter() - started_s
    summary = summary_of(one, complete=complete)
    print(run_table(summary))
    print(f"{sum(one.measures.fates.values()):,} requests in {wall_s:.1f} s")
    for problem in one.trace.problems:
        print(f"skipped: {problem}", file=sys.stderr)
    if folder is not None:
        decisions = folder / "decisions.jsonl" if len(files) > 1 else None
        if decisions is not None and complete and one.measures.fates[Fate.COMPLETE]:
            summary["ceilings"] = one.ceilings()
        write_run(folder, summary)
        page = run_page(summary, one.measures.series(), decisions)
        (folder / "report.html").write_text(page)
        print(f"results are in {folder}")
    return 0 if complete else INTERRUPTED


@contextlib.contextmanager
def _interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` and raises nothing."""
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def summary_of(one: Run, *, complete: bool) -> dict[str, Any]:
    """summary.json. The same settings and seed give the same bytes."""
    settings = one.settings
    return {
        "schema": SCHEMA,
        "complete": complete,
        "seed": settings.seed,
        "config": settings.policy.name,
        "conditions": conditions(settings),
        "bad_lines": one.trace.bad_lines,
        **one.measures.summary(),
        "timeline": one.timeline.as_json(),
    }


def write_run(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json and the reports made of it."""
    encoded = msgspec.json.format(msgspec.json.encode(summary), indent=1)
    (folder / "summary.json").write_bytes(encoded + b"\n")
    (folder / "report.md").write_text(run_report(summary))


def lines_of(settings: RunSettings) -> int:
    """About how many requests the trace has: its lines."""
    with open_bytes(Path(settings.trace)) as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return lines if settings.requests_max is None else min(lines, settings.requests_max)


def _progress() -> Progress:
    return Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _shown(progress: Progress, total: int) -> Listener:
    """A listener that moves the bar."""
    task = progress.add_task("replay", total=total or None)
    ended = 0

    def count(request: SimulatedRequest) -> None:
        nonlocal ended
        ended += 1
        if ended % _SHOWN_EVERY == 0:
            progress.update(task, completed=ended)

    return count
