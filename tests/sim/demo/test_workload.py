"""The demo's traffic: drawn from one seed, shared where it should be."""

import msgspec
import pytest

from sim.demo.workload import WorkloadSettings, conversations, requests_in

SETTINGS = WorkloadSettings()


def test_a_seed_decides_every_word():
    """Two draws of one seed are equal; another seed gives another workload."""
    one, two, other = (conversations(SETTINGS, seed) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_conversations_arrive_in_order_inside_the_window():
    """Arrivals only move on, and the last is before the end of the window."""
    workload = conversations(SETTINGS, 1)
    arrivals = [conversation.arrives_s for conversation in workload]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] < SETTINGS.arrival_window_s
    expected = SETTINGS.conversations_per_s * SETTINGS.arrival_window_s
    assert len(arrivals) == pytest.approx(expected, rel=0.5)


def test_turns_are_within_their_bounds():
    """As many turns as allowed; only the first is sent without a pause before it."""
    workload = conversations(SETTINGS, 1)
    counts = {len(conversation.turns) for conversation in workload}
    assert counts == set(range(SETTINGS.turns_min, SETTINGS.turns_max + 1))
    for conversation in workload:
        first, *others = conversation.turns
        assert first.think_s == 0
        assert all(0 < turn.think_s <= SETTINGS.think_s_max for turn in others)
        assert all(turn.answer_tokens >= 1 for turn in conversation.turns)
    assert requests_in(workload) == sum(len(conversation.turns) for conversation in workload)


def test_a_tenant_has_one_system_prompt_of_its_own():
    """Conversations of one tenant share their beginning, those of two do not."""
    workload = conversations(SETTINGS, 1)
    prompts = {}
    for conversation in workload:
        prompts.setdefault(conversation.tenant, set()).add(conversation.system)
    assert all(len(found) == 1 for found in prompts.values())
    assert len({next(iter(found)) for found in prompts.values()}) == len(prompts)
    assert len(workload) > len(prompts) > SETTINGS.tenants / 2


def test_a_longer_window_only_adds_conversations():
    """What arrives first does not depend on how long the run is."""
    longer = msgspec.structs.replace(SETTINGS, arrival_window_s=2 * SETTINGS.arrival_window_s)
    short, long = conversations(SETTINGS, 1), conversations(longer, 1)
    assert long[: len(short)] == short
    assert len(long) > len(short)
