"""Dynamo's cost and its two tiers, by hand and driven."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import OutputStarted, PoolReplaced, RequestEnded
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from homing_rivals.dynamo import Busy, DynamoCost, Queue, Softmax, TwoTier
from sim.cluster.settings import Absence
from sim.cluster.simulated_request import Fate
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import Driven, scheduler_of, settings_of
from tests.rivals.simulated import simulated
from tests.sim.made import arrival, cluster

BLOCK_BYTES = 256


def costs(plugin=None, *, matched, active, added, prompt_blocks=10, prefill=None):
    """Scores of endpoints that hold, run and would add so many blocks of a prompt of ten."""
    known = Affinity(
        np.array(matched, dtype=np.int64),
        prompt_blocks,
        {
            "active_blocks": np.array(active, dtype=np.float64),
            "new_blocks": np.array(added, dtype=np.float64),
        },
    )
    some = candidates(
        len(matched),
        inflight_prefill_tokens=prefill,
        affinities={"block-load-producer": known},
        prompt_tokens=64 * prompt_blocks,
    )
    return (plugin or DynamoCost()).score(request(), some).tolist()


def test_cost_is_blocks_to_prefill_and_blocks_that_run():
    """10 - 4 + (6 + 6) = 18; 10 + (0 + 10) = 20; 10 + 2 + (0 + 10) = 22, two blocks ahead."""
    scores = costs(
        matched=[4, 0, 0], active=[6, 0, 0], added=[6, 10, 10], prefill=[0.0, 0.0, 128.0]
    )
    assert scores == pytest.approx([1.0, 0.5, 0.0])


def test_credit_never_pays_for_more_than_there_is_to_prefill():
    """max(0, ...): all is cached, and a credit of 3 buys nothing off the blocks that run."""
    scores = costs(DynamoCost(overlap_credit=3.0), matched=[10, 10], active=[5, 6], added=[0, 0])
    assert scores == [1.0, 0.0]


def test_credit_decays_with_what_waits_in_front():
    """d = 1 and as much ahead as the prompt has: half the credit."""
    some = {"matched": [10, 4], "active": [0, 0], "added": [10, 10], "prefill": [640.0, 0.0]}
    # 20 - 10 against 10 - 4; then 20 - 5 against 10 - 4.
    assert costs(DynamoCost(prefill_load_scale=1.0), **some) == [0.0, 1.0]
    with_weight = DynamoCost(overlap_decay=1.0, active_request_weight=1.0)
    assert costs(with_weight, **some) == [0.0, 1.0]
    third = some | {"matched": [10, 4, 0], "active": [0] * 3, "added": [10] * 3}
    third["prefill"] = [640.0, 0.0, 0.0]
    assert costs(DynamoCost(overlap_decay=1.0), **third)[2] == pytest.approx((15 - 10) / (15 - 6))


def test_without_its_index_everybody_is_unknown():
    """Another configuration declared another one."""
    assert DynamoCost().score(request(), candidates(2)) is None


def ask(scheduler, text, now):
    asked = request(prompts=(text,), prompt_tokens=len(text) // 4)
    return scheduler.schedule(asked, now)


def test_four_requests_of_one_prompt_are_as_many_blocks_as_one():
    """Observed of Dynamo 1.6: four active requests, four decode blocks."""
    scheduler = scheduler_of("dynamo")
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    decisions = [ask(scheduler, b"p" * 4 * BLOCK_BYTES, 0.0) for _ in range(4)]
    index = scheduler.indexes["block-load-producer"]
    assert index.active.held(1).tolist() == [4]
    for decision in decisions:
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 1.0)
    assert index.active.blocks == 0


def test_a_shared_system_prompt_pins_one_endpoint():
    """Dynamo #737: it counts once, so that who has it stays cheaper until its tails are as long."""
    scheduler = scheduler_of("dynamo")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    random = Random(1)
    system = b"s" * 100 * BLOCK_BYTES
    went = Counter(
        ask(scheduler, system + random.randbytes(BLOCK_BYTES), float(at)).endpoint.name
        for at in range(60)
    )
    assert len(went) == 1
    cold = scheduler_of("dynamo")
    cold.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    spread = Counter(
        ask(cold, random.randbytes(101 * BLOCK_BYTES), float(at)).endpoint.name for at in range(60)
    )
    assert max(spread.values()) == 15


def test_what_was_sent_is_cached_for_120_seconds():
    """Each touch counts anew."""
    scheduler = scheduler_of("dynamo")
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    text = b"p" * 4 * BLOCK_BYTES
    assert ask(scheduler, text, 0.0).leg.matched_blocks == 0
    assert ask(scheduler, text, 119.0).leg.matched_blocks == 4
    assert ask(scheduler, text, 238.0).leg.matched_blocks == 4
    assert ask(scheduler, text, 359.0).leg.matched_blocks == 0


# --- two tiers ---


def chosen(plugin=None, **columns):
    some = candidates(total_blocks=10, **columns)
    scores = (plugin or TwoTier()).score(request(), some)
    return [at for at, score in enumerate(scores) if score == 1.0]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([33, 1], [0]),  # 32 more is not more than 32
        ([34, 1], [1]),
        ([400, 365], [0]),  # 35 more, and not a tenth more
        ([402, 365], [1]),
    ],
)
def test_the_load_counts_first_only_if_it_is_uneven_both_ways(requests, expected):
    """Both strictly."""
    assert chosen(matched_blocks=[10, 0], inflight_requests=requests) == expected


def test_the_cache_counts_from_more_than_half_of_the_prompt():
    """Then only those who hold the most of it, the emptiest of them."""
    assert chosen(matched_blocks=[5, 0], inflight_requests=[2, 1]) == [1]
    assert chosen(matched_blocks=[6, 0], inflight_requests=[2, 1]) == [0]
    assert chosen(matched_blocks=[9, 9, 8], inflight_requests=[3, 2, 0]) == [1]
    assert chosen(matched_blocks=[0, 0], inflight_requests=[1, 1]) == [0, 1]


def test_a_last_block_that_is_not_full_is_one_of_the_prompt():
    """640 tokens are ten blocks, of which six are more than half; 705 are twelve."""
    held = {"matched_blocks": [6, 0], "inflight_requests": [2, 1]}
    assert chosen(**held, prompt_tokens=640) == [0]
    assert chosen(**held, prompt_tokens=705) == [1]


# --- the picker ---


def picks(scores, count=4_000, **parameters):
    random = Random(3)
    picker = Softmax(**parameters)
    some = candidates(len(scores))
    return Counter(int(picker.pick(np.array(scores), some, random, at)[0]) for at in range(count))


def test_softmax_is_of_the_stretched_scores():
    """At 0.5, 1 against 0 is e^2 to 1, however close they were."""
    for scores in ([1.0, 0.0], [0.51, 0.5]):
        drawn = picks(scores, temperature=0.5)
        assert drawn[0] / 4_000 == pytest.approx(np.e**2 / (1 + np.e**2), abs=0.02)


def test_at_temperature_0_the_best_are_drawn_alike():
    """And nobody else."""
    drawn = picks([1.0, 0.3, 1.0])
    assert set(drawn) == {0, 2}
    assert drawn[0] / 4_000 == pytest.approx(0.5, abs=0.03)


@given(
    scores=st.lists(st.floats(0, 5), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.01, 1.0]),
    count=st.integers(1, 6),
)
def test_several_are_different_ones(scores, temperature, count):
    """The destination first, then fallbacks; as many as there are."""
    picker = Softmax(temperature=temperature, max_num_of_endpoints=count)
    order = picker.pick(np.array(scores), candidates(len(scores)), Random(1), 0).tolist()
    assert len(order) == len(set(order)) == min(count, len(scores))
    if not temperature:
        assert scores[order[0]] >= max(scores) * (1 - 1e-9)


def test_what_is_held_until_the_first_token_does_not_drain():
    """It decides by the same, and nothing of that reads a speed."""
    usual, held = settings_of("dynamo"), settings_of("dynamo-first-token")
    assert held.prefill_tokens_per_s == 1.0
    assert held.profile == usual.profile
    assert held.indexes == usual.indexes


@pytest.mark.parametrize(
    ("prefill", "held"),
    [
        ([131_072.0, 131_072.0], False),
        ([131_073.0, 131_073.0], True),
        ([131_073.0, 131_072.0], False),
        ([0.0, 1e9], False),
    ],
)
def test_requests_wait_while_every_endpoint_is_above_the_threshold(prefill, held):
    """16 x 8,192 tokens, strictly, and nobody is dropped either way."""
    some = candidates(2, inflight_prefill_tokens=prefill)
    assert Queue().holds(request(), some) is held
    assert Queue().keep(request(), some).all()


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    st.floats(0, 100),
    st.integers(1, 100_000),
)
def test_one_endpoint_that_is_not_busy_is_enough(prefill, threshold, batch):
    """A request waits if and only if there is none."""
    queue = Queue(queue_threshold=threshold, max_num_batched_tokens=batch)
    some = candidates(len(prefill), inflight_prefill_tokens=prefill)
    assert queue.holds(request(), some) is all(tokens > threshold * batch for tokens in prefill)


def test_a_first_token_lets_requests_go():
    """As the end of a request does; an end that nobody answered too."""
    driven = Driven("dynamo-queue")
    scheduler = driven.scheduler
    for name in "ab":
        driven.send(name, prompt_tokens=200_000)
    assert scheduler.admission.holds(request(prompt_tokens=1), 0.0)
    assert scheduler.admission.holds(request(prompt_tokens=1), 50.0)
    scheduler.take(OutputStarted(driven.leases[0]), 0.0)
    assert not scheduler.admission.holds(request(prompt_tokens=1), 0.0)
    driven.send("c", prompt_tokens=200_000)
    assert scheduler.admission.holds(request(prompt_tokens=1), 0.0)
    driven.end()
    assert not scheduler.admission.holds(request(prompt_tokens=1), 0.0)


def test_where_nobody_is_ready_nobody_waits():
    """The scheduler refuses at once, as for whom the subset leaves none."""
    driven = Driven("dynamo-queue")
    for name in "ab":
        driven.send(name, prompt_tokens=200_000)
    assert not driven.scheduler.admission.holds(request(subset=("192.0.2.77:8000",)), 0.0)
    driven.scheduler.take(PoolReplaced([]), 0.0)
    assert not driven.scheduler.admission.holds(request(), 0.0)


def test_other_strategies_of_dynamo_hold_nobody():
    """The queue is off there, as by default."""
    driven = Driven("dynamo-first-token")
    for name in "ab":
        driven.send(name, prompt_tokens=200_000)
    assert not driven.scheduler.admission.holds(request(), 0.0)


LONG_TOKENS = 100_000


def burst(count, **fields):
    """`count` prompts of their own, a millisecond after each other."""
    return [
        arrival(
            index,
            **{"time_s": index * 0.001, "prompt_tokens": LONG_TOKENS, "session": f"s{index}"}
            | fields,
        )
        for index in range(count)
    ]


def ran_burst(policy, given=None, **fields):
    """The requests of a burst of eight on two pods, in order, and the cluster."""
    requests = []
    one = cluster(
        burst(8) if given is None else given,
        policy=policy,
        pods=2,
        ended=requests.append,
        **({"response_chunks": True} | fields),
    )
    at_once = []
    one.gateway.decided = lambda request: at_once.append(request.sequence)
    one.run()
    return sorted(requests, key=lambda request: request.sequence), at_once, one


def test_a_burst_waits_in_the_router_and_is_served_in_order():
    """Two of 100,000 tokens make an endpoint busy: four go, one more with each first token."""
    requests, order, one = ran_burst("dynamo-queue")
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert order == sorted(order)
    decided = [request.submitted_at for request in requests]
    first = min(request.first_token_at for request in requests)
    assert sum(at < first for at in decided) == 4
    assert one.pickers.policies[0].open_requests == 0
    plain, _, _ = ran_burst("dynamo-first-token")
    assert all(request.submitted_at < first for request in plain)


def test_pages_let_requests_go_where_no_first_chunk_is_seen():
    """They count first tokens; the line is looked at as often as they are read."""
    requests, order, _ = ran_burst("dynamo-queue", response_chunks=False)
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert order == sorted(order)
    first, last = (pick(one.first_token_at for one in requests) for pick in (min, max))
    assert first < max(one.submitted_at for one in requests) < last


def test_a_client_that_leaves_is_never_placed():
    """And who waited behind it is served."""
    given = burst(8)
    requests, order, one = ran_burst("dynamo-queue", given, abort_share=0.5, abort_after_s=0.5)
    left = {one.sequence for one in requests if one.fate is Fate.ABORTED and one.route is None}
    assert left
    assert left.isdisjoint(order)
    assert {one.fate for one in requests} == {Fate.ABORTED, Fate.COMPLETE}
    assert one.pickers.policies[0].open_requests == 0


def test_who_waits_at_a_picker_that_dies_is_told_so():
    """As whose stream has ended; its client may come again."""
    gone = (Absence(replica=0, from_s=0.5, to_s=2.0),)
    requests, _, one = ran_burst("dynamo-queue", absences=gone)
    failed = [one for one in requests if one.fate is Fate.FAILED]
    assert [(one.status, one.route) for one in failed] == [(500, None)] * 4
    assert sum(one.fate is Fate.COMPLETE for one in requests) == 4
    assert one.pickers.policies[0].open_requests == 0


def test_two_pickers_have_a_line_each():
    """None sees what the other sends, so that each lets through what one alone would."""
    requests, _, one = ran_burst("dynamo-queue", burst(16), replicas=2)
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    first = min(request.first_token_at for request in requests)
    for replica in range(2):
        mine = [one for one in requests if one.replica == replica]
        assert sum(one.submitted_at < first for one in mine) == min(4, len(mine))
    assert [policy.open_requests for policy in one.pickers.policies] == [0, 0]


def test_the_queue_is_never_reached_by_what_is_small():
    """Then it decides as without."""
    given = burst(40, prompt_tokens=2_000)
    with_queue = simulated(given, "dynamo-queue")
    without = simulated(given, "dynamo-first-token")
    assert [one.pod.number for one in with_queue] == [one.pod.number for one in without]


@pytest.mark.parametrize(
    ("kv", "prefill", "kept"),
    [
        ([0.85, 0.2], [10_000.0, 0.0], [True, True]),
        ([0.86, 0.2], [0.0, 10_001.0], [False, False]),
        ([0.86, 0.2], [0.0, 10_000.0], [False, True]),
        ([np.nan, 0.2], [0.0, 0.0], [True, True]),
    ],
)
def test_an_endpoint_is_busy_above_either_threshold(kv, prefill, kept):
    some = candidates(2, kv_cache_usage=kv, inflight_prefill_tokens=prefill)
    assert Busy().keep(request(), some).tolist() == kept


def test_a_request_is_refused_with_429_while_all_are_busy():
    """A first token makes an endpoint free again."""
    driven = Driven("dynamo-threshold")
    for name in "ab":
        driven.send(name, prompt_tokens=20_000)
    refusal = driven.scheduler.schedule(request(prompt_tokens=1), 0.0)
    assert refusal.status == 429
    driven.scheduler.take(OutputStarted(driven.leases[0]), 0.0)
    assert driven.send("c", prompt_tokens=1) == driven.leases[0].slot
