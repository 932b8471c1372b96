"""The formats that can be read, and the opening of a trace."""

from pathlib import Path
from typing import Final

from sim.traces.arrival import TraceError
from sim.traces.capture import CAPTURE
from sim.traces.inference_perf import INFERENCE_PERF
from sim.traces.litellm import LITELLM
from sim.traces.openai_requests import OPENAI
from sim.traces.published import AZURE, BAILIAN, BURSTGPT, MOONCAKE
from sim.traces.reading import Format, LineFormat, ReadOptions, Trace, first_line, head

FORMATS: Final[tuple[Format, ...]] = (
    *(CAPTURE, MOONCAKE, BAILIAN, AZURE, BURSTGPT),
    *(LITELLM, OPENAI, INFERENCE_PERF),
)
"""In the order in which they are tried."""


def open_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """A trace to iterate, in the format that was asked for or that its beginning shows.

    Raises `TraceError` if no format fits, and `OSError`.
    """
    options = options or ReadOptions()
    for known in FORMATS:
        if options.format:
            fits = known.name == options.format
        elif isinstance(known, LineFormat):
            fits = known.recognises(first_line(path))
        else:
            fits = known.recognises(head(path))
        if fits:
            return Trace(path, known, options)
    names = ", ".join(known.name for known in FORMATS)
    raise TraceError(str(path), 0, "", f"Expected one of the formats {names}")
