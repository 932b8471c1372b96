"""Simulated pods with roles: the scheduler chooses two of them for each request."""

from msgspec import structs

from sim.cluster.policies import PolicySource, SchedulerPolicy
from sim.cluster.simulated_request import Fate
from tests.core.decision.staged import ROLE
from tests.core.journal.test_staged_reenactment import ALWAYS
from tests.sim.made import arrivals, cluster, kind

ROLES = ("prefill", "decode", "decode")
SOURCE = PolicySource(name="staged", text=ALWAYS, source="staged")


def pods(roles=ROLES):
    return tuple(structs.replace(kind(), labels={ROLE: role}) for role in roles)


class Noting(SchedulerPolicy):
    """A policy that notes the open leases of prefill endpoints after each response start."""

    def __init__(self, settings, *, seed):
        super().__init__(settings, seed=seed)
        self.after_start = []

    def response_started(self, route, now):
        super().response_started(route, now)
        self.after_start.append([one.slot for one in route.lease.earlier])


def test_prefill_endpoints_count_a_request_until_its_first_token():
    """The picker hears of the response headers with the first token; nothing stays in flight."""
    policies, ended = [], []

    def open_policy(seed):
        opened = cluster([], policy=SOURCE, pods=pods()).settings.opener(SOURCE)(seed)
        policies.append(Noting(opened.settings, seed=seed))
        return policies[-1]

    cluster(
        arrivals(40), policy=SOURCE, pods=pods(), open_policy=open_policy, ended=ended.append
    ).run()
    (policy,) = policies
    assert {request.fate for request in ended} == {Fate.COMPLETE}
    assert policy.after_start == [[-1]] * 40
    assert policy.inflight_counts() == [0, 0, 0]
    routes = {request.route.decision.account.route.value for request in ended}
    assert routes == {"prefill-decode"}


def test_without_a_prefill_pod_requests_are_refused():
    ended = []
    cluster(arrivals(3), policy=SOURCE, pods=pods(("decode", "decode")), ended=ended.append).run()
    assert {request.fate for request in ended} == {Fate.REFUSED}
    assert {request.refusal.stage.value for request in ended} == {"prefill"}
