"""Two generations of cache-aware routing: their formulas, and what their users report."""

import math
from collections import Counter

import numpy as np
import pytest

from epp.core.knowledge.candidates import Affinity
from homing_rivals.radix_tree import DEEPEST_BLOCKS, FIRST_HOLDER, RadixTreeSettings
from homing_rivals.smg_cache_aware import (
    CacheAware1,
    CacheAware4,
    expected_wait_s,
    imbalanced,
    kv_pressure,
    overfull,
)
from tests.builders import candidates, request
from tests.rivals.driven import Driven, text

GENERATIONS = (CacheAware1, CacheAware4)


def tree(matched, total=10, *, first=None, deepest=None):
    n = len(matched)
    columns = {
        FIRST_HOLDER: np.array([float(at == first) for at in range(n)]),
        DEEPEST_BLOCKS: np.full(n, float(max(matched) if deepest is None else deepest)),
    }
    return {RadixTreeSettings.type_name: Affinity(np.array(matched), total, columns)}


def best(plugin, affinities=None, **columns):
    scores = plugin.score(request(), candidates(affinities=affinities or {}, **columns))
    return np.flatnonzero(scores == 1.0).tolist()


# The guards.


@pytest.mark.parametrize(
    ("inflight", "expected"),
    [([64, 0], False), ([65, 0], True), ([195, 130], False), ([196, 130], True), ([5], False)],
)
def test_imbalance_needs_both_tests_and_both_are_strict(inflight, expected):
    """More than 64 apart, and more than 1.5 times the least."""
    assert imbalanced(np.array(inflight), balance_abs=64, balance_rel=1.5) is expected


def test_imbalance_by_ratio_alone_or_difference_alone_is_none():
    """200 against 134 is 66 apart and 1.49 times."""
    assert not imbalanced(np.array([200, 134]), balance_abs=64, balance_rel=1.5)
    assert not imbalanced(np.array([10, 1]), balance_abs=64, balance_rel=1.5)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_threshold_is_strict(generation):
    """3 of 10 blocks miss at 0.3, 4 match."""
    load = {"inflight_requests": [1, 0], "kv_cache_usage": [0.5, 0.0]}
    assert best(generation(), tree([3, 0], first=0), **load) == [1]
    assert best(generation(), tree([4, 0], first=0), **load) == [0]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_holder_that_is_no_candidate_leaves_the_first_in_the_list(generation):
    """What is known is known of somebody else."""
    assert best(generation(), tree([0, 0], deepest=9), inflight_requests=[5, 0]) == [0]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_without_a_tree_requests_decide(generation):
    """Also where the index failed."""
    assert best(generation(), inflight_requests=[3, 1, 2]) == [1]


def test_kv_pressure_is_strict_off_at_1_and_blind_to_the_unknown():
    """Somebody above the limit, or two too far apart."""
    some = candidates(kv_cache_usage=[0.9, math.nan, 0.5])
    assert kv_pressure(some, overload=0.8, balance=1.0)
    assert not kv_pressure(some, overload=0.9, balance=1.0)
    assert kv_pressure(some, overload=1.0, balance=0.3)
    assert not kv_pressure(candidates(2), overload=0.0, balance=0.0)


def test_kv_pressure_abandons_affinity():
    """The holder is full: load alone decides."""
    held = tree([9, 0], first=0)
    load = {"inflight_requests": [1, 0], "kv_cache_usage": [0.95, 0.1]}
    assert best(CacheAware4(), held, **load) == [0]
    assert best(CacheAware4(kv_overload=0.9), held, **load) == [1]


# Generation 1.


def test_generation_1_follows_who_was_first_sent_the_prefix():
    """Not the holder with fewer requests."""
    assert best(CacheAware1(), tree([9, 9], first=1), inflight_requests=[0, 40]) == [1]
    assert best(CacheAware1(), tree([9, 9], first=1), inflight_requests=[0, 65]) == [0]


def test_six_disjoint_prompts_go_to_one_worker():
    """sgl-project/sglang #32983, sglang-router 0.3.2: 18 of 18 requests, one after the other."""
    prompts = [text(f"topic{at}", 256) for at in range(6)] * 3
    pods = Driven("smg-cache-aware-1")
    assert {pods.ask(prompt) for prompt in prompts} == {0}
    pods = Driven("smg-cache-aware-4")
    assert Counter(pods.ask(prompt) for prompt in prompts[:6]) == {0: 3, 1: 3}


def test_one_runaway_worker_turns_prefixes_off_for_the_whole_fleet():
    """vllm-project/router #238: the holder is idle, but the guard asks for the fleet. The last asks
    for the endpoint."""
    load = {"inflight_requests": [90, 1, 0], "kv_cache_usage": [0.0, 0.0, 0.0]}
    assert best(CacheAware1(), tree([0, 9, 0], first=1), **load) == [2]
    assert best(CacheAware4(), tree([0, 9, 0], first=1), **load) == [1]


# Generation 4.


def test_the_gate_of_one_endpoint_is_strict_in_both_tests():
    """Above 1.5 times the mean, and by more than the margin above it."""
    assert overfull(np.array([30, 10]), balance_abs=9, balance_rel=1.5).tolist() == [False, False]
    assert overfull(np.array([31, 9]), balance_abs=10, balance_rel=1.5).tolist() == [True, False]
    assert overfull(np.array([31, 9]), balance_abs=11, balance_rel=1.5).tolist() == [False, False]


def test_generation_4_caps_the_margin_by_what_chance_explains():
    """smg 1.13.0: the same pool spills after a dozen; the new holder then takes its share."""
    pods = Driven("smg-cache-aware-4")
    hot = text("hot", 256)
    first = pods.send(hot)
    went = [pods.send(hot) for _ in range(140)]
    assert went.index(1 - first) < 12
    assert 40 < Counter(went)[1 - first] < 100


def test_generation_4_spills_past_other_full_endpoints():
    """Neither to the full holder nor to another that is as full; of the rest by expected wait."""
    spilt = best(
        CacheAware4(),
        tree([9, 0, 0, 0]),
        inflight_requests=[40, 40, 0, 1],
        kv_cache_usage=[0.0, 0.0, 0.5, 0.0],
    )
    assert spilt == [3]


def test_prompts_that_share_go_together_in_every_generation():
    """What the tree is for."""
    for name in ("1", "4"):
        pods = Driven(f"smg-cache-aware-{name}", pods=4)
        preamble = text("system", 512)
        assert len({pods.ask(preamble + text(f"q{at}", 32)) for at in range(8)}) == 1, name


def test_generation_4_discounts_a_holder_that_is_behind():
    """Prompt of 10 blocks of 64: 640 tokens behind halve the score at decay 1."""
    held = tree([9, 9])
    load = {"kv_cache_usage": [0.0, 0.5], "inflight_prefill_tokens": [100.0, 0.0]}
    assert best(CacheAware4(), held, **load) == [0]
    assert best(CacheAware4(overlap_decay=1.0), held, **load) == [1]


def test_generation_4_looks_at_eight_holders():
    """The ninth may be idle."""
    load = {"inflight_requests": [1] * 8 + [0, 0]}
    assert best(CacheAware4(), tree([9] * 9 + [0]), **load) == list(range(8))


def test_the_expected_wait_adds_queued_tokens_and_kv_pressure():
    """2,000 tokens are a second, half a cache 0.15; a silent endpoint has 1,024 for each request."""
    pool = candidates(
        inflight_requests=[5, 5, 2],
        inflight_prefill_tokens=[2_000.0, 0.0, 9.0],
        waiting_requests=[9, 1, math.nan],
        kv_cache_usage=[0.5, 0.0, math.nan],
    )
    assert expected_wait_s(pool) == pytest.approx([1.15, 0.512, 1.024])
    assert expected_wait_s(candidates(inflight_requests=[3, 1])).tolist() == [3.0, 1.0]
