"""What inspection finds: the published numbers of a published trace, and small cases by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.traces.arrival import Arrival
from sim.traces.caches import LruCache
from sim.traces.formats import open_trace
from sim.traces.inspection import Pool, inspect
from sim.traces.standard import STANDARD
from sim.traces.workloads import arrivals

PROMPTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=40)
"""A few blocks each, of a few texts."""


def pool(pods=8, kv_tokens=840 * 512):
    return Pool(pods=pods, profile=find_profile(DEFAULT_PROFILE), kv_tokens=kv_tokens)


def asks(*prompts, gap_s=1.0):
    return [
        Arrival(
            index=index,
            time_s=index * gap_s,
            prompt_tokens=64 * len(blocks),
            output_tokens=10,
            blocks=tuple(blocks),
            block_tokens=64,
        )
        for index, blocks in enumerate(prompts)
    ]


def test_the_mooncake_conversation_trace_has_its_published_numbers(shared_data):
    """Lengths, bursts and hit ceilings as the reference computed them on its own."""
    found = inspect(open_trace(shared_data / "traces" / "mooncake_conversation.jsonl"), pool())
    assert found.requests == 12_031
    assert round(found.duration_s) == 3537
    assert found.gap_cv == pytest.approx(3.03, abs=0.01)
    prompt, answer = found.prompt_tokens, found.output_tokens
    assert [round(prompt.mean), prompt.p50, prompt.p90, prompt.max] == [
        12_035,
        6909,
        27_367,
        126_195,
    ]
    assert prompt.p99 == pytest.approx(85_400, abs=1)
    assert [round(answer.mean), answer.p50, answer.p90, answer.max] == [343, 350, 597, 2000]
    assert found.prompt_tokens_total == pytest.approx(144.8e6, rel=1e-3)
    assert found.reuse.distinct_first == 1
    ceilings = found.ceilings
    assert ceilings.one_cache == pytest.approx(0.374, abs=0.001)
    assert 0.130 < ceilings.per_pod.random < 0.140
    assert ceilings.per_pod.round_robin == pytest.approx(0.139, abs=0.0005)
    assert ceilings.per_pod.affinity == pytest.approx(0.374, abs=0.002)
    assert ceilings.affinity_load_max_over_mean == pytest.approx(1.05, abs=0.03)
    at_capacity = ceilings.per_pod_at_capacity
    assert at_capacity.random == pytest.approx(0.056, abs=0.004)
    assert at_capacity.round_robin == pytest.approx(0.059, abs=0.0005)
    assert at_capacity.affinity == pytest.approx(0.151, abs=0.007)
    assert found.place.regime == "exceeds-the-pool"


def test_the_azure_code_trace_has_its_published_numbers(shared_data):
    """Bursts far from Poisson, and nothing known to be shared."""
    found = inspect(open_trace(shared_data / "traces" / "azure_2023_code.csv"), pool())
    assert found.requests == 8819
    assert found.gap_cv == pytest.approx(13.2, abs=0.1)
    assert [round(found.prompt_tokens.mean), found.prompt_tokens.p50] == [2048, 1469]
    assert [round(found.output_tokens.mean), found.output_tokens.p99] == [28, 252]
    assert found.ceilings.one_cache == 0
    assert found.place.regime == "no-sharing"


def test_a_trace_by_hand():
    """Three prompts of two blocks: the second repeats one, the third both."""
    found = inspect(asks([1, 2], [1, 3], [1, 2], gap_s=10.0), pool(pods=1))
    assert found.ceilings.one_cache == pytest.approx(3 / 6)
    assert found.ceilings.per_pod.random == found.ceilings.one_cache
    assert found.reuse.references == 6
    assert found.reuse.distinct == 3
    assert found.reuse.used_once == pytest.approx(1 / 3)
    assert found.reuse.live_tokens_max == 2 * 64
    assert found.reuse.gap_s.p50 == 10
    assert found.rate_per_s == pytest.approx(0.15)


def test_an_answer_that_a_later_prompt_contains_can_be_hit():
    """The first turn leaves its prompt and its answer behind."""
    turns = [
        Arrival(
            index=0,
            time_s=0.0,
            prompt_tokens=100,
            output_tokens=50,
            blocks=(1,),
            lengths=(100,),
            answer=2,
        ),
        Arrival(
            index=1,
            time_s=1.0,
            prompt_tokens=170,
            output_tokens=5,
            blocks=(1, 2, 3),
            lengths=(100, 50, 20),
            after=0,
        ),
    ]
    found = inspect(turns, pool(pods=1))
    assert found.ceilings.one_cache == pytest.approx(150 / 270)
    assert found.ceilings.per_pod_at_capacity.affinity == pytest.approx(150 / 270)
    assert found.waiting_for_answers == 1


@settings(max_examples=40)
@given(prompts=PROMPTS, pods=st.integers(1, 5), blocks=st.integers(1, 20))
def test_no_ceiling_is_above_a_higher_one(prompts, pods, blocks):
    """Room for all hits no less than some room, one cache no less than many."""
    found = inspect(asks(*prompts), pool(pods=pods, kv_tokens=64 * blocks)).ceilings
    for name in ("random", "round_robin", "affinity"):
        endless = getattr(found.per_pod, name)
        assert getattr(found.per_pod_at_capacity, name) <= endless <= found.one_cache
    assert found.one_cache_at_capacity <= found.one_cache


@pytest.mark.parametrize(
    ("kv_tokens", "regime"),
    [(10_000_000, "fits-a-pod"), (400_000, "fits-the-pool"), (20_000, "exceeds-the-pool")],
)
def test_the_regime_follows_from_working_set_and_cache(kv_tokens, regime):
    """150 system prompts of 6,000 tokens and their questions."""
    trace = arrivals(STANDARD["b2b"], seed=1, requests_max=1500)
    found = inspect(trace, pool(kv_tokens=kv_tokens))
    assert found.place.regime == regime
    assert len(found.place.sentences) >= 2


def conclusions(found):
    """What is said of the hit ratios, each with whether the numbers are so."""
    best, endless = found.ceilings.one_cache, found.ceilings.per_pod.affinity
    at_capacity = found.ceilings.per_pod_at_capacity
    gain, room = at_capacity.affinity - at_capacity.random, endless - at_capacity.affinity
    claims = {
        "share almost nothing": best < 0.05,
        "does not say what prompts share": not found.reuse.references,
        "any routing comes near": best - min(at_capacity.affinity, at_capacity.random) < 0.05,
        "pays": gain >= 0.05,
        "larger caches": room >= 0.05,
        "cache size decides": gain < 0.05 <= room,
        "less than random routing": gain <= -0.05,
        "gains little": abs(gain) < 0.05,
    }
    return {claim: so for claim, so in claims.items() if claim in found.place.sentences[0]}


@settings(max_examples=60)
@given(prompts=PROMPTS, pods=st.integers(1, 5), blocks=st.integers(1, 20))
def test_what_is_said_of_hits_follows_from_their_numbers(prompts, pods, blocks):
    """Always something, and never against a number beside it."""
    said = conclusions(inspect(asks(*prompts), pool(pods=pods, kv_tokens=64 * blocks)))
    assert said
    assert all(said.values())


@pytest.mark.parametrize("kind", sorted(STANDARD))
@pytest.mark.parametrize("pods", [1, 4])
def test_what_is_said_of_a_standard_workload_follows_from_its_numbers(kind, pods):
    """Also where the working set alone leads one to expect the opposite."""
    found = inspect(arrivals(STANDARD[kind], seed=1, requests_max=300), pool(pods=pods))
    said = conclusions(found)
    assert said
    assert all(said.values())


def test_a_working_set_that_fits_a_pod_is_not_all_that_decides():
    """Adapters come back too seldom for every pod to have met them."""
    found = inspect(arrivals(STANDARD["lora-mix"], seed=1, requests_max=1000), pool())
    assert found.place.regime == "fits-a-pod"
    assert "prefix routing still pays" in found.place.sentences[0]


def test_a_working_set_just_above_the_pool_still_rewards_affinity():
    """The cliff is not at its edge."""
    found = inspect(arrivals(STANDARD["b2b"], seed=1, requests_max=2000), pool(pods=4))
    assert found.place.regime == "exceeds-the-pool"
    assert "(1.05 times): prefix routing pays" in found.place.sentences[0]


def test_a_trace_without_blocks_is_not_said_to_share_nothing():
    """Nobody knows."""
    lengths = [structs.replace(one, blocks=(), block_tokens=0) for one in asks([1], [1])]
    assert "does not say what prompts share" in inspect(lengths, pool()).place.sentences[0]


def test_a_load_that_cannot_be_told_is_not_called_saturation():
    """At one instant there is no rate, and who waits for answers sends no faster than they come."""
    instant = asks([1], [1], gap_s=0.0)
    assert "at one instant" in inspect(instant, pool()).place.sentences[-1]
    waiting = [structs.replace(one, after=one.index - 1 if one.index else None) for one in instant]
    closed = [*waiting, structs.replace(waiting[-1], index=2, after=1, time_s=1e-6)]
    assert "wait for an answer" in inspect(closed, pool()).place.sentences[-1]


def test_the_control_is_told_to_be_routed_by_load():
    """No prefix policy can gain on it."""
    found = inspect(arrivals(STANDARD["zero-reuse"], seed=1, requests_max=500), pool())
    assert found.ceilings.one_cache == 0
    assert "route by load" in found.place.sentences[0]


def test_an_empty_trace_is_refused():
    """There is nothing to say of it."""
    with pytest.raises(ValueError, match="The trace has no requests"):
        inspect([], pool())


def test_a_single_request_has_no_rate_and_no_bursts():
    """No division by nothing."""
    found = inspect(asks([1]), pool())
    assert found.rate_per_s == math.inf
    assert found.gap_cv == 0


def test_the_tail_of_a_prompt_is_evicted_before_its_head():
    """And the least recently used prompt before the others."""
    cache = LruCache(30)
    cache.insert([1, 2, 3], [10, 10, 10])
    cache.insert([1, 4], [10, 10])
    assert cache.match([1, 2, 3], [10, 10, 10]) == 20
    assert cache.match([1, 4], [10, 10]) == 20


def test_parts_of_one_id_share_the_shorter_one():
    """A longer one is held from then on."""
    cache = LruCache(100)
    cache.insert([1], [10])
    assert cache.match([1, 2], [30, 5]) == 10
    cache.insert([1], [30])
    assert cache.match([1, 2], [20, 5]) == 20
