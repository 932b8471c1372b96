"""A few whole sequences."""

import pytest

from tests.sim.caches.made import PROFILE, begun, ended, opened, request, served


def test_the_answer_is_kept_for_the_next_turn():
    """Prompt and answer are one sequence, which replaced the prompt alone."""
    cache = opened("mlx-memory")
    served(cache, (1, 100), (2, 50), answer=3)
    assert len(cache) == 1
    assert cache.kept_bytes == 158 * PROFILE.kv_bytes_per_token
    assert served(cache, (1, 100), (2, 50), (3, 8), (4, 50)) == 158


@pytest.mark.parametrize(("trimmable", "expected"), [("true", 100), ("false", 100)])
def test_a_common_head_serves_another_conversation(trimmable, expected):
    """By trimming; or else by the system prompt, which is then kept beside."""
    cache = opened(f"mlx-memory:trimmable={trimmable}")
    served(cache, (1, 100), (2, 50))
    assert served(cache, (1, 100), (4, 50)) == expected


def test_what_cannot_be_trimmed_serves_no_shorter_prompt():
    """A head that ends inside of a message is found by trimming alone."""
    assert [
        [served(cache, (1, 100), (2, 50)), served(cache, (1, 100), (2, 30))][1]
        for cache in (opened("mlx-memory"), opened("mlx-memory:trimmable=false"))
    ] == [129, 100]


def test_a_whole_sequence_comes_before_a_head_no_longer():
    """The prompt continues one sequence, and shares no more with a longer one."""
    cache = opened("mlx-memory")
    served(cache, (1, 100), (2, 50), answer=3)
    assert served(cache, (1, 100), (2, 50), (3, 8), (5, 20)) == 158
    assert served(cache, (1, 100), (2, 50), (3, 8), (6, 20)) == 158


def test_the_same_prompt_is_found_whole():
    """Its last token is the engine's business."""
    cache = opened("mlx-memory")
    served(cache, (1, 100))
    assert served(cache, (1, 100)) == 99
    exact = opened("mlx-memory:trimmable=false")
    served(exact, (1, 100))
    assert served(exact, (1, 100)) == 100


def test_the_first_kept_goes_first_however_often_it_was_found():
    """Ten conversations stay; looking up refreshes nothing."""
    cache = opened("mlx-memory:entries_max=3")
    one = request((1, 100), (9, 9))
    for number in (1, 2, 3):
        served(cache, (number, 100))
    assert begun(cache, one) == 100
    cache.left(one, 0.0)
    served(cache, (4, 100))
    assert [begun(cache, request((number, 100), (9, 9))) for number in (1, 2, 3, 4)] == [
        0,
        100,
        100,
        100,
    ]


def test_system_prompts_stay_longest():
    """Answers go first while they are no fewer than prompts, and those while no fewer than they."""
    cache = opened("mlx-memory:entries_max=4,trimmable=false")
    for number in range(5):
        served(cache, (1, 100), (10 + number, 20), index=number)
    assert served(cache, (1, 100), (99, 20)) == 100


def test_bytes_bound_it_too():
    """As many go as are too much."""
    cache = opened(f"mlx-memory:memory_bytes={250 * PROFILE.kv_bytes_per_token}")
    for number in (1, 2):
        served(cache, (number, 92))
    assert len(cache) == 2
    served(cache, (3, 192))
    assert len(cache) == 1
    assert cache.kept_bytes <= 250 * PROFILE.kv_bytes_per_token


def test_an_unfinished_answer_is_not_kept():
    """The prompt is."""
    cache = opened("mlx-memory")
    one = request((1, 100), answer=2)
    begun(cache, one)
    cache.computed(one, 0.0)
    cache.left(one, 0.0)
    assert cache.kept_bytes == 100 * PROFILE.kv_bytes_per_token
    other = request((5, 100))
    begun(cache, other)
    ended(cache, other)
    assert len(cache) == 2
