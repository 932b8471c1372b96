"""Parsing of times in traces: numbers in several units, and dates."""

import math
import re
from datetime import UTC, datetime
from typing import Final

from epp.core.types import Seconds
from sim.traces.arrival import FieldError

UNITS_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Length in seconds of each time unit."""
_ABSOLUTE_FROM: Final = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
"""Smallest number that is a Unix time after 1973 in each unit, largest first; the same time in a
larger unit is a smaller number.
"""
_UNIT_AT_THE_END: Final = re.compile(
    r"(?<=[^a-z])(?:in )?(ns|us|ms|s|sec|seconds|milliseconds|microseconds|nanoseconds)"
    r"[^a-z]*$"
)
_SPELT_OUT: Final = {
    "sec": "s",
    "seconds": "s",
    "milliseconds": "ms",
    "microseconds": "us",
    "nanoseconds": "ns",
}


def unit_in(name: str) -> tuple[str, str]:
    """Split the time unit off a column name: `start_ns` gives ("start_", "ns"), `start` gives
    ("start", "").
    """
    found = _UNIT_AT_THE_END.search(name.lower())
    if found is None:
        return name, ""
    return name[: found.start()], _SPELT_OUT.get(found[1], found[1])


def seconds_of(value: object, field: str, unit: str, usual: str) -> Seconds:
    """Return the time `value` of column `field` in seconds; a date counts from 1970.

    A text is parsed as a number, or else as a date and time by `instant_of`. A number is in
    `unit`s. If `unit` is "", it is in `usual` units, unless it is so large that it must be a Unix
    time in a smaller unit. Raises `FieldError`.
    """
    if isinstance(value, str):
        text = value.strip()
        try:
            number = float(text)
        except ValueError:
            return instant_of(text, field).timestamp()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 2**80 else math.inf
    else:
        raise FieldError(field, f"Expected a time, got {type(value).__name__}")
    if not 0 <= number < math.inf:
        raise FieldError(field, f"Expected a time of at least 0, got {str(value)[:40]!r}")
    if not unit:
        unit = next((known for least, known in _ABSOLUTE_FROM if number >= least), usual)
    return number * UNITS_S[unit]


def instant_of(text: str, field: str) -> datetime:
    """Parse a date and time of ISO 8601; without a time zone it is UTC.

    Raises `FieldError`, which names the column `field`.
    """
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise FieldError(field, f"Expected a date and a time, got {text[:40]!r}") from None
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
