"""The response header `retry-after` (RFC 9110 section 10.2.3) as a number of seconds."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from epp.core.types import Seconds

RETRY_AFTER_HEADER: Final = "retry-after"
_BYTES_MAX: Final = 64
"""Maximum length in characters of a `retry-after` value; the longest date has 33 characters."""


def retry_after_s(headers: Mapping[str, str]) -> Seconds | None:
    """Return the seconds for which a response asks the client to wait, or None if it has no valid
    `retry-after`.

    A date is compared with the `date` of the same response, so that no clock is needed; without
    one, it is not valid. The result is never negative.
    """
    value = headers.get(RETRY_AFTER_HEADER, "").strip()
    if not value or len(value) > _BYTES_MAX:
        return None
    if value.isascii() and value.isdigit():
        return float(value)
    until, now = _date_of(value), _date_of(headers.get("date", ""))
    if until is None or now is None:
        return None
    return max(0.0, (until - now).total_seconds())


def _date_of(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value[:_BYTES_MAX])
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
