"""The list of readable trace formats, and `open_trace`, which detects the format of a file."""

from pathlib import Path
from typing import Final

from sim.traces.arrival import TraceError
from sim.traces.capture import CAPTURE
from sim.traces.columns import OBJECTS, PROMPTS, TABLE
from sim.traces.inference_perf import INFERENCE_PERF
from sim.traces.litellm import LITELLM
from sim.traces.openai_requests import OPENAI
from sim.traces.published import AZURE, BAILIAN, BURSTGPT, MOONCAKE
from sim.traces.reading import (
    DocumentFormat,
    Format,
    LineFormat,
    ReadOptions,
    Trace,
    empty,
    first_lines,
    head,
)

FORMATS: Final[tuple[Format, ...]] = (
    *(CAPTURE, MOONCAKE, BAILIAN, AZURE, BURSTGPT),
    *(LITELLM, OPENAI, INFERENCE_PERF, TABLE, PROMPTS, OBJECTS),
)
"""All trace formats. `_found` tries document formats first. It then tries the line formats in this
order on one line after the other, and those in `_BY_COLUMNS` only if no other one recognises a line.
"""
_BY_COLUMNS: Final = (PROMPTS, TABLE, OBJECTS)
"""Formats that are tried after all others, because they recognise almost any table or JSON object.
"""


def open_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Open a trace file in the format that the options name, or in the one that its beginning
    shows.

    Reading treats lines before the first recognised one as malformed. Raises `OSError`, and
    `TraceError` if the file is empty, no format fits, or the format would ignore one of the options
    `columns`, `time_unit` and `tokenizer`.
    """
    options = options or ReadOptions()
    first = next((number for number, _ in first_lines(path)), None)
    if first is None:
        raise empty(path)
    known = _named(options.format) if options.format else _found(path, options)
    if known is not None:
        _check(path, known, options)
        return Trace(path, known, options)
    names = ", ".join(known.name for known in FORMATS)
    raise TraceError(str(path), first, "", f"Expected one of the formats {names}")


def _named(name: str) -> Format | None:
    return next((known for known in FORMATS if known.name == name), None)


def _check(path: Path, known: Format, options: ReadOptions) -> None:
    """Raise `TraceError` if the options contain `columns`, `time_unit` or `tokenizer` and the
    format would ignore it.
    """
    takes = known.takes if isinstance(known, LineFormat) else frozenset()
    for name in ("columns", "time_unit", "tokenizer"):
        if getattr(options, name) and name not in takes:
            flag = f"--{name.replace('_', '-')}"
            raise TraceError(
                str(path), 0, "", f"Expected no {flag}: the format {known.name} does not use it"
            )


def _found(path: Path, options: ReadOptions) -> Format | None:
    """Return the format that recognises the file's beginning or one of its first lines; None if
    there is none.

    If the user names columns, only formats with named columns are tried for lines.
    """
    beginning = head(path)
    for known in FORMATS:
        if isinstance(known, DocumentFormat) and known.recognises(beginning):
            return known
    lines = [line for _, line in first_lines(path)]
    listing = [known for known in FORMATS if isinstance(known, LineFormat)]
    others = [one for one in listing if one not in _BY_COLUMNS]
    for tried in (_BY_COLUMNS,) if options.columns else (others, _BY_COLUMNS):
        for line in lines:
            for format_of_lines in tried:
                if format_of_lines.recognises(line):
                    return format_of_lines
    return None
