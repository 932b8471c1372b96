"""Faults from the seed, and what must hold whatever goes wrong."""

from itertools import islice
from random import Random

import pytest

from sim.cluster.check import checker
from sim.cluster.faults import FaultKind, draw_faults
from tests.sim.made import arrivals, cluster, kind

SEEDS = 100
REQUESTS = 60
"""Of 4 pods, all within a simulated minute."""


def test_faults_come_from_the_seed_alone():
    """The same seed draws the same, another does not; all kinds occur, in order of time."""
    first, again, other = (
        list(islice(draw_faults(seed, mean_gap_s=5.0), 200)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert {fault.kind for fault in first} == set(FaultKind)
    assert first == sorted(first, key=lambda fault: fault.at_s)
    assert 4.0 < first[-1].at_s / 200 < 6.0


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_the_invariants_hold_after_every_event_under_faults(first):
    """Small caches that preempt, impatient clients, blind replicas, dying and lagging pods."""
    for seed in range(first, first + 10):
        random = Random(f"{seed}:swarm")
        ended = []
        one = cluster(
            arrivals(
                REQUESTS, rate=random.uniform(5, 40), groups=random.choice((2, 8, 60)), seed=seed
            ),
            policy=random.choice(("default", "default", "round-robin", "session-affinity")),
            pods=tuple(kind(blocks_total=random.choice((90, 200, 2_000))) for _ in range(4)),
            seed=seed,
            replicas=random.choice((1, 1, 3)),
            abort_share=random.choice((0.0, 0.3)),
            abort_after_s=0.3,
            discovery_delay_s=random.choice((0.0, 1.0)),
            response_chunks=random.random() < 0.5,
            faults=draw_faults(seed, mean_gap_s=random.uniform(0.5, 5.0)),
            ended=ended.append,
        )
        one.run(checker(one))
        assert sorted(request.sequence for request in ended) == list(range(REQUESTS)), seed
        assert one.loop.now < 60, seed
        assert [policy.open_requests for policy in one.pickers.policies] == [0] * len(
            one.pickers.policies
        ), seed


def test_a_lost_request_is_found():
    """The checks can fail: take one away behind the cluster's back."""
    one = cluster(arrivals(40), pods=1)
    check = checker(one)

    def lose():
        if one.loop.now > 0.5 and one.clients.requests:
            one.clients.requests.popitem()
        check()

    with pytest.raises(AssertionError, match="arrived"):
        one.run(lose)
