"""Counts of a minute, against a model that remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from epp.strategies.recent_arrivals import ARRIVALS, RecentArrivalsSettings
from tests.builders import request

SLOTS = 3
WINDOW_S = 5
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("forget"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("wait"), st.integers(1, 4)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_it_counts_the_seconds_of_the_window(steps):
    """And who was ever used; it keeps one number a second at most."""
    index = RecentArrivalsSettings(window_s=WINDOW_S).open()
    known = {}
    now = 0
    for verb, value in steps:
        if verb == "record":
            index.record(request(), value, now + 0.5)
            known.setdefault(value, []).append(now)
        elif verb == "forget":
            index.forget(value)
            known.pop(value, None)
        else:
            now += value
            index.expire(float(now))
        found = index.match(request(), SLOTS, float(now))
        assert found.matched.tolist() == [int(slot in known) for slot in range(SLOTS)]
        assert found.columns[ARRIVALS].tolist() == [
            sum(at > now - WINDOW_S for at in known.get(slot, [])) for slot in range(SLOTS)
        ]
        assert all(len(counts) <= WINDOW_S for counts in index._counts.values())


def test_what_went_elsewhere_is_not_counted():
    """Once for each, and not once more when its second has left the window or its endpoint."""
    index = RecentArrivalsSettings(window_s=WINDOW_S).open()

    def arrivals():
        return index.match(request(), 1, 0.0).columns[ARRIVALS].tolist()

    asked = [request() for _ in range(4)]
    for one in asked[:3]:
        index.record(one, 0, 0.0)
    index.retract(asked[0], 0, 0, 0.1)
    index.retract(asked[0], 0, 0, 0.1)
    assert arrivals() == [2]
    index.expire(WINDOW_S + 1.0)
    index.record(asked[3], 0, WINDOW_S + 1.0)
    index.retract(asked[1], 0, 0, WINDOW_S + 1.0)
    assert arrivals() == [1]
    index.forget(0)
    index.record(request(), 0, WINDOW_S + 1.0)
    index.retract(asked[3], 0, 0, WINDOW_S + 1.0)
    assert arrivals() == [1]


def test_another_window_is_adopted():
    """What is older goes."""
    index = RecentArrivalsSettings().open()
    index.record(request(), 0, 0.0)
    assert RecentArrivalsSettings(window_s=1).adopt(index)
    index.expire(2.0)
    assert index.match(request(), 1, 2.0).columns[ARRIVALS].tolist() == [0]
