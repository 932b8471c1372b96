"""Durations as the field spells them: Go's "300ms", "1m30s", "2h"."""

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
    """Seconds. A type of its own, so that a parameter of this type is read from Go's spelling."""

    __slots__ = ()


def parse_duration(text: str) -> Duration:
    """Read a Go duration; "0" needs no unit.

    Raises `ValueError`, in one sentence, for anything else.
    """
    if text == "0":
        return Duration(0.0)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 300ms, 2s or 1m30s")
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    return Duration(-total_s if text.startswith("-") else total_s)


def check_above_zero(name: str, span: Duration) -> None:
    """Raises `ValueError`, in one sentence, unless the parameter `name` is finite and above 0."""
    if not (math.isfinite(span) and span > 0):
        raise ValueError(f"{name} must be a duration above 0s, is {float(span)}s")
