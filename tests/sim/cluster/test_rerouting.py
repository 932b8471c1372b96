"""A gateway that asks another endpoint than the one named first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.check import checker
from sim.cluster.faults import Fault, FaultKind
from sim.cluster.peering import PeerSettings
from sim.cluster.rerouting import Connections, Reschedule
from sim.cluster.settings import ClusterSettings, ClusterSettingsError
from sim.cluster.simulated_request import Failure, Fate
from tests.sim.made import arrivals, cluster, kind

HALF = Reschedule(from_s=2.0, to_s=6.0, share=0.5)


def rerouted(*reschedules, count=200, check=False, traffic=(), **fields):
    """The requests by number, and the cluster."""
    requests = []
    settings = {"fallback_endpoints_max": 1, "reschedules": reschedules} | fields
    one = cluster(arrivals(count, rate=20.0, **dict(traffic)), ended=requests.append, **settings)
    one.run(checker(one) if check else None)
    return sorted(requests, key=lambda request: request.sequence), one


def moved(requests):
    return [one for one in requests if one.passed_over]


def inflight(one):
    return [count for policy in one.pickers.policies for count in policy.inflight_counts()]


@given(st.floats(0.01, 1.0), st.integers(0, 3), st.integers(0, 1_000))
def test_every_policy_meets_the_same_failures(share, pod, request_index):
    """The draw is of the request, wherever it goes; nothing fails outside of the window."""
    windows = (Reschedule(from_s=1.0, to_s=2.0, share=share),)
    one, other = Connections(windows, seed=3), Connections(windows, seed=3)
    assert one.fails(pod, request_index, 0, 1.5) == other.fails(0, request_index, 0, 1.0)
    assert not one.fails(pod, request_index, 0, 0.999)
    assert not one.fails(pod, request_index, 0, 2.0)


def test_the_greatest_share_is_in_effect_and_pods_are_its_own():
    windows = (
        Reschedule(from_s=0.0, to_s=9.0, share=0.01),
        Reschedule(from_s=0.0, to_s=9.0, share=1.0, pods=(1,)),
    )
    connections = Connections(windows, seed=1)
    failed = {pod: sum(connections.fails(pod, at, 0, 1.0) for at in range(300)) for pod in (0, 1)}
    assert failed[1] == 300
    assert failed[0] < 30


def test_the_second_named_serves_and_the_books_are_right():
    """About half of the requests of the window; after every event leases are as many as requests."""
    requests, one = rerouted(HALF, check=True)
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    within = [request for request in requests if 2.0 < request.arrived_at < 5.9]
    assert 0.35 < len(moved(within)) / len(within) < 0.65
    assert all(1.9 < request.arrived_at < 6.0 for request in moved(requests))
    assert one.gateway.rescheduled == len(moved(requests))
    for request in requests:
        named = request.route.endpoint.endpoint_id
        served = request.pod.endpoint.endpoint_id
        assert (served != named) is bool(request.passed_over)
        if request.passed_over:
            assert served == request.route.decision.leg.fallbacks[0].endpoint_id
    assert not any(inflight(one))


def test_the_picker_counts_the_request_where_it_is_served():
    """From the head of the response on, which comes long before the answer ends."""
    requests = []
    (given_one,) = arrivals(1, output=(400, 400))
    one = cluster(
        [given_one], ended=requests.append, pods=2, fallback_endpoints_max=1,
        reschedules=(Reschedule(from_s=0.0, to_s=10.0),),
    )  # fmt: skip
    seen = []
    one.run(lambda: seen.append((one.loop.now, *inflight(one))))
    (request,) = requests
    named = one.pods.at(request.route.endpoint).number
    at_first = [counts for at, *counts in seen if request.routed_at < at < request.submitted_at]
    while_served = [
        counts for at, *counts in seen if request.submitted_at + 0.01 < at < request.finished_at
    ]
    assert at_first
    assert all(counts[named] == 1 and counts[1 - named] == 0 for counts in at_first)
    assert while_served
    assert all(counts[named] == 0 and counts[1 - named] == 1 for counts in while_served)
    assert not any(inflight(one))


def test_the_index_follows_the_request():
    """The next turn goes where the first was served, not where it was sent."""
    first, second = arrivals(2, groups=1, blocks=(40, 40), rate=0.5)
    requests = []
    one = cluster(
        [first, second], ended=requests.append, fallback_endpoints_max=1,
        reschedules=(Reschedule(from_s=0.0, to_s=first.time_s + 1.0),),
    )  # fmt: skip
    one.run()
    before, after = sorted(requests, key=lambda request: request.sequence)
    assert before.passed_over == 1
    assert after.pod is before.pod
    assert after.predicted_cached_tokens == after.engine.cached_tokens > 0


def test_without_a_second_name_nobody_serves():
    """503, and it is the gateway that says it; clients may ask again."""
    everybody = Reschedule(from_s=0.0, to_s=3.0)
    requests, one = rerouted(everybody, pods=1)
    lost = [request for request in requests if request.arrived_at < 2.9]
    assert {(request.fate, request.status, request.failure) for request in lost} == {
        (Fate.FAILED, 503, Failure.UNREACHABLE)
    }
    assert not any(inflight(one))


def test_a_pod_that_died_is_passed_over():
    """What no scenario says: the pod is gone and discovery has not told yet."""
    died = Fault(kind=FaultKind.DIE, at_s=3.0, pod=0, duration_s=0.0, factor=1.0)
    lost = {}
    for fallbacks in (0, 1):
        requests, one = rerouted(
            fallback_endpoints_max=fallbacks, faults=[died], pods=3, discovery_delay_s=2.0,
            check=True,
        )  # fmt: skip
        refused = [request for request in requests if request.status == 503]
        lost[fallbacks] = len(refused)
        assert one.gateway.rescheduled > 0 or not fallbacks
        assert not any(inflight(one))
    assert lost[1] == 0 < lost[0]


@pytest.mark.parametrize("peers", [None, PeerSettings(delay_s=0.005)])
def test_peers_are_told_where_it_is_served(peers):
    """Who hears of it knows that the pod has the prompt; who does not, knows nothing."""
    turns = list(arrivals(12, groups=1, blocks=(40, 40), rate=0.5))
    requests = []
    one = cluster(
        turns, ended=requests.append, replicas=2, peers=peers, fallback_endpoints_max=1,
        reschedules=(Reschedule(from_s=0.0, to_s=turns[0].time_s + 0.5),),
    )  # fmt: skip
    one.run()
    first, *others = sorted(requests, key=lambda request: request.sequence)
    assert first.passed_over == 1
    heard = next(request for request in others if request.replica != first.replica)
    candidates = heard.route.decision.leg.candidates
    names = [endpoint.endpoint_id for endpoint in candidates.endpoints]
    believed = candidates.matched_blocks[names.index(first.pod.endpoint.endpoint_id)]
    assert bool(believed) is (peers is not None)


def test_it_needs_pickers_that_name_several():
    with pytest.raises(ClusterSettingsError, match="expected fallback_endpoints_max") as refused:
        ClusterSettings(pods=(kind(),), reschedules=(HALF,))
    assert "reschedule at 2 s" in str(refused.value)
