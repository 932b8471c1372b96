"""RuvLLM's cache as it is written down: whole prompts, and a budget that does not hold."""

import pytest

from tests.sim.caches.made import PROFILE, begun, ended, opened, request, served


def test_a_shared_head_is_not_found():
    """The proposal's own chat example: one system prompt, another question."""
    cache = opened("ruvllm-faithful")
    assert served(cache, (1, 200), (2, 20)) == 0
    assert served(cache, (1, 200), (3, 20)) == 0
    assert cache.statistics.misses == 2


def test_a_whole_kept_prompt_is_found_in_a_longer_one():
    """What was asked before is the head of the next turn: a partial hit; again, a hit."""
    cache = opened("ruvllm-faithful")
    served(cache, (1, 200), (2, 20), answer=9)
    assert served(cache, (1, 200), (2, 20), (9, 8), (3, 20)) == 220
    assert served(cache, (1, 200), (2, 20)) == 220
    told = cache.statistics
    assert (told.lookups, told.hits, told.partial_hits, told.misses) == (3, 1, 1, 1)


def test_short_prompts_are_not_kept():
    """`min_cache_tokens` decides."""
    cache = opened("ruvllm-faithful:min_cache_tokens=50")
    served(cache, (1, 49))
    assert served(cache, (1, 49)) == 0
    served(cache, (2, 50))
    assert served(cache, (2, 50)) == 50


def budget(tokens):
    return f"ruvllm-faithful:memory_share={tokens / PROFILE.kv_tokens}"


def test_one_entry_goes_for_one_that_comes_whatever_their_sizes():
    """Ten prompts of 100 tokens, then one of 900 in a budget of 1,000: nine and it are 1,800."""
    cache = opened(budget(1_000))
    for number in range(10):
        served(cache, (number, 100), now=number)
    assert cache.statistics.evictions == 0
    served(cache, (99, 900), now=20.0)
    assert cache.statistics.evictions == 1
    assert cache.statistics.memory_bytes == 1_800 * PROFILE.kv_bytes_per_token


def test_the_fewest_hits_go_first_then_the_oldest():
    """What was hit once outlives what came later and was never hit."""
    cache = opened(budget(300))
    for now, number in enumerate((1, 2, 3)):
        served(cache, (number, 100), now=now)
    assert served(cache, (1, 100), (7, 1), now=5.0) == 100
    # That prompt of 101 tokens took the place of 2, the oldest without a hit.
    assert served(cache, (2, 100), now=6.0) == 0
    assert served(cache, (1, 100), now=7.0) == 100


def test_what_is_in_use_is_not_evicted():
    """A prompt that somebody works on stays until he has left."""
    cache = opened(budget(200))
    served(cache, (1, 100))
    user = request((1, 100), (2, 20))
    assert begun(cache, user, 1.0) == 100
    served(cache, (3, 150), now=2.0)
    assert served(cache, (1, 100), now=3.0) == 100
    ended(cache, user)


@pytest.mark.parametrize("name", ["ruvllm-faithful", "ruvllm-fixed"])
def test_a_request_that_leaves_unanswered_lets_go(name):
    """Withdrawn before its prompt is computed, it keeps nothing and holds nothing."""
    cache = opened(name)
    one = request((1, 200))
    begun(cache, one)
    cache.left(one, 1.0)
    assert served(cache, (1, 200)) == 0
    assert served(cache, (1, 200)) == 200
