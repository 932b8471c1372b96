"""Places where jobs run: the cores of this machine, or a cluster that was started elsewhere.

A cluster only needs `submit`, as in `concurrent.futures`. Its workers import this distribution, so
they need the same version of it and of its dependencies.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self

from sim.experiments.jobs import Answer, Crew, Job, JobError, Workers

LOCAL: Final = "local"
EXECUTOR_HELP: Final = "local, dask://HOST:PORT or ray://HOST:PORT"
IN_FLIGHT_MAX: Final = 4_096
"""Maximum number of jobs submitted to a cluster and not yet ended. It is meant to exceed the
cluster's number of cores, and bounds its memory.
"""
_CONNECT_S: Final = 10


class ExecutorError(Exception):
    """The workers that `--executor` names cannot be used; the message is one sentence."""


class Submitting(Protocol):
    """The interface of an executor that runs submitted tasks: the method `submit`, as in
    `concurrent.futures.Executor`.
    """

    def submit(self, task: Callable[..., Any], /, *given: Any) -> "Future[Any]": ...


class Submitted:
    """Implementation of `Workers` on top of any executor, which the caller creates and closes.
    Leaving the context cancels all jobs that have not begun.
    """

    def __init__(self, executor: Submitting) -> None:
        self._executor = executor
        self._ended: SimpleQueue[tuple[int, Future[Any]] | None] = SimpleQueue()
        self._busy: dict[int, Future[Any]] = {}
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancel the jobs that have not begun, and end the iterator that `outcomes` returned. Do
        not wait for jobs that are running on the cluster.
        """
        self._stopped = True
        for future in list(self._busy.values()):
            future.cancel()
        self._ended.put(None)

    def outcomes(
        self, task: Callable[[Job], Answer], jobs: Sequence[Job]
    ) -> Iterator[tuple[int, Answer | JobError]]:
        """Yield the outcome of each job, as `Workers.outcomes` specifies.

        An exception of a job or of the cluster becomes a `JobError` that is yielded as that job's
        outcome.
        """
        left = enumerate(jobs)
        self._submit(task, left, IN_FLIGHT_MAX)
        while self._busy and not self._stopped:
            ended = self._ended.get()
            if ended is None or self._stopped:
                # Cancelled jobs have ended too, but did not fail.
                return
            number, future = ended
            del self._busy[number]
            self._submit(task, left, 1)
            yield number, _outcome(future)

    def _submit(
        self, task: Callable[[Job], Answer], left: Iterator[tuple[int, Job]], count: int
    ) -> None:
        for _, (number, job) in zip(range(count), left, strict=False):
            future = self._executor.submit(task, job)
            self._busy[number] = future
            future.add_done_callback(self._telling(number))

    def _telling(self, number: int) -> "Callable[[Future[Any]], None]":
        return lambda future: self._ended.put((number, future))


def _outcome(future: "Future[Any]") -> Any:
    try:
        problem = future.exception()
    except CancelledError:
        return JobError("the cluster cancelled the job")
    if isinstance(problem, JobError):
        return problem
    if problem is not None:
        return JobError(f"{type(problem).__name__}: {problem}")
    return future.result()


@contextlib.contextmanager
def workers_at(named: str, size: int) -> Iterator[Workers]:
    """Yield the workers at the place `named`, which has one of the forms in `EXECUTOR_HELP`. `size`
    is the number of processes if that place is this machine.

    Raises `ExecutorError` if `named` has another form, the cluster does not answer, or its client
    library is not installed.
    """
    if named == LOCAL:
        with Crew(size) as crew:
            yield crew
        return
    scheme, _, address = named.partition("://")
    opened = _CLUSTERS.get(scheme)
    if opened is None or not address:
        raise ExecutorError(f"--executor {named}: expected {EXECUTOR_HELP}")
    with opened(address) as executor, Submitted(executor) as submitted:
        yield submitted


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Submitting]:
    try:
        distributed: Any = import_module("distributed")
    except ImportError as problem:
        raise ExecutorError(_missing("dask", problem)) from problem
    try:
        _reach(address)
        client = distributed.Client(f"tcp://{address}", timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as problem:
        raise ExecutorError(f"--executor dask://{address}: {_in_a_line(problem)}") from problem
    with client:
        # A scheduler that takes tasks for pure would merge equal jobs into one.
        yield client.get_executor(pure=False)


class _Ray:
    """An adapter that offers Ray's remote tasks as `submit` of `concurrent.futures`."""

    def __init__(self, ray: Any) -> None:
        # The task is sent to the cluster once, and then referred to.
        self._remote: Callable[[Callable[..., Any]], Any] = cache(ray.remote(max_retries=1))
        self._task_error: type[Exception] = ray.exceptions.RayTaskError

    def submit(self, task: Callable[..., Any], /, *given: Any) -> "Future[Any]":
        # Ray sets a result on its own future even if that was cancelled, which raises an error.
        asked: Future[Any] = Future()
        theirs: Future[Any] = self._remote(task).remote(*given).future()
        theirs.add_done_callback(lambda ended: self._tell(asked, ended))
        return asked

    def _tell(self, asked: "Future[Any]", ended: "Future[Any]") -> None:
        if not asked.set_running_or_notify_cancel():
            return
        problem: Any = ended.exception()
        if isinstance(problem, self._task_error):
            # Ray wraps the error in a coloured traceback; the cause is the task's own sentence.
            problem = problem.cause  # type: ignore[attr-defined]
        if problem is None:
            asked.set_result(ended.result())
        else:
            asked.set_exception(problem)


@contextlib.contextmanager
def _ray(address: str) -> Iterator[Submitting]:
    try:
        ray: Any = import_module("ray")
    except ImportError as problem:
        raise ExecutorError(_missing("ray", problem)) from problem
    try:
        _reach(address)
        # These settings keep Ray's messages out of the progress bar and the table.
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        connection = ray.init(f"ray://{address}", **quiet)
    except (OSError, ValueError, RuntimeError) as problem:
        raise ExecutorError(f"--executor ray://{address}: {_in_a_line(problem)}") from problem
    with connection:
        yield _Ray(ray)


def _reach(address: str) -> None:
    """Raise `OSError` or `ValueError` if nothing listens at `address` (HOST:PORT).

    Without this check, the client libraries would retry (Ray for half a minute) and print more than
    one sentence.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError("expected HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _in_a_line(problem: Exception) -> str:
    """Return the text of an exception on one line; a traceback is reduced to its last line."""
    text = str(problem).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    return " ".join(text.split())


_CLUSTERS: Final = {"dask": _dask, "ray": _ray}


def _missing(extra: str, problem: ImportError) -> str:
    return f"--executor {extra}:// needs pip install 'homing-epp[sim,{extra}]': {problem}"
