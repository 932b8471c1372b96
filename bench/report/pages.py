"""Metrics pages of many pods, served by one process that does not count.

Small pages have the few series that decide, with other numbers each time; they keep the endpoints
fresh while requests are measured. Large ones are those of a simulated engine under load, 60 KB and
more (`bench.scrape.live_pages`).
"""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from multiprocessing.connection import Connection
from random import Random
from typing import Final, Protocol, cast

from msgspec import Struct

from bench.scrape import live_pages
from epp.app import loop_factory

_LONG_NAME: Final = "meta-llama/Llama-3.1-8B-Instruct"
_SMALL_PAGES: Final = 997
_SMALL: Final = """\
vllm:num_requests_waiting{{model_name="m"}} {waiting}
vllm:num_requests_running{{model_name="m"}} {running}
vllm:kv_cache_usage_perc{{model_name="m"}} {usage:.4f}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="27214"}} 1.0
"""


class _Counter(Protocol):
    value: int


class Pages(Struct, frozen=True):
    """Where they are, whose they are, and how many were sent."""

    port: int
    pid: int
    sent: _Counter


def small_pages() -> list[bytes]:
    random = Random("report:pages")
    return [
        _SMALL.format(
            waiting=random.randint(0, 9), running=random.randint(0, 64), usage=random.random()
        ).encode()
        for _ in range(_SMALL_PAGES)
    ]


class _Pod(asyncio.Protocol):
    """Answers each request on a connection with the next page, over and over."""

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
    return (
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
        b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n%s" % (len(page), page)
    )


def _serve(large: bool, cores: frozenset[int], tell: Connection, sent: _Counter) -> None:
    async def serve() -> None:
        answers = [_answer(page) for page in (live_pages(_LONG_NAME) if large else small_pages())]
        numbers = count()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Pod(answers, next(numbers), sent), "127.0.0.1", 0, backlog=2_048
        )
        tell.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    os.sched_setaffinity(0, cores)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


@contextmanager
def pages(cores: frozenset[int], *, large: bool) -> Iterator[Pages]:
    """Served inside."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    # One writer; whoever reads it may be late by a page.
    sent = cast("_Counter", spawn.Value("Q", 0, lock=False))
    process = spawn.Process(target=_serve, args=(large, cores, theirs, sent), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield Pages(ours.recv(), process.pid, sent)
    finally:
        process.terminate()
        process.join()
