"""An autoscaler: its rule, and what it does to pods under the production scheduler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sim.cluster.arrivals import Rate, at_rates
from sim.cluster.autoscaler import Autoscaler, AutoscalerSettings, ScaledBy, desired_pods
from sim.cluster.check import checker
from sim.cluster.incidents import Leave, Restart, play
from sim.cluster.settings import ClusterSettingsError
from sim.cluster.simulated_request import Fate
from tests.sim.made import arrivals, cluster, kind

BURST = (Rate(from_s=20.0, to_s=45.0, factor=8.0),)
"""Eight times as many requests for a while."""
CHECKED_EVERY = 400
"""Events: the checks look at every block of every pod."""


@pytest.fixture(scope="module")
def burst():
    """A run of that burst."""
    return Scaled()


def settings(**fields):
    """Quick, so that a run of minutes shows all of it."""
    quick = {
        "metric": ScaledBy.INFLIGHT_REQUESTS, "target": 5.0, "pods_min": 2, "pods_max": 5,
        "interval_s": 5.0, "stabilization_s": 20.0, "startup_s": 6.0, "grace_s": 60.0,
    }  # fmt: skip
    return AutoscalerSettings(**(quick | fields))


class Scaled:
    """A run under an autoscaler, and how many pods there were after each event."""

    def __init__(self, *, incidents=(), count=1_100, pods=2, rates=BURST, **fields):
        self.requests = []
        given = at_rates(arrivals(count, rate=4.0, output=(80, 120)), rates)
        self.cluster = cluster(given, ended=self.requests.append, pods=pods)
        play(incidents, self.cluster)
        self.autoscaler = Autoscaler(settings(**fields), self.cluster)
        self.counts = []
        self._check = checker(self.cluster)
        self.cluster.run(self._look)

    def _look(self):
        if len(self.counts) % CHECKED_EVERY == 0:
            self._check()
        there = sum(pod.announced for pod in self.cluster.pods)
        self.counts.append((self.cluster.loop.now, there))

    def most(self, from_s=0.0, to_s=1e9):
        return max(there for at, there in self.counts if from_s <= at <= to_s)

    def least(self, from_s=0.0, to_s=1e9):
        return min(there for at, there in self.counts if from_s <= at <= to_s)


@pytest.mark.parametrize(
    ("shown", "silent", "wanted"),
    [
        ((4, 4), 0, 2),
        ((8, 8), 0, 4),
        ((2, 2), 0, 1),
        ((4.4, 4.4), 0, 2),
        ((4.5, 4.5), 0, 3),
        ((3.6, 3.6), 0, 2),
        ((3, 3, 3), 0, 3),
        ((0, 0), 0, 0),
        # Two start: were they there, eight requests would be two a pod. Nobody is sent away for that.
        ((8,), 3, 4),
        # Still too many with the one that starts, as if it were idle.
        ((16, 16), 1, 8),
        # One restarts: it is taken to be on target, and the others are not to be fewer for it.
        ((1, 1, 1), 1, 2),
        ((), 3, 3),
    ],
)
def test_the_rule_of_kubernetes(shown, silent, wanted):
    """ceil(pods x mean / target) beyond a tenth; who shows nothing never turns the direction."""
    assert desired_pods(shown, silent=silent, target=4.0, tolerance=0.1) == wanted


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    st.integers(0, 10),
    st.floats(0.5, 50.0),
)
def test_pods_that_show_nothing_only_moderate(shown, silent, target):
    """With them there are never more asked for than the load needs, never fewer than are there."""
    wanted = desired_pods(shown, silent=silent, target=target, tolerance=0.1)
    alone = desired_pods(shown, silent=0, target=target, tolerance=0.1)
    pods = len(shown) + silent
    if alone > len(shown):
        assert pods <= wanted <= max(pods, alone)
    else:
        assert alone <= wanted <= pods


def test_pods_come_with_a_burst_and_go_after_it(burst):
    """Within its bounds, start-up and window; no request is lost, and the books are right."""
    scaled = burst
    assert {request.fate for request in scaled.requests} == {Fate.COMPLETE}
    assert scaled.most() == 5
    assert scaled.least() == 2
    # The first look after the burst has begun is at 25 s, and a pod takes 6 s to start.
    assert scaled.most(0, 25) == 2
    assert scaled.most(31, 45) == 5
    # For 20 s the highest recommendation counts.
    assert scaled.least(42, 60) == 5
    assert scaled.counts[-1][1] == 2
    joined = scaled.cluster.pods[2]
    of_it = [request for request in scaled.requests if request.pod is joined]
    assert len(of_it) > 50
    first = min(of_it, key=lambda request: request.routed_at)
    assert first.engine.cached_tokens == 0
    assert [policy.open_requests for policy in scaled.cluster.pickers.policies] == [0]


def test_the_same_run_again_is_the_same(burst):
    """Pods come and go at the same instants."""
    assert Scaled().counts == burst.counts


def test_what_it_is_told_of_waiting_requests_alone_is_less():
    """Requests that run need no pod more."""
    waiting = Scaled(metric=ScaledBy.WAITING_REQUESTS, target=8.0)
    assert waiting.most() == 2


def test_names_are_used_again():
    """Two bursts need no more names than one, and what comes back is cold."""
    bursts = [Rate(from_s=at, to_s=at + 25.0, factor=8.0) for at in (20.0, 90.0)]
    scaled = Scaled(rates=bursts, count=2_000)
    assert len(scaled.cluster.pods) == 5
    assert max(pod.restarts for pod in scaled.cluster.pods) == 1
    assert {request.fate for request in scaled.requests} == {Fate.COMPLETE}
    assert scaled.most() == 5


def test_what_is_away_for_a_restart_is_not_replaced_and_what_left_is():
    """So that there are never more than the most, nor fewer than the least for long."""
    steady = {"count": 400, "rates": (), "pods_min": 3, "pods_max": 3, "pods": 3}
    restarted = Scaled(incidents=[Restart(at_s=20, pods=(1,), grace_s=5, startup_s=30)], **steady)
    assert len(restarted.cluster.pods) == 3
    assert restarted.counts[-1][1] == 3
    left = Scaled(incidents=[Leave(at_s=20, pods=(1,))], **steady)
    assert [pod.alive for pod in left.cluster.pods] == [True, False, True, True]
    assert left.cluster.pods.count.totals().pods_max == 3


def test_who_has_not_started_is_given_up_first():
    """A burst that is over before a pod is there leaves none behind, and drains nobody."""
    short = (Rate(from_s=20.0, to_s=30.0, factor=12.0),)
    scaled = Scaled(rates=short, count=400, startup_s=100.0, stabilization_s=0.0)
    totals = scaled.cluster.pods.count.totals()
    assert totals.pods_max > 2
    assert totals.pods_max > scaled.most() == 2
    assert len(scaled.cluster.pods) == 2


def test_it_keeps_to_its_own_pods():
    """By label: who prefills is not counted, and what it starts is like the others that decode."""
    decoding = structs.replace(kind(), labels={"llm-d.ai/role": "decode"})
    prefilling = structs.replace(kind(), labels={"llm-d.ai/role": "prefill"})
    scaled = Scaled(
        pods=(prefilling, decoding), labels=dict(decoding.labels), pods_min=1, pods_max=3
    )
    roles = [pod.kind.labels["llm-d.ai/role"] for pod in scaled.cluster.pods]
    assert roles == ["prefill", "decode", "decode", "decode"]
    assert scaled.cluster.pods[0].alive


@pytest.mark.parametrize(
    ("fields", "pods", "said"),
    [
        ({}, 1, "expected 2 to 5 pods at the beginning, got 1"),
        ({}, 6, "expected 2 to 5 pods at the beginning, got 6"),
        ({"labels": {"a": "b"}}, 3, "expected 2 to 5 pods with {'a': 'b'} at the beginning, got 0"),
    ],
)
def test_it_begins_within_its_bounds(fields, pods, said):
    with pytest.raises(ClusterSettingsError) as refused:
        settings(**fields).check([kind()] * pods)
    assert said in str(refused.value)


def test_the_least_is_not_above_the_most():
    with pytest.raises(ValueError, match="expected pods_max of at least pods_min, 6, got 5"):
        settings(pods_min=6)
