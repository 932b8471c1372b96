"""Durations in Go's spelling: "300ms", "1m30s", "2h"."""

import math
import re
from typing import Final

_UNITS_S: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_WHOLE: Final = re.compile(rf"[+-]?(?:{_PART.pattern})+", re.ASCII)


class Duration(float):
    """A duration as a number of seconds. In a configuration, it is written as in Go, such as
    "1m30s".
    """

    __slots__ = ()


def parse_duration(text: str) -> Duration:
    """Return the duration that `text` states in Go's spelling, such as "300ms"; "0" needs no unit.

    Raises `ValueError`, whose message is one sentence, for any other text.
    """
    if text == "0":
        return Duration(0.0)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 300ms, 2s or 1m30s")
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    return Duration(-total_s if text.startswith("-") else total_s)


def duration_text(span_s: float) -> str:
    """Return a duration in seconds as text in Go's spelling without an exponent, such as "0.05s" or
    "10us".
    """
    text = f"{span_s:g}s"
    if "e" not in text:
        return text
    return f"{span_s * 1e6:.6g}us" if abs(span_s) < 1.0 else f"{span_s:.0f}s"


def check_above_zero(name: str, span: Duration) -> None:
    """Raise `ValueError`, whose message is one sentence, unless `span` is finite and above 0.
    `name` is the name of the parameter in the message.
    """
    if not (math.isfinite(span) and span > 0):
        raise ValueError(f"{name} is {float(span)}s; it must be finite and above 0s")
