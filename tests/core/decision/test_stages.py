"""Decisions in stages: rules, routes, legs, refusals and records."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.core.abilities import Abilities
from epp.core.decision.account import Route
from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ResponseStarted,
    ScrapeFailed,
    ServedBy,
    Tick,
)
from epp.core.decision.stages import (
    Always,
    Multimodal,
    Never,
    Order,
    PrefillEnd,
    Stages,
    Uncached,
    may_encode_elsewhere,
    may_prefill_elsewhere,
    rotation_of,
)
from epp.core.knowledge.affinity import SessionIndexSettings
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.types import ApiKind, EndpointMetrics, Refusal, RefusalReason, Stage
from epp.plugins.encoder_cache import EncoderCacheSettings
from epp.plugins.filters import DecodeRole, EncodeRole, PrefillRole
from epp.plugins.pickers import UniformRandom
from tests.builders import PREFIX, candidates, request
from tests.core.decision.staged import (
    BOTH,
    DECODE,
    ENCODE,
    PREFILL,
    ROLE,
    chat,
    of_role,
    pool_of,
    profile,
    scrape,
    sums,
)

OK = Outcome(status=200)
PLAIN = Stages(
    decode=profile("decode", DecodeRole()),
    prefill=profile("prefill", PrefillRole()),
    prefill_if=Always(),
)
ALL = structs.replace(BOTH, encode=ENCODE, encode_if=Multimodal())
IMAGE = (b"digest-of-an-image",)


def with_image(**fields):
    return chat(media=[IMAGE], **fields)


def names(decision):
    """Return the endpoint of each stage by its name."""
    return {leg.stage.value: leg.endpoint.name for leg in decision.account.legs}


def uncached(tokens, cached, *rule):
    return Uncached(*rule).applies(request(prompt_tokens=tokens), cached)


# --- roles and rules ---


@pytest.mark.parametrize(
    ("role", "kept"),
    [
        (None, "d"),
        ("decode", "d"),
        ("prefill", "p"),
        ("encode", "e"),
        ("prefill-decode", "dp"),
        ("both", "dp"),
        ("encode-prefill", "pe"),
        ("encode-prefill-decode", "dpe"),
        ("encode-decode", ""),
        ("other", ""),
    ],
)
def test_each_role_label_is_kept_by_the_filters_of_its_stages(role, kept):
    offered = candidates(1, labels=[{} if role is None else {ROLE: role}])
    found = ""
    for letter, one in (("d", DecodeRole()), ("p", PrefillRole()), ("e", EncodeRole())):
        found += letter if one.keep(request(), offered)[0] else ""
    assert found == kept


@pytest.mark.parametrize(
    ("tokens", "cached", "rule", "runs"),
    [
        (1_000, 0, (0,), False),
        (15, 0, (16,), False),
        (16, 0, (16,), True),
        (63, 0, (16, 64), False),
        (64, 0, (16, 64), True),
        (100, 85, (16,), False),
        (100, 84, (16,), True),
        (100, 128, (16,), False),
        (0, 0, (1,), False),
    ],
)
def test_prefill_runs_elsewhere_from_a_number_of_uncached_tokens(tokens, cached, rule, runs):
    assert uncached(tokens, cached, *rule) == runs


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_the_rule_is_monotone_in_both_numbers_of_tokens(tokens, cached, limit, least):
    runs = uncached(tokens, cached, limit, least)
    if runs:
        assert limit
        assert uncached(tokens + 1, cached, limit, least)
        assert cached == 0 or uncached(tokens, cached - 1, limit, least)
    assert not uncached(tokens, cached, 0, least)


def test_the_other_rules_read_no_tokens():
    assert Always().applies(chat(), 512)
    assert not Never().applies(chat(), 0)
    assert Multimodal().applies(with_image(), 0)
    assert not Multimodal().applies(chat(), 0)


@pytest.mark.parametrize(
    ("fields", "prefills", "encodes"),
    [
        ({"api": ApiKind.CHAT}, True, True),
        ({"api": ApiKind.COMPLETIONS}, True, False),
        ({"api": ApiKind.MESSAGES}, True, False),
        ({"api": ApiKind.RESPONSES}, True, False),
        ({"api": ApiKind.TOKENS}, True, False),
        ({"api": ApiKind.EMBEDDINGS}, False, False),
        ({"api": ApiKind.OPAQUE}, False, False),
        ({"headers": {":path": "/v1/chat/completions"}}, True, True),
        ({"headers": {":path": "/tenant/v1/chat/completions?x=1"}}, True, True),
        ({"headers": {":path": "/v1/chat/completions", ":method": "GET"}}, False, False),
        ({"headers": {":path": "/v1/completions"}}, True, False),
        ({"headers": {":path": "/v1/messages"}}, True, False),
        ({"headers": {":path": "/v1/messages/count_tokens"}}, False, False),
        ({"headers": {":path": "/v1/responses"}}, True, False),
        ({"headers": {":path": "/inference/v1/generate"}}, True, False),
        ({"headers": {":path": "/v1/embeddings"}, "api": ApiKind.TOKENS}, False, False),
        ({"headers": {":path": "/v1/models"}}, False, False),
        ({"api": ApiKind.COMPLETIONS, "prompts": (b"a", b"b")}, False, False),
    ],
)
def test_only_five_paths_may_take_a_remote_stage(fields, prefills, encodes):
    asked = request(**fields)
    assert may_prefill_elsewhere(asked) == prefills
    assert may_encode_elsewhere(asked) == encodes


# --- routes ---


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(
    ("prefill", "encode", "prefills", "encodes"),
    list(product((True, False), repeat=4)),
)
def test_the_route_follows_from_profiles_and_rules(order, prefill, encode, prefills, encodes):
    stages = Stages(
        decode=DECODE,
        prefill=PREFILL if prefill else None,
        encode=ENCODE if encode else None,
        prefill_if=Always() if prefills else Never(),
        encode_if=Always() if encodes else Never(),
        order=order,
    )
    made = pool_of(["prefill", "decode", "encode"], stages)
    decision = made.schedule(chat(), 0.1)
    with_prefill = prefill and (prefills or order is Order.PREFILL_FIRST)
    with_encode = encode and encodes
    expected = {"decode": "pod-1"}
    expected |= {"prefill": "pod-0"} if with_prefill else {}
    expected |= {"encode": "pod-2"} if with_encode else {}
    assert names(decision) == expected
    assert decision.endpoint.name == "pod-1"
    route = decision.account.route
    if stages.alone:
        assert route is None
    else:
        parts = [name for name in ("encode", "prefill", "decode") if name in expected]
        assert route.value == ("-".join(parts) if len(parts) > 1 else "decode-only")


def test_each_index_is_matched_once_for_all_stages():
    made = pool_of(["prefill", "decode", "encode"], ALL)
    asked = []
    index = made.indexes[PREFIX]
    original = index.match
    made.indexes._by_name[PREFIX] = Counted(index, asked)
    made.schedule(with_image(), 0.1)
    assert len(asked) == 1
    assert original is not None


class Counted:
    """An index that notes each match."""

    def __init__(self, index, asked):
        self._index = index
        self._asked = asked

    def __getattr__(self, name):
        return getattr(self._index, name)

    def match(self, asked, slots, now):
        self._asked.append(asked)
        return self._index.match(asked, slots, now)


def test_an_endpoint_that_does_both_gets_one_leg():
    made = pool_of(["prefill-decode"])
    decision = made.schedule(chat(), 0.1)
    assert decision.account.route is Route.DECODE_ONLY
    assert decision.earlier == ()
    assert decision.prefiller is None
    assert sums(made) == (1, 512, 512.0, 1)


def test_an_endpoint_encodes_for_its_own_prefill():
    made = pool_of(["encode-prefill", "decode"], ALL)
    decision = made.schedule(with_image(), 0.1)
    assert names(decision) == {"decode": "pod-1", "prefill": "pod-0"}
    assert decision.encoders == ()


def test_an_endpoint_that_encodes_and_decodes_counts_one_request():
    roles = ["prefill", "encode-prefill-decode"]
    apart = structs.replace(ALL, prefill=profile("prefill", PrefillRole(), scorers=[Last()]))
    made = pool_of(roles, apart)
    decision = made.schedule(with_image(), 0.1)
    assert names(decision) == {"decode": "pod-1", "prefill": "pod-0", "encode": "pod-1"}
    assert made.pool.columns.inflight_requests[:2].tolist() == [1, 1]
    made.take(RequestEnded(decision.lease, OK), 0.2)
    assert sums(made) == (0, 0, 0.0, 0)


class Last:
    """A scorer that prefers the endpoint in the first slot."""

    type_name = "last"
    abilities = PrefillRole.abilities

    def score(self, request, candidates, /):
        return (candidates.slot == 0).astype(np.float64)


def test_ties_of_two_roles_are_not_locked_together():
    """Ten thousand decisions, four endpoints of each role: every pair equally often."""
    made = pool_of(["prefill"] * 4 + ["decode"] * 4, PLAIN, indexes={})
    pairs = Counter()
    for _ in range(10_000):
        decision = made.schedule(chat(1), 0.1)
        pairs[decision.endpoint.name, decision.prefiller.name] += 1
        made.take(RequestEnded(decision.lease, OK), 0.1)
    assert len(pairs) == 16
    assert max(pairs.values()) - min(pairs.values()) < 0.05 * 10_000 / 16


def test_a_permuted_pool_has_the_same_distribution():
    counts = []
    for roles in (["prefill"] * 3 + ["decode"] * 3, ["decode", "prefill"] * 3):
        made = pool_of(roles, PLAIN, indexes={})
        found = Counter()
        for _ in range(900):
            decision = made.schedule(chat(1), 0.1)
            found[decision.prefiller.name] += 1
        counts.append(sorted(found.values()))
    assert counts[0] == counts[1]


def test_the_decode_stage_rotates_as_a_single_profile_does():
    assert [rotation_of(Stage.DECODE, number) for number in range(50)] == list(range(50))


def test_a_stage_that_does_not_run_draws_no_dice():
    random = {
        "decode": profile("decode", DecodeRole(), picker=UniformRandom()),
        "prefill": profile("prefill", PrefillRole(), picker=UniformRandom()),
    }
    picked = []
    for stages in (
        Stages(decode=random["decode"]),
        Stages(**random, prefill_if=Never()),
        Stages(**random, prefill_if=Always()),
    ):
        made = pool_of(["decode"] * 5 + ["prefill"] * 5, stages, indexes={})
        picked.append([made.schedule(chat(1), 0.1).endpoint.name for _ in range(20)])
    assert picked[0] == picked[1]
    assert picked[0] != picked[2]


def test_the_peer_is_the_endpoint_chosen_before():
    seen = []
    noting = profile("prefill", PrefillRole(), scorers=[Notes(seen)])
    made = pool_of(["prefill", "decode"], structs.replace(PLAIN, prefill=noting))
    made.schedule(chat(), 0.1)
    decoding = profile("decode", DecodeRole(), scorers=[Notes(seen)])
    later = structs.replace(PLAIN, decode=decoding, order=Order.PREFILL_FIRST)
    made = pool_of(["prefill", "decode"], later)
    made.schedule(chat(), 0.1)
    assert seen == [1, 0]


class Notes:
    """A scorer that notes the peer, and that may read anything."""

    type_name = "notes"
    abilities = Abilities()

    def __init__(self, seen):
        self._seen = seen

    def score(self, request, candidates, /):
        self._seen.append(candidates.peer)
        return np.zeros(len(candidates))


# --- load ---


def test_a_remote_prefill_is_charged_where_it_is_computed():
    made = pool_of(["prefill", "decode"])
    decision = made.schedule(chat(512), 0.1)
    columns = made.pool.columns
    assert columns.prefill_backlog_tokens[:2].tolist() == [512.0, 0.0]
    assert columns.inflight_requests[:2].tolist() == [1, 1]
    assert decision.lease.prefill_tokens == 0.0
    assert decision.account.uncached_tokens == 512


def test_prefill_is_charged_with_what_its_own_endpoint_has_not_cached():
    """The decode endpoint has the prompt of the first request, the prefill endpoint does not."""
    never = structs.replace(BOTH, prefill_if=Never())
    made = pool_of(["prefill", "decode"], never)
    first = made.schedule(chat(512), 0.1)
    made.take(RequestEnded(first.lease, OK), 0.2)
    made.take(Reconfigured(structs.replace(made.settings, stages=BOTH)), 0.2)
    second = made.schedule(chat(512), 0.3)
    assert second.leg.matched_blocks == 8
    assert second.account.uncached_tokens == 0
    assert made.pool.columns.prefill_backlog_tokens[0] == 512.0


@pytest.mark.parametrize(
    ("end", "first", "second"),
    [(PrefillEnd.HEADERS, 0, 0), (PrefillEnd.OUTPUT, 1, 0)],
)
def test_the_prefill_leg_ends_with_the_configured_sign(end, first, second):
    made = pool_of(["prefill", "decode"], structs.replace(BOTH, prefill_end=end))
    decision = made.schedule(chat(stream=True), 0.1)
    made.take(ResponseStarted(decision.lease), 0.2)
    assert made.pool.columns.inflight_requests[0] == first
    made.take(OutputStarted(decision.lease), 0.3)
    assert made.pool.columns.inflight_requests[0] == second
    assert made.pool.columns.inflight_requests[1] == 1
    made.take(RequestEnded(decision.lease, OK), 0.4)
    assert sums(made) == (0, 0, 0.0, 0)


def test_an_unseen_prefill_leg_is_closed_soon_and_the_decode_leg_later():
    made = pool_of(["prefill", "decode"])
    decision = made.schedule(chat(512), 0.0)
    made.take(RequestEnded(decision.lease, Outcome(ending=Ending.UNSEEN)), 0.0)
    made.take(Tick(), 0.5)
    assert made.pool.columns.inflight_requests[:2].tolist() == [1, 1]
    made.take(Tick(), 1.5)
    assert made.pool.columns.inflight_requests[:2].tolist() == [0, 1]
    made.take(Tick(), 60.0)
    assert sums(made) == (0, 0, 0.0, 0)


def test_only_the_decode_leg_moves_to_the_endpoint_that_served():
    made = pool_of(["prefill", "decode", "decode"])
    decision = made.schedule(chat(), 0.1)
    moved_to = next(at for at in (1, 2) if at != decision.lease.slot)
    made.take(ServedBy(decision.lease, made.pool.endpoint_in(moved_to).address), 0.2)
    assert made.pool.columns.inflight_requests[0] == 1
    assert made.pool.columns.inflight_requests[moved_to] == 1
    assert made.pool.columns.prefill_backlog_tokens[:3].tolist() == [512.0, 0.0, 0.0]
    made.take(RequestEnded(decision.lease, OK), 0.3)
    assert sums(made) == (0, 0, 0.0, 0)


EVENTS = ("headers", "output", "end", "error", "left", "unseen", "moved", "gone", "reused", "tick")


@given(st.lists(st.sampled_from(EVENTS), max_size=12), st.sampled_from(["image", "text"]))
def test_legs_closed_in_any_order_leave_no_load_behind(events, kind):
    """The events of one request, of a second one at the same endpoints, and of the pool."""
    roles = ["prefill", "decode", "encode", "decode"]
    made = pool_of(roles, ALL)
    ask = with_image if kind == "image" else chat
    leases = [made.schedule(ask(), 0.0).lease, made.schedule(ask(), 0.0).lease]
    lives = Counter()
    now = 0.0
    for event in events:
        now += 0.1
        lease = leases[0]
        if event == "headers":
            made.take(ResponseStarted(lease), now)
        elif event == "output":
            made.take(OutputStarted(lease), now)
        elif event in {"end", "error", "left", "unseen"}:
            outcome = {
                "end": OK,
                "error": Outcome(status=502),
                "left": Outcome(ending=Ending.CLIENT_LEFT),
                "unseen": Outcome(ending=Ending.UNSEEN),
            }[event]
            made.take(RequestEnded(lease, outcome), now)
        elif event == "moved":
            made.take(ServedBy(lease, made.pool.endpoint_in(3).address), now)
        elif event in {"gone", "reused"}:
            if event == "reused":
                lives[0] += 1
            members = [
                of_role(at, role, incarnation=str(lives[at])) for at, role in enumerate(roles)
            ]
            without = [one for at, one in enumerate(members) if at != 0]
            made.take(PoolReplaced(without if event == "gone" else members), now)
            made.take(PoolReplaced(members), now)
        else:
            made.take(Tick(), now)
        assert made.pool.columns.inflight_requests[:4].min() >= 0
        assert made.pool.columns.inflight_context_tokens[:4].min() >= 0
    for lease in leases * 2:
        made.take(RequestEnded(lease, OK), now + 1.0)
    made.take(Tick(), now + 1_000.0)
    assert sums(made) == (0, 0, 0.0, 0)
    for lease in leases:
        assert all(one.slot == -1 for one in (lease, *lease.earlier))


# --- what indexes record ---


def test_both_endpoints_of_a_prompt_are_recorded_whatever_the_profiles_are_called():
    stages = structs.replace(
        BOTH,
        decode=structs.replace(DECODE, name="x"),
        prefill=structs.replace(PREFILL, name="y"),
        prefill_if=Uncached(64),
    )
    made = pool_of(["prefill", "decode"], stages)
    first = made.schedule(chat(512), 0.1)
    assert first.account.route is Route.PREFILL_DECODE
    matched = made.indexes.match(chat(512), 2, 0.2)[PREFIX].matched
    assert matched.tolist() == [8, 8]
    made.take(RequestEnded(first.lease, OK), 0.2)
    second = made.schedule(chat(512), 0.3)
    assert second.account.route is Route.DECODE_ONLY
    assert second.leg.matched_blocks == 8


def test_an_early_error_retracts_both_records():
    made = pool_of(["prefill", "decode"])
    decision = made.schedule(chat(512), 0.1)
    made.take(RequestEnded(decision.lease, Outcome(status=503)), 0.2)
    assert made.indexes.match(chat(512), 2, 0.3)[PREFIX].matched.tolist() == [0, 0]


def test_an_error_of_the_answer_leaves_the_record_of_the_prefill():
    made = pool_of(["prefill", "decode"])
    decision = made.schedule(chat(512), 0.1)
    made.take(ResponseStarted(decision.lease), 0.2)
    made.take(RequestEnded(decision.lease, Outcome(status=200, ending=Ending.ERROR)), 0.3)
    assert made.indexes.match(chat(512), 2, 0.4)[PREFIX].matched.tolist() == [8, 0]


def test_media_are_recorded_where_they_are_encoded_and_sessions_where_they_are_served():
    indexes = {
        PREFIX: PrefixIndexSettings(),
        "media": EncoderCacheSettings(),
        "sessions": SessionIndexSettings(),
    }
    made = pool_of(["prefill", "decode", "encode"], ALL, indexes=indexes)
    asked = with_image(session_id="s")
    made.schedule(asked, 0.1)
    found = made.indexes.match(asked, 3, 0.2)
    assert found[PREFIX].matched.tolist() == [8, 8, 0]
    assert found["media"].matched.tolist() == [0, 0, 1]
    assert found["sessions"].matched.tolist() == [0, 1, 0]


def test_without_an_encode_stage_media_are_recorded_at_the_decode_endpoint():
    indexes = {"media": EncoderCacheSettings()}
    never = structs.replace(ALL, encode_if=Never())
    made = pool_of(["decode", "encode"], structs.replace(never, prefill=None), indexes=indexes)
    asked = with_image()
    made.schedule(asked, 0.1)
    assert made.indexes.match(asked, 2, 0.2)["media"].matched.tolist() == [1, 0]


def test_peers_learn_of_each_stage_without_the_session_of_the_prefill():
    indexes = {PREFIX: PrefixIndexSettings(), "sessions": SessionIndexSettings()}
    made = pool_of(["prefill", "decode"], indexes=indexes)
    made.placements.tell_peers()
    made.schedule(chat(session_id="s"), 0.1)
    assert [(one.slot, one.left_out) for one in made.placements.sent] == [
        (0, ("sessions",)),
        (1, ()),
    ]


def test_a_prompt_is_cold_for_a_stage_whose_endpoints_do_not_have_it():
    made = pool_of(["prefill", "decode"], structs.replace(BOTH, prefill_if=Never()))
    first = made.schedule(chat(512), 0.1)
    assert first.lease.request.moment.cold
    made.take(Reconfigured(structs.replace(made.settings, stages=BOTH)), 0.2)
    second = made.schedule(chat(512), 0.2)
    cold = {leg.stage: leg.lease.request.moment.cold for leg in second.account.legs}
    assert cold == {Stage.DECODE: False, Stage.PREFILL: True}


# --- refusals ---


def test_a_stage_without_an_endpoint_refuses_the_request_and_counts_nothing():
    made = pool_of(["decode", "decode"])
    refusal = made.schedule(chat(), 0.1)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (503, RefusalReason.NO_PREFILL_ENDPOINTS)
    assert refusal.stage is Stage.PREFILL
    assert "stage prefill" in refusal.message
    assert "prefill-filter" in refusal.message
    assert sums(made) == (0, 0, 0.0, 0)


def test_a_subset_without_the_role_refuses_too():
    made = pool_of(["prefill", "decode"])
    allowed = (made.pool.endpoint_in(1).address,)
    refusal = made.schedule(chat(subset=allowed), 0.1)
    assert refusal.reason is RefusalReason.NO_PREFILL_ENDPOINTS
    assert made.schedule(chat(1, subset=allowed, api=ApiKind.EMBEDDINGS), 0.1).earlier == ()


def test_a_role_whose_endpoints_are_not_ready_is_refused_by_name():
    """An endpoint is not ready before its first good scrape."""
    made = pool_of(["decode"])
    members = [of_role(0, "decode"), of_role(1, "prefill", ready_after_s=60.0)]
    made.take(PoolReplaced(members), 0.1)
    refusal = made.schedule(chat(), 0.2)
    assert (refusal.status, refusal.reason) == (503, RefusalReason.NO_PREFILL_ENDPOINTS)
    scrape(made, 0.3)
    assert made.schedule(chat(), 0.4).prefiller.name == "pod-1"


def test_an_endpoint_with_old_metrics_serves_its_stage_if_there_is_no_other():
    made = pool_of(["prefill", "prefill", "decode"])
    made.take(PageScraped(1, EndpointMetrics(waiting_requests=0.0)), 100.0)
    assert made.schedule(chat(text=b"b"), 100.1).prefiller.name == "pod-1"
    allowed = tuple(made.pool.endpoint_in(slot).address for slot in (0, 2))
    assert made.schedule(chat(subset=allowed), 100.1).prefiller.name == "pod-0"


def test_the_encode_and_decode_stages_refuse_by_name():
    made = pool_of(["prefill", "decode"], ALL)
    assert made.schedule(with_image(), 0.1).reason is RefusalReason.NO_ENCODE_ENDPOINTS
    made = pool_of(["prefill"], ALL)
    refusal = made.schedule(chat(), 0.1)
    assert (refusal.stage, refusal.reason) == (Stage.DECODE, RefusalReason.NO_ENDPOINTS)


def test_a_fallback_serves_what_a_missing_stage_would_refuse():
    made = pool_of(["decode", "decode"], structs.replace(BOTH, fallback=DECODE))
    decision = made.schedule(chat(), 0.1)
    assert decision.account.route is Route.AGGREGATED_FALLBACK
    assert decision.earlier == ()
    assert sums(made) == (1, 512, 512.0, 1)
    made = pool_of(["prefill"], structs.replace(BOTH, fallback=DECODE))
    assert isinstance(made.schedule(chat(), 0.1), Refusal)


def test_a_fallback_serves_what_only_unreachable_endpoints_would_prefill():
    """Without a fallback they are tried, because the picker may be cut off, not they."""
    for fallback, route in ((DECODE, Route.AGGREGATED_FALLBACK), (None, Route.PREFILL_DECODE)):
        made = pool_of(["prefill", "decode"], structs.replace(BOTH, fallback=fallback))
        for at in (0.1, 0.2):
            made.take(ScrapeFailed(slot=0, answered=False), at)
        assert made.schedule(chat(), 0.3).account.route is route
        scrape(made, 0.4)
        assert made.schedule(chat(), 0.5).account.route is Route.PREFILL_DECODE


def test_a_fallback_does_not_replace_an_endpoint_that_is_reached():
    made = pool_of(["prefill", "prefill", "decode"], structs.replace(BOTH, fallback=DECODE))
    for at in (0.1, 0.2):
        made.take(ScrapeFailed(slot=0, answered=False), at)
    for number in range(4):
        decision = made.schedule(chat(text=bytes([65 + number])), 0.3)
        assert [leg.lease.slot for leg in decision.earlier] == [1]


def test_a_stage_emptied_by_load_is_refused_as_saturated():
    shedding = structs.replace(PREFILL, filters=(*PREFILL.filters, *profile("x", Sheds()).filters))
    made = pool_of(["prefill", "decode"], structs.replace(BOTH, prefill=shedding))
    refusal = made.schedule(chat(), 0.1)
    assert (refusal.status, refusal.stage) == (429, Stage.PREFILL)


class Sheds:
    """A filter that sheds every request."""

    type_name = "sheds"
    abilities = UtilizationDetector.abilities

    def keep(self, request, candidates, /):
        return np.zeros(len(candidates), dtype=np.bool_)


def test_a_request_that_may_be_shed_is_shed_by_its_fullest_stage():
    """The idle prefill endpoints do not hide a full decode endpoint."""
    made = pool_of(["prefill"] * 9 + ["decode"])
    scrape(made, 0.05)
    low = chat(priority=-1)
    assert not isinstance(made.schedule(low, 0.1), Refusal)
    full = {"waiting_requests": 50.0}
    made.take(
        PageScraped(9, EndpointMetrics(running_requests=1.0, kv_cache_usage=0.1, **full)), 0.2
    )
    refusal = made.schedule(low, 0.3)
    assert (refusal.reason, refusal.stage) == (RefusalReason.SATURATED, Stage.DECODE)
    assert "stage decode" in refusal.message
    assert not isinstance(made.schedule(chat(), 0.3), Refusal)


# --- failures ---


def failing(made, decision, now, status=503):
    made.take(RequestEnded(decision.lease, Outcome(status=status)), now)


def test_one_pair_that_fails_again_and_again_blames_nobody():
    made = pool_of(["prefill", "decode"])
    for number in range(10):
        failing(made, made.schedule(chat(), number / 10), number / 10 + 0.05)
    assert made.pool.set_aside_count() == 0
    assert not made.outliers.ejection.away


def test_the_endpoint_that_fails_with_two_partners_is_set_aside():
    made = pool_of(["prefill", "decode", "decode", "prefill"], PLAIN, indexes={})
    broken = "pod-0"
    now = 0.0
    for _ in range(40):
        now += 0.01
        decision = made.schedule(chat(1), now)
        if decision.prefiller.name == broken:
            failing(made, decision, now, status=502)
        else:
            made.take(ResponseStarted(decision.lease), now)
            made.take(RequestEnded(decision.lease, OK), now)
    assert set(made.outliers.ejection.away) == {0}


def refusing(counts):
    """Let a prefill endpoint answer 503 for two partners, while its counter of refusals goes through
    `counts`; return the scheduler 3 s later.
    """
    made = pool_of(["prefill", "decode", "decode", "prefill"], PLAIN, indexes={})
    first, then = counts

    def page(slot, count, now):
        made.take(PageScraped(slot, EndpointMetrics(rejections_total=count)), now)

    for slot in range(4):
        page(slot, first, 0.01)
    now = 0.02
    for _ in range(40):
        now += 0.01
        decision = made.schedule(chat(1), now)
        if decision.prefiller.name == "pod-0":
            failing(made, decision, now)
        else:
            made.take(RequestEnded(decision.lease, OK), now)
    page(0, then, now)
    for step in range(1, 4):
        made.take(Tick(), now + step)
    return made


def test_a_503_while_the_engine_counts_refusals_means_full():
    """With two partners, and none of them is ejected or set aside."""
    made = refusing((5.0, 25.0))
    assert not made.outliers.ejection.away
    assert made.pool.set_aside_count() == 0
    assert set(made.full.by_slot) == {0}


def test_a_503_without_a_counted_refusal_is_a_failure():
    made = refusing((5.0, 5.0))
    assert set(made.outliers.ejection.away) == {0}
    assert not made.full.by_slot


def test_a_503_of_engines_that_count_no_refusals_is_judged_at_once():
    made = refusing((None, None))
    assert set(made.outliers.ejection.away) == {0}


def test_a_decode_endpoint_that_the_gateway_cannot_reach_is_judged_alone():
    made = pool_of(["prefill", "decode", "decode"], PLAIN, indexes={})
    now = 0.0
    for _ in range(30):
        now += 0.01
        decision = made.schedule(chat(1), now)
        if decision.endpoint.name == "pod-1":
            outcome = Outcome(status=503, by_gateway=True)
            made.take(RequestEnded(decision.lease, outcome), now)
        else:
            made.take(ResponseStarted(decision.lease), now)
            made.take(RequestEnded(decision.lease, OK), now)
    assert made.pool.standings(now, math.inf)[0].value == "ready"
    assert 1 in made.outliers.ejection.away or made.pool.set_aside_count() == 1


@pytest.mark.parametrize(
    "refused", [Outcome(status=429), Outcome(status=503, retry_after_s=1.0)], ids=["429", "503"]
)
@pytest.mark.parametrize("ejected", [0, 1], ids=["prefill", "decode"])
def test_a_probe_of_a_request_that_was_refused_by_a_full_endpoint_is_followed_by_another(
    ejected, refused
):
    made = pool_of(["prefill", "decode", "prefill", "decode"], PLAIN, indexes={})
    made.outliers.ejection.eject(ejected, Cause.FAILING, 0.1, serving_some=False)
    now = 100.0
    made.take(Tick(), now)
    assert made.outliers.ejection.away[ejected].probed
    scrape(made, now)
    probes = 0
    for _ in range(40):
        now += 0.01
        decision = made.schedule(chat(1), now)
        probes += any(leg.lease.probe for leg in decision.account.legs)
        made.take(RequestEnded(decision.lease, refused), now)
    assert probes > 1
    assert made.outliers.ejection.away[ejected].open_probes == 0
    assert ejected not in made.outliers.ejection.masked
