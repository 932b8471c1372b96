import math

import pytest
from msgspec import ValidationError, convert

from epp.core.duration import Duration
from epp.core.knowledge.saturation import UtilizationDetector
from tests.builders import candidates, request

NAN = math.nan


def utilization(detector=None, **columns):
    return (detector or UtilizationDetector()).utilization(candidates(**columns)).tolist()


def test_the_worse_of_queue_and_kv_cache_counts():
    """max(waiting / 5, usage / 0.8), the reference picker's defaults."""
    found = utilization(
        waiting_requests=[0, 5, 2, 10], kv_cache_usage=[0.4, 0.0, 0.8, 0.4], metrics_age_s=[0] * 4
    )
    assert found == pytest.approx([0.5, 1.0, 1.0, 2.0])


def test_thresholds_can_be_set():
    """By the field's names."""
    detector = convert(
        {"queueDepthThreshold": 10, "kvCacheUtilThreshold": 0.5}, UtilizationDetector
    )
    found = utilization(detector, waiting_requests=[5, 0], kv_cache_usage=[0.0, 0.4])
    assert found == pytest.approx([0.5, 0.8])


def test_stale_and_never_scraped_count_as_full():
    """At least 1; worse stays worse. An age equal to the threshold is not stale."""
    found = utilization(
        waiting_requests=[0, 0, NAN, 10],
        kv_cache_usage=[0.0, 0.0, NAN, 0.0],
        metrics_age_s=[1.0, 1.1, math.inf, 9.0],
    )
    assert found == [0.0, 1.0, 1.0, 2.0]


def test_an_engine_that_refused_counts_as_full():
    """Until its next good scrape, however idle its last one was."""
    found = utilization(
        waiting_requests=[0, 0, 20], kv_cache_usage=[0.0] * 3, saturated=[False, True, True]
    )
    assert found == [0.0, 1.0, 4.0]


def test_what_an_engine_does_not_report_is_not_held_against_it():
    """One signal known: that one. None: not full."""
    found = utilization(waiting_requests=[10, NAN, NAN], kv_cache_usage=[NAN, 0.8, NAN])
    assert found == pytest.approx([2.0, 1.0, 0.0])


def test_the_pool_is_as_full_as_the_mean():
    """And an empty pool has no room."""
    detector = UtilizationDetector()
    pool = candidates(waiting_requests=[0, 10, 5], kv_cache_usage=[0.0] * 3)
    assert detector.saturation(pool) == pytest.approx(1.0)
    assert detector.saturation(candidates(0)) == 1.0


def kept(detector, waiting):
    pool = candidates(waiting_requests=waiting, kv_cache_usage=[0.0] * len(waiting))
    return detector.keep(request(), pool).tolist()


def test_the_filter_drops_what_is_fuller_than_its_headroom_allows():
    """Full to the threshold stays."""
    assert kept(UtilizationDetector(), [4, 5, 6, 7]) == [True, True, False, False]
    assert kept(UtilizationDetector(headroom=0.2), [4, 5, 6, 7]) == [True, True, True, False]


def test_the_filter_keeps_all_when_all_are_too_full():
    """Some endpoint has to serve."""
    assert kept(UtilizationDetector(), [6, 50]) == [True, True]


@pytest.mark.parametrize(
    "parameters",
    [
        {"queueDepthThreshold": 0},
        {"kvCacheUtilThreshold": 0},
        {"kvCacheUtilThreshold": 1.5},
        {"headroom": -0.1},
        {"queueDepth": 5},
    ],
)
def test_a_threshold_out_of_bounds_is_refused(parameters):
    """By its name."""
    with pytest.raises(ValidationError, match=next(iter(parameters))):
        convert(parameters, UtilizationDetector)


def test_a_staleness_that_nothing_meets_is_refused():
    """0 s would call every endpoint full."""
    with pytest.raises(
        ValueError, match="metricsStalenessThreshold is 0s; it must be more than 0s"
    ):
        UtilizationDetector(metrics_staleness_threshold=Duration(0))
