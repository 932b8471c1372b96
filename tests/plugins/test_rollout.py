"""The screener of revisions: no request is served by two revisions."""

from collections import Counter

import pytest
from msgspec import ValidationError, convert, structs

from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.stages import Always, Order, Stages
from epp.core.types import Refusal, RefusalReason
from epp.plugins.filters import DecodeRole, PrefillRole
from epp.plugins.rollout import REVISION_LABEL, ROLE_LABEL, RolloutScreener
from tests.builders import candidates, endpoint, request
from tests.core.decision.staged import ROLE, chat, pool_of, profile, scrape

SET = "disaggregatedset.x-k8s.io/name"
ROLES = {"values": ["prefill", "decode"]}
STRICT = {
    "name": "revision",
    "headerName": "X-Disagg-Revision",
    "labelKey": REVISION_LABEL,
    "mode": "strict",
}
SLICE = {"name": "slice", "headerName": "x-slice", "labelKey": "slice", "mode": "prefer"}


def screener(mode="sum", *, selectors=(), scope="", **gating):
    gating = {"requireRoles": ROLES} | gating if mode != "disabled" else gating
    return convert(
        {
            "scope": {"labelSelector": scope},
            "headerSelectors": list(selectors),
            "revisionGating": {"mode": mode, **gating},
        },
        RolloutScreener,
    )


def pods(*counts):
    """Return the labels of pods for each (revision, prefill pods, decode pods)."""
    return [
        {REVISION_LABEL: revision, ROLE_LABEL: role}
        for revision, *numbers in counts
        for role, number in zip(("prefill", "decode"), numbers, strict=True)
        for _ in range(number)
    ]


def kept(plugin, labels, **fields):
    """Return the revisions of the endpoints that stay."""
    found = plugin.keep(request(**fields), candidates(labels=labels)).tolist()
    return {one.get(REVISION_LABEL) for one, keep in zip(labels, found, strict=True) if keep}


def shares(plugin, labels, draws=4_000):
    """Return the share of requests that each revision gets."""
    drawn = Counter()
    for number in range(draws):
        (revision,) = kept(plugin, labels, request_id=f"request-{number}")
        drawn[revision] += 1
    return {revision: count / draws for revision, count in drawn.items()}


def test_a_revision_without_a_required_role_gets_nothing():
    labels = pods(("a", 2, 9), ("b", 0, 5), ("c", 3, 0))
    assert {frozenset(kept(screener(), labels, request_id=str(n))) for n in range(200)} == {
        frozenset({"a"})
    }
    assert kept(screener(), pods(("a", 0, 9), ("b", 2, 0))) == set()


@pytest.mark.parametrize(("mode", "share"), [("sum", 11 / 13), ("max-role", 9 / 10)])
def test_the_draw_is_by_ready_pods(mode, share):
    """The figures of the field's example: 2P 9D against 1P 1D."""
    found = shares(screener(mode), pods(("a", 2, 9), ("b", 1, 1)))
    # Three standard deviations of 4,000 draws are below 0.018.
    assert found["a"] == pytest.approx(share, abs=0.018)


@pytest.mark.parametrize("mode", ["sum", "max-role"])
def test_the_shares_are_those_of_the_draw(mode):
    """A revision without a required role has a share of 0."""
    labels = pods(("a", 2, 9), ("b", 1, 3), ("c", 0, 5))
    plugin = screener(mode)
    told = plugin.shares([endpoint(at, labels=one) for at, one in enumerate(labels)])
    drawn = shares(plugin, labels)
    assert sum(told.values()) == pytest.approx(1.0)
    assert told == {name: pytest.approx(drawn.get(name, 0.0), abs=0.02) for name in "abc"}
    assert screener("disabled").shares([endpoint(0, labels=labels[0])]) == {}


def test_the_first_required_role_breaks_a_tie_of_the_largest():
    found = shares(screener("max-role"), pods(("a", 1, 3), ("b", 3, 1)))
    assert found["a"] == pytest.approx(0.25, abs=0.021)


def test_ranks_of_one_pod_count_once():
    """A decode pod with eight ports is one pod."""
    labels = pods(("a", 1, 1), ("b", 1, 1))
    offered = candidates(labels=[*labels, *[labels[1]] * 7])
    columns = offered._columns
    for slot in range(4, 11):
        named = structs.replace(columns.endpoints[1], endpoint_id=f"uid-1:{slot}")
        columns.endpoints[slot] = named
    drawn = Counter()
    for number in range(4_000):
        keep = screener().keep(request(request_id=str(number)), offered).tolist()
        drawn["a" if keep[0] else "b"] += 1
    assert drawn["a"] / 4_000 == pytest.approx(0.5, abs=0.024)


def test_the_same_request_id_draws_the_same_revision():
    labels = pods(("a", 5, 5), ("b", 5, 5))
    for number in range(20):
        same = {frozenset(kept(screener(), labels, request_id=str(number))) for _ in range(5)}
        assert len(same) == 1


def test_pods_outside_the_scope_do_not_count():
    labels = [one | {SET: "mine"} for one in pods(("a", 1, 1))]
    labels += [one | {SET: "other"} for one in pods(("b", 9, 9))]
    assert kept(screener(scope=f"{SET}=mine"), labels) == {"a"}


def test_endpoints_without_a_revision_are_dropped():
    assert kept(screener(), [*pods(("a", 1, 1)), {}, {ROLE_LABEL: "decode"}]) == {"a"}


def test_a_strict_header_replaces_the_draw():
    plugin = screener(selectors=[STRICT])
    labels = pods(("a", 9, 9), ("b", 1, 1), ("c", 0, 4))

    def of(revision):
        return kept(plugin, labels, headers={"x-disagg-revision": revision})

    assert of("b") == {"b"}
    assert of("c") == set()
    assert of("unknown") == set()


def test_without_gating_only_strict_headers_limit():
    plugin = screener("disabled", selectors=[STRICT, SLICE])
    labels = pods(("a", 1, 0), ("b", 0, 1))
    assert kept(plugin, labels) == {"a", "b"}
    assert kept(plugin, labels, headers={"x-disagg-revision": "b"}) == {"b"}
    assert kept(plugin, labels, headers={"x-slice": "7"}) == {"a", "b"}


def test_the_response_carries_every_selected_label():
    plugin = screener(selectors=[STRICT, SLICE])
    served = endpoint(0, labels={REVISION_LABEL: "a", "slice": "1"})
    assert plugin.response_headers(request(), served, "") == {
        "x-disagg-revision": "a",
        "x-slice": "1",
    }
    assert plugin.response_headers(request(), endpoint(0), "") == {}


def test_the_names_of_a_guide_are_read_too():
    gating = {"mode": "max-role", "requiredRoles": ["prefill", "decode"]}
    plugin = convert(
        {"revisionGating": gating | {"revisionHeaderName": "x-revision"}}, RolloutScreener
    )
    labels = pods(("a", 1, 1), ("b", 1, 1))
    assert kept(plugin, labels, headers={"x-revision": "b"}) == {"b"}
    assert any("requiredRoles" in said for said in plugin.warnings())


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"revisionGating": {"mode": "sum"}},
        {"revisionGating": {"mode": "sum", "requireRoles": {"values": []}}},
        {"revisionGating": {"mode": "fair", "requireRoles": ROLES}},
        {
            "revisionGating": {"mode": "sum", "requireRoles": ROLES},
            "scope": {"labelSelector": "a in"},
        },
    ],
)
def test_invalid_parameters_are_refused(parameters):
    with pytest.raises(ValidationError):
        convert(parameters, RolloutScreener)


# --- in the scheduler ---


def staged(*counts, order=Order.DECODE_FIRST, plugin=None):
    """Return a scheduler of pods of both roles with a screener."""
    stages = Stages(
        decode=profile("decode", DecodeRole()),
        prefill=profile("prefill", PrefillRole()),
        prefill_if=Always(),
        order=order,
        screen=profile("screen", plugin or screener()),
    )
    made = pool_of([], stages)
    labels = [one | {ROLE: one[ROLE_LABEL]} for one in pods(*counts)]
    made.take(PoolReplaced([endpoint(at, labels=one) for at, one in enumerate(labels)]), 0.0)
    scrape(made, 0.0)
    return made


@pytest.mark.parametrize("order", Order)
def test_prefill_and_decode_always_have_one_revision(order):
    made = staged(("a", 2, 9), ("b", 1, 3), order=order)
    drawn = Counter()
    for number in range(400):
        decision = made.schedule(chat(request_id=str(number)), 0.1)
        labels = {leg.endpoint.labels[REVISION_LABEL] for leg in decision.account.legs}
        assert len(labels) == 1
        drawn.update(labels)
        dropped = decision.leg.dropped["disaggregatedset-rollout-screener"]
        assert {
            made.pool.endpoint_in(at).labels[REVISION_LABEL] for at in dropped
        } & labels == set()
    assert set(drawn) == {"a", "b"}


def test_no_complete_revision_is_refused_with_503_and_counts_nothing():
    made = staged(("a", 0, 9), ("b", 2, 0))
    refusal = made.schedule(chat(), 0.1)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (503, RefusalReason.NO_ENDPOINTS)
    assert "disaggregatedset-rollout-screener" in refusal.message
    assert made.ledger.open_leases == 0


def test_a_single_profile_can_have_a_screener():
    stages = Stages(decode=profile("decode"), screen=profile("screen", screener()))
    made = pool_of([], stages)
    labels = pods(("a", 1, 1), ("b", 1, 0))
    made.take(PoolReplaced([endpoint(at, labels=one) for at, one in enumerate(labels)]), 0.0)
    scrape(made, 0.0)
    for number in range(20):
        decision = made.schedule(chat(request_id=str(number)), 0.1)
        assert decision.endpoint.labels[REVISION_LABEL] == "a"
