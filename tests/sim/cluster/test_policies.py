"""Baselines, and what `--config` names."""

from collections import Counter

import pytest

from epp.configuration.config import ConfigError
from epp.core.knowledge.inflight import Outcome
from epp.core.types import Refusal
from sim.cluster.policies import BASELINES, PolicyNameError, policy_source
from tests.builders import endpoint, request


def opened(name, *, pods=4, seed=1):
    policy = policy_source(name).opener(0.2)(seed)
    policy.replace([endpoint(number) for number in range(pods)], 0.0)
    return policy


def names(policy, requests):
    return [policy.route(one, 0.0).endpoint.name for one in requests]


def many(count, **fields):
    return [request(request_id=str(number), **fields) for number in range(count)]


@pytest.mark.parametrize("name", [*BASELINES, "default"])
def test_every_policy_gives_back_what_it_counted(name):
    """Routed, counted, completed: nothing is left, and nobody is refused."""
    policy = opened(name)
    routes = [policy.route(one, 0.0) for one in many(40)]
    assert policy.open_requests == sum(policy.inflight_counts()) == 40
    for route in routes:
        policy.complete(route, Outcome(status=200), 1.0)
    assert policy.open_requests == 0
    assert policy.inflight_counts() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", [*BASELINES, "default"])
def test_without_a_pod_every_policy_refuses(name):
    """503, as production says it."""
    refusal = opened(name, pods=0).route(request(), 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503


def test_round_robin_takes_pods_in_turn():
    """In the order in which they were announced."""
    assert names(opened("round-robin", pods=3), many(6)) == ["pod-0", "pod-1", "pod-2"] * 2


def test_least_requests_fills_evenly():
    """No pod is two ahead of another."""
    assert set(Counter(names(opened("least-requests"), many(40))).values()) == {10}


def test_power_of_two_is_closer_to_even_than_random():
    """The well-known effect: the longest queue is much shorter."""
    most = {
        name: max(Counter(names(opened(name, pods=16), many(800))).values())
        for name in ("random", "power-of-two")
    }
    assert most["power-of-two"] <= 53 < most["random"]


def test_a_session_stays_where_it_is_when_another_pod_leaves():
    """Only the sessions of the pod that left move."""
    policy = opened("session-affinity", pods=5)
    sessions = [request(session_id=f"session-{number}") for number in range(60)]
    before = names(policy, sessions)
    policy.replace([endpoint(number) for number in range(4)], 1.0)
    after = names(policy, sessions)
    assert "pod-4" in before
    assert all(now == was for now, was in zip(after, before, strict=True) if was != "pod-4")
    assert len(set(after)) == 4


def test_the_same_seed_chooses_alike_and_another_does_not():
    """Dice come from the seed alone."""
    first, second = (names(opened("random", seed=seed), many(50)) for seed in (1, 1))
    assert first == second
    assert first != names(opened("random", seed=2), many(50))


def test_a_name_that_is_nothing_is_refused_with_what_there_is(tmp_path):
    """One sentence that lists the built-ins; a broken file names its problem."""
    with pytest.raises(PolicyNameError, match=r"neither a file nor one of default, .*sticky"):
        policy_source("no-such-thing")
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Nothing\n")
    with pytest.raises(ConfigError):
        policy_source(str(broken))
