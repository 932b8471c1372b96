"""Configurations that others publish, by their names."""

import pytest

from epp.core.decision.scheduler import Decision
from sim.cluster.built_in import configurations
from sim.cluster.policies import built_in, policy_source
from tests.sim.made import arrival, arrivals, ran


@pytest.mark.parametrize("name", built_in())
def test_every_built_in_serves(name):
    """By its name, to the end; each with a text has the hash of it."""
    requests, cluster = ran(arrivals(40), policy=name)
    assert len(requests) == 40
    assert not cluster.requests
    assert (policy_source(name).hash is None) == (name not in configurations())


def test_llm_d_weighs_three_two_two():
    """And nothing else."""
    requests, _ = ran(arrivals(3), policy="llm-d-3-2-2")
    decision = requests[0].route.decision
    assert isinstance(decision, Decision)
    assert decision.scorers == (
        "prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer",
    )  # fmt: skip
    assert decision.scored.parts.max(axis=1).tolist() == [0, 2, 2]


def prompts(count, *, tokens, at_s=0.0):
    """One text for all, as long as it is told, sent one after another."""
    blocks = tuple(range(1, tokens // 64 + 1))
    return [
        arrival(
            at, time_s=at_s + 0.001 * at, prompt_tokens=tokens, output_tokens=200,
            blocks=blocks, block_tokens=64,
        )
        for at in range(count)
    ]  # fmt: skip


def test_who_holds_the_prompt_keeps_it_until_saturated():
    """All go where the first went; once 18 s of uncached prompts wait there, elsewhere too."""
    requests, _ = ran(prompts(30, tokens=6_400), policy="sticky-until-saturated", pods=4)
    assert len({one.pod.number for one in requests}) == 1
    heavy = []
    for at in range(24):
        # Nine tenths are shared, so that each adds 20,000 tokens to compute.
        shared = tuple(range(1, 2_001))
        own = tuple(range(10_000 * (at + 1), 10_000 * (at + 1) + 310))
        heavy.append(
            arrival(
                at, time_s=0.001 * at, prompt_tokens=64 * 2_310, output_tokens=2,
                blocks=shared + own, block_tokens=64,
            )
        )  # fmt: skip
    requests, _ = ran(heavy, policy="sticky-until-saturated", pods=2)
    (first, *_), pods = requests, [one.pod.number for one in requests]
    assert pods[1:8].count(first.pod.number) == 7
    assert len(set(pods)) == 2
