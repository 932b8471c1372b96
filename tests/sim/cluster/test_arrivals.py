"""Arrivals at another rate: nothing is lost or reordered, and the rate is what was asked for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.arrivals import Rate, at_rates
from tests.sim.made import arrival

FACTORS = st.floats(0.01, 50.0)


@st.composite
def rates(draw):
    """Some that ascend and do not overlap."""
    at_s, found = 0.0, []
    for _ in range(draw(st.integers(0, 4))):
        from_s = at_s + draw(st.floats(0.0, 50.0))
        at_s = from_s + draw(st.floats(0.1, 50.0))
        end = draw(st.none() | FACTORS)
        found.append(Rate(from_s=from_s, to_s=at_s, factor=draw(FACTORS), factor_end=end))
    return found


def moved(times_s, given_rates):
    given_arrivals = (arrival(index, time_s=time_s) for index, time_s in enumerate(times_s))
    return [one.time_s for one in at_rates(given_arrivals, given_rates)]


def trace_time_s(at_s, given_rates):
    """How much of the trace has passed by an instant of the run: the integral, by small steps."""
    passed_s, before_s = 0.0, 0.0
    for rate in given_rates:
        if at_s <= rate.from_s:
            break
        passed_s += rate.from_s - before_s
        before_s = min(at_s, rate.to_s)
        share = (before_s - rate.from_s) / rate.length_s
        reached = rate.factor + share * (rate.last - rate.factor)
        # Of a straight line the mean of its ends is exact.
        passed_s += (before_s - rate.from_s) * (rate.factor + reached) / 2
    return passed_s + max(0.0, at_s - before_s)


@given(st.lists(st.floats(0.0, 2_000.0), max_size=30).map(sorted), rates())
def test_each_request_comes_when_so_much_of_the_trace_has_passed(times_s, given_rates):
    found = moved(times_s, given_rates)
    assert len(found) == len(times_s)
    for time_s, at_s in zip(times_s, found, strict=True):
        assert trace_time_s(at_s, given_rates) == pytest.approx(time_s, rel=1e-6, abs=1e-6)
    for before, after in pairwise(found):
        assert after >= before - 1e-9 * max(1.0, before)


def test_a_step_and_a_ramp():
    """Three times as many for ten seconds; from one to three times as many over ten seconds."""
    each_second = [float(at) for at in range(60)]
    step = moved(each_second, [Rate(from_s=10, to_s=20, factor=3)])
    assert sum(10 <= at < 20 - 1e-9 for at in step) == 30
    assert sum(20 - 1e-9 <= at < 30 - 1e-9 for at in step) == 10
    ramp = moved(each_second, [Rate(from_s=10, to_s=20, factor=1, factor_end=3)])
    assert sum(10 <= at < 15 for at in ramp) == 8
    assert sum(15 <= at < 20 - 1e-9 for at in ramp) == 12
