"""The rule that compares the time of a prefill at the decode endpoint with that of a remote one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.core.decision.account import Route
from epp.core.decision.inputs import PageScraped, RequestEnded
from epp.core.decision.stages import ByTime, Order, PrefillWork, Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.types import EndpointMetrics, KvTransfers, Refusal
from epp.plugins.filters import DecodeRole, PrefillRole
from epp.plugins.stage_time import DecodeTime, PrefillTime
from tests.core.decision.staged import chat, pool_of, profile

RULE = ByTime()
SPEED = 16_000.0

tokens = st.integers(0, 40_000).map(float)
counts = st.integers(0, 200).map(float)
works = st.builds(
    PrefillWork,
    uncached_tokens=tokens,
    pending_tokens=tokens,
    tokens_per_s=st.floats(1_000.0, 100_000.0),
    decoding_requests=counts,
    receiving_tokens=tokens,
    sending_tokens=tokens,
)
links = st.floats(1e8, 1e12)


def work(uncached, pending=0.0, decoding=0.0):
    return PrefillWork(
        uncached_tokens=float(uncached),
        pending_tokens=float(pending),
        tokens_per_s=SPEED,
        decoding_requests=float(decoding),
    )


def saves(rule, local, remote, prompt_tokens=40_000):
    return rule.saves_time(prompt_tokens, local, remote)


# --- the formula ---


def test_the_times_are_those_of_the_formula():
    rule = ByTime(
        prefill_delay=0.5,
        kv_bytes_per_token=1e5,
        link_bytes_per_s=1e10,
        overhead_s=0.01,
        overhead_s_per_token=1e-5,
    )
    local, remote = work(4_000, pending=800, decoding=4), work(2_000, pending=1_600)
    prefill = 4_000 * (1 + (8_000 - 2_000) / 40_000)
    delay = 0.5 * 4 * (prefill - 200)
    assert rule.prefill_s(local, 8_000) == pytest.approx((800 + prefill + delay) / SPEED)
    computed = 2_000 * (1 + (8_000 - 1_000) / 40_000)
    remote_s = (1_600 + computed) / SPEED + 0.01 + 0.08 + 4_000 * 1e-5
    assert rule.remote_s(8_000, local, remote) == pytest.approx(remote_s)


def test_a_remote_prefill_waits_for_earlier_prefills_at_the_decode_endpoint():
    local, idle = work(100, pending=160_000), work(100)
    assert RULE.remote_s(100, local, idle) >= 10.0


def test_a_transfer_shares_the_network_with_those_of_other_requests():
    """It takes longer, and delays what is left of the others when it begins."""
    moved_s = 1_000 * RULE.transfer_s_per_token
    computed_s = RULE.remote_overhead_s(1_000)
    alone = RULE.remote_s(1_000, work(1_000), work(0))
    assert alone == pytest.approx(computed_s + moved_s)
    for ahead in (0.0, 50_000.0):
        receiving = structs.replace(work(1_000), receiving_tokens=ahead)
        sending = structs.replace(work(0), sending_tokens=50_000.0)
        beside = RULE.remote_s(1_000, receiving, sending)
        assert beside == pytest.approx(51 * moved_s + 50 * moved_s - computed_s)
    few = structs.replace(work(1_000), receiving_tokens=100.0)
    assert RULE.remote_s(1_000, few, work(0)) == alone


def test_a_few_prompt_tokens_delay_no_request():
    assert RULE.prefill_s(work(150, decoding=100), 150) == RULE.prefill_s(work(150), 150)


@given(works, works, tokens, st.floats(1.0, 100.0))
def test_more_uncached_tokens_speak_for_a_remote_prefill_if_the_link_is_faster_than_the_prefill(
    local, remote, more, times
):
    link = times * local.tokens_per_s * RULE.kv_bytes_per_token
    rule = structs.replace(RULE, link_bytes_per_s=link)
    fewer = structs.replace(local, uncached_tokens=max(0.0, local.uncached_tokens - more))
    if saves(rule, fewer, remote):
        assert saves(rule, local, remote)


@given(works, works, tokens)
def test_a_longer_queue_at_the_prefill_endpoint_speaks_against_it(local, remote, more):
    longer = structs.replace(remote, pending_tokens=remote.pending_tokens + more)
    if saves(RULE, local, longer):
        assert saves(RULE, local, remote)


@given(works, works, tokens)
def test_transfers_of_other_requests_speak_against_a_remote_prefill(local, remote, more):
    receiving = structs.replace(local, receiving_tokens=local.receiving_tokens + more)
    sending = structs.replace(remote, sending_tokens=remote.sending_tokens + more)
    if saves(RULE, receiving, sending):
        assert saves(RULE, local, remote)


@given(works, works, links, st.floats(1.0, 100.0))
def test_a_faster_link_speaks_for_a_remote_prefill(local, remote, link, times):
    slow, fast = (structs.replace(RULE, link_bytes_per_s=one) for one in (link, link * times))
    if saves(slow, local, remote):
        assert saves(fast, local, remote)


@given(works, works, tokens)
def test_more_decoding_requests_speak_for_a_remote_prefill(local, remote, more):
    busier = structs.replace(local, decoding_requests=local.decoding_requests + more)
    if saves(RULE, local, remote):
        assert saves(RULE, busier, remote)


@given(works, works)
def test_prefill_stays_if_nothing_can_be_transferred_or_nothing_is_missing(local, remote):
    unlinked = structs.replace(RULE, link_bytes_per_s=0.0)
    assert unlinked.transfer_s_per_token == math.inf
    assert not saves(unlinked, local, remote)
    assert not saves(RULE, structs.replace(local, uncached_tokens=0.0), remote)


# --- decisions ---

BY_TIME = Stages(
    decode=profile("decode", DecodeRole(), scorers=[DecodeTime()]),
    prefill=profile("prefill", PrefillRole(), scorers=[PrefillTime()]),
    prefill_if=RULE,
    order=Order.PREFILL_FIRST,
)
ROLES = ("prefill", "decode")


def busy_decode(scheduler, running):
    page = EndpointMetrics(
        waiting_requests=0.0, running_requests=float(running), kv_cache_usage=0.0
    )
    scheduler.take(PageScraped(1, page), 0.0)


def route(scheduler, request, now=0.0):
    return scheduler.schedule(request, now).account.route


@pytest.mark.parametrize("order", Order)
def test_a_prompt_is_computed_elsewhere_only_if_decoding_requests_would_suffer(order):
    stages = structs.replace(BY_TIME, order=order)
    idle = pool_of(ROLES, stages)
    assert route(idle, chat(4_096)) is Route.DECODE_ONLY
    busy = pool_of(ROLES, stages)
    busy_decode(busy, 20)
    assert route(busy, chat(4_096)) is Route.PREFILL_DECODE
    assert route(busy, chat(64, text=b"b")) is Route.DECODE_ONLY


@pytest.mark.parametrize("order", Order)
def test_without_a_prefill_endpoint_the_decode_endpoint_prefills(order):
    alone = pool_of(("decode", "decode"), structs.replace(BY_TIME, order=order))
    busy_decode(alone, 20)
    assert route(alone, chat(4_096)) is Route.DECODE_ONLY


def test_without_a_decode_endpoint_requests_are_refused():
    refusal = pool_of(("prefill",), BY_TIME).schedule(chat(64), 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.stage == "decode"


def test_a_prompt_that_the_decode_endpoint_has_cached_stays_there():
    scheduler = pool_of(ROLES, BY_TIME)
    busy_decode(scheduler, 20)
    assert route(scheduler, chat(4_096)) is Route.PREFILL_DECODE
    assert route(scheduler, chat(4_096)) is Route.DECODE_ONLY


def test_an_endpoint_of_both_roles_counts_what_its_prefill_delays():
    """The prefill endpoint also decodes, and is as busy as the decode endpoint."""
    scheduler = pool_of(("both", "decode"), BY_TIME)
    for slot in (0, 1):
        page = EndpointMetrics(waiting_requests=0.0, running_requests=20.0, kv_cache_usage=0.0)
        scheduler.take(PageScraped(slot, page), 0.0)
    assert route(scheduler, chat(4_096)) is Route.DECODE_ONLY


def test_transfers_in_flight_keep_prompts_at_the_decode_endpoint_of_a_slow_network():
    """The network needs 0.2 s for a prompt, and a prefill delays eight requests by 0.26 s each."""
    slow = {"link_bytes_per_second": 5e9}
    stages = Stages(
        decode=profile("decode", DecodeRole(), scorers=[DecodeTime(**slow)]),
        prefill=profile("prefill", PrefillRole(), scorers=[PrefillTime(**slow)]),
        prefill_if=structs.replace(RULE, link_bytes_per_s=5e9),
        order=Order.PREFILL_FIRST,
    )
    scheduler = pool_of(("prefill", "decode"), stages)
    busy_decode(scheduler, 8)
    texts = [bytes([65 + at]) for at in range(12)]
    decisions = [scheduler.schedule(chat(4_096, text=text), 0.0) for text in texts]
    remote = [one for one in decisions if one.account.route is Route.PREFILL_DECODE]
    assert 1 < len(remote) < 12
    assert scheduler.pool.columns.receiving_tokens[:2].tolist() == [0.0, len(remote) * 4_096.0]
    assert scheduler.pool.columns.sending_tokens[:2].tolist() == [len(remote) * 4_096.0, 0.0]
    for one in remote:
        scheduler.take(RequestEnded(one.lease, Outcome(status=200)), 1.0)
    assert not scheduler.pool.columns.receiving_tokens[:2].any()
    assert not scheduler.pool.columns.sending_tokens[:2].any()


def told_transfers(scheduler, slot, size_bytes, ended, now=0.0):
    """Give the scheduler a page that counts transfers of 1 s each."""
    transfers = KvTransfers(received_bytes=size_bytes, ended=ended, ended_s=ended)
    page = EndpointMetrics(
        waiting_requests=0.0, running_requests=8.0, kv_cache_usage=0.0, transfers=transfers
    )
    scheduler.take(PageScraped(slot, page), now)


@pytest.mark.parametrize("learns", [True, False])
def test_the_measured_speed_of_the_network_replaces_the_configured_one(learns):
    """The network has 1 GB/s instead of the default 20 GB/s, so a transfer takes 1.07 s."""
    stages = Stages(
        decode=profile("decode", DecodeRole(), scorers=[DecodeTime(learn_link_speed=learns)]),
        prefill=profile("prefill", PrefillRole(), scorers=[PrefillTime(learn_link_speed=learns)]),
        prefill_if=structs.replace(RULE, learn_link_speed=learns),
        order=Order.PREFILL_FIRST,
    )
    scheduler = pool_of(("prefill", "decode"), stages)
    told_transfers(scheduler, 1, 0.0, 0.0)
    assert route(scheduler, chat(4_096)) is Route.PREFILL_DECODE
    told_transfers(scheduler, 1, 1e9, 1.0)
    measured = Route.DECODE_ONLY if learns else Route.PREFILL_DECODE
    assert route(scheduler, chat(4_096, text=b"b")) is measured
    for number in range(2, 50):
        told_transfers(scheduler, 1, 1e9 + number * 20e9, float(number))
    assert route(scheduler, chat(4_096, text=b"c")) is Route.PREFILL_DECODE


def test_a_pair_has_one_transfer_at_a_time_until_the_first_has_shown_its_speed():
    scheduler = pool_of(("prefill", "decode"), BY_TIME)
    told_transfers(scheduler, 1, 0.0, 0.0)
    texts = [bytes([65 + at]) for at in range(4)]
    routes = [route(scheduler, chat(4_096, text=text)) for text in texts]
    assert routes == [Route.PREFILL_DECODE, *[Route.DECODE_ONLY] * 3]
    told_transfers(scheduler, 1, 20e9, 1.0)
    assert route(scheduler, chat(4_096, text=b"z")) is Route.PREFILL_DECODE


@given(works, works, links)
def test_the_measured_speed_counts_like_a_configured_one(local, remote, link):
    measured = structs.replace(local, link_bytes_per_s=link)
    configured = structs.replace(RULE, link_bytes_per_s=link)
    assert RULE.remote_s(40_000, measured, remote) == configured.remote_s(40_000, local, remote)
    fixed = structs.replace(RULE, learn_link_speed=False)
    assert fixed.remote_s(40_000, measured, remote) == RULE.remote_s(40_000, local, remote)
    unlinked = structs.replace(RULE, link_bytes_per_s=0.0)
    assert not saves(unlinked, measured, remote)


def test_a_queue_at_the_prefill_endpoints_sends_prompts_to_decode_endpoints():
    scheduler = pool_of(ROLES, BY_TIME)
    busy_decode(scheduler, 8)
    texts = [bytes([65 + at]) for at in range(40)]
    routes = [route(scheduler, chat(4_096, text=text)) for text in texts]
    assert routes[0] is Route.PREFILL_DECODE
    assert Route.DECODE_ONLY in routes
