"""Reading of a trace file as arrivals in order of time, one at a time, without loading the file.

The beginning of the file determines the format (`formats`); the file's name does not.
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
from sim.traces.kept import CachedTraces, NotCached
from sim.traces.workloads import Generated

PROBLEMS_MAX: Final = 10
"""Maximum number of malformed lines whose errors are stored; all malformed lines are counted."""
BEGINNING_LINES_MAX: Final = 10
"""Number of lines at the beginning of a file in which its format (blank lines do not count) or its
header is searched.
"""
_DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT_FROM_BYTES: Final = 16 * 1024 * 1024
"""Size in bytes from which an uncompressed trace file is cached in parsed form; reading one takes
about a second.
"""
_KEPT_FROM_PACKED_BYTES: Final = 2 * 1024 * 1024


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Options for reading a trace."""

    format: str = ""
    """Name of the trace format, or "" to detect it by content."""
    block_tokens: int | None = None
    """Number of tokens in a block, which overrides the size that a line of the trace states; None
    for that size, or else the usual one of the format. Captures, workload files and prompts as text
    ignore it.
    """
    skip_bad: bool = False
    """True to count malformed lines and go on; False to stop at the first one."""
    reorder_max: int = 10_000
    """Maximum number of lines by which an arrival may be out of order in the file."""
    rate_per_s: float | None = None
    """Arrival rate in requests a second, if the trace has no times; None for 1."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs (role, column name) that the user gave; roles are keys of `column_names.ROLES`."""
    time_unit: str = ""
    """Unit of the times in the trace, a key of `moments.UNITS_S`, or "" for the unit of the format
    or the column name.
    """
    tokenizer: str = ""
    """Path of a `tokenizer.json` or its folder that counts the tokens of texts; "" to count one
    token for every four bytes.
    """
    seed: int = 1
    """Random seed for files that describe a workload instead of listing requests, and define no
    seed.
    """
    kept_in: str = ""
    """Folder in which big traces are cached in parsed form, or "" to parse them each time."""

    def at_rate_s(self, arrivals: int) -> Seconds:
        """Return the arrival time in seconds of the request number `arrivals` (from 0) in a trace
        without times, at the constant rate `rate_per_s`.
        """
        return arrivals / (self.rate_per_s or 1.0)


Parse: TypeAlias = Callable[[int, bytes], Arrival | None]
"""Parser (index, line) -> arrival, or None if the line is valid but no request to simulate. Times
may start anywhere. It may raise the exceptions in `MALFORMED`.
"""
MALFORMED: Final = (FieldError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that parsing a malformed line or document raises."""


class LineFormat(Struct, frozen=True, kw_only=True):
    """A trace format with one request on each line."""

    name: str
    recognises: Callable[[bytes], bool]
    """Function that returns whether a line, cut to 64 KiB, has this format."""
    parser: Callable[[bytes, ReadOptions], Parse]
    """Function (first line, options) -> parser of the lines of this trace. It may raise the
    exceptions in `MALFORMED`.
    """
    has_header: bool = False
    """True if the file begins with a header line; it is searched in the first ten lines."""
    token_estimate: str = ""
    """Sentence about how tokens are estimated, for formats with text; "" if lines have token
    counts.
    """
    generated: Callable[[bytes], Generated | None] | None = None
    """Function from the first line to the workload from which the requests were generated. It may
    raise the exceptions in `MALFORMED`. None if requests of this format are always recorded.
    """
    takes: frozenset[str] = frozenset()
    """The options that this format uses, among `columns`, `time_unit` and `tokenizer`."""


class DocumentFormat(Struct, frozen=True, kw_only=True):
    """A trace format whose file is one document that describes a workload."""

    name: str
    recognises: Callable[[bytes], bool]
    """Function that returns whether a document, cut to 64 KiB, has this format."""
    generated: Callable[[bytes], Generated]
    """Function from the document to the workload that it describes. It may raise the exceptions in
    `MALFORMED`.
    """


Format: TypeAlias = LineFormat | DocumentFormat


class Trace:
    """A trace file that can be iterated repeatedly. Its counters, such as `bad_lines`, describe the
    latest iteration.
    """

    def __init__(self, path: Path, trace_format: Format, options: ReadOptions) -> None:
        """Create a trace that is read from `path` in a known format. Use `open_trace` to detect the
        format.
        """
        self.path = path
        self.format = trace_format
        self.options = options
        self.bad_lines = 0
        self.problems: list[TraceError] = []
        """Errors of the first ten malformed lines."""
        self._read = 0
        """Number of non-blank lines after the header that were read, malformed ones included."""
        self._unread: set[int] = set()
        """Indices of malformed lines and of lines that are too far out of order. A request that
        waits for the answer to one of them is sent without waiting.
        """

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests in order of time; the first is at time 0.

        Raises `OSError`, and `TraceError` at a malformed line unless `skip_bad` is set.
        """
        self.bad_lines = 0
        self.problems = []
        self._read = 0
        self._unread = set()
        return self._kept() if self.is_kept else from_zero(self._in_order())

    @property
    def is_kept(self) -> bool:
        """True if the trace is big enough for the cache on disk, a cache folder is set, and the file
        lists requests.

        A complete iteration then writes the cache entry, unless a line is malformed, a request has a
        body or the entry is too large, and later iterations read it.
        """
        if not self.options.kept_in or isinstance(self.format, DocumentFormat):
            return False
        from_bytes = _KEPT_FROM_PACKED_BYTES if is_packed(self.path) else _KEPT_FROM_BYTES
        return self.path.stat().st_size >= from_bytes

    def keep(self) -> None:
        """Read a big trace once so that it is cached on disk for later readers, unless it is cached
        already. Do nothing if `is_kept` is False.
        """
        if self.is_kept:
            with contextlib.suppress(NotCached):
                kept, name = self._place()
                if kept.holds(name):
                    return
            for _ in self:
                pass

    def without_requests(self) -> TraceError:
        """Return the error for a complete iteration without any request: that of the first
        malformed line, if there was one.
        """
        if self.problems:
            return self.problems[0]
        if isinstance(self.format, LineFormat) and not self._read:
            return empty(self.path)
        return TraceError(str(self.path), 0, "", "Expected at least one request")

    def requests_expected(self) -> int:
        """Return the expected number of requests of an iteration, for a progress bar.

        It is exact for a document, whose requests are generated to count them. For other formats it
        is the number of lines without the header, including blank and malformed ones. Raises
        `TraceError` and `OSError`.
        """
        if isinstance(self.format, DocumentFormat):
            return sum(1 for _ in self._arrivals())
        return max(0, lines_in(self.path) - self.format.has_header)

    def generated(self) -> Generated | None:
        """Return the workload from which the requests are generated, or None if they were recorded.

        Raises `TraceError` and `OSError`.
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
        """Yield the requests in the order and with the times of the file, without malformed lines.

        The counters of this trace do not change. Raises `TraceError` and `OSError`.
        """
        options = msgspec.structs.replace(self.options, skip_bad=True)
        return (one for _, one in Trace(self.path, self.format, options)._arrivals())

    def drawn_by_seed(self) -> bool:
        """Return whether `options.seed` decides which requests an iteration yields.

        It does not if the file lists requests or defines its own seed. Raises `TraceError` and
        `OSError`.
        """
        generated = self.generated() if isinstance(self.format, DocumentFormat) else None
        return generated is not None and generated.seed is None

    def _place(self) -> tuple[CachedTraces, str]:
        """Return the cache on disk, and the name of the entry of this trace.

        Raises `NotCached` if the trace cannot be cached.
        """
        options = self.options
        how = (
            self.format.name, options.block_tokens, options.skip_bad, options.reorder_max,
            options.rate_per_s, options.columns, options.time_unit, options.tokenizer,
        )  # fmt: skip
        kept = CachedTraces(Path(options.kept_in))
        return kept, kept.name_of(self.path, how)

    def _kept(self) -> Iterator[Arrival]:
        """Yield the requests from the trace's entry in the cache on disk as far as that is intact,
        and all others from the trace file.
        """
        before = _stamp(self.path)
        try:
            kept, name = self._place()
        except NotCached:
            yield from from_zero(self._in_order())
            return
        given = 0
        with contextlib.suppress(NotCached):
            for arrival in kept.read(name):
                yield arrival
                given += 1
            return

        def as_named() -> bool:
            """Return whether the trace may be cached under its name: it has no malformed lines, and
            the file has not changed since the name of its cache entry was computed.
            """
            return not self.bad_lines and _stamp(self.path) == before

        arrivals = kept.keeping(name, from_zero(self._in_order()), as_named)
        yield from islice(arrivals, given, None)

    def _in_order(self) -> Iterator[Arrival]:
        """Yield the requests sorted by time, in a window of `reorder_max` requests.

        A request that is further out of order counts as a malformed line.
        """
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
        """Yield (line number, arrival) in the order of the file. The line number is 0 for generated
        requests.
        """
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
    """Yield the arrivals, with times shifted so that the first is at 0."""
    origin_s: float | None = None
    for arrival in arrivals:
        if origin_s is None:
            origin_s = arrival.time_s
        time_s = arrival.time_s - origin_s
        yield msgspec.structs.replace(arrival, time_s=time_s) if origin_s else arrival


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a trace file, or of the merged lines of a folder of live captures.

    Raises `TraceError` and `OSError`.
    """
    digest = hashlib.sha256()
    with captured(path) if path.is_dir() else path.open("rb") as file:
        while part := file.read(HEAD_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Return inode, size and modification time of a file, which show whether it changed."""
    told = path.stat()
    return told.st_ino, told.st_size, told.st_mtime_ns


def empty(path: Path) -> TraceError:
    """Return the error for a trace file without content or with nothing but a header."""
    return TraceError(str(path), 0, "", "The trace is empty, expected at least one request")


def head(path: Path) -> bytes:
    """Return the first 64 KiB of a trace, decompressed."""
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def first_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of the first ten non-blank lines of a trace, each cut to 64 KiB."""
    with opened(path) as file:
        for number, line in islice(_numbered(file, str(path)), BEGINNING_LINES_MAX):
            yield number, line[:HEAD_BYTES]


def _numbered(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of the non-blank lines. Raises `TraceError` at a line of 64
    MiB or more.
    """
    number = 0
    while line := file.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX:
            raise TraceError(path, number, "", f"Expected a line below {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line
