"""Memory behind the block pool."""

import pytest

from sim.caches.lmcache_cpu import EvictedBlocks
from sim.engine.engine import Engine, EngineSettings
from tests.sim.caches.made import PROFILE, opened, request

SMALL = EngineSettings(blocks_total=129)
"""2,048 tokens."""


def replayed(cache, prompts):
    """The same engine for all, one after another: (cached tokens, duration of the first step)."""
    engine = Engine(SMALL, PROFILE, cache)
    told, now = [], 0.0
    for at, tokens in enumerate(prompts):
        one = request(tokens, output=1, index=at)
        engine.submit(one, now)
        steps = []
        while (step := engine.step(now)) is not None:
            engine.check()
            steps.append(step)
            now = step.ends_at
        told.append((one.cached_tokens, steps[0].duration_s))
    return told


def test_what_the_pool_has_forgotten_is_loaded():
    """Three prompts of 1,024 tokens do not fit: the first comes back, but for its last block."""
    prompts = [(1, 1_024), (2, 1_024), (3, 1_024), (1, 1_024)]
    cache = opened("lmcache-cpu:chunk_tokens=16", settings=SMALL)
    with_tier = replayed(cache, prompts)
    without = replayed(None, prompts)
    assert [tokens for tokens, _ in without] == [0, 0, 0, 0]
    assert [tokens for tokens, _ in with_tier] == [0, 0, 0, 1_008]
    load_s = 1_008 * PROFILE.kv_bytes_per_token / 63e9
    slower = opened("lmcache-cpu:chunk_tokens=16,bytes_per_s=6.3e9", settings=SMALL)
    more_s = replayed(slower, prompts)[3][1] - with_tier[3][1]
    assert more_s == pytest.approx(9 * load_s)
    assert with_tier[3][1] < without[3][1]


def test_whole_chunks_are_loaded():
    """1,008 tokens are there: three chunks of 256."""
    prompts = [(1, 1_024), (2, 1_024), (3, 1_024), (1, 1_024)]
    cache = opened("lmcache-cpu", settings=SMALL)
    assert replayed(cache, prompts)[3][0] == 768


def test_memory_is_bounded_and_the_oldest_goes():
    """Room for the last prompt alone: the first is not found any more, the second is."""
    room = 1_024 * PROFILE.kv_bytes_per_token
    prompts = [(1, 1_024), (2, 1_024), (3, 1_024), (4, 1_024), (1, 1_024), (3, 1_024)]
    cache = opened(f"lmcache-cpu:memory_bytes={room},chunk_tokens=16", settings=SMALL)
    tokens = [tokens for tokens, _ in replayed(cache, prompts)]
    assert tokens[:5] == [0, 0, 0, 0, 0]
    assert tokens[5] > 0
    assert cache.evicted.blocks <= 64


def test_stretches_of_one_key_grow_together():
    """Tail, then head: one stretch. Two that are apart: the one nearer to the head."""
    memory = EvictedBlocks(100)
    memory.add(1, 4, 8)
    memory.add(1, 0, 4)
    assert memory.match([1], [8], 0, 8) == 8
    assert memory.blocks == 8
    memory.add(2, 6, 8)
    memory.add(2, 0, 2)
    assert memory.match([2], [8], 0, 8) == 2
    assert memory.blocks == 10


def test_the_tail_of_the_oldest_goes_first():
    """A prompt that was used counts as used from its tail to its head."""
    memory = EvictedBlocks(8)
    memory.add(2, 4, 8)
    memory.add(1, 0, 4)
    assert memory.match([1, 2], [4, 8], 0, 8) == 8
    memory.add(3, 0, 2)
    assert memory.match([1, 2], [4, 8], 0, 8) == 6
