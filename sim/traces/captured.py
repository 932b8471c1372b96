"""The folder of a live capture read as one file: the requests of all its processes in order of
time.
"""

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from epp.configuration.past_decisions import CaptureError, lines_of, past_files
from epp.core.capture.lines import FORMAT_NAME, CaptureHeader
from epp.core.capture.transcript import BEHIND_MAX
from epp.core.types import Seconds
from sim.traces.arrival import TraceError
from sim.traces.line_stream import stream_of


class _Timed(Struct):
    time_s: Seconds


_time_of = msgspec.json.Decoder(_Timed).decode


def captured(folder: Path) -> BinaryIO:
    """Return the header and one line for each request. Raises `TraceError` and `OSError`.

    A malformed line keeps its place, and the parser of lines reports it.
    """
    origins = past_files(folder, "requests")
    if not origins:
        raise TraceError(str(folder), 0, "", "Expected files of a capture, requests-*.jsonl.gz")
    headers = {
        path: msgspec.json.decode(next(lines_of(path), b"{}"), type=dict)
        for files in origins.values()
        for path in files
    }
    sizes = {header.get("block_tokens", 64) for header in headers.values() if header}
    if len(sizes) != 1:
        told = ", ".join(map(str, sorted(sizes)))
        raise TraceError(
            str(folder), 0, "", f"Expected blocks of one size in all files, got {told}"
        )
    header = CaptureHeader(
        format=FORMAT_NAME,
        version=1,
        block_tokens=sizes.pop(),
        source=f"{len(origins)} processes",
    )
    first = msgspec.json.encode(header) + b"\n"
    merged = heapq.merge(*(_in_order(_requests(files)) for files in origins.values()))
    lines = _after(first, (line for _, line in merged))
    return stream_of(lines)


def _after(first: bytes, lines: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from lines


def _requests(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        try:
            lines = lines_of(path)
            next(lines, None)
            yield from lines
        except CaptureError as problem:
            raise TraceError(str(path), 0, "", str(problem)) from None


def _in_order(lines: Iterator[bytes]) -> Iterator[tuple[Seconds, bytes]]:
    window: list[tuple[Seconds, bytes]] = []
    latest_s = 0.0
    for line in lines:
        try:
            at_s = latest_s = _time_of(line).time_s
        except msgspec.DecodeError:
            at_s = latest_s
        if len(window) <= BEHIND_MAX:
            heapq.heappush(window, (at_s, line))
        else:
            yield heapq.heappushpop(window, (at_s, line))
    while window:
        yield heapq.heappop(window)
