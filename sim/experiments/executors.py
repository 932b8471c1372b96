"""Where jobs run: on the cores of this machine, or on a cluster that somebody else has started.

Of a cluster nothing is needed but `submit`, as `concurrent.futures` has it. Its workers import this
distribution: they need the same version of it, and of what it imports.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from importlib import import_module
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Protocol, Self

from sim.experiments.jobs import Answer, Crew, Job, JobError, Workers

LOCAL: Final = "local"
EXECUTOR_HELP: Final = "local, dask://HOST:PORT or ray://HOST:PORT"
IN_FLIGHT_MAX: Final = 4_096
"""Jobs that a cluster is given at a time: more than it has cores, and no more than it can hold."""
_CONNECT_S: Final = 10


class ExecutorError(Exception):
    """Jobs cannot run where they were to: one sentence."""


class Submitting(Protocol):
    """What is needed of a `concurrent.futures.Executor`."""

    def submit(self, task: Callable[..., Any], /, *given: Any) -> "Future[Any]": ...


class Submitted:
    """`Workers` behind any executor, which stays the caller's. Leaving the context cancels."""

    def __init__(self, executor: Submitting) -> None:
        self._executor = executor
        self._ended: SimpleQueue[tuple[int, Future[Any]] | None] = SimpleQueue()
        self._busy: dict[int, Future[Any]] = {}
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancel what has not begun; `outcomes` ends. What runs elsewhere is waited for by nobody."""
        self._stopped = True
        for future in list(self._busy.values()):
            future.cancel()
        self._ended.put(None)

    def outcomes(
        self, task: Callable[[Job], Answer], jobs: Sequence[Job]
    ) -> Iterator[tuple[int, Answer | JobError]]:
        """As `Workers` has it. An exception of a job, or of the cluster, is why it cannot be done."""
        left = enumerate(jobs)
        self._submit(task, left, IN_FLIGHT_MAX)
        while self._busy and not self._stopped:
            ended = self._ended.get()
            if ended is None or self._stopped:
                # What was cancelled has ended too, and did not fail.
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
        return JobError("the cluster has cancelled it")
    if isinstance(problem, JobError):
        return problem
    if problem is not None:
        return JobError(f"{type(problem).__name__}: {problem}")
    return future.result()


@contextlib.contextmanager
def workers_at(named: str, size: int) -> Iterator[Workers]:
    """`named` as `EXECUTOR_HELP` has it; `size`: processes on this machine, if it is that.

    Raises `ExecutorError` if nobody is there, or what it takes to speak to it is not installed.
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
        # Equal jobs would be one to a scheduler that takes tasks for pure.
        yield client.get_executor(pure=False)


class _Ray:
    """Ray's tasks behind `submit`."""

    def __init__(self, ray: Any) -> None:
        # A task is sent to the cluster once, then named.
        self._remote: Callable[[Callable[..., Any]], Any] = cache(ray.remote(max_retries=1))
        self._task_error: type[Exception] = ray.exceptions.RayTaskError

    def submit(self, task: Callable[..., Any], /, *given: Any) -> "Future[Any]":
        # Ray sets a result on its own future whether or not that was cancelled, which raises.
        asked: Future[Any] = Future()
        theirs: Future[Any] = self._remote(task).remote(*given).future()
        theirs.add_done_callback(lambda ended: self._tell(asked, ended))
        return asked

    def _tell(self, asked: "Future[Any]", ended: "Future[Any]") -> None:
        if not asked.set_running_or_notify_cancel():
            return
        problem: Any = ended.exception()
        if isinstance(problem, self._task_error):
            # It is told as a traceback in colours: what the task itself has raised is a sentence.
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
        # Else it tells of itself, between the bar and the table.
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        connection = ray.init(f"ray://{address}", **quiet)
    except (OSError, ValueError, RuntimeError) as problem:
        raise ExecutorError(f"--executor ray://{address}: {_in_a_line(problem)}") from problem
    with connection:
        yield _Ray(ray)


def _reach(address: str) -> None:
    """Raise `OSError` or `ValueError` where nobody listens: clients go on trying, Ray's for half a
    minute, and say more than a sentence.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError("expected HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _in_a_line(problem: Exception) -> str:
    """Of a traceback that was sent along what it ends with."""
    text = str(problem).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    return " ".join(text.split())


_CLUSTERS: Final = {"dask": _dask, "ray": _ray}


def _missing(extra: str, problem: ImportError) -> str:
    return f"--executor {extra}:// needs pip install 'homing-epp[sim,{extra}]': {problem}"
