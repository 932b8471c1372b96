"""production-stack's qps fallback."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import PoolReplaced
from epp.core.duration import Duration
from epp.strategies.arrival_rate import Arrivals, ArrivalsSettings
from tests.builders import endpoint, request
from tests.strategies.driven import Driven, text


def told(index, now=0.0, slots=3):
    columns = index.match(request(), slots, now).columns
    return columns["arrivals"].tolist(), columns["seen"].tolist()


def test_the_first_that_was_never_sent_anything_then_the_fewest():
    """In the order of the list; ties go to the first, not in turn."""
    pods = Driven("production-stack-qps", pods=3)
    assert [pods.ask(text(f"{at}", 8)) for at in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_how_long_requests_stay_does_not_count():
    """An endpoint with nine requests in flight is like one that has answered nine."""
    pods = Driven("production-stack-qps", pods=2)
    assert [pods.send(text("a", 8)), pods.ask(text("b", 8))] == [0, 1]
    assert pods.ask(text("c", 8)) == 0


def test_a_new_endpoint_gets_everything_until_it_has_caught_up():
    """The rate is a count: 40 requests in a row to who came last."""
    pods = Driven("production-stack-qps", pods=2)
    for at in range(80):
        pods.ask(text(f"{at}", 8))
    pods.scheduler.take(PoolReplaced([endpoint(number) for number in range(3)]), pods.now)
    pods.report(2)
    assert [pods.ask(text(f"{at}", 8)) for at in range(40)] == [2] * 40
    assert pods.ask(text("then", 8)) == 0


def test_arrivals_count_for_a_minute():
    """An endpoint that was sent something remains one that was."""
    index = ArrivalsSettings().open()
    index.record(request(), 0, 0.5)
    index.record(request(), 0, 30.0)
    index.expire(60.0)
    assert told(index) == ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    index.expire(90.0)
    assert told(index) == ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0])


def test_who_leaves_was_never_sent_anything_and_what_moved_was_not_sent():
    """Whoever leaves twice."""
    index = ArrivalsSettings().open()
    index.record(request(), 0, 0.0)
    asked = request()
    index.retract(asked, 1, index.record(asked, 1, 0.0), 0.0)
    index.forget(0)
    index.forget(0)
    assert told(index) == ([0.0, 0.0, 0.0], [0.0, 1.0, 0.0])


@given(times=st.lists(st.floats(0, 1_000), max_size=200))
def test_memory_is_bounded_by_steps_whatever_arrives(times):
    """And nothing within the window is lost."""
    index = ArrivalsSettings().open()
    for now in sorted(times):
        index.record(request(), 0, now)
        assert len(index._steps[0]) <= 61
    if times:
        index.expire(max(times))
        assert told(index)[0][0] >= sum(now > max(times) - 59 for now in times)
        assert told(index)[0][0] <= sum(now > max(times) - 61 for now in times)


def test_another_window_starts_counting_anew():
    """Steps of two lengths cannot be added up."""
    index = Arrivals(ArrivalsSettings())
    index.record(request(), 0, 0.0)
    assert ArrivalsSettings().adopt(index)
    assert told(index)[0] == [1.0, 0.0, 0.0]
    assert ArrivalsSettings(window=Duration(30.0)).adopt(index)
    assert told(index) == ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="window"):
        ArrivalsSettings(window=Duration(0.0))
