"""Faults from the seed, and what must hold whatever goes wrong."""

from itertools import islice
from random import Random

import pytest

from sim.cluster.check import checker
from sim.cluster.faults import Fault, FaultKind, draw_faults
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


def overlapping(fault_kind, shown):
    """Return what `shown` says of a pod over time, with a fault from 1 to 3 s and one from 2 to 5 s."""
    faults = [
        Fault(kind=fault_kind, at_s=at_s, pod=0, duration_s=duration_s, factor=factor)
        for at_s, duration_s, factor in ((1.0, 2.0, 4.0), (2.0, 3.0, 2.0))
    ]
    one, seen = cluster(arrivals(120, rate=20.0), pods=1, faults=faults), []
    one.run(lambda: seen.append((one.loop.now, shown(one.pods[0], one.loop.now))))
    return seen


def test_the_end_of_a_lag_does_not_end_a_later_one():
    """The pod is slow until the end of the later one."""
    for at_s, slowness in overlapping(FaultKind.LAG, lambda pod, _: pod.engine.slowness):
        expected = 1.0 if at_s < 1 or at_s > 5 else 4.0 if at_s < 2 else 2.0
        assert slowness == expected or at_s in {1.0, 2.0, 5.0}, at_s


def test_the_end_of_a_stale_page_does_not_end_a_later_one():
    """The page shows the state at the beginning of the later one until that ends."""
    seen = overlapping(FaultKind.STALE, lambda pod, now: pod.page(now).requests_total)
    assert len({total for at_s, total in seen if 2 < at_s < 5}) == 1
    assert seen[-1][1] == 120


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
