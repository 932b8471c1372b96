"""Reading of every kind of trace file as lines, so that the parsers of formats see only lines.

A gzip file is decompressed. A JSON array gives one line for each element, a Parquet file one JSON
object for each row, the detailed result of a serving benchmark one object for each request, and the
folder of a live capture the requests of all its processes. The first bytes of a file determine its
kind; its name does not.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct

from sim.traces.arrival import TraceError, field_error
from sim.traces.captured import captured
from sim.traces.line_stream import stream_of

LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Number of bytes that one line of a trace must not reach, and limit for one element of a JSON array.
"""
HEAD_BYTES: Final = 65_536
_GZIP: Final = b"\x1f\x8b"
_PARQUET: Final = b"PAR1"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_READ_BYTES: Final = 1024 * 1024
_NOT_BLANK: Final = re.compile(r"[^ \t\r\n]")
_ROWS: Final = 4096
"""Maximum number of rows of a Parquet file that are in memory at once."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open the trace file or folder `path` as a file of lines.

    Raises `TraceError` and `OSError`; reading the file inside the `with` block raises them too.
    """
    with contextlib.ExitStack() as files:
        try:
            yield _open(path, files)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise TraceError(str(path), 0, "", "Expected a whole gzip file") from None


def is_packed(path: Path) -> bool:
    """Return whether `path` is a gzip file, by its first bytes."""
    return not path.is_dir() and _begins_with(path, _GZIP)


def lines_in(path: Path) -> int:
    """Return the number of lines of the trace, including a last line without line end.

    Raises `TraceError` and `OSError`.
    """
    lines, last = 0, b"\n"
    with opened(path) as file:
        while part := file.read(HEAD_BYTES):
            lines += part.count(b"\n")
            last = part[-1:]
    return lines + (last != b"\n")


def _open(path: Path, files: contextlib.ExitStack) -> BinaryIO:
    if path.is_dir():
        return files.enter_context(captured(path))
    # Opening a pipe could wait for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise TraceError(str(path), 0, "", "Expected a regular file: a trace is read several times")
    if _begins_with(path, _PARQUET):
        return stream_of(_rows(path))
    raw: Any = files.enter_context(path.open("rb"))
    if is_packed(path):
        raw = files.enter_context(gzip.GzipFile(fileobj=raw))
    file = files.enter_context(io.BufferedReader(raw, HEAD_BYTES))
    if file.peek(HEAD_BYTES).startswith(_BYTE_ORDER_MARK):
        file.read(len(_BYTE_ORDER_MARK))
    beginning = file.peek(HEAD_BYTES).lstrip()
    if beginning.startswith(b"["):
        return stream_of(_elements(file, path))
    if beginning.startswith(b"{") and b'"input_lens"' in beginning:
        return stream_of(_requests_of_results(file, path))
    return file


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _rows(path: Path) -> Iterator[bytes]:
    """Yield each row of a Parquet file as one line of JSON."""
    # The import takes longer than reading most traces.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    encode = msgspec.json.Encoder(enc_hook=_as_json).encode
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    yield encode(row) + b"\n"
    except (pa.ArrowException, msgspec.ValidationError, TypeError, ValueError) as problem:
        sentence = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise TraceError(
            str(path), 0, "", f"Expected a whole Parquet file of plain columns: {sentence}"
        ) from None


def _as_json(value: Any) -> Any:
    """Return a date or time as text, because JSON has no type for it.

    Raises `TypeError` for a value of another type.
    """
    plain = getattr(value, "isoformat", None)
    if plain is None:
        raise TypeError(f"{type(value).__name__} is no number, text, time, list or object")
    return plain()


class _Text:
    """A scanner of the JSON values in a UTF-8 file, from the file's current position on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoded = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._at = 0
        # Numbers become floats, because only the end of a value matters.
        self._decode = json.JSONDecoder(parse_int=float).raw_decode

    def next_character(self) -> str:
        """Return the next non-blank character without consuming it; "" at the end of the file."""
        while True:
            found = _NOT_BLANK.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more(_READ_BYTES):
                return ""

    def take(self) -> None:
        """Consume the character of the JSON file that `next_character` returned."""
        self._at += 1

    def value(self) -> str:
        """Consume the JSON value at the current position, and return its text on one line.

        Raises `ValueError` if the value is malformed or longer than `LINE_BYTES_MAX` characters.
        """
        while True:
            try:
                _, end = self._decode(self._text, self._at)
            except json.JSONDecodeError:
                # The value may be incomplete. Reading as much again keeps the cost of all attempts
                # below twice the last.
                held = len(self._text) - self._at
                if held > LINE_BYTES_MAX or not self._more(max(_READ_BYTES, held)):
                    raise
            else:
                value, self._at = self._text[self._at : end], end
                return value.replace("\n", " ").replace("\r", " ")

    def _more(self, size: int) -> bool:
        read = self._file.read(size)
        self._text = self._text[self._at :] + self._decoded(read, final=not read)
        self._at = 0
        return bool(read)


def _elements(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield each element of a JSON array as one line; only a part of the file is in memory."""
    number = 0
    try:
        text = _Text(file)
        text.next_character()
        text.take()
        follows = ","
        while follows == "," and text.next_character() != "]":
            number += 1
            yield text.value().encode() + b"\n"
            follows = text.next_character()
            if follows == ",":
                text.take()
        well_formed = text.next_character() == "]"
    except UnicodeDecodeError:
        raise TraceError(str(path), number, "", "Expected UTF-8") from None
    except RecursionError:
        expected = "Expected JSON that is nested less deeply"
        raise TraceError(str(path), number, "", expected) from None
    except ValueError:
        well_formed = False
    if not well_formed:
        expected = f"Expected a whole JSON array, and it is malformed at element {number}"
        raise TraceError(str(path), number, "", expected)


class _Results(Struct, kw_only=True):
    """Members of a benchmark result of `vllm bench serve --save-detailed` or SGLang's
    `bench_serving`, from which requests are read.
    """

    input_lens: list[int]
    output_lens: list[int]
    start_times: list[float] | None = None
    errors: list[str] | None = None


def _requests_of_results(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield a line for each successful request in a file of benchmark results, which has one result
    on each line.
    """
    decode = msgspec.json.Decoder(_Results).decode
    for number in itertools.count(1):
        line = file.readline(LINE_BYTES_MAX)
        if not line:
            return
        if not line.strip():
            continue
        try:
            results = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            told = field_error(problem)
            raise TraceError(str(path), number, told.field, told.expected) from None
        requests = len(results.input_lens)
        optional = (results.start_times, results.errors)
        lengths = {len(results.output_lens), *(len(column) for column in optional if column)}
        if lengths != {requests}:
            expected = "Expected input_lens, output_lens, start_times and errors of one length"
            raise TraceError(str(path), number, "", expected)
        for place, (prompt, output) in enumerate(
            zip(results.input_lens, results.output_lens, strict=True)
        ):
            if results.errors and results.errors[place]:
                continue
            row: dict[str, float] = {"input_len": prompt, "output_len": output}
            if results.start_times:
                row["start_time"] = results.start_times[place]
            yield msgspec.json.encode(row) + b"\n"
