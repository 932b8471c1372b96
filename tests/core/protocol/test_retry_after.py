"""The header `retry-after`: seconds, a date, or nothing that can be understood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.protocol.retry_after import retry_after_s

DATE = "Fri, 27 Nov 2026 14:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": "9" * 64}, 1e64),
        ({"retry-after": "9" * 65}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "1.5"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "\u0663"}, None),
        ({"retry-after": "Fri, 27 Nov 2026 14:00:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": "Fri, 27 Nov 2026 13:59:30 GMT", "date": DATE}, 0.0),
        ({"retry-after": "Fri, 27 Nov 2026 14:00:30 GMT"}, None),
        ({"retry-after": "Fri, 27 Nov 2026 14:00:30 GMT", "date": "today"}, None),
        ({"retry-after": "Fri, 99 Nov 2026 14:00:30 GMT", "date": DATE}, None),
    ],
)
def test_what_a_response_asks_for(headers, seconds):
    """RFC 9110 section 10.2.3 allows a number of seconds and a date."""
    found = retry_after_s(headers)
    assert found == (None if seconds is None else pytest.approx(seconds))


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_is_a_number_of_seconds_or_nothing(value, date):
    """It is never an error and never negative."""
    found = retry_after_s({"retry-after": value, "date": date})
    assert found is None or found >= 0.0
