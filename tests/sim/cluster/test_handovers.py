"""Disaggregated requests in a cluster: their legs, transfers, leases and failures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sim.caches.names import cache_named
from sim.cluster.check import checker
from sim.cluster.faults import Fault, FaultKind, draw_faults
from sim.cluster.links import KVTransferSettings
from sim.cluster.prefill_rules import DECODE, PREFILL, RoundRobinPrefill
from sim.cluster.rerouting import Reschedule
from sim.cluster.settings import ClientSettings, ClusterSettings, ClusterSettingsError
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Failure, Fate
from sim.engine.features import features_named
from sim.engine.links import ACROSS_ZONES_S, LINKS
from sim.engine.profiles import DEFAULT_PROFILE, KVWindow, find_profile
from sim.measurement.measures import Measures, Targets, ttft_of
from tests.sim.made import arrival, arrivals, cluster, kind

LINK = LINKS["roce200"]
PROFILE = find_profile(DEFAULT_PROFILE)
SPLIT = (kind().with_role(PREFILL), kind().with_role(DECODE))
"""One pod of each role."""


def made(given_all, *, pods=SPLIT, tokens_min=0, transfer=None, policy="least-requests", **more):
    """A cluster of pods with roles, and the list of its ended requests."""
    ends = []
    one = cluster(
        given_all,
        pods=pods,
        policy=policy,
        kv_transfer=transfer or KVTransferSettings(link=LINK),
        prefill_rule=RoundRobinPrefill(tokens_min=tokens_min),
        ended=ends.append,
        **more,
    )
    return one, ends


def played(given_all, *, check=True, **more):
    one, ends = made(given_all, **more)
    one.run(checker(one) if check else None)
    return sorted(ends, key=lambda request: request.sequence), one


def wait(one, seconds):
    """Let time pass after the last request."""
    until = one.loop.now + seconds
    while one.loop.next_at <= until:
        one.loop.step()


def used_blocks(one):
    """By rank of each running pod; the state of a dead engine is of no use."""
    return [rank.pool.blocks_used for pod in one.pods if pod.alive for rank in pod.ranks]


def test_a_lone_request_takes_what_the_sequence_says():
    """Client, sidecar, prefill, hop, transfer and one decode pass; one after another."""
    (request,), one = played([arrival(prompt_tokens=1_000, output_tokens=5)])
    handover, leg = request.handover, request.handover.engine
    front_s = PROFILE.frontend_delay_s(1_000)
    sent_s = 2 * 0.0005
    assert leg.queued_at == pytest.approx(sent_s + 0.001 + front_s)
    prefill_s = handover.prefilled_at - leg.queued_at
    assert prefill_s == pytest.approx(1_000 / PROFILE.prefill_tokens_per_s(1_000))
    arrived_s = handover.prefilled_at + 0.001 + front_s
    assert request.submitted_at == handover.reserved_at == pytest.approx(arrived_s)
    transfer_s = LINK.setup_s + 1_000 * PROFILE.kv_bytes_per_token / LINK.bytes_per_s
    assert handover.received_at == pytest.approx(arrived_s + transfer_s)
    first_s = handover.received_at + PROFILE.decode_step_s(1, 1_000)
    assert request.first_token_at == pytest.approx(first_s)
    assert ttft_of(request) == pytest.approx(first_s + 0.0005)
    assert one.gateway.handovers.totals.tokens == 1_000
    assert one.gateway.handovers.totals.size_bytes == 1_000 * PROFILE.kv_bytes_per_token


def test_both_pods_cache_the_prompt_and_count_its_tokens_once():
    """The next request is computed and moved only as far as it is new, and says what P had."""
    given_all = [
        arrival(index, time_s=float(index), prompt_tokens=640, output_tokens=4,
                blocks=tuple(range(1, 11)), block_tokens=64)
        for index in range(2)
    ]  # fmt: skip
    measures = Measures(Targets())
    one, ends = made(given_all)
    one._tell_stepped = measures.gaps.add
    one.run(checker(one))
    first, second = ends
    assert first.cached_tokens == 0
    assert second.cached_tokens == second.handover.engine.cached_tokens == 624
    assert second.engine.fetched_tokens == 16
    wait(one, 1.0)
    assert used_blocks(one) == [0, 0]
    gaps = measures.gaps.whole()
    assert gaps.output_tokens == 8
    pages = [pod.page(one.loop.now) for pod in one.pods]
    assert [page.answer_tokens_total for page in pages] == [2, 8]


def test_short_prompts_stay_at_the_decode_pod():
    given_all = [
        arrival(index, time_s=index / 4, prompt_tokens=100 * index + 1) for index in range(4)
    ]
    requests, one = played(given_all, tokens_min=150)
    assert [request.handover is not None for request in requests] == [False, False, True, True]
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert {request.pod.number for request in requests} == {1}
    assert one.gateway.handovers.totals.transfers == 2


def test_a_pod_with_both_roles_that_is_chosen_twice_serves_the_whole_request():
    (request,), one = played([arrival()], pods=(kind().with_role("prefill-decode"),))
    assert request.fate is Fate.COMPLETE
    assert request.handover is None
    assert one.gateway.handovers.totals.transfers == 0


def test_a_full_decode_pod_holds_the_blocks_of_the_prefill_pod():
    """Requests that wait for decode memory keep the prefill pod's memory."""
    decode = kind(blocks_total=101).with_role(DECODE)
    given_all = [arrival(index, prompt_tokens=800, output_tokens=300) for index in range(6)]
    one, ends = made(given_all, pods=(SPLIT[0], decode))
    most, waiting = [0, 0], 0

    def after():
        nonlocal waiting
        most[:] = map(max, most, used_blocks(one))
        waiting = max(waiting, one.pods[1].waiting)

    one.run(after)
    assert [request.fate for request in ends] == [Fate.COMPLETE] * 6
    assert waiting >= 4
    # Five prompts of fifty blocks wait while one or two decode.
    assert most[0] >= 4 * 50
    totals = one.gateway.handovers.totals
    assert totals.reservation_s > 5.0
    wait(one, 60.0)
    assert used_blocks(one) == [0, 0]
    assert totals.leases_expired == 0


def test_a_leg_in_transfer_counts_as_waiting_on_the_page():
    """And its blocks as used."""
    slow = KVTransferSettings(link=structs.replace(LINK, bytes_per_s=1e8))
    one, _ = made([arrival(prompt_tokens=1_600)], transfer=slow)
    while not any(rank.legs.fetching for rank in one.pods[1].ranks):
        one.loop.step()
    page = one.pods[1].page(one.loop.now)
    assert (page.waiting_requests, page.running_requests) == (1, 0)
    assert page.kv_cache_usage == pytest.approx(100 / one.pods[1].ranks[0].pool.blocks_usable)
    one.run()


@pytest.mark.parametrize("concurrent", [False, True])
def test_concurrent_legs_reserve_while_the_prefill_pod_computes(concurrent):
    transfer = KVTransferSettings(link=LINK, concurrent=concurrent)
    (request,), _ = played([arrival(prompt_tokens=4_000)], transfer=transfer)
    handover = request.handover
    assert (handover.reserved_at < handover.prefilled_at) is concurrent
    assert handover.began_at == max(handover.reserved_at, handover.prefilled_at)
    assert request.fate is Fate.COMPLETE


def test_push_hides_the_transfer_behind_the_prefill():
    """Only the last layer remains of a transfer that is shorter than the prefill."""
    took = {}
    for push in (False, True):
        transfer = KVTransferSettings(link=LINK, concurrent=True, push=push)
        (request,), one = played([arrival(prompt_tokens=4_000)], transfer=transfer)
        took[push] = request.handover.received_at - request.handover.prefilled_at - LINK.setup_s
        assert one.gateway.handovers.totals.size_bytes == 4_000 * PROFILE.kv_bytes_per_token
    whole_s = 4_000 * PROFILE.kv_bytes_per_token / LINK.bytes_per_s
    assert took == {False: pytest.approx(whole_s), True: pytest.approx(whole_s / PROFILE.layers)}


def test_more_contention_and_slower_links_mean_longer_transfers():
    """Four prefill pods that send to one decode pod, at the same time."""
    took = []
    for name, count in (("roce200", 1), ("roce200", 4), ("tcp-25gbe", 4)):
        pods = (*(SPLIT[0],) * 4, SPLIT[1])
        given_all = [arrival(index, prompt_tokens=4_000) for index in range(count)]
        transfer = KVTransferSettings(link=LINKS[name])
        _, one = played(given_all, pods=pods, transfer=transfer)
        totals = one.gateway.handovers.totals
        took.append(totals.transfer_s / totals.transfers)
    assert took == sorted(took)
    bytes_s = 4_000 * PROFILE.kv_bytes_per_token / LINK.bytes_per_s
    assert took[0] == pytest.approx(LINK.setup_s + bytes_s)
    assert took[1] == pytest.approx(LINK.setup_s + 4 * bytes_s)


def test_nics_zones_and_first_contacts_change_the_transfer():
    """Two NICs halve the time of the bytes, if the other side has as many."""
    far = structs.replace(kind(), labels={"topology.kubernetes.io/zone": "a"})
    near = structs.replace(kind(), labels={"topology.kubernetes.io/zone": "b"})
    pods = (far.with_role(PREFILL, nics=2), near.with_role(DECODE, nics=2))
    transfer = KVTransferSettings(link=LINK, first_contact_s=3.0)
    given_all = [arrival(index, time_s=10.0 * index, prompt_tokens=2_000) for index in range(2)]
    requests, _ = played(given_all, pods=pods, transfer=transfer, policy="random")
    took = [one.handover.received_at - one.handover.began_at for one in requests]
    usual_s = LINK.setup_s + ACROSS_ZONES_S + 2_000 * PROFILE.kv_bytes_per_token / 40e9
    assert took == [pytest.approx(usual_s + 3.0), pytest.approx(usual_s)]


# --- cancellation, leases and failures ------------------------------------------------------------


def left_at(stage, *, transfer=None, after_s=40.0):
    """Let the client of one long request leave at a stage; the request, the cluster, the time."""
    one, ends = made([arrival(prompt_tokens=8_000, output_tokens=500)], transfer=transfer)
    (request,) = one.clients.requests.values() or [None]
    return one, ends, request, stage, after_s


SLOW = KVTransferSettings(link=structs.replace(LINK, bytes_per_s=1e9))
"""A transfer of 8,000 tokens takes a second."""


def reach(one, condition):
    """Run until there is a request for which `condition` holds; return it."""
    while True:
        one.loop.step()
        for request in one.clients.requests.values():
            if request.handover is not None and condition(request.handover):
                return request


STAGES = {
    "prefill": lambda handover: handover.engine is not None,
    "hop": lambda handover: handover.prefilled_at is not None,
    "transfer": lambda handover: handover.transfer is not None,
    "decode": lambda handover: handover.received_at is not None,
}


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_frees_all_blocks_in_the_end(stage, concurrent):
    """The prefill pod frees its blocks at the end of the lease, unless they were or are being read."""
    transfer = structs.replace(SLOW, concurrent=concurrent)
    later = arrival(1, time_s=100.0)
    one, ends = made([arrival(prompt_tokens=8_000, output_tokens=500), later], transfer=transfer)
    request = reach(one, STAGES[stage])
    handover, left_at_s = request.handover, one.loop.now
    one.gateway.hang_up(request)
    assert request.fate is Fate.ABORTED
    check = checker(one)
    freed_s = None
    while one.loop.now < 90.0:
        one.loop.step()
        check()
        if freed_s is None and not one.pods[0].ranks[0].pool.blocks_used:
            freed_s = one.loop.now
    held_s = freed_s - left_at_s
    # With concurrent legs the transfer begins at the end of the prefill.
    reads = stage in {"transfer", "decode"} or (stage == "hop" and concurrent)
    expired = one.gateway.handovers.totals.leases_expired
    if stage == "prefill":
        assert held_s < 1.0
    elif reads:
        assert held_s < 1.2
    else:
        assert freed_s == pytest.approx(handover.prefilled_at + 30.0)
    assert expired == (stage == "hop" and not concurrent)
    assert used_blocks(one) == [0, 0]
    assert not len(one.gateway.handovers)
    one.run()
    assert [end.fate for end in ends] == [Fate.ABORTED, Fate.COMPLETE]


def test_heartbeats_renew_the_lease_while_the_decode_engine_has_the_request():
    """A leg that waits 25 s for memory and is then aborted: 20 s from its last heartbeat."""
    decode = kind(blocks_total=101).with_role(DECODE)
    given_all = [
        arrival(0, prompt_tokens=1_000, output_tokens=500),
        arrival(1, time_s=0.5, prompt_tokens=1_200),
        arrival(2, time_s=200.0),
    ]
    one, _ = made(given_all, pods=(SPLIT[0], decode))
    request = reach(
        one, lambda handover: handover.request.sequence == 1 and handover.decode_since is not None
    )
    handover = request.handover
    one.pods[1].slow_down(100.0)
    wait(one, 27.0)
    assert handover.reserved_at is None
    one.gateway.hang_up(request)
    while one.loop.now < 120.0 and handover in one.gateway.handovers._open:
        one.loop.step()
    # The lease of 30 s would have ended soon after; the sixth heartbeat came 25 s after the first.
    assert one.loop.now == pytest.approx(handover.decode_since + 25.0 + 20.0)
    assert one.gateway.handovers.totals.leases_expired == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_pod_that_dies_fails_what_it_has_not_handed_over(stage):
    """502 for its legs, 500 for what would be read; what was read goes on."""
    later = arrival(1, time_s=100.0)
    given_all = [arrival(prompt_tokens=8_000, output_tokens=50), later]
    pods = (*(SPLIT[0],) * 2, SPLIT[1])
    one, ends = made(given_all, pods=pods, transfer=SLOW)
    request = reach(one, STAGES[stage])
    one.pods.kill(request.handover.pod)
    one.run(checker(one))
    first, second = sorted(ends, key=lambda end: end.sequence)
    expected = {
        "prefill": (Fate.FAILED, Failure.PREFILL_POD_DIED, 502),
        "hop": (Fate.FAILED, Failure.KV_TRANSFER, 500),
        "transfer": (Fate.FAILED, Failure.KV_TRANSFER, 500),
        "decode": (Fate.COMPLETE, None, 200),
    }
    assert (first.fate, first.failure, first.status) == expected[stage]
    assert second.fate is Fate.COMPLETE
    assert not len(one.gateway.handovers)


@pytest.mark.parametrize("stage", STAGES)
def test_a_decode_pod_that_dies_leaves_the_prefill_pod_its_blocks_until_the_lease_ends(stage):
    later = arrival(1, time_s=100.0)
    given_all = [arrival(prompt_tokens=8_000, output_tokens=50), later]
    pods = (SPLIT[0], *(SPLIT[1],) * 2)
    one, ends = made(given_all, pods=pods, transfer=SLOW)
    request = reach(one, STAGES[stage])
    died_at_s = one.loop.now
    one.pods.kill(request.pod)
    prefill = one.pods[0].ranks[0].pool
    while prefill.blocks_used:
        one.loop.step()
    if stage in {"prefill", "decode"}:
        assert one.loop.now - died_at_s < 1.0
    else:
        assert one.loop.now >= request.handover.prefilled_at + 20.0
    one.run(checker(one))
    first, second = sorted(ends, key=lambda end: end.sequence)
    assert (first.fate, first.failure) == (Fate.FAILED, Failure.POD_DIED)
    assert first.status == (200 if stage in {"transfer", "decode"} else 503)
    assert second.fate is Fate.COMPLETE


def test_a_lost_request_is_sent_again_and_answered():
    one, ends = made(
        [arrival(prompt_tokens=8_000, output_tokens=50)],
        pods=(*(SPLIT[0],) * 2, SPLIT[1]),
        clients=ClientSettings(retries=2, pause_s=2.0),
    )
    request = reach(one, STAGES["prefill"])
    one.pods.kill(request.handover.pod)
    one.run(checker(one))
    assert [end.fate for end in ends] == [Fate.COMPLETE]
    assert request.retries == 1
    assert request.handover.pod.number != 0 or one.pods[0].alive


def test_a_prompt_that_the_prefill_pod_rejects_fails_with_400():
    small = kind(blocks_total=11).with_role(PREFILL)
    (request,), one = played([arrival(prompt_tokens=1_000)], pods=(small, SPLIT[1]))
    assert (request.fate, request.failure, request.status) == (Fate.FAILED, Failure.KV_CACHE, 400)
    assert not one.pods[1].requests


@pytest.mark.parametrize("concurrent", [False, True])
def test_an_answer_that_the_decode_pod_rejects_fails_with_400(concurrent):
    """The prefill pod may have computed the prompt; its lease ends later."""
    small = kind(blocks_total=71).with_role(DECODE)
    transfer = KVTransferSettings(link=LINK, concurrent=concurrent)
    given_all = [arrival(prompt_tokens=1_000, output_tokens=500)]
    (request,), one = played(given_all, pods=(SPLIT[0], small), transfer=transfer)
    assert (request.failure, request.status) == (Failure.KV_CACHE, 400)
    wait(one, 40.0)
    assert used_blocks(one) == [0, 0]
    assert one.gateway.handovers.totals.leases_expired == (not concurrent)


def test_a_decode_pod_that_cannot_be_reached_is_passed_over_before_the_prefill():
    pods = (SPLIT[0], *(SPLIT[1],) * 2)
    reschedule = Reschedule(from_s=0.0, to_s=100.0, pods=(), share=1.0)
    requests, one = played(
        list(arrivals(10)),
        pods=pods,
        policy="default",
        fallback_endpoints_max=1,
        reschedules=(reschedule,),
        check=False,
    )
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert one.gateway.rescheduled == 10
    assert one.gateway.handovers.totals.transfers == 10


KINDS = {
    "usual": (),
    "speculative": ("speculative:acceptance=0.7/0.4/0.2",),
    "ranks": ("ranks:count=2",),
    "whole": ("whole-prompts",),
}


def roles(name, counts=(2, 2), blocks_total=130):
    usual = PodKind.of(PROFILE, features=features_named(KINDS[name]))
    small = structs.replace(usual, engine=structs.replace(usual.engine, blocks_total=blocks_total))
    return (
        *(small.with_role(PREFILL),) * counts[0],
        *(small.with_role(DECODE),) * counts[1],
    )


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_pool_with_roles_answers_everything_and_keeps_its_books(name, concurrent):
    """Short of memory, with clients that leave; the same run twice."""
    told = []
    for _ in range(2):
        transfer = KVTransferSettings(link=LINK, concurrent=concurrent)
        requests, one = played(
            list(arrivals(60, rate=50.0, output=(5, 60))),
            pods=roles(name),
            transfer=transfer,
            tokens_min=200,
            abort_share=0.3,
            abort_after_s=0.2,
        )
        assert {request.fate for request in requests} <= {Fate.COMPLETE, Fate.ABORTED}
        assert sum(request.fate is Fate.COMPLETE for request in requests) > 30
        wait(one, 60.0)
        assert not any(used_blocks(one))
        assert not len(one.gateway.handovers)
        told.append([(request.ended_at, request.cached_tokens) for request in requests])
    assert told[0] == told[1]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    concurrent=st.booleans(),
    push=st.booleans(),
    bytes_per_s=st.sampled_from([1e8, 1e9, 2e10]),
    blocks_total=st.sampled_from([90, 130, 400]),
)
def test_blocks_return_whatever_fails(seed, concurrent, push, bytes_per_s, blocks_total):
    """Pods die, restart, join and lag, clients leave and retry."""
    link = structs.replace(LINK, bytes_per_s=bytes_per_s)
    requests, one = played(
        list(arrivals(40, rate=20.0, seed=seed, output=(5, 60))),
        pods=roles("usual", counts=(3, 3), blocks_total=blocks_total),
        transfer=KVTransferSettings(link=link, concurrent=concurrent, push=concurrent and push),
        seed=seed,
        faults=draw_faults(seed, mean_gap_s=0.7),
        abort_share=0.2,
        abort_after_s=0.5,
        clients=ClientSettings(retries=3, pause_s=0.2),
    )
    assert len(requests) == 40
    one.faults._pull = lambda: None
    wait(one, 120.0)
    assert not any(used_blocks(one))
    assert not len(one.gateway.handovers)
    for nics in (
        *one.gateway.handovers._sending.values(),
        *one.gateway.handovers._receiving.values(),
    ):
        assert not nics.active


def test_pickers_do_not_choose_prefill_pods_for_decoding():
    requests, one = played(
        list(arrivals(40)), pods=(*(SPLIT[0],) * 2, *(SPLIT[1],) * 2), policy="default"
    )
    assert {request.pod.number for request in requests} <= {2, 3}
    assert {request.handover.pod.number for request in requests} == {0, 1}
    assert one.pickers.policies[0].open_requests == 0


def test_a_prefill_pod_that_leaves_is_no_longer_chosen():
    fault = Fault(kind=FaultKind.DIE, at_s=1.0, pod=0, duration_s=1.0, factor=1.0)
    requests, _ = played(
        list(arrivals(60, rate=15.0)),
        pods=(*(SPLIT[0],) * 2, SPLIT[1]),
        faults=[fault],
        discovery_delay_s=0.5,
    )
    late = [request for request in requests if request.arrived_at > 1.6]
    assert late
    assert {request.handover.pod.number for request in late} == {1}
    assert {request.fate for request in late} == {Fate.COMPLETE}


@pytest.mark.parametrize(
    ("pods", "transfer", "says"),
    [
        (
            (structs.replace(kind(), labels={"llm-d.ai/role": "decode"}),),
            KVTransferSettings(link=LINK),
            "expected an engine with a kv_connector",
        ),
        (
            (structs.replace(SPLIT[0], profile=structs.replace(PROFILE, kv_bytes_per_token=0)),),
            KVTransferSettings(link=LINK),
            "has no kv_bytes_per_token",
        ),
        (
            (structs.replace(SPLIT[0], cache=cache_named("mlx-memory")),),
            KVTransferSettings(link=LINK),
            "KV transfers need vLLM's cache",
        ),
        (SPLIT, KVTransferSettings(link=LINK, push=True), "push needs concurrent legs"),
        (
            (structs.replace(SPLIT[0], profile=structs.replace(PROFILE, layers=None)),),
            KVTransferSettings(link=LINK, push=True, concurrent=True),
            "has no layers",
        ),
    ],
)
def test_settings_that_cannot_hand_over_are_refused(pods, transfer, says):
    with pytest.raises(ClusterSettingsError, match=says):
        ClusterSettings(pods=pods, kv_transfer=transfer)


def test_a_prefill_rule_needs_a_network():
    with pytest.raises(ClusterSettingsError, match="a prefill rule needs kv_transfer"):
        cluster([], pods=SPLIT, prefill_rule=RoundRobinPrefill())


def test_a_sliding_window_moves_fewer_bytes():
    window = KVWindow(tokens=128, bytes_per_token=50_000, other_bytes_per_token=30_000)
    profile = structs.replace(PROFILE, kv_window=window)
    pods = tuple(structs.replace(pod, profile=profile) for pod in SPLIT)
    (_,), one = played([arrival(prompt_tokens=1_000)], pods=pods)
    expected_bytes = 1_000 * 30_000 + 128 * 50_000
    assert one.gateway.handovers.totals.size_bytes == expected_bytes
