"""Pods whose engines do something besides."""

import pytest
from msgspec import structs

from sim.caches.names import cache_named
from sim.cluster.check import checker
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Fate
from sim.engine.engine import Engine
from sim.engine.features import features_named
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.ranks import RankedEngine
from sim.engine.speculative_engine import SpeculativeEngine
from tests.sim.made import arrivals, cluster, ran

PROFILE = find_profile(DEFAULT_PROFILE)
EXPERTS = structs.replace(PROFILE, expert_tokens=(64, 1064), expert_s=(2e-3, 12e-3))
KINDS = {
    "usual": (PROFILE, ()),
    "whole": (PROFILE, ("whole-prompts",)),
    "speculative": (PROFILE, ("speculative:acceptance=0.7/0.4/0.2",)),
    "ranks": (PROFILE, ("ranks:count=3",)),
    "experts": (EXPERTS, ("ranks:count=3",)),
    "all": (EXPERTS, ("whole-prompts", "speculative:acceptance=0.7/0.4", "ranks:count=2")),
}


def kind(name, *, blocks_total=None, cache="vllm"):
    profile, features = KINDS[name]
    made = PodKind.of(profile, features=features_named(features), cache=cache_named(cache))
    if blocks_total is None:
        return made
    return structs.replace(made, engine=structs.replace(made.engine, blocks_total=blocks_total))


@pytest.mark.parametrize(
    "cache", ["vllm", "offload:memory_bytes=300000000,shared_bytes=1000000000"]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_pool_of_such_pods_answers_everything(name, cache):
    """Under load and short of memory, whoever leaves; the books agree after every event."""
    ends = []
    one = cluster(
        list(arrivals(80, rate=60.0)),
        pods=(kind(name, blocks_total=257, cache=cache),) * 2,
        abort_share=0.3,
        abort_after_s=0.2,
        ended=ends.append,
    )
    one.run(checker(one))
    assert len(ends) == 80
    assert {request.fate for request in ends} <= {Fate.COMPLETE, Fate.ABORTED}
    assert sum(request.fate is Fate.COMPLETE for request in ends) > 40


@pytest.mark.parametrize("name", KINDS)
def test_the_same_seed_gives_the_same_run(name):
    """Hits and times, to the digit."""
    told = []
    for _ in range(2):
        requests, _ = ran(list(arrivals(60)), pods=(kind(name),) * 2)
        told.append([(one.engine.cached_tokens, one.ended_at) for one in requests])
    assert told[0] == told[1]


def test_speculation_makes_answers_shorter_in_time_and_not_in_tokens():
    """Three of four tokens are accepted."""
    given = list(arrivals(60, rate=4.0, output=(50, 90)))
    spans = []
    for name in ("usual", "speculative"):
        requests, _ = ran(given, pods=(kind(name),) * 2)
        assert [one.engine.generated_tokens for one in requests] == [
            one.output_tokens for one in given
        ]
        spans.append(sum(one.ended_at - one.first_token_at for one in requests))
    assert spans[1] < 0.75 * spans[0]


def test_a_usual_pod_has_the_usual_engine():
    """What nothing is said of computes as before: the loop of its engine is no other."""
    _, one = ran([], pods=(kind("usual"), kind("speculative"), kind("ranks")))
    usual, speculative, ranks = (type(pod.engine) for pod in one.pods)
    assert (usual, speculative, ranks) == (Engine, SpeculativeEngine, RankedEngine)
    assert {type(rank) for rank in one.pods[2].ranks} == {Engine}


def test_a_page_tells_of_all_ranks():
    """Their blocks together, and what is looked up and found at any."""
    _, one = ran(list(arrivals(60)), pods=(kind("ranks"),))
    (pod,) = one.pods
    page = pod.page(one.loop.now)
    assert page.blocks_total == 3 * kind("usual").engine.blocks_total
    assert page.requests_total == page.ttft_count == 60
    assert 0 < page.cache_hit_tokens < page.cache_queried_tokens
    assert all(rank.pool.free_runs() for rank in pod.ranks)


def test_ranks_find_less_than_one_engine_of_the_same_pool():
    """Prompts that share a head are at whatever rank is free: more ranks, fewer hits."""
    found = []
    for name in ("usual", "ranks"):
        requests, _ = ran(list(arrivals(200, rate=40.0, output=(20, 60))), pods=(kind(name),))
        found.append(sum(one.engine.cached_tokens for one in requests))
    assert found[1] < found[0]


def test_pickers_believe_whole_prompts_to_be_computed_as_fast_as_chunks():
    """And three ranks three times as fast."""
    usual = kind("usual").prefill_tokens_per_s
    assert kind("whole").prefill_tokens_per_s == usual
    assert kind("ranks").prefill_tokens_per_s == 3 * usual
    assert kind("whole").engine.max_num_batched_tokens == PROFILE.max_model_len_tokens
