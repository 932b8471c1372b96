"""Many runs over all cores, with a bar; what is done when one interrupts is kept."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sim.measures import Series
from sim.run import Run, RunSettings


class Result(Struct, frozen=True, kw_only=True):
    """What comes back from a run in another process."""

    number: int
    """Position of its settings among the jobs."""
    summary: dict[str, Any]
    series: Series


def run_job(number: int, settings: RunSettings) -> Result:
    """One run, without files. Raises as `Run` does."""
    one = Run(settings)
    one.run()
    return Result(number=number, summary=one.measures.summary(), series=one.measures.series())


def run_jobs(
    jobs: Sequence[RunSettings], title: str, done: Callable[[Result], None], *, workers: int
) -> bool:
    """Run all, tell `done` of each in the order in which they end; False if interrupted.

    Raises what a run raises; what has begun is then cut short.
    """
    with _progress(title) as progress:
        task = progress.add_task(title, total=len(jobs))
        # Forked children would inherit the bar's thread and its locks.
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(
            min(workers, len(jobs)), mp_context=context, initializer=_leave_interrupts
        )
        try:
            futures = [executor.submit(run_job, at, job) for at, job in enumerate(jobs)]
            for future in as_completed(futures):
                done(future.result())
                progress.advance(task)
        except KeyboardInterrupt:
            _cut_short(executor)
            return False
        except BaseException:
            _cut_short(executor)
            raise
        executor.shutdown()
    return True


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal: the parent alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cut_short(executor: ProcessPoolExecutor) -> None:
    processes = list((executor._processes or {}).values())  # noqa: SLF001 - no public way before 3.14
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _progress(title: str) -> Progress:
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
