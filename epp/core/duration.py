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
    """A number of seconds. A parameter of this type is read from Go's spelling."""

    __slots__ = ()


def parse_duration(text: str) -> Duration:
    """Return the duration that `text` spells as in Go; "0" needs no unit.

    Raises `ValueError`, with one sentence, for anything else.
    """
    if text == "0":
        return Duration(0.0)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 300ms, 2s or 1m30s")
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    return Duration(-total_s if text.startswith("-") else total_s)


def check_above_zero(name: str, span: Duration) -> None:
    """Raise `ValueError`, with one sentence, unless the parameter `name` is finite and above 0."""
    if not (math.isfinite(span) and span > 0):
        raise ValueError(f"{name} is {float(span)}s; it must be a duration above 0s")
