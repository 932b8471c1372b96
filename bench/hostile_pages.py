"""Maximum share of the event loop that a pod can use with a hostile metrics page.

Each row is one response of a pod: the cost of receiving and reading it, in units of a usual page,
and the pod's share of the loop in the long run if every scrape gets this response.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from bench.scrape import live_pages
from epp.shell.engines.exposition import (
    ADAPTERS_MAX,
    SERIES_MAX,
    ExpositionError,
    PageMemory,
    PageReader,
)
from epp.shell.engines.loop_share import LoopShare
from epp.shell.engines.page_client import PIECE_S, BadResponseError, ResponseReader
from epp.shell.engines.scrape import INTERVAL_S_MIN

_PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_SCRAPES: Final = 20
_PATIENCE_S: Final = 1.0
_GAUGE: Final = b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 1\n"
_CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _plain(page: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)


def _series(count: int) -> bytes:
    return b"".join(b'vllm:num_requests_waiting{e="%d"} 1\n' % number for number in range(count))


def _held(count: int) -> bytes:
    return b"".join(
        b'vllm:lora_adapter_loaded{adapter_name="a%d",level="gpu"} 1\n' % number
        for number in range(count)
    )


def _states(count: int) -> bytes:
    return b"".join(
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a%d,b"} %d\n'
        % (number, number)
        for number in range(count)
    )


def _names(count: int) -> bytes:
    names = b",".join(b"%d" % number for number in range(count))
    return b'vllm:lora_requests_info{running_lora_adapters="%b"} 1\n' % names


def answers() -> Iterator[tuple[str, bytes, int]]:
    """Yield each hostile response as (name, bytes of the response, number of bytes that arrive at
    once).
    """
    whole = 256 * 1024
    for what, page in (
        ("as many wanted series as are read", _series(SERIES_MAX)),
        ("60,000 wanted series", _series(60_000)),
        ("90,000 wanted series", _series(90_000)),
        ("as many resident adapters as are read", _GAUGE + _held(ADAPTERS_MAX)),
        ("as many adapter states as are read", _GAUGE + _states(SERIES_MAX - 1)),
        ("500,000 adapter names in one label", _GAUGE + _names(500_000)),
        ("4 MB of empty lines", b"\n" * 4_000_000),
        ("60,000 lines that no engine knows", b"v 1\n" * 60_000),
        ("4 MB of labels on one line", _GAUGE + b"vllm:cache_config_info{" + b'a="",' * 600_000),
        (
            "4 MB of escapes on one line",
            _GAUGE + b'vllm:cache_config_info{a="' + b"\\n" * 2_000_000,
        ),
    ):
        yield what, _plain(page), whole
    crumbs = b"1\r\n#\r\n"
    yield "600,000 chunks of a byte", _CHUNKED + crumbs * 600_000 + b"0\r\n\r\n", whole
    yield "62 KB that arrive byte by byte", _plain(b"#" * 62_000), 1
    yield "headers that arrive byte by byte", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10_000, 1


def _receive_and_read(reader: PageReader, memory: PageMemory, answer: bytes, at_once: int) -> int:
    """Receive the response `answer` in pieces of `at_once` bytes and read its metrics page. Return
    the number of pieces until the response was complete or refused.
    """
    response = ResponseReader(_PAGE_BYTES_MAX)
    pieces = 0
    with suppress(BadResponseError, ExpositionError):
        for start in range(0, len(answer), at_once):
            pieces += 1
            response.feed(answer[start : start + at_once])
            if response.body is not None:
                reader.read(response.body, {}, memory)
                break
    return pieces


def _long_run(answer_of: Callable[[int], tuple[bytes, int]]) -> tuple[float, float]:
    """Read the response `answer_of(number)` many times as a scrape of one pod does, without a
    network. Return the median CPU seconds of one scrape, and the share of the event loop's time
    that scrapes would use in the second half of the run.
    """
    account = LoopShare(time.thread_time).open()
    reader, memory = PageReader(), PageMemory()
    costs_s, pauses_s = [], []
    for number in range(_SCRAPES):
        answer, at_once = answer_of(number)
        started_s = time.thread_time()
        with account:
            pieces = _receive_and_read(reader, memory, answer, at_once)
        account.charge(pieces * PIECE_S)
        costs_s.append(time.thread_time() - started_s + pieces * PIECE_S)
        pauses_s.append(account.settle(INTERVAL_S_MIN, _PATIENCE_S))
    half = _SCRAPES // 2
    return sorted(costs_s)[half], sum(costs_s[half:]) / sum(pauses_s[half:])


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the cost of each hostile response."""
    pages = [_plain(page) for page in live_pages("llama-3.1-8b")]
    usual_s, share = _long_run(lambda number: (pages[number % len(pages)], 256 * 1024))
    yield "a usual page", f"{usual_s * 1e3:.2f} ms, {share:.2%} of the loop"
    for what, answer, at_once in answers():
        cost_s, share = _long_run(lambda _, wire=answer, size=at_once: (wire, size))
        yield what, f"{cost_s * 1e3:.1f} ms, {cost_s / usual_s:.0f} usual pages, {share:.2%}"
