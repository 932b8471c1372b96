"""What happens at told instants, to pods and to pickers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from sim.cluster.autoscaler import Autoscaler, AutoscalerSettings, ScaledBy
from sim.cluster.check import checker
from sim.cluster.incidents import (
    Configure,
    Drain,
    Freeze,
    Join,
    Leave,
    Restart,
    Slow,
    SlowLink,
    check_incidents,
    play,
)
from sim.cluster.links import KVTransferSettings
from sim.cluster.policies import policy_source
from sim.cluster.prefill_rules import DECODE, PREFILL, RoundRobinPrefill
from sim.cluster.rerouting import Reschedule
from sim.cluster.settings import Absence, ClientSettings, ClusterSettingsError
from sim.cluster.simulated_request import Fate
from sim.engine.links import LINKS
from tests.sim.made import arrivals, cluster, kind

PODS = 3
ROLES = (
    *(kind().with_role(PREFILL),) * 2,
    kind().with_role(DECODE),
)
SPAN_S = 12.0
"""How long 120 requests arrive, about."""
INSTANTS = st.floats(0.0, SPAN_S)
NUMBERS = st.sets(st.integers(0, PODS - 1), max_size=PODS).map(lambda few: tuple(sorted(few)))


def windows(kind_of, **fields):
    return st.builds(
        lambda from_s, lasts_s, pods: kind_of(
            from_s=from_s, to_s=from_s + lasts_s, pods=pods, **fields
        ),
        INSTANTS,
        st.floats(0.1, 5.0),
        NUMBERS,
    )


INCIDENTS = st.lists(
    st.one_of(
        st.builds(
            Join,
            at_s=INSTANTS,
            kinds=st.just((kind(),)),
            startup_s=st.floats(0.0, 5.0),
        ),
        st.builds(Leave, at_s=INSTANTS, pods=NUMBERS),
        st.builds(Drain, at_s=INSTANTS, pods=NUMBERS, grace_s=st.floats(0.0, 5.0)),
        st.builds(
            Restart,
            at_s=INSTANTS,
            pods=NUMBERS,
            grace_s=st.floats(0.0, 5.0),
            startup_s=st.floats(0.0, 5.0),
            stagger_s=st.floats(0.0, 3.0),
        ),
        windows(Slow, factor=3.0),
        windows(Freeze),
        st.builds(Configure, at_s=INSTANTS, policy=st.just(policy_source("llm-d-3-2-2"))),
    ),
    max_size=6,
)


PICKERS = (
    {},
    {"absences": (Absence(0, 4.0, 6.0),)},
    {"replicas": 2, "absences": (Absence(1, 0.0, 2.0), Absence(0, 1.0, 3.0))},
    {"fallback_endpoints_max": 2, "reschedules": (Reschedule(from_s=1.0, to_s=9.0, share=0.5),)},
)
SCALED = AutoscalerSettings(
    metric=ScaledBy.INFLIGHT_REQUESTS, target=1.0, pods_min=2, pods_max=6, interval_s=1.0,
    stabilization_s=2.0, startup_s=1.0, grace_s=3.0,
)  # fmt: skip


def played(incidents, *, count=120, rate=10.0, check=False, autoscaler=None, **fields):
    """The requests by number, and the cluster."""
    requests = []
    one = cluster(
        arrivals(count, rate=rate, **fields.pop("traffic", {})), ended=requests.append,
        **({"pods": PODS} | fields),
    )  # fmt: skip
    play(incidents, one)
    if autoscaler is not None:
        Autoscaler(autoscaler, one)
    one.run(checker(one) if check else None)
    return sorted(requests, key=lambda request: request.sequence), one


@settings(max_examples=25, deadline=None)
@given(
    INCIDENTS,
    st.sampled_from((ClientSettings(), ClientSettings(retries=2, pause_s=0.1, timeout_s=5.0))),
    st.sampled_from(PICKERS),
    st.sampled_from((None, SCALED)),
)
def test_whatever_happens_no_request_is_lost_and_no_lease_stays(
    incidents, clients, pickers, autoscaler
):
    """After every event the invariants hold; each request ends in one way."""
    requests, one = played(
        incidents, count=80, check=True, clients=clients, autoscaler=autoscaler, **pickers
    )
    assert [request.sequence for request in requests] == list(range(80))
    assert {policy.open_requests for policy in one.pickers.policies} == {0}
    assert one.pods.count.pods >= sum(pod.alive for pod in one.pods)


@settings(max_examples=25, deadline=None)
@given(INCIDENTS.map(lambda some: [one for one in some if not isinstance(one, Join)]))
def test_an_autoscaler_never_has_more_pods_than_it_may(incidents):
    """Whatever dies, restarts or is drained meanwhile; and it ends with as many as it wants."""
    most = []
    one = cluster(arrivals(120, rate=10.0), pods=PODS)
    play(incidents, one)
    autoscaler = Autoscaler(SCALED, one)
    one.run(lambda: most.append(sum(pod.announced for pod in one.pods)))
    assert max(most) <= SCALED.pods_max
    assert SCALED.pods_min <= autoscaler.pods <= SCALED.pods_max


def test_pods_restart_one_after_another():
    """Each is away for its start-up, the next begins `stagger_s` later, all are back."""
    _, one = played([Restart(at_s=2, startup_s=1.5, stagger_s=3)], count=200)
    assert [pod.restarts for pod in one.pods] == [1, 1, 1]
    assert [pod.announced for pod in one.pods] == [True, True, True]
    assert [pod.page(one.loop.now).process_started_at_s for pod in one.pods] == [3.5, 6.5, 9.5]


def test_what_leaves_while_it_restarts_stays_away():
    """However the two overlap; and what restarts while it leaves does not come back."""
    leaving = [Restart(at_s=2, pods=(0,), grace_s=30), Leave(at_s=3, pods=(0,))]
    restarting = [Drain(at_s=2, pods=(1,), grace_s=30), Restart(at_s=3, pods=(1,), startup_s=1)]
    _, one = played([*leaving, *restarting], count=300, traffic={"output": (200, 400)})
    assert [pod.alive for pod in one.pods] == [False, False, True]
    assert one.pods.count.pods == 1


def test_when_all_pods_have_left_clients_are_refused():
    requests, _ = played([Leave(at_s=3)], discovery_delay_s=0.5)
    late = [request for request in requests if request.arrived_at > 3.6]
    assert late
    assert {(request.fate, request.status) for request in late} == {(Fate.REFUSED, 503)}


def test_labels_and_speeds_are_the_pods_own():
    """Discovery announces labels; a pod of half the speed takes twice as long for a pass."""
    slow = structs.replace(kind(), labels={"zone": "a"}, speed=0.5)
    requests, one = played(
        [Join(at_s=1, kinds=(slow,))], policy="round-robin", pods=1, traffic={"blocks": (2, 2)},
        rate=2.0,
    )  # fmt: skip
    assert one.pods[1].endpoint.labels == {"zone": "a"}
    passes_s = {
        number: [
            (one_of.ended_at - one_of.first_token_at) / (one_of.arrival.output_tokens - 1)
            for one_of in requests
            if one_of.pod is one.pods[number] and one_of.arrival.output_tokens > 1
        ]
        for number in (0, 1)
    }
    assert min(passes_s[1]) > 1.7 * min(passes_s[0])


def test_a_slow_time_ends_at_the_speed_of_the_pod():
    slow = structs.replace(kind(), speed=0.5)
    _, one = played([Slow(from_s=1, to_s=3, factor=10)], pods=(slow,) * 2)
    assert [pod.engine.slowness for pod in one.pods] == [2.0, 2.0]


@pytest.mark.parametrize("order", [1, -1])
def test_a_slow_time_may_follow_another_at_once(order):
    """The end of the first does not end the second, whichever the scenario names first."""
    incidents = [Slow(from_s=1, to_s=3, factor=10), Slow(from_s=3, to_s=5, factor=4)]
    one, seen = cluster(arrivals(120, rate=20.0), pods=1), []
    play(incidents[::order], one)
    one.run(lambda: seen.append((one.loop.now, one.pods[0].engine.slowness)))
    assert {slowness for at, slowness in seen if 1 < at < 3} == {10.0}
    assert {slowness for at, slowness in seen if 3 < at < 5} == {4.0}
    assert seen[-1][1] == 1.0


def test_a_page_stands_still_for_a_while():
    """Its requests go on, the page tells none of it, and then tells all."""
    seen = []
    one = cluster(arrivals(120, rate=10.0, output=(300, 300)), pods=1)
    play([Freeze(from_s=2, to_s=6)], one)
    one.run(lambda: seen.append((one.loop.now, one.pods[0].page(one.loop.now).requests_total)))
    frozen = {total for at, total in seen if 2 <= at < 6}
    assert len(frozen) <= 2
    assert seen[-1][1] == 120


def test_a_picker_that_starts_later_is_configured_like_the_others():
    """Another configuration holds for all from its instant on."""
    _, one = played(
        [Configure(at_s=3, policy=policy_source("llm-d-3-2-2"))],
        replicas=2,
        absences=(Absence(1, 5.0, 8.0),),
    )
    names = {tuple(policy.settings.plugin_names) for policy in one.pickers.policies}
    assert names == {tuple(policy_source("llm-d-3-2-2").opener(0.2)(0).settings.plugin_names)}


def test_another_configuration_knows_pods_as_the_first_did():
    """How fast they prefill is told to it too."""
    _, one = played([Configure(at_s=3, policy=policy_source("llm-d-3-2-2"))])
    assert one.settings.prefill_tokens_per_s != PREFILL_TOKENS_PER_S
    (policy,) = one.pickers.policies
    assert policy.settings.prefill_tokens_per_s == one.settings.prefill_tokens_per_s


@pytest.mark.parametrize(
    ("incidents", "said"),
    [
        ([Leave(at_s=1, pods=(3,))], "leave at 1 s: expected a pod from 0 to 2, got 3"),
        ([Join(at_s=5, kinds=(kind(),)), Drain(at_s=4, pods=(3,))], "which joins at 5 s"),
        (
            [Freeze(from_s=1, to_s=3), Freeze(from_s=2, to_s=4, pods=(0,))],
            "freeze at 2 s: expected a start after the previous event of this kind for pod 0, which ends at 3 s",
        ),
        ([Leave(at_s=1, role="decode")], "leave at 1 s: expected the role of a pod, got 'decode'"),
        ([SlowLink(from_s=1, to_s=2, factor=2)], "slow-link at 1 s: expected pods with a role"),
    ],
)
def test_what_cannot_be_is_refused(incidents, said):
    with pytest.raises(ClusterSettingsError) as refused:
        check_incidents(incidents, kinds=(kind(),) * PODS)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("incidents", "said"),
    [
        ([Leave(at_s=1, role=PREFILL, pods=(2,))], "expected a prefill pod from 0 to 1, got 2"),
        (
            [Join(at_s=5, kinds=ROLES[2:]), Drain(at_s=4, role=DECODE, pods=(1,))],
            "drain at 4 s: expected a decode pod that exists at that time, got 1, which joins at 5 s",
        ),
        (
            [SlowLink(from_s=1, to_s=3, factor=2, role=DECODE),
             SlowLink(from_s=2, to_s=4, factor=2, pods=(2,))],
            "slow-link at 2 s: expected a start after the previous event of this kind for pod 2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_in_a_role_is_refused(incidents, said):
    with pytest.raises(ClusterSettingsError) as refused:
        check_incidents(incidents, kinds=ROLES)
    assert said in str(refused.value)


def with_roles(incidents, **fields):
    return played(
        incidents,
        pods=ROLES,
        policy="round-robin",
        kv_transfer=KVTransferSettings(link=LINKS["tcp-25gbe"]),
        prefill_rule=RoundRobinPrefill(),
        check=True,
        **fields,
    )


def test_an_incident_of_a_role_concerns_the_pods_of_this_role():
    """Numbers count the pods of the role."""
    _, one = with_roles([Leave(at_s=2, role=PREFILL, pods=(1,))])
    assert [pod.alive for pod in one.pods] == [True, False, True]
    _, one = with_roles([Restart(at_s=2, role=PREFILL, startup_s=1)])
    assert [pod.restarts for pod in one.pods] == [1, 1, 0]


def test_a_slow_link_delays_the_transfers_of_its_time():
    """A hundred times as slow for the pods of one role, and as before afterwards."""
    slow = SlowLink(from_s=4, to_s=6, factor=100, role=DECODE)
    usual, _ = with_roles([])
    requests, _ = with_roles([slow])

    def transfer_s(request):
        return request.handover.received_at - request.handover.reserved_at

    for before, request in zip(usual, requests, strict=True):
        assert request.fate is Fate.COMPLETE
        begins_s = request.handover.reserved_at
        if request.handover.received_at < 4:
            assert transfer_s(request) == pytest.approx(transfer_s(before))
        elif 4 < begins_s < 5.5:
            assert transfer_s(request) > 10 * transfer_s(before)
    assert any(4 < request.handover.reserved_at < 5.5 for request in requests)
    last = requests[-1]
    assert last.handover.reserved_at > 8
    assert transfer_s(last) < 0.1


def test_what_follows_on_each_other_is_taken():
    check_incidents(
        [Slow(from_s=1, to_s=2, factor=2), Slow(from_s=2, to_s=3, factor=3),
         Freeze(from_s=1, to_s=3), Join(at_s=1, kinds=(kind(),)), Leave(at_s=1, pods=(3,))],
        kinds=(kind(),) * PODS,
    )  # fmt: skip
