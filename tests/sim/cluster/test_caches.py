"""Pods that keep prompts in another way than vLLM's."""

import pytest
from msgspec import structs

from sim.caches.names import BEHAVIOURS, cache_named
from sim.cluster.check import checker
from sim.cluster.incidents import Restart, play
from sim.cluster.simulated_pod import PodKind
from sim.cluster.simulated_request import Failure, Fate
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from tests.sim.made import arrival, arrivals, cluster, ran


def kind(cache):
    return PodKind.of(find_profile(DEFAULT_PROFILE), cache=cache_named(cache))


def small(cache):
    """With a KV cache of 4,096 tokens."""
    usual = kind(cache)
    return structs.replace(usual, engine=structs.replace(usual.engine, blocks_total=257))


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_pool_of_such_pods_answers_everything(name):
    """Under load and short of memory, whoever leaves; the books agree after every event."""
    given = [
        arrival(
            at,
            time_s=at / 60,
            prompt_tokens=400 + at,
            output_tokens=1 + at % 24,
            blocks=(1 + at % 4, 100 + at),
            lengths=(300, 100 + at),
        )
        for at in range(80)
    ]
    ends = []
    one = cluster(
        given, pods=(small(name),) * 2, abort_share=0.3, abort_after_s=0.2, ended=ends.append
    )
    one.run(checker(one))
    assert {request.fate for request in ends} <= {Fate.COMPLETE, Fate.ABORTED}
    assert sum(request.fate is Fate.COMPLETE for request in ends) > 40
    if name != "ruvllm-faithful":
        assert any(request.engine.cached_tokens for request in ends if request.engine)


def test_the_same_seed_gives_the_same_run():
    """Hits and times, to the digit."""
    told = []
    for _ in range(2):
        requests, _ = ran(list(arrivals(60)), pods=(small("mlx-disk"), small("lmcache-cpu")))
        told.append([(one.engine.cached_tokens, one.ended_at) for one in requests])
    assert told[0] == told[1]


@pytest.mark.parametrize(("name", "cached_tokens"), [("mlx-memory", 0), ("mlx-disk", 1_024)])
def test_a_disk_outlives_the_process_of_its_pod_and_memory_does_not(name, cached_tokens):
    """The pod restarts between two prompts that begin alike."""
    given = [
        arrival(
            at, time_s=100.0 * at, prompt_tokens=tokens, blocks=(1, 2)[: at + 1], lengths=lengths
        )
        for at, (tokens, lengths) in enumerate([(1_024, (1_024,)), (1_100, (1_024, 76))])
    ]
    requests = []
    one = cluster(given, pods=(kind(name),), ended=requests.append)
    play([Restart(at_s=50.0, startup_s=10.0)], one)
    one.run()
    assert [request.fate for request in requests] == [Fate.COMPLETE] * 2
    assert requests[1].engine.cached_tokens == cached_tokens


def test_a_request_longer_than_a_slot_is_refused_as_too_long():
    """Four slots share 4,096 tokens."""
    given = [arrival(at, prompt_tokens=tokens) for at, tokens in enumerate((1_000, 1_100))]
    requests, _ = ran(given, pods=(small("kronk-imc-v1"),))
    assert [request.failure for request in requests] == [None, Failure.KV_CACHE]


def test_what_a_cache_takes_is_not_there_for_requests():
    """Half of the KV cache unless it is told otherwise, in whole blocks."""
    assert kind("vllm").engine.kv_tokens == 434_000
    assert kind("ruvllm-fixed").engine.kv_tokens == 216_992
    assert kind("ruvllm-fixed:memory_share=0.25").engine.kv_tokens == 325_488
