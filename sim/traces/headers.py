"""Headers of a request in a trace as the picker receives them: few and short, names in lower case."""

import re
from collections.abc import Mapping
from typing import Final

from sim.traces.arrival import FieldError

HEADERS_MAX: Final = 64
VALUE_CHARACTERS_MAX: Final = 4_096
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
"""Syntax of a header name: RFC 9110, 5.6.2."""


def headers_of(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of each header. Raises `FieldError`, whose text never has a value."""
    if len(given) > HEADERS_MAX:
        raise FieldError("headers", f"Expected at most {HEADERS_MAX}, got {len(given)}")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise FieldError("headers", "Expected names of RFC 9110, got another one")
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
