"""A trace file to arrivals in order of time, one at a time: no file is held as a whole.

Formats are told apart by the first line that any of them knows, never by the name of the file.
`containers` makes lines of what a trace is stored in. A line that is malformed is named; it stops the
reading, or is counted.
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
"""Bad lines that are remembered; all are counted."""
BEGINNING_LINES_MAX: Final = 10
"""Lines that may be bad before the one that tells the format."""
_DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT_FROM_BYTES: Final = 16 * 1024 * 1024
"""A file of lines so large takes about a second to read."""
_KEPT_FROM_PACKED_BYTES: Final = 2 * 1024 * 1024


class ReadOptions(Struct, frozen=True, kw_only=True):
    """How a trace is to be read."""

    format: str = ""
    """Name of a format; "": found by content."""
    block_tokens: int | None = None
    """Tokens in a block where the format does not say; None: what is usual for the format."""
    skip_bad: bool = False
    """Count malformed lines instead of stopping at the first."""
    reorder_max: int = 10_000
    """Lines by which an arrival may be out of order."""
    rate_per_s: float | None = None
    """Arrivals a second where the trace has no times; None: nothing was said, and it is 1."""
    columns: tuple[tuple[str, str], ...] = ()
    """(what, name): the column `name` of the trace holds `what`, a name of `columns.ROLES`."""
    time_unit: str = ""
    """Unit of the times, a key of `moments.UNITS_S`; "": the unit of the format or of the column."""
    tokenizer: str = ""
    """`tokenizer.json`, or its folder, that counts the tokens of texts; "": bytes are counted."""
    seed: int = 1
    """For formats that describe a workload instead of listing requests."""
    kept_in: str = ""
    """Folder in which big traces are kept as they were read; "": they are read each time."""

    def at_rate_s(self, arrivals: int) -> Seconds:
        """When a request arrives after `arrivals` others in a trace without times."""
        return arrivals / (self.rate_per_s or 1.0)


Parse: TypeAlias = Callable[[int, bytes], Arrival | None]
"""(index, line) -> arrival, its time on any clock; None if the line is no request. May raise what
`MALFORMED` holds."""
MALFORMED: Final = (FieldError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What is raised for a line or a document that is not as expected."""


class LineFormat(Struct, frozen=True, kw_only=True):
    """A format with one request a line."""

    name: str
    says: str
    """What it is, for the help."""
    recognises: Callable[[bytes], bool]
    """By one line, its first 64 KiB."""
    parser: Callable[[bytes, ReadOptions], Parse]
    """(first line, options) -> the parser of the others; may raise what a parser raises."""
    has_header: bool = False
    """The first line is no request; it is looked for among the first few."""
    token_estimate: str = ""
    """How tokens are estimated, a sentence, where lines have text; "": they have counts."""
    generated: Callable[[bytes], Generated | None] | None = None
    """First line -> what its requests were drawn from; may raise what a parser raises. None: lines
    of this format are always recorded."""
    takes: frozenset[str] = frozenset()
    """Which of the options `columns`, `time_unit` and `tokenizer` change how it is read."""


class DocumentFormat(Struct, frozen=True, kw_only=True):
    """A format that is one document and describes a workload."""

    name: str
    says: str
    recognises: Callable[[bytes], bool]
    """By its first 64 KiB."""
    generated: Callable[[bytes], Generated]
    """Document -> what it describes; may raise what a parser raises."""


Format: TypeAlias = LineFormat | DocumentFormat


class Trace:
    """A file that can be iterated again and again; counters tell of the latest iteration."""

    def __init__(self, path: Path, trace_format: Format, options: ReadOptions) -> None:
        """Use `open_trace`."""
        self.path = path
        self.format = trace_format
        self.options = options
        self.bad_lines = 0
        self.problems: list[TraceError] = []
        """The first few bad lines."""
        self._read = 0
        """Lines that could have been requests."""
        self._unread: set[int] = set()
        """Indices of bad lines: nobody can wait for their answers."""

    def __iter__(self) -> Iterator[Arrival]:
        """Arrivals in order of time, the first at 0.

        Raises `TraceError` at a malformed line, unless those are skipped, and `OSError`.
        """
        self.bad_lines = 0
        self.problems = []
        self._read = 0
        self._unread = set()
        return self._kept() if self.is_kept else from_zero(self._in_order())

    @property
    def is_kept(self) -> bool:
        """Whether it is read from where it is kept, and put there by an iteration to the end."""
        if not self.options.kept_in or isinstance(self.format, DocumentFormat):
            return False
        from_bytes = _KEPT_FROM_PACKED_BYTES if is_packed(self.path) else _KEPT_FROM_BYTES
        return self.path.stat().st_size >= from_bytes

    def keep(self) -> None:
        """Read all of a big trace once, unless it is kept already: for others that will read it."""
        if self.is_kept:
            with contextlib.suppress(NotKept):
                kept, name = self._place()
                if kept.holds(name):
                    return
            for _ in self:
                pass

    def without_requests(self) -> TraceError:
        """Why an iteration to the end gave none: the first of the lines that were skipped, if any."""
        if self.problems:
            return self.problems[0]
        if isinstance(self.format, LineFormat) and not self._read:
            return empty(self.path)
        return TraceError(str(self.path), 0, "", "Expected at least one request")

    def requests_expected(self) -> int:
        """How many requests an iteration will give: exact for a document, which is read for it.

        Else all lines but the header, whether blank, bad or failed. Raises `TraceError`, `OSError`.
        """
        if isinstance(self.format, DocumentFormat):
            return sum(1 for _ in self._arrivals())
        return max(0, lines_in(self.path) - self.format.has_header)

    def generated(self) -> Generated | None:
        """What the requests are drawn from; None: they were recorded. Raises as iterating does."""
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
        """The requests in the order of the file, at the times of the file; bad lines are left out.

        The counters do not change. Raises `TraceError` and `OSError`.
        """
        options = msgspec.structs.replace(self.options, skip_bad=True)
        return (one for _, one in Trace(self.path, self.format, options)._arrivals())

    def drawn_by_seed(self) -> bool:
        """Whether the seed of the options decides what an iteration gives.

        Not where requests are listed, nor where the file names its own. Raises as iterating does.
        """
        generated = self.generated() if isinstance(self.format, DocumentFormat) else None
        return generated is not None and generated.seed is None

    def _place(self) -> tuple[KeptTraces, str]:
        """Where it is kept. Raises `NotKept` if it cannot be."""
        options = self.options
        how = (
            self.format.name, options.block_tokens, options.skip_bad, options.reorder_max,
            options.rate_per_s, options.columns, options.time_unit, options.tokenizer,
        )  # fmt: skip
        kept = KeptTraces(Path(options.kept_in))
        return kept, kept.name_of(self.path, how)

    def _kept(self) -> Iterator[Arrival]:
        """From where it is kept as far as that goes, the rest from the file."""
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
            """What bad lines there were is not kept, nor what was written since it got its name."""
            return not self.bad_lines and _stamp(self.path) == before

        arrivals = kept.keeping(name, from_zero(self._in_order()), as_named)
        yield from islice(arrivals, given, None)

    def _in_order(self) -> Iterator[Arrival]:
        """Sorted by time over a window of `reorder_max` arrivals."""
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
        """(line, arrival) in the order of the file."""
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
    """The same, the first at 0."""
    origin_s: float | None = None
    for arrival in arrivals:
        if origin_s is None:
            origin_s = arrival.time_s
        time_s = arrival.time_s - origin_s
        yield msgspec.structs.replace(arrival, time_s=time_s) if origin_s else arrival


def content_hash(path: Path) -> str:
    """SHA-256 of the bytes of a trace; of a folder of captured files, of their lines in order.

    Raises `TraceError` and `OSError`.
    """
    digest = hashlib.sha256()
    with captured(path) if path.is_dir() else path.open("rb") as file:
        while part := file.read(HEAD_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when the file does."""
    told = path.stat()
    return told.st_ino, told.st_size, told.st_mtime_ns


def empty(path: Path) -> TraceError:
    """What is said of a file in which nothing is written, or no more than a header."""
    return TraceError(str(path), 0, "", "The trace is empty, expected at least one request")


def head(path: Path) -> bytes:
    """The first 64 KiB, unpacked."""
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def first_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the first ten lines that are not blank, at most 64 KiB of each."""
    with opened(path) as file:
        for number, line in islice(_numbered(file, str(path)), BEGINNING_LINES_MAX):
            yield number, line[:HEAD_BYTES]


def _numbered(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX:
            raise TraceError(path, number, "", f"Expected a line below {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line
