"""`retry-after` of refusals: the expected drain time of the queue, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from epp.core.flow.drain_rate import (
    PLACED_KEPT,
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    DrainRate,
)


def rate_of(*times_s, since_s=0.0):
    rate = DrainRate()
    rate.begin(since_s)
    for time_s in times_s:
        rate.placed(time_s)
    return rate


def test_each_waiting_request_takes_the_mean_time_between_placements():
    assert rate_of(1.0, 2.0, 3.0, 4.0).retry_after_s(10, 4.0) == 10
    assert rate_of(0.5, 1.0, 1.5, 2.0).retry_after_s(10, 2.0) == 5


def test_a_queue_that_does_not_drain_asks_for_more_and_more_time():
    stuck = rate_of()
    assert [stuck.retry_after_s(2, now) for now in (0.0, 4.0, 10.0, 500.0)] == [1, 8, 20, 60]


def test_only_the_last_placements_count():
    """The queue drained slowly at first, and drains fast now."""
    fast = [100.0 + at / 10 for at in range(1, PLACED_KEPT + 1)]
    assert rate_of(50.0, 100.0, *fast).retry_after_s(15, fast[-1]) == 2


def test_a_queue_that_was_empty_begins_to_measure_again():
    rate = rate_of(100.0)
    rate.begin(200.0)
    rate.placed(201.0)
    assert rate.retry_after_s(3, 201.0) == 3


def test_no_request_ever_waited():
    assert DrainRate().retry_after_s(0, 5.0) == RETRY_AFTER_S_MIN


@given(
    st.lists(st.floats(0, 1e6), max_size=200).map(sorted),
    st.integers(0, 10**6),
    st.floats(0, 1e6),
)
def test_it_is_bounded_and_grows_with_the_queue(times_s, requests, after_s):
    rate = rate_of(*times_s)
    now = (times_s[-1] if times_s else 0.0) + after_s
    found = rate.retry_after_s(requests, now)
    assert RETRY_AFTER_S_MIN <= found <= rate.retry_after_s(requests + 5, now)
    assert rate.retry_after_s(requests + 5, now) <= RETRY_AFTER_S_MAX
