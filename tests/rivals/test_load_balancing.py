"""Load alone: by hand, and over many requests."""

from collections import Counter
from random import Random

import numpy as np

from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from epp.core.types import EndpointMetrics
from homing_rivals.load_balancing import DataParallelLoad, PowerOfTwo, RandomTie
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import scheduler_of

PODS = 4


def pool_of(name, pods=PODS, seed=1):
    scheduler = scheduler_of(name, seed)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(pods)]), 0.0)
    return scheduler


def sent(scheduler, count, *, now=0.0):
    """Where `count` requests go that do not end."""
    decisions = [scheduler.schedule(request(request_id=f"{n}"), now) for n in range(count)]
    return [decision.endpoint.name for decision in decisions]


def test_round_robin_goes_round():
    """Each once, then again in the same order."""
    went = sent(pool_of("round-robin-live"), 3 * PODS)
    assert went == went[:PODS] * 3
    assert len(set(went[:PODS])) == PODS


def test_random_reaches_everybody_by_its_dice():
    """Another seed, other draws."""
    assert len(set(sent(pool_of("random-live"), 200))) == PODS
    assert sent(pool_of("random-live"), 50) != sent(pool_of("random-live", seed=2), 50)


def test_least_requests_fills_up_whoever_got_free():
    """All are even while nothing ends; what ends makes room for the next."""
    scheduler = pool_of("least-requests-live")
    leases = [scheduler.schedule(request(request_id=f"{n}"), 0.0).lease for n in range(40)]
    assert set(Counter(lease.slot for lease in leases).values()) == {10}
    freed = leases[7]
    slot = freed.slot
    scheduler.take(RequestEnded(freed, Outcome(status=200)), 0.0)
    assert scheduler.schedule(request(), 0.0).lease.slot == slot


def test_two_choices_stay_far_closer_together_than_chance():
    """ln ln n against ln n / ln ln n: the reason for the rule."""

    def most(name):
        return max(Counter(sent(pool_of(name, pods=40), 400)).values())

    assert most("power-of-two-live") < most("random-live")


def test_two_choices_compare_two_different_ones():
    """Of a pair the better, whichever was drawn first; alone there is no choice."""
    picker, random = PowerOfTwo(), Random(1)
    pair = np.array([0.2, 0.9])
    picks = [picker.pick(pair, candidates(2), random, 0).tolist() for _ in range(20)]
    assert picks == [[1]] * 20
    assert picker.pick(np.array([0.0]), candidates(1), random, 0).tolist() == [0]
    for seed in range(10):
        first = Random(seed).sample(range(5), 2)[0]
        assert picker.pick(np.ones(5), candidates(5), Random(seed), 0).item() == first
    level = [picker.pick(np.ones(2), candidates(2), random, 0).item() for _ in range(50)]
    assert set(level) == {0, 1}


def test_ties_are_drawn_and_nothing_else():
    """Never the lesser one."""
    picker, random = RandomTie(), Random(1)
    scores = np.array([0.5, 1.0, 1.0, 0.0])
    picks = {picker.pick(scores, candidates(4), random, 0).item() for _ in range(60)}
    assert picks == {1, 2}


def test_vllm_counts_a_waiting_request_four_times():
    """One waiting weighs more than three that run and as much as four."""

    def best(**columns):
        scores = DataParallelLoad().score(request(), candidates(**columns))
        return np.flatnonzero(scores == 1.0).tolist()

    assert best(waiting_requests=[1, 0], running_requests=[0, 3]) == [1]
    assert best(waiting_requests=[1, 0], running_requests=[0, 4]) == [0, 1]
    assert best(waiting_requests=[1, 0], running_requests=[0, 5]) == [0]
    unknown = candidates(waiting_requests=[np.nan, 0, 2], running_requests=[0, 0, 0])
    assert np.isnan(DataParallelLoad().score(request(), unknown)).tolist() == [True, False, False]


def test_vllm_spreads_a_burst_between_two_reports():
    """Each of them counts as waiting at once; without that all would go to the emptiest."""
    scheduler = pool_of("vllm-data-parallel", pods=2)
    for slot, running in ((0, 0.0), (1, 8.0)):
        loaded = EndpointMetrics(waiting_requests=0.0, running_requests=running, kv_cache_usage=0.1)
        scheduler.take(PageScraped(slot, loaded), 0.0)
    went = Counter(sent(scheduler, 8, now=0.05))
    assert went == {"pod-0": 5, "pod-1": 3}
