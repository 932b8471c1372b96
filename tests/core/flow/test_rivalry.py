"""Whether requests gain anything by waiting in the picker."""

import pytest

from epp.core.flow.demand import COMPARED_S
from epp.core.flow.rivalry import RIVALS_S, STANDING_S, Rivalry
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings, Ordering
from tests.builders import request

FAIR = BandSettings(fairness=Fairness.TOKENS)


def rivalry(band=FAIR, **fields):
    return Rivalry(FlowSettings(default_band=band, **fields))


def test_a_flow_is_alone_until_another_comes():
    found = rivalry()
    assert not found.met("a", 0, 1.0)
    assert not found.met("a", 0, 2.0)
    assert found.is_alone(request(), 2.0)
    assert found.met("b", 0, 3.0), "a competition begins"
    assert not found.met("a", 0, 4.0), "it goes on"
    assert not found.is_alone(request(), 4.0)


def test_a_competition_ends_a_while_after_the_last_request_of_another_flow():
    found = rivalry()
    found.met("a", 0, 1.0)
    found.met("b", 0, 2.0)
    found.met("b", 0, 50.0)
    assert not found.is_alone(request(), 1.9 + RIVALS_S)
    assert found.is_alone(request(), 2.0 + RIVALS_S)


@pytest.mark.parametrize(
    ("settings", "competes"),
    [
        (FlowSettings(default_band=FAIR), True),
        (FlowSettings(), True),
        (FlowSettings(by_priority=False), False),
        (FlowSettings(by_priority=False, default_band=FAIR), False),
    ],
)
def test_priorities_compete_if_they_have_bands(settings, competes):
    found = Rivalry(settings)
    found.met("a", 0, 1.0)
    found.met("a", 1, 1.0)
    assert found.is_alone(request(), 1.0) is not competes


def test_flows_do_not_compete_if_their_band_is_one_queue():
    found = rivalry(BandSettings(fairness=Fairness.NONE))
    found.met("a", 0, 1.0)
    found.met("b", 0, 1.0)
    assert found.is_alone(request(), 1.0)


def test_requests_that_are_ordered_by_deadline_always_compete():
    found = rivalry(BandSettings(ordering=Ordering.DEADLINE))
    assert not found.is_alone(request(), 1.0)


def test_a_short_burst_need_not_wait():
    found = rivalry()
    assert not found.must_wait(1.0)
    assert not found.must_wait(0.9 + STANDING_S)
    found.found_room()
    assert not found.must_wait(1.9 + 2 * STANDING_S)
    assert found.must_wait(1.9 + 3 * STANDING_S)


def test_room_that_is_soon_gone_again_does_not_end_a_burst():
    """In a large pool some endpoint has room every now and then."""
    found = rivalry()
    assert not found.must_wait(1.0)
    found.found_room()
    assert not found.must_wait(0.9 + STANDING_S)
    found.found_room()
    assert found.must_wait(1.0 + STANDING_S)


def test_requests_wait_as_long_as_others_wait():
    found = rivalry()
    assert not found.must_wait(1.0)
    assert found.must_wait(1.0 + STANDING_S)
    found.holding = True
    found.found_room()
    assert found.must_wait(1.0 + STANDING_S), "room for one request that waited is none for others"


def test_a_higher_priority_outranks_for_a_while():
    found = rivalry()
    found.met("", 1, 1.0)
    found.met("", 0, 2.0)
    assert found.is_outranked(request(priority=0), 2.0)
    assert not found.is_outranked(request(priority=1), 2.0)
    assert not found.is_outranked(request(priority=0), 1.0 + RIVALS_S)


def test_no_request_is_outranked_without_bands():
    found = rivalry(by_priority=False)
    found.met("", 1, 1.0)
    found.met("", 0, 2.0)
    assert not found.is_outranked(request(priority=0), 2.0)


def test_the_highest_priority_is_first_while_lower_ones_compete():
    found = rivalry()
    found.met("", 2, 1.0)
    assert not found.is_first(request(priority=2), 1.0), "nobody competes"
    found.met("", 1, 1.0)
    found.met("", 0, 1.0)
    assert found.is_first(request(priority=2), 1.0)
    assert not found.is_first(request(priority=1), 1.0)
    assert not found.is_first(request(), 1.0)
    assert not found.is_first(request(priority=2), 1.0 + RIVALS_S)


def test_a_light_flow_is_first_while_heavy_ones_compete():
    found = rivalry()
    found.flow_of = lambda one: one.request_id
    for _ in range(2):
        found.met("large", 0, 1.0, 1_000)
        found.met("small", 0, 1.0, 10)
    later = 1.0 + COMPARED_S
    assert found.is_first(request(request_id="small"), later)
    assert not found.is_first(request(request_id="large"), later)
    assert found.keeps_off(request(request_id="large"), later)


def test_a_flow_with_more_weight_may_ask_for_more():
    found = rivalry(BandSettings(fairness=Fairness.TOKENS, weights={"large": 100.0}))
    found.flow_of = lambda one: one.request_id
    for _ in range(2):
        found.met("large", 0, 1.0, 1_000)
        found.met("small", 0, 1.0, 10)
    assert not found.keeps_off(request(request_id="large"), 1.0 + COMPARED_S)
