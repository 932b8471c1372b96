import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.load_report import LENGTH_MAX, LoadReport, read_load_report


@pytest.mark.parametrize(
    "text",
    [
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0",
        "text named_metrics.num_requests_waiting=3,named_metrics.kv_cache_usage_perc=2.5e-1",
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}',
        "TEXT cpu=0.9, named_metrics.num_requests_waiting=3, named_metrics.kv_cache_usage_perc=.25",
    ],
)
def test_both_formats_of_vllm_are_read(text):
    """In any case and order; what is not asked for is passed over, what is not told is NaN."""
    report = read_load_report(text)
    assert (report.waiting_requests, report.kv_cache_usage) == (3.0, 0.25)
    assert math.isnan(report.running_requests)


def test_running_requests_count_and_a_cache_beyond_full_is_full():
    """An engine may round up."""
    report = read_load_report(
        "TEXT named_metrics.num_requests_running=4, named_metrics.kv_cache_usage_perc=1.5"
    )
    assert (report.running_requests, report.kv_cache_usage) == (4.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TEXT",
        "BIN CgQI",
        "JSON {",
        "JSON []",
        'JSON {"named_metrics": {"num_requests_waiting": "3"}}',
        'JSON {"named_metrics": {}}',
        "TEXT cpu_utilization=0.9",
        "TEXT named_metrics.num_requests_waiting=many",
        "TEXT named_metrics.num_requests_waiting=1_0",
        "TEXT named_metrics.num_requests_waiting=-1",
        "TEXT named_metrics.num_requests_waiting=nan",
        "TEXT named_metrics.num_requests_waiting=inf",
        "TEXT named_metrics.num_requests_waiting=1e300",
        "TEXT named_metrics.num_requests_waiting=" + "1" * 40,
        "TEXT named_metrics.num_requests_waiting=1" + " " * LENGTH_MAX,
    ],
)
def test_what_is_not_a_report_is_none(text):
    """Malformed, too long, or without a number that a gauge of load can have."""
    assert read_load_report(text) is None


@given(st.text(max_size=80), st.sampled_from(["", "TEXT ", "JSON ", "TEXT named_metrics."]))
def test_whatever_is_sent_is_a_report_within_bounds_or_none(text, start):
    """Nothing raises: whoever answers writes the header."""
    report = read_load_report(start + text)
    assert report is None or isinstance(report, LoadReport)
    if report is not None and not math.isnan(report.kv_cache_usage):
        assert 0 <= report.kv_cache_usage <= 1
