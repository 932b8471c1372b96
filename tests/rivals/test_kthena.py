"""kthena's points by hand, its table of answered prompts, and what they decide together."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from epp.core.types import Refusal
from homing_rivals.kthena import (
    AnsweredBlocksSettings,
    FreeKVCachePoints,
    TopMatches,
    UnstartedRequests,
)
from homing_rivals.routed_blocks import RoutedBlocksSettings
from tests.builders import affinity, candidates, endpoint, request
from tests.rivals.driven import Driven, scheduler_of, text
from tests.rivals.simulated import hit_rate, simulated
from tests.sim.made import arrivals

INDEX = "answered-blocks-producer"
SHIPPED = {
    "block_tokens": 16,
    "blocks_per_request_max": 128,
    "last_partial_block": True,
    "contiguous": True,
    "tail_first": True,
}


def opened(**parameters):
    return AnsweredBlocksSettings(**(SHIPPED | parameters)).open()


def said(*blocks, tail=b""):
    """A prompt of one letter a block."""
    return request(prompts=(b"".join(letter.encode() * 64 for letter in blocks) + tail,))


def matched(index, *blocks, tail=b""):
    known = index.match(said(*blocks, tail=tail), 3, 0.0)
    return known.matched.tolist(), known.total


def answered(index, asked, slot):
    """What undoes it."""
    index.match(asked, 3, 0.0)
    recorded = index.record(asked, slot, 0.0)
    index.release(asked.without_prompts(), slot, recorded, 1.0)
    return recorded


# Points.


def prefix_points(blocks, total, request_id="one", **parameters):
    pool = candidates(len(blocks), affinities={INDEX: affinity(blocks, total)})
    return TopMatches(**parameters).score(request(request_id=request_id), pool).tolist()


def test_a_prefix_is_worth_whole_points():
    """2 of 3 blocks: 66.7, cut off to 66."""
    assert prefix_points([2, 1, 0, 3], 3) == [0.66, 0.33, 0.0, 1.0]


def test_points_are_cut_off_after_the_product_of_floats():
    """29 of 50 blocks are 57.99999999999999 there, and 57 points; 28 of 50 are 56."""
    assert prefix_points([29, 28], 50) == [0.57, 0.56]


def test_the_five_best_have_points_and_the_others_none():
    """Seven hold some of ten blocks."""
    assert prefix_points([1, 2, 3, 4, 5, 6, 2], 10)[2:6] == [0.3, 0.4, 0.5, 0.6]
    assert sorted(prefix_points([1, 2, 3, 4, 5, 6, 2], 10))[:3] == [0.0, 0.0, 0.2]
    assert prefix_points([1, 2, 3], 10, top=1) == [0.0, 0.0, 0.3]


def test_of_those_who_tie_for_the_last_place_the_request_draws():
    """A prompt that eight hold alike is worth something at five; each of them is among these."""
    drawn = Counter()
    for number in range(400):
        points = prefix_points([4] * 8, 4, request_id=f"{number}")
        assert sorted(points) == [0.0] * 3 + [1.0] * 5
        drawn.update(at for at, worth in enumerate(points) if worth)
    assert min(drawn.values()) > 200
    assert prefix_points([4] * 8, 4) == prefix_points([4] * 8, 4)


def test_a_prompt_without_a_block_says_nothing_of_anybody():
    """Neither does another index."""
    pool = candidates(2, affinities={INDEX: affinity([0, 0], 0)})
    assert TopMatches().score(request(), pool) is None
    assert TopMatches().score(request(), candidates(2)) is None


def request_points(inflight, running, **parameters):
    pool = candidates(inflight_requests=inflight, running_requests=running)
    return UnstartedRequests(**parameters).score(request(), pool).tolist()


def test_what_was_sent_and_does_not_run_weighs_a_hundred_times():
    """5, 4 + 100 x 2 = 204 and 3 + 100 x 3 = 303: 98.3, 32.7 and none, cut off."""
    assert request_points([5, 4, 3], [9.0, 2.0, math.nan]) == [0.98, 0.32, 0.0]


def test_an_even_load_is_worth_nothing_and_an_idle_pool_everything():
    """The points are a share of the greatest load, not of the range."""
    assert request_points([3, 3], [3.0, 3.0]) == [0.0, 0.0]
    assert request_points([0, 0], [3.0, math.nan]) == [1.0, 1.0]
    assert request_points([4, 2], [0.0, 0.0], unstarted_weight=0.0) == [0.0, 0.5]


def test_a_free_kv_cache_is_worth_whole_points():
    """0.376 in use: 62.4, cut off."""
    pool = candidates(kv_cache_usage=[0.376, 1.0, 0.0, math.nan])
    assert FreeKVCachePoints().score(request(), pool).tolist() == [0.62, 0.0, 1.0, 1.0]


# What is known of prompts.


def test_a_prompt_is_known_once_it_was_answered():
    """Not while it runs."""
    index = opened()
    asked = said("a", "b")
    index.match(asked, 3, 0.0)
    recorded = index.record(asked, 1, 0.0)
    assert matched(index, "a", "b") == ([0, 0, 0], 2)
    index.release(asked.without_prompts(), 1, recorded, 1.0)
    assert matched(index, "a", "b", "c") == ([0, 2, 0], 3)


def test_what_failed_or_moved_is_not_known():
    """A failure is told after the end, a move before it."""
    index = opened()
    asked = said("a", "b", tail=b"rest")
    failed = answered(index, asked, 0)
    index.retract(asked.without_prompts(), 0, failed, 1.0)
    index.retract(asked, 1, index.record(asked, 1, 1.0), 2.0)
    assert matched(index, "a", "b", tail=b"rest") == ([0, 0, 0], 3)
    assert index.blocks == 0


def test_a_last_block_that_is_not_full_is_one_of_the_prompt():
    """Also where a prompt has no other; longer prompts than 128 blocks end there."""
    index = opened()
    answered(index, said("a", tail=b"rest"), 0)
    assert matched(index, "a", tail=b"rest") == ([2, 0, 0], 2)
    assert matched(index, "a", tail=b"other") == ([1, 0, 0], 2)
    assert matched(index, tail=b"short") == ([0, 0, 0], 1)
    assert index.match(request(prompts=(Random(1).randbytes(64 * 300),)), 3, 0.0).total == 128


def test_of_a_prompt_its_tail_is_pushed_out_first():
    """By the endpoint's own capacity."""
    index = opened(blocks_per_endpoint_max=3)
    answered(index, said("a", "b", "c"), 0)
    answered(index, said("x"), 0)
    assert matched(index, "a", "b", "c") == ([2, 0, 0], 3)
    assert matched(index, "x") == ([1, 0, 0], 1)


def test_settings_of_another_kind_open_another_index():
    """One that learns from answers is told of them only where that is declared."""
    assert not RoutedBlocksSettings(block_tokens=16).adopt(opened())
    assert not AnsweredBlocksSettings(**SHIPPED).adopt(RoutedBlocksSettings(block_tokens=16).open())
    index = opened()
    answered(index, said("a", "b"), 0)
    assert AnsweredBlocksSettings(**SHIPPED | {"blocks_per_endpoint_max": 1}).adopt(index)
    assert matched(index, "a", "b") == ([1, 0, 0], 2)


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from("abc"), min_size=1, max_size=5)),
        max_size=30,
    )
)
def test_who_has_the_last_block_has_all_before_it(prompts):
    """So that to count from the head finds what kthena finds from the last block on."""
    index = opened(blocks_per_endpoint_max=4)
    for slot, blocks in prompts:
        answered(index, said(*blocks), slot)
        for asked in ("abcab", "aabbc", blocks):
            held = [matched(index, *asked[:end])[0] for end in range(1, len(asked) + 1)]
            for each in range(3):
                whole = [end + 1 for end, counts in enumerate(held) if counts[each] == end + 1]
                assert held[-1][each] == max(whole, default=0)


# What they decide.


def test_points_of_each_kind_count_alike():
    """A prompt of 50 blocks, of which the three hold 29, none and all.

    Prefix: 57, 0 and 100. Requests: b = 4, 1 + 100 x 1 = 101 and 3 + 100 x 2 = 203, so 98.0, 50.2 and
    none. KV cache: 62.4, 95 and 9.999999999999998, which is 9. In all 217, 145 and 109.
    """
    pool = candidates(
        inflight_requests=[4, 1, 3],
        running_requests=[4.0, 0.0, 1.0],
        kv_cache_usage=[0.376, 0.05, 0.9],
        affinities={INDEX: affinity([29, 0, 50], 50)},
    )
    scheduler = scheduler_of("kthena")
    scored = scheduler.settings.profile.score(request(), pool, scheduler.failures)
    assert scored.total.tolist() == pytest.approx([2.17, 1.45, 1.09])


def test_of_equal_sums_any_is_taken():
    """Points are whole, so a hundredth of the cache more or less is none."""
    driven = Driven("kthena", pods=2)
    driven.report(0, kv=0.101)
    driven.report(1, kv=0.109)
    assert {driven.ask(text(f"other{number}", 64)) for number in range(20)} == {0, 1}


@pytest.mark.parametrize(("waiting", "served"), [((9, 30), True), ((10, 10), False)])
def test_who_has_ten_waiting_is_passed_over(waiting, served):
    """Where everybody has, the request is refused, as it is there, and may come back."""
    driven = Driven("kthena")
    for slot, requests in enumerate(waiting):
        driven.report(slot, waiting=float(requests))
    decision = driven.scheduler.schedule(request(), 0.0)
    if served:
        assert decision.lease.slot == 0
    else:
        assert isinstance(decision, Refusal)
        assert decision.status == 429


def test_a_burst_of_one_prompt_is_spread_because_no_answer_has_ended():
    """Whatever it has in common; afterwards each of them has it."""
    driven = Driven("kthena", pods=4)
    shared = text("shared", 640)
    went = Counter(driven.send(shared) for _ in range(40))
    assert set(went.values()) == {10}
    assert driven.index(INDEX).blocks == 0
    driven.end()
    assert driven.index(INDEX).blocks == 4 * 40


def test_an_answer_that_failed_teaches_nothing():
    """Nor does one whose endpoint has left."""
    driven = Driven("kthena", pods=1)
    driven.send(text("shared", 640))
    driven.scheduler.take(RequestEnded(driven.leases.pop(), Outcome(status=500)), 0.0)
    assert driven.index(INDEX).blocks == 0
    driven.send(text("shared", 640))
    driven.scheduler.take(PoolReplaced([endpoint(1)]), 0.0)
    driven.end()
    assert driven.index(INDEX).blocks == 0
    assert list(driven.scheduler.failures) == []


def test_a_conversation_stays_where_it_is_warm():
    """Each turn after the other, on equal endpoints."""
    driven = Driven("kthena", pods=3)
    said = ""
    homes = set()
    for turn in range(12):
        said += text(f"turn {turn} ", 64)
        homes.add(driven.ask(said))
    assert len(homes) == 1


def test_the_profile_has_the_weights_of_its_chart():
    """One filter and three scorers of 1 each."""
    profile = scheduler_of("kthena").settings.profile
    assert [one.name for one in profile.filters] == ["utilization-filter"]
    assert {one.name: one.weight for one in profile.scorers} == {
        "unstarted-requests-scorer": 1.0,
        "free-kv-cache-points-scorer": 1.0,
        "top-matches-scorer": 1.0,
    }


def test_it_finds_more_in_caches_than_load_alone():
    """In the simulator, whose prompts have blocks of 16 tokens for it."""

    def hits(policy):
        return hit_rate(simulated(arrivals(150, rate=10.0, groups=12), policy))

    assert hits("kthena") > 1.1 * hits("least-requests-live")
