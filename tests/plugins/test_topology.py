"""The filter and the scorer by topology."""

import pytest
from msgspec import ValidationError, convert, structs

from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.stages import Always, Order, Stages
from epp.plugins.filters import DecodeRole, PrefillRole
from epp.plugins.topology import TopologyAffinityFilter, TopologyAffinityScorer
from tests.builders import candidates, endpoint, request
from tests.core.decision.staged import ROLE, chat, pool_of, profile, scrape
from tests.core.knowledge.test_topology import HOST, PLACE, RACK, REGION, ZONE

OTHERS = (
    PLACE,
    PLACE | {HOST: "h2"},
    PLACE | {HOST: "h2", RACK: "r2"},
    PLACE | {HOST: "h2", RACK: "r2", ZONE: "z2"},
    {HOST: "h2", RACK: "r2", ZONE: "z2", REGION: "g2"},
    {},
)
FILTER, SCORER = TopologyAffinityFilter, TopologyAffinityScorer


def near(*others, peer=PLACE):
    """Return candidates with the labels `others` after their peer, in slot 0."""
    return candidates(labels=[peer, *others]).near(0).take([*range(1, 1 + len(others))])


def kept(level, *others, peer=PLACE):
    made = convert({"minAffinity": level}, FILTER)
    return made.keep(request(), near(*others, peer=peer)).tolist()


def test_the_scores_are_those_of_the_field():
    scores = SCORER().score(request(), near(*OTHERS)).tolist()
    assert scores == [1.0, 0.2, 0.05, 0.02, 0.0, 0.0]


@pytest.mark.parametrize(("level", "count"), [("host", 1), ("rack", 2), ("zone", 3), ("region", 4)])
def test_the_filter_keeps_what_is_at_least_as_near(level, count):
    assert kept(level, *OTHERS) == [at < count for at in range(len(OTHERS))]


@pytest.mark.parametrize("level", ["host", "rack", "zone", "region"])
def test_the_filter_keeps_all_if_it_cannot_tell_or_none_is_near(level):
    assert kept(level, *OTHERS, peer={}) == [True] * len(OTHERS)
    assert kept(level, {}, {ZONE: "elsewhere"}) == [True, True]
    alone = candidates(labels=list(OTHERS))
    assert convert({"minAffinity": level}, FILTER).keep(request(), alone).all()


def test_without_a_peer_all_scores_are_zero():
    assert SCORER().score(request(), candidates(labels=list(OTHERS))).tolist() == [0.0] * 6


def test_the_filter_needs_a_known_level():
    with pytest.raises(ValidationError, match="Invalid enum value 'pod'"):
        convert({"minAffinity": "pod"}, FILTER)
    assert FILTER().min_affinity == "host"


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("by", ["filter", "scorer"])
def test_the_stage_that_comes_second_is_near_the_first(order, by):
    """In either order, whatever the zone of the first."""
    used = {"scorers": [SCORER()]} if by == "scorer" else {}
    filters = [convert({"minAffinity": "zone"}, FILTER)] if by == "filter" else []
    decode, prefill = profile("decode", DecodeRole()), profile("prefill", PrefillRole())
    if order is Order.DECODE_FIRST:
        prefill = profile("prefill", PrefillRole(), *filters, **used)
    else:
        decode = profile("decode", DecodeRole(), *filters, **used)
    stages = Stages(decode=decode, prefill=prefill, prefill_if=Always(), order=order)
    made = pool_of([], stages)
    roles = ["prefill", "decode"] * 3
    labels = [{ROLE: role, ZONE: f"z{at % 3}"} for at, role in enumerate(roles)]
    made.take(PoolReplaced([endpoint(at, labels=one) for at, one in enumerate(labels)]), 0.0)
    scrape(made, 0.0)
    zones = set()
    for _ in range(30):
        decision = made.schedule(chat(), 0.1)
        pair = decision.prefiller.labels[ZONE], decision.endpoint.labels[ZONE]
        assert pair[0] == pair[1]
        zones.add(pair[0])
    assert zones == {"z0", "z1", "z2"}


def test_a_moved_endpoint_is_near_another_from_then_on():
    """Places follow the labels of the latest list of endpoints."""
    stages = Stages(
        decode=profile("decode", DecodeRole()),
        prefill=profile("prefill", PrefillRole(), scorers=[SCORER()]),
        prefill_if=Always(),
    )
    made = pool_of([], stages)
    decode = endpoint(0, labels={ROLE: "decode", ZONE: "a"})
    near_by = endpoint(1, labels={ROLE: "prefill", ZONE: "a"})
    other = endpoint(2, labels={ROLE: "prefill", ZONE: "b"})
    made.take(PoolReplaced([decode, near_by, other]), 0.0)
    scrape(made, 0.0)
    assert made.schedule(chat(), 0.1).prefiller.name == "pod-1"
    moved = structs.replace(decode, labels={ROLE: "decode", ZONE: "b"})
    made.take(PoolReplaced([moved, near_by, other]), 0.2)
    assert made.schedule(chat(), 0.3).prefiller.name == "pod-2"
