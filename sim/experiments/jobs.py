"""Many simulation runs of one experiment in several processes, with a progress bar; results are
written after each run.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.config import ConfigError
from sim.cluster.simulated_request import SimulatedRequest
from sim.experiments.endless import IdleWatch
from sim.experiments.run import Run, RunSettings
from sim.experiments.run_options import count_of_runs
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.measurement.measures import Series, rounded
from sim.measurement.summaries import (
    Resampled,
    RunSummary,
    Summary,
    Traffic,
    as_json,
)
from sim.output import add_output_options, progress_bar, write_whole
from sim.sentences import sentence_of
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.held import HeldTrace

Job = TypeVar("Job")
Answer = TypeVar("Answer")
OfRuns = TypeVar("OfRuns", bound=Summary)


class JobError(Exception):
    """A simulation run, or another job of `Workers`, failed; the message is one sentence."""


class Workers(Protocol):
    """Processes, on this machine or elsewhere, that run jobs."""

    def outcomes(
        self, task: Callable[[Job], Answer], jobs: Sequence[Job]
    ) -> Iterator[tuple[int, Answer | JobError]]:
        """Run `task` on each job and yield (position of the job, result or `JobError`) in the order
        in which the jobs end, until `stop` is called.

        `task` must be a function of a module, because workers receive only its name.
        """
        ...

    def stop(self) -> None:
        """End the iterator that `outcomes` returned, and stop its jobs. Jobs that are running
        elsewhere than on this machine continue to their end.
        """
        ...


class Result(Struct, frozen=True, kw_only=True):
    """The result of a simulation run, small enough to be sent between processes."""

    summary: RunSummary
    series: Series


Results = Mapping[int, Result]
"""Results of completed runs, by position of the run in `Experiment.jobs`."""


class Experiment(Struct, Generic[OfRuns], frozen=True, kw_only=True):
    """A set of runs with the functions that summarise and report them. Reports cover all runs, or
    after Ctrl-C those that have ended.
    """

    title: str
    jobs: Sequence[RunSettings]
    summary: Callable[[Results, bool], OfRuns]
    """Function (results so far, True if all runs have ended) -> summary of the experiment."""
    table: Callable[[OfRuns], str]
    reports: Callable[[OfRuns, Results], dict[str, str]]
    """Function (summary of the experiment, results) -> content of each report file, by file name.
    """

    def carry_out(self, folder: Path | None, *, workers: int) -> int:
        """Run all jobs, write the results to `folder` after each job, print the table, and return
        the exit code. Nothing is written if `folder` is None.

        A large trace of which all requests are replayed is read once before the runs, so that the
        processes find it in the cache on disk. Raises `JobError`, `TraceError` and `OSError`;
        results of earlier jobs are already written then.
        """
        results: dict[int, Result] = {}
        summary: OfRuns | None = None
        first = self.jobs[0]
        if first.requests_max is None:
            open_trace(Path(first.trace), first.read).keep()

        def told() -> OfRuns:
            summary = self.summary(results, len(results) == len(self.jobs))
            if folder is not None:
                write_whole(folder / "summary.json", as_json(summary))
                for name, content in self.reports(summary, results).items():
                    write_whole(folder / name, content.encode())
            return summary

        with Crew(min(workers, len(self.jobs))) as crew, interrupts_call(crew.stop):
            with progress_bar(self.title) as bar:
                for number, result in bar.track(crew.results(self.jobs), total=len(self.jobs)):
                    results[number] = result
                    # Without a folder there is no reader, and a report takes seconds.
                    summary = None if folder is None else told()
            # Ctrl-C waits for this, so that no report is made twice.
            if summary is None:
                summary = told()
        print(self.table(summary))
        if folder is not None:
            print(f"results are in {folder}")
        if len(results) == len(self.jobs):
            return 0
        print(
            f"sim: interrupted, {len(results)} of {len(self.jobs)} runs are done", file=sys.stderr
        )
        return INTERRUPTED


class Crew:
    """Implementation of `Workers` with processes on this machine, each of which runs one job at a
    time. Leaving the context ends the processes.
    """

    def __init__(self, size: int) -> None:
        self._stopped = False
        self._members: dict[Connection, SpawnProcess] = {}
        # A forked child would inherit the progress bar's thread and its locks.
        self._context = multiprocessing.get_context("spawn")
        for _ in range(size):
            self._hire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for pipe, process in self._members.items():
            pipe.close()
            process.join()
            process.close()

    def stop(self) -> None:
        """Kill the worker processes, and thus end the iterator that `outcomes` returned."""
        self._stopped = True
        for process in self._members.values():
            process.kill()

    def results(self, jobs: Sequence[RunSettings]) -> Iterator[tuple[int, Result]]:
        """Yield (position of the run among `jobs`, result) in the order in which the runs end,
        until `stop` is called.

        Raises `JobError` for a run that failed.
        """
        for number, outcome in self.outcomes(run_job, jobs):
            if isinstance(outcome, JobError):
                raise outcome
            yield number, outcome

    def outcomes(
        self, task: Callable[[Job], Answer], jobs: Sequence[Job]
    ) -> Iterator[tuple[int, Answer | JobError]]:
        """Yield the outcome of each job, as `Workers.outcomes` specifies. If a process dies, its
        job fails, a new process replaces it, and the other jobs continue.
        """
        left = enumerate(jobs)
        busy: dict[Connection, int] = {}

        def occupy(pipe: Connection) -> None:
            number, job = next(left, (-1, None))
            if job is not None:
                busy[pipe] = number
                # A dead process is detected later, when its pipe is read.
                with contextlib.suppress(OSError):
                    pipe.send((task, job))

        for pipe in list(self._members):
            occupy(pipe)
        while busy:
            for pipe in cast("list[Connection]", wait(list(busy))):
                number = busy.pop(pipe)
                try:
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    # The other end of the pipe is closed.
                    if self._stopped:
                        return
                    outcome = JobError("the process that replayed the trace has died")
                    pipe = self._replace(pipe)  # noqa: PLW2901  the rest is about the new pipe
                occupy(pipe)
                yield number, outcome

    def _hire(self) -> Connection:
        # Children inherit the ignored signal: Ctrl-C reaches all processes of a terminal, and only
        # the parent handles it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        finally:
            signal.signal(signal.SIGINT, before)
        self._members[ours] = process
        return ours

    def _replace(self, pipe: Connection) -> Connection:
        process = self._members.pop(pipe)
        pipe.close()
        process.join()
        process.close()
        return self._hire()


def _work(pipe: Connection) -> None:
    """Run the jobs that arrive through `pipe` until it is closed, and send back each result or a
    `JobError`. This is the main function of a worker process.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            task, job = pipe.recv()
            try:
                outcome = task(job)
            except (JobError, TraceError, ConfigError, OSError) as problem:
                # The exception itself may have constructor arguments with which it cannot be sent.
                outcome = JobError(sentence_of(problem))
            pipe.send(outcome)


def run_job(settings: RunSettings, held: HeldTrace | None = None) -> Result:
    """Run the simulation of `settings` without writing files. `held` is its trace if that is
    already in memory, else None. Raises what `Run` raises, and `JobError` if requests would wait for
    ever.
    """
    latest_s = 0.0

    def ended(request: SimulatedRequest) -> None:
        nonlocal latest_s
        latest_s = max(latest_s, request.arrived_at)

    one = Run(settings, [ended], held=held)
    watch = IdleWatch(one)
    one.run()
    if watch.problem:
        raise JobError(watch.problem)
    summary = one.summary()
    blocks = one.variation.blocks
    summary = replace(
        summary,
        # Requests that wait for answers arrive later than in the trace, and incomplete requests
        # count too.
        requests_per_s=rounded(summary.requests.sent / latest_s) if latest_s else None,
        traffic=Traffic(
            generated=one.variation.generated,
            resampled=None if blocks is None else Resampled(blocks=blocks.count, cut=str(blocks)),
        ),
    )
    return Result(summary=summary, series=one.measures.steady_series())


def add_experiment_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags --seeds, --seed, --workers and the flags for output."""
    add = parser.add_argument_group("Runs").add_argument
    add("--seeds", type=count_of_runs, default=5, metavar="K",
        help="number of runs of each configuration, each with other traffic (default: 5)")  # fmt: skip
    add("--seed", type=int, default=1, help="seed of the first run of each configuration; the next runs use the next numbers "
        "(default: 1)")  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=count_of_runs, default=cores, metavar="N",
        help=f"number of processes (default: all {cores} cores)")  # fmt: skip
    add_output_options(parser)
