"""Requests that wait at their picker before they are placed, as `core/protocol/waiting` has it."""

import pytest

from epp.core.types import Refusal, RefusalReason
from epp.plugins.strategy import config_of, producer, step
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicySource
from sim.cluster.simulated_request import Fate
from tests.sim.made import arrival, arrivals, cluster, ran

NO_ROOM = Refusal(reason=RefusalReason.SATURATED, status=429, message="there is no room")


class After:
    """Resolves each request so many seconds after it came."""

    def __init__(self, wait_s, resolution=None):
        self.wait_s = wait_s
        self.resolution = resolution
        self.loop = None
        self.begun = self.cancelled = 0

    def begin(self, request, body, resume):
        self.begun += 1
        self.loop.after(self.wait_s, resume, self.resolution or request)
        return self

    def cancel(self):
        self.cancelled += 1


def ran_with(resolver, given, **fields):
    requests = []
    one = cluster(given, resolver=resolver, ended=requests.append, **fields)
    resolver.loop = one.loop
    one.run()
    return sorted(requests, key=lambda request: request.sequence), one


def test_who_waits_is_served_later_and_all_the_same():
    """By as much as it waited, where nobody else is in the way."""
    given = list(arrivals(1))
    (plain,), _ = ran(given)
    (waited,), one = ran_with(After(2.0), given)
    assert waited.fate is plain.fate is Fate.COMPLETE
    assert waited.routed_at == plain.routed_at
    assert waited.finished_at - plain.finished_at == pytest.approx(2.0, abs=0.05)
    assert one.pickers.policies[0].open_requests == 0


def test_there_may_be_no_room():
    """Then it is refused when that is known."""
    (refused,), one = ran_with(After(1.0, NO_ROOM), list(arrivals(1)))
    assert (refused.fate, refused.status) == (Fate.REFUSED, 429)
    assert refused.ended_at > 1.0
    assert one.pickers.policies[0].open_requests == 0


def test_a_client_that_leaves_ends_the_wait():
    """Whoever resolves it afterwards is not heard."""
    resolver = After(50.0)
    requests, one = ran_with(resolver, list(arrivals(20)), abort_share=1.0, abort_after_s=1.0)
    assert {request.fate for request in requests} == {Fate.ABORTED}
    assert all(request.route is None for request in requests)
    assert resolver.cancelled == resolver.begun > 0
    assert one.pickers.policies[0].open_requests == 0


COUNTED = """
saturationDetector: {pluginRef: concurrency-detector}
featureGates: [flowControl]
flowControl: {defaultPriorityBand: {fairnessPolicyRef: token-fairness-policy}}
"""


@pytest.mark.parametrize("pickers", [1, 2, 4])
def test_pickers_share_the_room_of_pods_evenly(pickers):
    """Twenty requests run at a time, whichever pickers placed them, and none picker's wait longer
    than the others' by much.
    """
    counted = producer("concurrency-detector", maxConcurrency=10)
    text = config_of(counted, step("added-time-scorer")) + COUNTED
    policy = PolicySource(name="queue", text=text, source="made")
    given = [
        arrival(number, time_s=number * 0.01, prompt_tokens=500, output_tokens=100)
        for number in range(400)
    ]
    requests, most = [], 0
    one = cluster(
        given,
        policy=policy,
        pods=2,
        ended=requests.append,
        replicas=pickers,
        peers=PeerSettings(delay_s=0.001) if pickers > 1 else None,
    )

    def count():
        nonlocal most
        most = max(most, sum(len(pod.requests) for pod in one.pods.announced()))

    one.run(count)
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    # Each picker may send one request to each pod before it hears of the others.
    assert 20 <= most <= 20 + 2 * (pickers - 1)
    ends = [
        max(request.ended_at for request in requests if request.replica == replica)
        for replica in range(pickers)
    ]
    assert min(ends) > 0.75 * max(ends)
    assert [policy.open_requests for policy in one.pickers.policies] == [0] * pickers
