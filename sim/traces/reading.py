"""Reading of a trace file as arrivals in order of time, one at a time, without loading the file.

The first line that any format recognises determines the format; the file's name does not.
`containers` turns the stored form into lines. A malformed line is reported with its number; it
stops the reading or is counted.
"""

import contextlib
import hashlib
import heapq
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec
from msgspec import Struct

from epp.core.types import Seconds
from sim.traces.arrival import Arrival, FieldError, TraceError, field_error
from sim.traces.captured import captured
from sim.traces.containers import HEAD_BYTES, LINE_BYTES_MAX, is_packed, lines_in, opened
from sim.traces.kept import KeptTraces, NotKept
from sim.traces.workloads import Generated

PROBLEMS_MAX: Final = 10
"""Maximum number of bad lines that are stored; all are counted."""
BEGINNING_LINES_MAX: Final = 10
"""Maximum number of lines before and including the one that determines the format."""
_DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT_FROM_BYTES: Final = 16 * 1024 * 1024
"""File size from which a trace is cached; reading one of this size takes about a second."""
_KEPT_FROM_PACKED_BYTES: Final = 2 * 1024 * 1024


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Options for reading a trace."""

    format: str = ""
    """Name of a format, or "" to detect it by content."""
    block_tokens: int | None = None
    """Tokens in a block if the format does not say; None for the usual size of the format."""
    skip_bad: bool = False
    """Count malformed lines instead of stopping at the first."""
    reorder_max: int = 10_000
    """Number of lines by which an arrival may be out of order."""
    rate_per_s: float | None = None
    """Arrivals a second if the trace has no times; None if not given, which means 1."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs (what, name): the column `name` of the trace contains `what`, a key of `columns.ROLES`.
    """
    time_unit: str = ""
    """Unit of the times, a key of `moments.UNITS_S`, or "" for the unit of the format or the
    column.
    """
    tokenizer: str = ""
    """`tokenizer.json`, or its folder, that counts the tokens of texts; "" counts bytes instead."""
    seed: int = 1
    """Seed of formats that describe a workload instead of listing requests."""
    kept_in: str = ""
    """Folder in which big traces are cached in parsed form, or "" to read them each time."""

    def at_rate_s(self, arrivals: int) -> Seconds:
        """Return the arrival time of the request after `arrivals` others in a trace without times."""
        return arrivals / (self.rate_per_s or 1.0)


Parse: TypeAlias = Callable[[int, bytes], Arrival | None]
"""Function (index, line) -> arrival, with its time on any clock, or None if the line is not a
request. It may raise the exceptions in `MALFORMED`.
"""
MALFORMED: Final = (FieldError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that a malformed line or document raises."""


class LineFormat(Struct, frozen=True, kw_only=True):
    """A format with one request a line."""

    name: str
    says: str
    """Description for the help text."""
    recognises: Callable[[bytes], bool]
    """Recognises one line by its first 64 KiB."""
    parser: Callable[[bytes, ReadOptions], Parse]
    """Function (first line, options) -> parser of the other lines; may raise what a parser raises.
    """
    has_header: bool = False
    """The first line is a header; it is searched among the first few lines."""
    token_estimate: str = ""
    """Sentence about the estimate of tokens, for formats with text; "" if lines have counts."""
    generated: Callable[[bytes], Generated | None] | None = None
    """Function first line -> what its requests were drawn from; may raise what a parser raises.
    None if lines of this format are always recorded.
    """
    takes: frozenset[str] = frozenset()
    """Subset of the options `columns`, `time_unit` and `tokenizer` that the format uses."""


class DocumentFormat(Struct, frozen=True, kw_only=True):
    """A format that is one document and describes a workload."""

    name: str
    says: str
    recognises: Callable[[bytes], bool]
    """Recognises a document by its first 64 KiB."""
    generated: Callable[[bytes], Generated]
    """Function document -> what it describes; may raise what a parser raises."""


Format: TypeAlias = LineFormat | DocumentFormat


class Trace:
    """A trace file that can be iterated repeatedly; its counters describe the latest iteration."""

    def __init__(self, path: Path, trace_format: Format, options: ReadOptions) -> None:
        """Create a trace; callers use `open_trace`."""
        self.path = path
        self.format = trace_format
        self.options = options
        self.bad_lines = 0
        self.problems: list[TraceError] = []
        """The first few bad lines."""
        self._read = 0
        """Lines that could have been requests."""
        self._unread: set[int] = set()
        """Indices of bad lines; no request can wait for their answers."""

    def __iter__(self) -> Iterator[Arrival]:
        """Yield arrivals in order of time, the first at 0.

        Raises `OSError`, and `TraceError` at a malformed line unless those are skipped.
        """
        self.bad_lines = 0
        self.problems = []
        self._read = 0
        self._unread = set()
        return self._kept() if self.is_kept else from_zero(self._in_order())

    @property
    def is_kept(self) -> bool:
        """True if the trace is read from the cache on disk, to which a complete iteration writes
        it.
        """
        if not self.options.kept_in or isinstance(self.format, DocumentFormat):
            return False
        from_bytes = _KEPT_FROM_PACKED_BYTES if is_packed(self.path) else _KEPT_FROM_BYTES
        return self.path.stat().st_size >= from_bytes

    def keep(self) -> None:
        """Read all of a big trace once for later readers, unless it is cached already."""
        if self.is_kept:
            with contextlib.suppress(NotKept):
                kept, name = self._place()
                if kept.holds(name):
                    return
            for _ in self:
                pass

    def without_requests(self) -> TraceError:
        """Return why a complete iteration gave no request: the first skipped line, if any."""
        if self.problems:
            return self.problems[0]
        if isinstance(self.format, LineFormat) and not self._read:
            return empty(self.path)
        return TraceError(str(self.path), 0, "", "Expected at least one request")

    def requests_expected(self) -> int:
        """Return how many requests an iteration will give; exact for a document, which is read for
        it.

        For other formats it is the number of lines without the header, including blank and bad
        ones. Raises `TraceError` and `OSError`.
        """
        if isinstance(self.format, DocumentFormat):
            return sum(1 for _ in self._arrivals())
        return max(0, lines_in(self.path) - self.format.has_header)

    def generated(self) -> Generated | None:
        """Return what the requests are drawn from, or None if they were recorded. Raises what
        iterating raises.
        """
        try:
            if isinstance(self.format, DocumentFormat):
                with opened(self.path) as file:
                    return self.format.generated(file.read(_DOCUMENT_BYTES_MAX))
            if self.format.generated is None:
                return None
            line = next((line for _, line in first_lines(self.path)), b"")
            return self.format.generated(line)
        except MALFORMED as problem:
            raise self._named(0, problem) from None

    def as_written(self) -> Iterator[Arrival]:
        """Yield the requests in the order and at the times of the file, without bad lines.

        The counters do not change. Raises `TraceError` and `OSError`.
        """
        options = msgspec.structs.replace(self.options, skip_bad=True)
        return (one for _, one in Trace(self.path, self.format, options)._arrivals())

    def drawn_by_seed(self) -> bool:
        """Return whether the seed of the options decides what an iteration gives.

        It does not if requests are listed or the file defines a seed. Raises what iterating raises.
        """
        generated = self.generated() if isinstance(self.format, DocumentFormat) else None
        return generated is not None and generated.seed is None

    def _place(self) -> tuple[KeptTraces, str]:
        """Return the cache and the name of this trace's entry. Raises `NotKept` if it cannot be
        cached.
        """
        options = self.options
        how = (
            self.format.name, options.block_tokens, options.skip_bad, options.reorder_max,
            options.rate_per_s, options.columns, options.time_unit, options.tokenizer,
        )  # fmt: skip
        kept = KeptTraces(Path(options.kept_in))
        return kept, kept.name_of(self.path, how)

    def _kept(self) -> Iterator[Arrival]:
        """Yield from the cached entry as far as it is intact, and the rest from the file."""
        before = _stamp(self.path)
        try:
            kept, name = self._place()
        except NotKept:
            yield from from_zero(self._in_order())
            return
        given = 0
        with contextlib.suppress(NotKept):
            for arrival in kept.read(name):
                yield arrival
                given += 1
            return

        def as_named() -> bool:
            """Return False if there were bad lines or the file changed after its entry was named."""
            return not self.bad_lines and _stamp(self.path) == before

        arrivals = kept.keeping(name, from_zero(self._in_order()), as_named)
        yield from islice(arrivals, given, None)

    def _in_order(self) -> Iterator[Arrival]:
        """Yield arrivals sorted by time over a window of `reorder_max` arrivals."""
        window: list[tuple[Seconds, int, Arrival]] = []
        latest_s = -math.inf
        for line, arrival in self._arrivals():
            if arrival.time_s < latest_s:
                span = f"at most {self.options.reorder_max} lines out of order"
                self._bad(TraceError(str(self.path), line, "", f"Expected arrivals {span}"))
                self._unread.add(arrival.index)
                continue
            entry = (arrival.time_s, arrival.index, arrival)
            if len(window) < self.options.reorder_max:
                heapq.heappush(window, entry)
                continue
            latest_s, _, earliest = heapq.heappushpop(window, entry)
            yield earliest
        while window:
            yield heapq.heappop(window)[2]

    def _arrivals(self) -> Iterator[tuple[int, Arrival]]:
        """Yield (line, arrival) in the order of the file."""
        with opened(self.path) as file:
            try:
                if isinstance(self.format, DocumentFormat):
                    generated = self.format.generated(file.read(_DOCUMENT_BYTES_MAX))
                    seed = self.options.seed if generated.seed is None else generated.seed
                    yield from ((0, one) for one in generated.arrivals(seed))
                else:
                    yield from self._lines(file, self.format)
            except MALFORMED as problem:
                raise self._named(0, problem) from None

    def _lines(self, file: BinaryIO, trace_format: LineFormat) -> Iterator[tuple[int, Arrival]]:
        parse: Parse | None = None
        index = 0
        for number, line in _numbered(file, str(self.path)):
            if parse is None:
                try:
                    parse = trace_format.parser(line, self.options)
                except MALFORMED as problem:
                    named = self._named(number, problem)
                    if not trace_format.has_header or number >= BEGINNING_LINES_MAX:
                        raise named from None
                    self._bad(named)
                    continue
                if trace_format.has_header:
                    continue
            try:
                arrival = parse(index, line)
            except MALFORMED as problem:
                self._bad(self._named(number, problem))
                self._unread.add(index)
                arrival = None
            index += 1
            self._read = index
            if arrival is None:
                continue
            if arrival.after in self._unread:
                arrival = msgspec.structs.replace(arrival, after=None)
            yield number, arrival

    def _named(self, number: int, problem: Exception) -> TraceError:
        if isinstance(problem, FieldError):
            return TraceError(str(self.path), number, problem.field, problem.expected)
        if isinstance(problem, UnicodeDecodeError):
            return TraceError(str(self.path), number, "", "Expected UTF-8")
        if isinstance(problem, RecursionError):
            syntax = "YAML" if isinstance(self.format, DocumentFormat) else "JSON"
            expected = f"Expected {syntax} that is nested less deeply"
            return TraceError(str(self.path), number, "", expected)
        told = field_error(problem)
        return TraceError(str(self.path), number, told.field, told.expected)

    def _bad(self, problem: TraceError) -> None:
        if not self.options.skip_bad:
            raise problem
        self.bad_lines += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def from_zero(arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Yield the same arrivals, shifted so that the first is at 0."""
    origin_s: float | None = None
    for arrival in arrivals:
        if origin_s is None:
            origin_s = arrival.time_s
        time_s = arrival.time_s - origin_s
        yield msgspec.structs.replace(arrival, time_s=time_s) if origin_s else arrival


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a trace's bytes, or of the ordered lines of a folder of captures.

    Raises `TraceError` and `OSError`.
    """
    digest = hashlib.sha256()
    with captured(path) if path.is_dir() else path.open("rb") as file:
        while part := file.read(HEAD_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a value that changes when the file does."""
    told = path.stat()
    return told.st_ino, told.st_size, told.st_mtime_ns


def empty(path: Path) -> TraceError:
    """Return the error for a file without content or with nothing but a header."""
    return TraceError(str(path), 0, "", "The trace is empty, expected at least one request")


def head(path: Path) -> bytes:
    """Return the first 64 KiB, unpacked."""
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def first_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the first ten lines that are not blank, at most 64 KiB of each."""
    with opened(path) as file:
        for number, line in islice(_numbered(file, str(path)), BEGINNING_LINES_MAX):
            yield number, line[:HEAD_BYTES]


def _numbered(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of the lines that are not blank."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX:
            raise TraceError(path, number, "", f"Expected a line below {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line
