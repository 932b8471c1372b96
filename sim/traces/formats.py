"""The formats that can be read, and the opening of a trace."""

from pathlib import Path
from typing import Final

from sim.traces.arrival import TraceError
from sim.traces.capture import CAPTURE
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
    *(LITELLM, OPENAI, INFERENCE_PERF),
)
"""In the order in which they are tried."""


def open_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """A trace to iterate, in the format that was asked for or that its beginning shows.

    Lines before the first that a format knows are malformed ones of it. Raises `TraceError` if
    nothing is written in it or no format fits, and `OSError`.
    """
    options = options or ReadOptions()
    first = next((number for number, _ in first_lines(path)), None)
    if first is None:
        raise empty(path)
    known = _named(options.format) if options.format else _found(path)
    if known is not None:
        return Trace(path, known, options)
    names = ", ".join(known.name for known in FORMATS)
    raise TraceError(str(path), first, "", f"Expected one of the formats {names}")


def _named(name: str) -> Format | None:
    return next((known for known in FORMATS if known.name == name), None)


def _found(path: Path) -> Format | None:
    """By its beginning: a document, or the first line that some format knows."""
    beginning = head(path)
    for known in FORMATS:
        if isinstance(known, DocumentFormat) and known.recognises(beginning):
            return known
    for _, line in first_lines(path):
        for known in FORMATS:
            if isinstance(known, LineFormat) and known.recognises(line):
                return known
    return None
