"""One buffer for one system prompt."""

import pytest

from sim.caches.behaviour import PCIE_5_X16_BYTES_PER_S
from tests.sim.caches.made import PROFILE, begun, ended, opened, request, served

COPY_S_PER_TOKEN = PROFILE.kv_bytes_per_token / PCIE_5_X16_BYTES_PER_S


def test_the_system_prompt_is_restored_and_nothing_else():
    """The messages behind it are computed anew each time, and the copy takes its time."""
    cache = opened("kronk-spc")
    first = request((1, 2_000), (2, 50), answer=9)
    assert begun(cache, first) == 0
    assert ended(cache, first) == pytest.approx(2 * 2_000 * COPY_S_PER_TOKEN)
    found = cache.fetch(request((1, 2_000), (2, 50), (9, 8), (3, 50)), 0, 1.0)
    assert found.tokens == 2_000
    assert found.restore_s == pytest.approx(2_000 * COPY_S_PER_TOKEN)


def test_alternating_system_prompts_never_hit():
    """There is one buffer, whoever they are of."""
    cache = opened("kronk-spc")
    assert [served(cache, (turn % 2 + 1, 500), (10 + turn, 9)) for turn in range(8)] == [0] * 8


@pytest.mark.parametrize("messages", [((1, 99), (2, 500)), ((1, 500),)])
def test_short_ones_and_lone_messages_are_no_system_prompts(messages):
    """Below 100 tokens, or with nothing behind it."""
    cache = opened("kronk-spc")
    served(cache, *messages)
    assert served(cache, *messages) == 0
