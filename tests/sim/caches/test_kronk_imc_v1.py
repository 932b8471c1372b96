"""Conversations in slots."""

from sim.caches.names import cache_named
from tests.sim.caches.made import SETTINGS, begun, ended, opened, request, served

SYSTEM = (1, 300)


def test_all_messages_but_the_last_are_kept():
    """What the answer and the question before took is computed again in the next turn, once."""
    cache = opened("kronk-imc-v1")
    assert served(cache, SYSTEM, (2, 50), answer=3) == 0
    assert served(cache, SYSTEM, (2, 50), (3, 8), (4, 50), answer=5) == 300
    assert served(cache, SYSTEM, (2, 50), (3, 8), (4, 50), (5, 8), (6, 50)) == 358


def test_the_slot_with_the_most_messages_is_taken():
    """Two begin the prompt; the longer conversation wins, and the shorter stays."""
    cache = opened("kronk-imc-v1:slots=2")
    long, short = request(SYSTEM, (2, 50), (3, 50)), request(SYSTEM, (4, 50))
    assert [begun(cache, long), begun(cache, short)] == [0, 0]
    ended(cache, long)
    ended(cache, short)
    assert served(cache, SYSTEM, (2, 50), (9, 5)) == 350


def test_a_slot_that_is_built_is_passed_over():
    """Two with the same messages at once: each builds its own; the slots are then full."""
    cache = opened("kronk-imc-v1:slots=2")
    first, second, third = (request(SYSTEM, (2 + at, 50)) for at in range(3))
    assert [begun(cache, one) for one in (first, second, third)] == [0, 0, None]
    cache.computed(first, 1.0)
    # Its messages are there, but it generates: who has them in common waits for it.
    assert begun(cache, third) is None
    ended(cache, first)
    assert begun(cache, third) == 300


def test_a_slot_that_generates_is_passed_over_if_nobody_waits():
    """The second takes another slot, and computes what the first has."""
    for waits, expected in (("true", None), ("false", 0)):
        cache = opened(f"kronk-imc-v1:slots=2,waits={waits}")
        first, second = request(SYSTEM, (2, 50)), request(SYSTEM, (3, 50))
        begun(cache, first)
        cache.computed(first, 1.0)
        assert begun(cache, second) == expected


def test_a_common_head_is_salvaged():
    """No slot has only messages of the prompt: the rest is trimmed, and the salvage is counted."""
    cache = opened("kronk-imc-v1")
    served(cache, SYSTEM, (2, 200), (3, 50))
    assert served(cache, SYSTEM, (2, 90), (4, 50)) == 390
    assert cache.salvages == 1


def test_no_salvage_of_few_tokens_or_more_messages():
    """Below 100 tokens in common; or the slot has more messages than the prompt."""
    cache = opened("kronk-imc-v1")
    served(cache, (1, 99), (2, 200), (3, 50))
    assert served(cache, (1, 99), (4, 200), (5, 50)) == 0
    served(cache, (8, 500), (9, 50), (10, 50), (11, 50))
    assert served(cache, (8, 500), (12, 50)) == 0
    assert cache.salvages == 0


def test_an_empty_slot_comes_before_the_oldest():
    """Three conversations in two slots: the third takes that of the first."""
    cache = opened("kronk-imc-v1:slots=2")
    for now, number in enumerate((1, 2, 3)):
        served(cache, (number, 300), (50 + number, 9), now=now)
    assert cache.rebuilds == 1
    assert served(cache, (2, 300), (60, 9), now=4.0) == 300
    assert served(cache, (1, 300), (61, 9), now=5.0) == 0


def test_more_agents_than_slots_thrash():
    """Taking turns they rebuild every time; with a slot for each none but the first."""
    hits = {}
    for slots in (3, 4):
        cache = opened(f"kronk-imc-v1:slots={slots}")
        hits[slots] = [served(cache, (turn % 4, 300), (50, 9), now=turn) for turn in range(16)]
    assert hits[3] == [0] * 16
    assert hits[4] == [0] * 4 + [300] * 12


def test_who_leaves_before_the_end_of_its_prompt_leaves_an_empty_slot():
    """What was half computed is not there; the slot is free."""
    cache = opened("kronk-imc-v1:slots=1")
    served(cache, SYSTEM, (2, 50))
    gone = request(SYSTEM, (2, 50), (3, 50))
    assert begun(cache, gone) == 300
    cache.left(gone, 1.0)
    assert served(cache, SYSTEM, (2, 50)) == 0


def test_a_slot_has_its_share_of_the_cache():
    """No request may be longer than that."""
    assert cache_named("kronk-imc-v1:slots=4").request_tokens_max(SETTINGS) == 434_000 // 4
