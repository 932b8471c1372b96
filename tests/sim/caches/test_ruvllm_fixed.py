"""RuvLLM's cache with its faults repaired: heads are shared, and the budget holds."""

from hypothesis import given
from hypothesis import strategies as st

from tests.sim.caches.made import PROFILE, begun, opened, request, served


def with_room(tokens):
    return opened(f"ruvllm-fixed:memory_share={tokens / PROFILE.kv_tokens},min_cache_tokens=1")


def test_a_shared_head_is_found_and_kept_once():
    """Two questions behind one system prompt: the head is one node."""
    cache = opened("ruvllm-fixed")
    assert served(cache, (1, 200), (2, 20)) == 0
    assert served(cache, (1, 200), (3, 30)) == 200
    assert cache.statistics.memory_bytes == 250 * PROFILE.kv_bytes_per_token


def test_a_part_of_a_message_is_found():
    """The same text, cut short: as far as it goes."""
    cache = opened("ruvllm-fixed")
    served(cache, (1, 200))
    assert served(cache, (1, 120)) == 120
    assert served(cache, (1, 300)) == 200
    assert served(cache, (1, 300)) == 300


def test_leaves_go_before_what_they_hang_on():
    """A shared head outlives its tails, which go by their hits, then by their age."""
    cache = with_room(200)
    for now, number in enumerate((2, 3, 4, 5, 6, 7)):
        served(cache, (1, 100), (number, 25), now=now)
    assert cache.statistics.evictions == 2
    assert [served(cache, (1, 100), (number, 25), now=9.0) for number in (7, 2)] == [125, 100]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 60)), min_size=1, max_size=4),
        max_size=40,
    ),
    st.integers(1, 200),
)
def test_the_budget_holds(prompts, tokens_max):
    """Whatever comes; and each look-up is a hit, a partial hit or a miss."""
    cache = with_room(tokens_max + 1)
    held = request((1, 30), index=99)
    begun(cache, held)
    cache.computed(held, 0.0)
    for now, messages in enumerate(prompts):
        served(cache, *messages, now=now, index=now)
        told = cache.statistics
        assert 0 <= told.memory_bytes <= (tokens_max + 1) * PROFILE.kv_bytes_per_token
        assert told.lookups == told.hits + told.partial_hits + told.misses
