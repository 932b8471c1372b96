"""Checks of the request headers in a trace."""

import re
from collections.abc import Mapping
from typing import Final

from sim.traces.arrival import FieldError

HEADERS_MAX: Final = 64
VALUE_CHARACTERS_MAX: Final = 4_096
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
"""Regular expression of a valid header name (RFC 9110, 5.6.2) of at most 128 characters."""


def headers_of(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (name in lower case, value) of each header.

    Raises `FieldError` for too many headers, an invalid or repeated name, or a long value; the
    error never contains a value.
    """
    if len(given) > HEADERS_MAX:
        raise FieldError("headers", f"Expected at most {HEADERS_MAX}, got {len(given)}")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise FieldError(
                "headers", "Expected header names of RFC 9110 with at most 128 characters"
            )
        if name.lower() in headers:
            raise FieldError("headers", f"Expected {name.lower()} once, got it twice")
        if len(value) > VALUE_CHARACTERS_MAX:
            raise FieldError(
                "headers",
                f"Expected at most {VALUE_CHARACTERS_MAX:,} characters in {name}, got "
                f"{len(value):,}",
            )
        headers[name.lower()] = value
    return tuple(headers.items())
