"""Pods are known by another identity with each seed, and nothing else of them changes with it."""

from msgspec import structs

from sim.cluster.simulated_pod import SimulatedPod
from tests.sim.made import arrivals, cluster, ran


def endpoints(seed):
    return [pod.endpoint for pod in cluster([], seed=seed).pods]


def test_a_pod_has_another_identity_with_each_seed():
    """As the uids of two installations; within one run it stays, whoever asks."""
    one, again, other = endpoints(1), endpoints(1), endpoints(2)
    assert one == again
    assert {each.endpoint_id for each in one}.isdisjoint(each.endpoint_id for each in other)
    assert [each.name for each in one] == [each.name for each in other]
    assert [each.address for each in one] == [each.address for each in other]


def test_where_hashes_put_requests_differs_from_seed_to_seed():
    """Else an interval over seeds would leave out the luck of a ring."""

    def placed(seed):
        given = arrivals(60, rate=5.0, groups=12)
        requests, _ = ran(given, policy="session-rendezvous", seed=seed)
        return tuple(request.pod.name for request in requests)

    assert placed(1) == placed(1)
    assert len({placed(seed) for seed in range(4)}) == 4


def test_who_hashes_nothing_decides_alike(monkeypatch):
    """Dice of a pod's scrapes are known by its name."""

    def placed():
        requests, _ = ran(arrivals(60, rate=5.0, groups=12))
        return [(request.pod.name, request.first_token_at) for request in requests]

    as_it_is = placed()
    told = SimulatedPod.endpoint.fget

    def renamed(pod):
        endpoint = told(pod)
        return structs.replace(endpoint, endpoint_id=f"another-{endpoint.endpoint_id}")

    monkeypatch.setattr(SimulatedPod, "endpoint", property(renamed))
    assert placed() == as_it_is
