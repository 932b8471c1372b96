"""Sessions that are restored whole or not at all."""

import pytest

from sim.caches.behaviour import PCIE_5_X16_BYTES_PER_S
from sim.caches.names import cache_named
from tests.sim.caches.made import PROFILE, SETTINGS, begun, ended, opened, request, served

COPY_S_PER_TOKEN = PROFILE.kv_bytes_per_token / PCIE_5_X16_BYTES_PER_S
SYSTEM = (1, 300)


def test_the_next_turn_is_appended():
    """The whole prompt of the last turn is restored; its answer was not saved."""
    cache = opened("kronk-imc-v2")
    first = request(SYSTEM, (2, 50), answer=3)
    assert begun(cache, first) == 0
    # The prompt, and its system prompt apart.
    assert ended(cache, first) == pytest.approx(650 * COPY_S_PER_TOKEN)
    second = request(SYSTEM, (2, 50), (3, 8), (4, 50))
    found = cache.fetch(second, 0, 1.0)
    assert found.tokens == 350
    assert found.restore_s == pytest.approx(350 * COPY_S_PER_TOKEN)
    assert ended(cache, second) == pytest.approx(408 * COPY_S_PER_TOKEN)


def test_the_same_prompt_is_exact_and_not_saved_again():
    """It keeps its session to the end, so that another such prompt finds none meanwhile."""
    cache = opened("kronk-imc-v2")
    served(cache, SYSTEM, (2, 50))
    one, other = request(SYSTEM, (2, 50)), request(SYSTEM, (2, 50))
    assert begun(cache, one) == 350
    assert cache.computed(one, 1.0) == 0.0
    assert begun(cache, other) == 300
    cache.left(one, 1.0)
    cache.left(other, 1.0)


def test_a_common_head_is_not_used_but_for_the_system_prompt():
    """An edited message: only what is saved whole is restored."""
    cache = opened("kronk-imc-v2")
    served(cache, SYSTEM, (2, 500), (3, 50))
    assert served(cache, SYSTEM, (2, 499), (3, 50)) == 300
    assert served(cache, (9, 90), (2, 500)) == 0
    assert served(cache, (9, 90), (2, 501)) == 0


def test_slots_bound_what_runs_and_sessions_what_is_kept():
    """Two run at once; of seven conversations the first is gone."""
    cache = opened("kronk-imc-v2")
    running = [request((number, 300), (50, 9)) for number in range(3)]
    assert [begun(cache, one) for one in running] == [0, 0, None]
    for one in running[:2]:
        ended(cache, one)
    assert cache_named("kronk-imc-v2").sessions == 6
    for now, number in enumerate(range(2, 7), start=1):
        served(cache, (number, 300), (50, 9), now=now)
    assert served(cache, (6, 300), (50, 9), (51, 9), now=9.0) == 309
    # Its session is gone, and so is its system prompt: there are six of those too.
    assert served(cache, (0, 300), (50, 9), (51, 9), now=9.5) == 0


def test_short_prompts_have_no_session():
    """They run in a slot, and that is all."""
    cache = opened("kronk-imc-v2")
    served(cache, (1, 99))
    assert served(cache, (1, 99)) == 0
    assert cache.rebuilds == 0


def test_who_leaves_before_the_end_of_its_prompt_changes_nothing():
    """The snapshot that it was to continue stays, and its session is free."""
    cache = opened("kronk-imc-v2:slots=1,queue_depth=1")
    served(cache, SYSTEM, (2, 50))
    gone = request(SYSTEM, (2, 50), (3, 50))
    assert begun(cache, gone) == 350
    cache.left(gone, 1.0)
    assert served(cache, SYSTEM, (2, 50), (4, 50)) == 350


def test_a_slot_has_its_share_of_the_cache():
    """No request may be longer than that."""
    assert cache_named("kronk-imc-v2:slots=2").request_tokens_max(SETTINGS) == 434_000 // 2
