"""Unfairness between flows: a light flow that waits as long as a heavy one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.flow.uses import FLOWS_MAX, WINDOW_S, FlowUses


def ratio_of(*uses, now=WINDOW_S):
    """The ratio after a window with `uses`: (flow, tokens, wait) of each request."""
    noted = FlowUses(0.0)
    for flow, tokens, waited_s in uses:
        noted.left(0, flow, tokens=tokens, waited_s=waited_s, now=1.0)
    return noted.light_wait_ratios(now).get(0)


def test_a_light_flow_that_waits_like_a_heavy_one_is_unfair():
    """First come, first served."""
    assert ratio_of(("big", 900, 4.0), ("big", 900, 4.0), ("small", 10, 4.0)) == 1.0


def test_a_light_flow_that_hardly_waits_is_fair():
    ratio = ratio_of(("big", 900, 4.0), ("big", 900, 4.0), ("small", 10, 0.1))
    assert ratio == pytest.approx(0.1 / 2.7)


def test_a_flow_that_is_only_refused_is_light():
    assert ratio_of(("big", 900, 1.0), ("small", 0, 9.0)) == pytest.approx(9 / 5)


@pytest.mark.parametrize(
    "uses",
    [
        (),
        (("alone", 10, 1.0),),
        (("a", 10, 1.0), ("b", 11, 50.0)),
        (("big", 900, 0.0), ("small", 1, 0.0)),
    ],
)
def test_without_a_light_flow_that_could_wait_less_nothing_is_said(uses):
    assert ratio_of(*uses) is None


def test_only_the_last_complete_window_counts():
    uses = (("big", 900, 4.0), ("small", 10, 4.0))
    assert ratio_of(*uses, now=WINDOW_S - 0.1) is None
    assert ratio_of(*uses, now=2 * WINDOW_S - 0.1) == 1.0
    assert ratio_of(*uses, now=2 * WINDOW_S) is None
    assert ratio_of(*uses, now=10 * WINDOW_S) is None


@given(
    st.lists(
        st.tuples(st.text(max_size=1), st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 50)),
        max_size=50,
    )
)
def test_it_is_finite_and_bounded_by_the_number_of_requests(uses):
    noted, now = FlowUses(0.0), 0.0
    for flow, tokens, waited_s, after_s in uses:
        now += after_s
        noted.left(0, flow, tokens=tokens, waited_s=waited_s, now=now)
        for ratio in noted.light_wait_ratios(now).values():
            assert 0.0 <= ratio <= len(uses) + 1e-6


def test_invented_flows_are_not_all_remembered():
    uses = FlowUses(0.0)
    for number in range(FLOWS_MAX + 10):
        uses.left(0, str(number), tokens=1.0, waited_s=1.0, now=1.0)
    assert len(uses._bands[0]) == FLOWS_MAX
