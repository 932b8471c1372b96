"""Reading of times in traces: numbers in several units, and dates."""

import math
import re
from datetime import UTC, datetime
from typing import Final

from epp.core.types import Seconds
from sim.traces.arrival import FieldError

UNITS_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Length of each unit in seconds."""
_ABSOLUTE_FROM: Final = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
"""Lower bound of a Unix time of the years 1973 to 5138 in each unit; larger units stay below it."""
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
    """Cut the unit off the name of a column: `start_ns` gives ("start_", "ns"), `start` ("start", "")."""
    found = _UNIT_AT_THE_END.search(name.lower())
    if found is None:
        return name, ""
    return name[: found.start()], _SPELT_OUT.get(found[1], found[1])


def seconds_of(value: object, field: str, unit: str, usual: str) -> Seconds:
    """Return the time in the column `field` in seconds; a date counts from 1970.

    A text is read as a number, else as a date and time by `instant_of`. A number counts `unit`s. If
    `unit` is "", it counts `usual` units, unless it is so large that it can only be a Unix time in a
    smaller unit. Raises `FieldError`.
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
    """Read a date and time of ISO 8601, which is in UTC unless it says another zone.

    Raises `FieldError`.
    """
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise FieldError(field, f"Expected a date and a time, got {text[:40]!r}") from None
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
