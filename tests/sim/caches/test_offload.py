"""Memory of the host and a store of the pool behind the blocks of engines."""

import pytest
from msgspec import structs

from sim.caches.names import cache_named
from sim.caches.offload import HOST, SHARED
from sim.cluster.incidents import Restart, play
from sim.cluster.simulated_pod import PodKind
from sim.engine.engine import Engine
from tests.sim.caches.made import PROFILE, opened, request
from tests.sim.caches.test_lmcache_cpu import SMALL, replayed
from tests.sim.made import arrival, cluster

PROMPTS = [(1, 1_024), (2, 1_024), (3, 1_024), (1, 1_024)]
BLOCK_BYTES = 16 * PROFILE.kv_bytes_per_token


def test_what_the_pool_has_forgotten_is_loaded():
    """Whole blocks, but for the last token's; the pass waits for bytes over speed."""
    cache = opened("offload", settings=SMALL)
    with_tier = replayed(cache, PROMPTS)
    assert [tokens for tokens, _ in with_tier] == [0, 0, 0, 1_008]
    assert cache.hit_tokens == {HOST: 1_008}
    slower = replayed(opened("offload:bytes_per_s=6.3e9", settings=SMALL), PROMPTS)
    more_s = slower[3][1] - with_tier[3][1]
    assert more_s == pytest.approx(9 * 63 * BLOCK_BYTES / 63e9)


def test_no_memory_is_vllm():
    """The same hits and the same times."""
    assert replayed(opened("offload:memory_bytes=0", settings=SMALL), PROMPTS) == replayed(
        None, PROMPTS
    )


def test_memory_is_bounded_and_holds_again_what_the_pool_holds():
    """Room for two prompts, which are the last two: the pool has them too, and the first is lost."""
    room = 2 * 64 * BLOCK_BYTES
    cache = opened(f"offload:memory_bytes={room}", settings=SMALL)
    assert [tokens for tokens, _ in replayed(cache, PROMPTS)] == [0, 0, 0, 0]
    assert cache.tiers[HOST].blocks == 128


def test_what_the_memory_lacks_comes_from_the_store():
    """Of the first prompt half is in the memory: the head; slower, and counted by tier."""
    room = (3 * 64 - 32) * BLOCK_BYTES
    text = f"offload:memory_bytes={room},shared_bytes={10**10},shared_bytes_per_s=6.3e9"
    cache = opened(text, settings=SMALL)
    told = replayed(cache, PROMPTS[:3])
    told += replayed(cache, [(1, 1_024)])
    assert told[3][0] == 1_008
    assert cache.hit_tokens == {HOST: 512, SHARED: 496}


def test_answers_are_kept_too():
    """The next turn finds prompt and answer."""
    cache = opened("offload", settings=SMALL)
    engine = Engine(SMALL, PROFILE, cache)
    one = request((1, 320), output=65, answer=7)
    engine.submit(one, 0.0)
    while engine.step(0.0) is not None:
        pass
    engine.pool.clear()
    later = request((1, 320), (7, 65), (8, 100), index=1)
    assert cache.fetch(later, 0, 1.0).tokens == 384


def kind(text):
    usual = PodKind.of(PROFILE, cache=cache_named(text))
    return structs.replace(usual, engine=SMALL)


def prompt(index, time_s):
    return arrival(
        index, time_s=time_s, prompt_tokens=1_025, blocks=(1,), lengths=(1_025,), output_tokens=2
    )


def test_a_store_is_that_of_all_pods_and_outlives_them():
    """The other pod finds it, and so does the first one when it has begun anew."""
    text = f"offload:memory_bytes=0,shared_bytes={10**10}"
    given = [prompt(at, 10.0 * at) for at in range(3)]
    requests = []
    one = cluster(given, policy="round-robin", pods=(kind(text),) * 2, ended=requests.append)
    play([Restart(at_s=15.0, startup_s=2.0)], one)
    one.run()
    assert [request.engine.cached_tokens for request in requests] == [0, 1_024, 1_024]
    assert len({request.pod.number for request in requests[:2]}) == 2
    assert one.pods.tier_tokens() == {"device": 0, HOST: 0, SHARED: 2_048}


def test_the_memory_of_a_host_is_its_own_and_goes_with_its_process():
    """Neither the other pod nor the next process has it; the page tells of tiers."""
    given = [prompt(at, 10.0 * at) for at in range(4)]
    requests = []
    one = cluster(given, policy="round-robin", pods=(kind("offload"),) * 2, ended=requests.append)
    play([Restart(at_s=25.0, startup_s=2.0, pods=(1,))], one)
    one.run()
    assert [request.engine.cached_tokens for request in requests] == [0, 0, 1_024, 0]
    page = one.pods[0].page(one.loop.now)
    assert page.tier_hit_tokens == {"device": 1_024, HOST: 0}
    assert page.cache_hit_tokens == 1_024
    assert one.pods.tier_tokens() == {"device": 1_024, HOST: 0}


def test_pods_of_different_models_share_no_blocks():
    """The store of one is not that of the other."""
    stores = {}
    cache = cache_named("offload:shared_bytes=10000000000")
    caches = [
        cache.open_in(stores, profile, SMALL, None)
        for profile in (PROFILE, PROFILE, structs.replace(PROFILE, model="another"))
    ]
    shared = [one.tiers[SHARED] for one in caches]
    assert shared[0] is shared[1]
    assert shared[0] is not shared[2]
