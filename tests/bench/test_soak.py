"""What the soak reads of the picker once its load has ended."""

import pytest

from bench.soak import open_on

PAGE = """\
# TYPE homing_inflight_requests gauge
homing_inflight_requests{endpoint_name="a",namespace="",port="1"} 2.0
homing_inflight_requests{endpoint_name="b",namespace="",port="2"} 1.0
# TYPE homing_extproc_streams_inflight gauge
homing_extproc_streams_inflight 4.0
"""


def test_what_is_open_is_counted_over_all_endpoints():
    """Requests in flight and streams."""
    assert sorted(open_on(PAGE).values()) == [3, 4]


def test_a_page_that_does_not_tell_is_no_proof_that_nothing_is_open():
    """A gauge that was renamed must not pass for 0."""
    with pytest.raises(KeyError, match="streams"):
        open_on(PAGE.replace("extproc_streams_inflight", "other"))
