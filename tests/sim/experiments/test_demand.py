"""What a trace asks for, and where it asks for most."""

import pytest

from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.demand import demand_of, guessed_pods
from tests.sim.made import arrival


def day(counts, *, every_s=600.0, **fields):
    """So many requests in each stretch of `every_s`, evenly."""
    times_s = [
        every_s * (number + at / count)
        for number, count in enumerate(counts)
        for at in range(count)
    ]
    return [arrival(index, time_s=at, **fields) for index, at in enumerate(times_s)]


def test_the_busiest_stretch_of_a_long_trace_is_sized_for():
    """The evening, and nothing else."""
    given = day([10, 10, 40, 10])
    found = demand_of(given, sized_s_max=600.0)
    assert found.cut
    assert found.sized_for.places == range(20, 60)
    assert found.sized_for.start_s == 1200.0
    assert found.sized_for.end_s == 1800.0
    assert found.whole.places == range(70)
    assert sum(one.demand.requests for one in found.over_time) == 70


def test_long_answers_make_a_stretch_busy():
    """Not the number of requests alone."""
    given = [
        *day([20]),
        *(arrival(20 + at, time_s=600.0 + at, output_tokens=900) for at in range(5)),
    ]
    assert demand_of(given, sized_s_max=300.0).sized_for.places.stop == 25


def test_a_short_trace_is_sized_for_as_it_is():
    """Also one of which all requests come at once."""
    assert not demand_of(day([5, 5]), sized_s_max=3600.0).cut
    at_once = demand_of([arrival(at) for at in range(9)], sized_s_max=3600.0)
    assert at_once.sized_for.places == range(9)
    assert guessed_pods(at_once.sized_for, find_profile(DEFAULT_PROFILE), 1.0) == 1


def test_shares_are_of_how_fast_work_comes():
    """A stretch at half the rate has half of it, however long it is."""
    found = demand_of(day([60, 30]), sized_s_max=600.0)
    shares = [found.share_of_sized(one) for one in found.over_time]
    assert shares[0] == pytest.approx(1.0, rel=0.1)
    assert shares[-1] == pytest.approx(0.5, rel=0.1)


def test_the_last_request_is_of_the_stretch_that_ends_with_it():
    """Not of one without length, which would have no rate."""
    found = demand_of([arrival(at, time_s=300.0 * at) for at in range(3)], sized_s_max=3600.0)
    assert [(one.start_s, one.end_s, one.places) for one in found.over_time] == [
        (0.0, 300.0, range(1)), (300.0, 600.0, range(1, 3)),
    ]  # fmt: skip


def test_the_guess_grows_with_the_work():
    """Twice as fast, about twice as many."""
    profile = find_profile(DEFAULT_PROFILE)
    stretch = demand_of(day([3_000] * 2, every_s=60.0, prompt_tokens=8_000), sized_s_max=900).whole
    once, twice = (guessed_pods(stretch, profile, speed) for speed in (1.0, 2.0))
    assert once > 1
    assert 1.8 <= twice / once <= 2.2


def test_of_nothing_there_is_no_demand():
    """The trace says so in its own words."""
    with pytest.raises(ValueError, match="no requests"):
        demand_of([], sized_s_max=1.0)
