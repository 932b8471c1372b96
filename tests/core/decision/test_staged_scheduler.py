"""The staged scheduler and full endpoints. Its decisions otherwise are tested in `test_stages`."""

from epp.core.decision.account import Route
from epp.core.decision.staged_choice import StagedChoice
from epp.core.knowledge.fullness import FULL
from tests.core.decision.staged import chat, pool_of


def test_a_full_endpoint_serves_its_stage_if_no_other_endpoint_has_the_role():
    made = pool_of(["prefill", "decode", "prefill"])
    first = made.schedule(chat(), 0.1)
    made.full.refused(1, 0.1, 30.0, 0.2)
    second = made.schedule(chat(text=b"b"), 0.3)
    assert second.lease.slot == first.lease.slot == 1
    assert FULL not in second.leg.dropped


def test_a_stage_prefers_endpoints_that_are_not_full_and_records_the_others():
    made = pool_of(["prefill", "decode", "prefill"])
    made.full.refused(0, 0.1, 30.0, 0.2)
    for number in range(4):
        decision = made.schedule(chat(text=bytes([65 + number])), 0.3)
        (prefill,) = decision.earlier
        assert prefill.lease.slot == 2
        assert prefill.dropped[FULL].tolist() == [0]


def test_the_route_names_the_stages_with_endpoints_of_their_own():
    made = pool_of(["prefill", "decode"])
    choice = made.schedule(chat(), 0.1)
    assert choice.account.route is Route.PREFILL_DECODE
    assert StagedChoice(decode=None, encode=None).route is Route.DECODE_ONLY
