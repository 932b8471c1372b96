"""Metrics pages of many pods, served by one process that is not measured."""

import asyncio
import multiprocessing
import os
import resource
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from multiprocessing.connection import Connection
from typing import Final, Protocol, cast

from msgspec import Struct

from epp.shell.process.event_loop import loop_factory

_OPEN_FILES: Final = 4096


class _Counter(Protocol):
    value: int


class Pages(Struct, frozen=True):
    """A running process that serves metrics pages: its port, its process id, and the number of
    pages sent so far.
    """

    port: int
    pid: int
    sent: _Counter


class _Pod(asyncio.Protocol):
    """A connection of a simulated pod that answers each request with the next of the given
    responses, cyclically.
    """

    def __init__(self, answers: Sequence[bytes], first: int, sent: _Counter) -> None:
        self._answers = islice(cycle(answers), first % len(answers), None)
        self._asked = b""
        self._sent = sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._asked += data
        while b"\r\n\r\n" in self._asked:
            self._asked = self._asked.split(b"\r\n\r\n", 1)[1]
            self._transport.write(next(self._answers))
            self._sent.value += 1


def _answer(page: bytes) -> bytes:
    """Return an HTTP response with a metrics page, like that of vLLM's web server."""
    return (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jun 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-length: %d\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n%s"
        % (len(page), page)
    )


def _serve(
    pages: Sequence[bytes], cores: Collection[int], tell: Connection, sent: _Counter
) -> None:
    async def serve() -> None:
        answers = [_answer(page) for page in pages]
        connections = count()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Pod(answers, next(connections), sent), "127.0.0.1", 0, backlog=2_048
        )
        tell.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    allow_open_files()
    os.sched_setaffinity(0, cores)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


def allow_open_files() -> None:
    """Raise this process's limit of open files if its hard limit allows that, because many shells
    allow fewer than a thousand open connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, hard))


@contextmanager
def served(pages: Sequence[bytes], cores: Collection[int] | None = None) -> Iterator[Pages]:
    """Run a process on the processors `cores` that serves the metrics pages `pages`, during the
    context; it may use all processors of this process if `cores` is None.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    # There is one writer; a reader may be late by a page.
    sent = cast("_Counter", spawn.Value("Q", 0, lock=False))
    given = pages, cores or os.sched_getaffinity(0), theirs, sent
    process = spawn.Process(target=_serve, args=given, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield Pages(ours.recv(), process.pid, sent)
    finally:
        process.terminate()
        process.join()
