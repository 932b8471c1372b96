"""Which flows are light or heavy, by the tokens that they ask for."""

from hypothesis import given
from hypothesis import strategies as st

from epp.core.flow.demand import COMPARED_S, DEMAND_S, FlowDemand
from epp.core.flow.uses import FLOWS_MAX, LIGHT_SHARE


def demand(now=1.0, **tokens):
    found = FlowDemand()
    for flow, asked in tokens.items():
        found.ask(0, flow, asked, now)
    return found


def test_a_flow_is_heavy_if_another_one_asks_for_much_less():
    found = demand(large=1_000, small=100)
    assert found.is_light(0, "small", 1.0)
    assert found.is_heavy(0, "large", 1.0)
    assert not found.is_light(0, "large", 1.0)
    assert not found.is_heavy(0, "small", 1.0)
    assert not found.is_heavy(0, "new", 1.0)


def test_no_flow_is_heavy_if_all_ask_for_as_much_or_there_is_one():
    for found in (demand(a=1_000, b=900, c=1_100), demand(a=1_000), demand()):
        assert not found.is_light(0, "a", 1.0)
        assert not found.is_light(0, "new", 1.0)
        assert not found.is_heavy(0, "a", 1.0)


def test_one_light_flow_makes_all_others_heavy():
    found = demand(a=1_000, b=1_000, c=1_000, small=10)
    assert [found.is_heavy(0, flow, 1.0) for flow in ("a", "b", "c", "small")] == [True] * 3 + [
        False
    ]


def test_flows_of_other_bands_are_not_compared():
    found = demand(large=1_000)
    found.ask(1, "small", 10, 1.0)
    assert not found.is_heavy(0, "large", 1.0)


def test_a_flow_that_asks_for_nothing_is_forgotten_after_two_windows():
    found = demand(large=1_000, small=100)
    later = 1.0 + DEMAND_S
    found.ask(0, "large", 1_000, later)
    assert found.is_heavy(0, "large", later), "the last window counts"
    later += DEMAND_S
    found.ask(0, "large", 1_000, later)
    assert not found.is_heavy(0, "large", later)
    assert not found.is_light(0, "small", later + 10 * DEMAND_S)


def test_flows_are_compared_now_and_then():
    found = demand(a=1_000)
    assert not found.is_heavy(0, "a", 1.0)
    found.ask(0, "b", 10, 1.0)
    assert not found.is_heavy(0, "a", 1.0 + COMPARED_S / 2)
    assert found.is_heavy(0, "a", 1.0 + COMPARED_S)


def test_the_number_of_flows_is_bounded():
    found = FlowDemand()
    for number in range(3 * FLOWS_MAX):
        found.ask(0, f"flow-{number}", 10.0, 1.0)
    assert len(found.asked) == FLOWS_MAX
    assert not found.is_heavy(0, "flow-0", 1.0)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**9), max_size=12))
def test_a_flow_below_the_limit_is_never_heavy(asked):
    found = demand()
    for flow, tokens in asked.items():
        found.ask(0, flow, tokens, 1.0)
    mean = sum(asked.values()) / len(asked) if asked else 0.0
    heavy = {flow for flow in asked if found.is_heavy(0, flow, 1.0)}
    light = {flow for flow, tokens in asked.items() if tokens < LIGHT_SHARE * mean}
    assert heavy == (asked.keys() - light if light else set())
    assert {flow for flow in asked if found.is_light(0, flow, 1.0)} == light


def test_the_demand_of_a_flow_is_divided_by_its_weight():
    found = demand(large=1_000, small=100)
    weights = {"large": 10.0}
    assert not found.is_light(0, "small", 1.0, weights)
    assert not found.is_heavy(0, "large", 1.0, weights)
