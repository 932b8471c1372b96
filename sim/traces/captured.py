"""Reading of a folder of live captures as one file: requests of all captured processes in order of
time.
"""

import heapq
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from epp.core.journal.events import Level
from epp.core.journal.lines import FORMAT_NAME, VERSION, CaptureHeader
from epp.core.journal.requests import BEHIND_MAX
from epp.core.types import Seconds
from epp.journal.problem import JournalError
from epp.journal.reading import Segments, journals
from sim.traces.arrival import TraceError
from sim.traces.line_stream import stream_of


class _Timed(Struct):
    time_s: Seconds


_time_of = msgspec.json.Decoder(_Timed).decode


def captured(folder: Path) -> BinaryIO:
    """Return a file with the header line and one line for each captured request.

    Raises `TraceError` if the folder cannot be read or its block sizes differ; reading the file may
    raise it too. A malformed line keeps its place among the others, so that the parser of lines
    reports it.
    """
    try:
        processes = journals(folder, Level.INPUTS)
        sizes = {size for process in processes for size in process.block_sizes()}
    except JournalError as problem:
        raise TraceError(str(folder), 0, "", str(problem)) from None
    if len(sizes) != 1:
        told = ", ".join(map(str, sorted(sizes))) or "none"
        raise TraceError(
            str(folder), 0, "", f"Expected blocks of one size in all files, got {told}"
        )
    header = CaptureHeader(
        format=FORMAT_NAME,
        version=VERSION,
        block_tokens=sizes.pop(),
        source=f"{len(processes)} processes",
    )
    merged = heapq.merge(*(_in_order(_lines(folder, process)) for process in processes))
    first = msgspec.json.encode(header) + b"\n"
    return stream_of(chain((first,), (line for _, line in merged)))


def _lines(folder: Path, process: Segments) -> Iterator[bytes]:
    try:
        yield from process.request_lines()
    except JournalError as problem:
        raise TraceError(str(folder), 0, "", str(problem)) from None


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
