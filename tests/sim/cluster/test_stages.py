"""Simulated pods with roles: the scheduler chooses two of them for each request."""

import pytest
from msgspec import structs

from epp.configuration.config import DEFAULT_CONFIG
from epp.configuration.defaults import default_with_stages
from epp.core.types import Stage
from sim.cluster.links import KVTransferSettings
from sim.cluster.policies import PolicySource, SchedulerPolicy, policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_request import Fate
from sim.engine.links import LINKS
from tests.core.decision.staged import ROLE
from tests.core.journal.test_staged_reenactment import ALWAYS
from tests.sim.made import arrival, arrivals, cluster, kind

ROLES = ("prefill", "decode", "decode")
TRANSFERS = KVTransferSettings(link=LINKS["roce200"])
BY_ROLE = default_with_stages({Stage.PREFILL}).text
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


def served_by_role(given_all, roles, *, text=ALWAYS, open_policy=None, **more):
    """Serve requests by pods with roles and a network; return them in order of arrival."""
    ended = []
    source = PolicySource(name="staged", text=text, source="staged")
    cluster(
        given_all,
        policy=source,
        pods=tuple(kind().with_role(role) for role in roles),
        kv_transfer=KVTransferSettings(link=LINKS["roce200"]),
        ended=ended.append,
        open_policy=open_policy and open_policy(source),
        **more,
    ).run()
    return sorted(ended, key=lambda request: request.sequence)


def test_the_scheduler_chooses_the_prefill_pod_of_a_handover():
    requests = served_by_role(arrivals(20), ("prefill", "prefill", "decode"))
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    for request in requests:
        assert request.handover.pod.endpoint == request.route.decision.prefiller
        assert request.pod.endpoint == request.route.endpoint


def test_the_picker_sees_the_headers_when_the_decode_engine_has_the_request():
    """The prefill leg has ended then, and the transfer has not."""
    times = {}

    class Timing(SchedulerPolicy):
        def response_started(self, route, now):
            super().response_started(route, now)
            times[route.lease.request.request_id] = now
            assert [one.slot for one in route.lease.earlier] == [-1]

    def open_policy(source):
        opened = cluster([], policy=source).settings.opener(source)
        return lambda seed: Timing(opened(seed).settings, seed=seed)

    requests = served_by_role(arrivals(20), ROLES, open_policy=open_policy)
    for request in requests:
        seen_s = times[str(request.arrival.index)]
        assert seen_s == pytest.approx(request.submitted_at + 0.0005)
        assert seen_s > request.handover.prefilled_at
        assert seen_s < request.first_token_at
    assert len(times) == 20


@pytest.mark.parametrize(
    ("name", "roles", "kv_transfer", "chosen"),
    [
        ("default", ROLES, TRANSFERS, BY_ROLE),
        ("default", ROLES, None, DEFAULT_CONFIG),
        ("default", ("decode", "decode"), TRANSFERS, DEFAULT_CONFIG),
        ("homing", ROLES, TRANSFERS, DEFAULT_CONFIG),
    ],
)
def test_the_built_in_default_is_that_of_the_product(name, roles, kv_transfer, chosen):
    """Only pods that prefill and do not decode change the default; a named strategy never changes."""
    settings = ClusterSettings(
        pods=tuple(kind().with_role(role) for role in roles), kv_transfer=kv_transfer
    )
    policy = settings.policy_of(policy_source(name))
    assert (policy.name, policy.text) == (name, chosen)
    opened = settings.opener(policy_source(name))(1).settings
    assert (opened.stages.prefill is None) == (chosen == DEFAULT_CONFIG)


def test_the_default_by_role_prefills_long_prompts_elsewhere_and_short_ones_not():
    busy = [arrival(at, output_tokens=400, prompt_tokens=128) for at in range(40)]
    late = [
        arrival(40 + at, time_s=2.0 + at, prompt_tokens=tokens)
        for at, tokens in enumerate((8_000, 64))
    ]
    requests = served_by_role(
        [*busy, *late], ("prefill", "decode"), text=default_with_stages({Stage.PREFILL}).text
    )
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    by_index = {request.arrival.index: request for request in requests}
    assert by_index[40].handover is not None
    assert by_index[41].handover is None
