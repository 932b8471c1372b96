"""Incidents of pods and pickers at given times of a simulation run, as a scenario defines them.

Pods are numbered from 0. Pods that join get the next numbers in the order of their joining. An
incident without pod numbers concerns all pods that exist at its time. If an incident names a role,
it concerns only pods of this role, and its pod numbers count the pods of this role. Two incidents
of one kind that last for a time must not overlap for the same pod.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettingsError
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.cluster.windows import Duration, Instant, Numbers, check_window


class Join(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: new pods are requested at `at_s`, and serve with empty caches `startup_s`
    seconds later.
    """

    at_s: Instant
    kinds: tuple[PodKind, ...]
    startup_s: Duration = 0.0


class Leave(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: pods end at `at_s` and do not return; their requests fail."""

    at_s: Instant
    pods: Numbers = ()
    role: str = ""


class Drain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: pods are withdrawn from discovery at `at_s` and finish their requests, for at
    most `grace_s` seconds; then they end.
    """

    at_s: Instant
    pods: Numbers = ()
    role: str = ""
    grace_s: Duration = 30.0


class Restart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: pods end as with `Drain`, each beginning `stagger_s` seconds after the previous
    one, and restart `startup_s` seconds after their end, unless they leave for good.

    The pod's name and address stay the same, and its cache is empty. With a `grace_s` of 0, the pod
    crashes.
    """

    at_s: Instant
    pods: Numbers = ()
    role: str = ""
    grace_s: Duration = 0.0
    startup_s: Duration = 30.0
    stagger_s: Duration = 0.0


class Slow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: from `from_s` to `to_s`, every pass of the pods' engines takes `factor` times as
    long as usual.
    """

    from_s: Instant
    to_s: Instant
    factor: Annotated[float, Meta(gt=0.0, le=1_000.0)]
    pods: Numbers = ()
    role: str = ""

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Freeze(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: from `from_s` to `to_s`, the pods' metrics pages stay as they were at `from_s`,
    but that of a pod whose process ends is free again.
    """

    from_s: Instant
    to_s: Instant
    pods: Numbers = ()
    role: str = ""

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class SlowLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: from `from_s` to `to_s`, the NICs of the pods have the usual bandwidth divided by
    `factor`, in both directions.
    """

    from_s: Instant
    to_s: Instant
    factor: Annotated[float, Meta(gt=0.0, le=1e6)]
    pods: Numbers = ()
    role: str = ""

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Configure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: from `at_s` on, all pickers use another configuration, including pickers that
    start later.
    """

    at_s: Instant
    policy: PolicySource
    """Policy that the pickers use from `at_s` on. It must have an `EndpointPickerConfig`, so it
    cannot be a baseline.
    """


Incident: TypeAlias = Join | Leave | Drain | Restart | Slow | Freeze | SlowLink | Configure
OfPods: TypeAlias = Leave | Drain | Restart | Slow | Freeze | SlowLink
"""Incidents of some or all pods."""
_DURING: Final = (Slow, Freeze, SlowLink)
"""Incidents that last for a time, after which pods are as before."""
_SPELT: Final[Mapping[type, str]] = {SlowLink: "slow-link"}
"""Kinds of incidents whose name in scenario files is not that of their type."""


def begins_at_s(incident: Incident) -> Seconds:
    """Return the time in seconds at which an incident begins."""
    return incident.from_s if isinstance(incident, _DURING) else incident.at_s


def check_incidents(incidents: Sequence[Incident], *, kinds: Sequence[PodKind]) -> None:
    """Raise `ClusterSettingsError` if an incident contradicts the pods or another incident.

    An incident must not name a pod that has not joined at its time, or a role that no pod has. (It
    may name a pod that has ended.) `SlowLink` needs pods with a role. Two incidents of one kind
    must not slow down the same pod at the same time, or its network, or freeze its page. `kinds`
    are the pods at the start.
    """
    there = [(0.0, kind) for kind in kinds]
    joins = [one for one in incidents if isinstance(one, Join)]
    for join in sorted(joins, key=lambda one: one.at_s + one.startup_s):
        there += [(join.at_s + join.startup_s, kind) for kind in join.kinds]
    windows: dict[tuple[type, int], list[tuple[Seconds, Seconds]]] = {}
    for incident in incidents:
        if isinstance(incident, (Join, Configure)):
            continue
        what = f"{_spelt(type(incident))} at {begins_at_s(incident):g} s"
        if isinstance(incident, SlowLink) and not any(kind.transfers for _, kind in there):
            raise ClusterSettingsError(f"{what}: expected pods with a role, which have a network")
        numbers = [at for at, (_, kind) in enumerate(there) if incident.role in ("", kind.role)]
        _check_pods(what, incident, numbers, [arrival_s for arrival_s, _ in there])
        if isinstance(incident, _DURING):
            concerned = [numbers[at] for at in incident.pods] if incident.pods else numbers
            for number in concerned:
                window = incident.from_s, incident.to_s
                windows.setdefault((type(incident), number), []).append(window)
    for (kind_of, number), of_one in windows.items():
        for before, after in pairwise(sorted(of_one)):
            if after[0] < before[1]:
                raise ClusterSettingsError(
                    f"{_spelt(kind_of)} at {after[0]:g} s: expected a start after the "
                    f"previous event of this kind for pod {number}, which ends at {before[1]:g} s"
                )


def _spelt(kind_of: type) -> str:
    return _SPELT.get(kind_of, kind_of.__name__.lower())


def _check_pods(
    what: str, incident: OfPods, numbers: Sequence[int], arrivals_s: Sequence[Seconds]
) -> None:
    """Raise `ClusterSettingsError` unless all pods that an incident names have joined at its time.
    Pods that have left are not checked.

    `numbers` are the numbers of the pods that have its role, and `arrivals_s` has the time at which
    each pod joins. `what` names the incident.
    """
    at_s, of_role = begins_at_s(incident), f" {incident.role}" if incident.role else ""
    if not numbers:
        raise ClusterSettingsError(f"{what}: expected the role of a pod, got {incident.role!r}")
    for number in incident.pods:
        if number >= len(numbers):
            raise ClusterSettingsError(
                f"{what}: expected a{of_role} pod from 0 to {len(numbers) - 1}, got {number}"
            )
        arrival_s = arrivals_s[numbers[number]]
        if at_s < arrival_s:
            raise ClusterSettingsError(
                f"{what}: expected a{of_role} pod that exists at that time, got {number}, which "
                f"joins at {arrival_s:g} s"
            )


def play(incidents: Sequence[Incident], cluster: Cluster) -> None:
    """Schedule the incidents of a scenario in `cluster`, before the run starts."""
    loop = cluster.loop
    # Another incident of its kind may begin when one ends, and must be scheduled after this end.
    for incident in sorted(incidents, key=begins_at_s):
        match incident:
            case Join():
                loop.at(incident.at_s, cluster.pods.expect, len(incident.kinds))
                loop.at(incident.at_s + incident.startup_s, cluster.pods.add, incident.kinds)
            case Leave() | Drain() | Restart():
                loop.at(incident.at_s, _end_pods, cluster, incident)
            case Slow():
                loop.at(incident.from_s, _slow_down, cluster, incident, incident.factor)
                loop.at(incident.to_s, _slow_down, cluster, incident, 1.0)
            case Freeze():
                loop.at(incident.from_s, _freeze, cluster, incident, True)
                loop.at(incident.to_s, _freeze, cluster, incident, False)
            case SlowLink():
                loop.at(incident.from_s, _slow_link, cluster, incident, incident.factor)
                loop.at(incident.to_s, _slow_link, cluster, incident, 1.0)
            case Configure():
                loop.at(incident.at_s, cluster.pickers.configure, incident.policy)


def _named(cluster: Cluster, incident: OfPods) -> list[SimulatedPod]:
    """Return the pods that an incident concerns."""
    pods = [pod for pod in cluster.pods if incident.role in ("", pod.kind.role)]
    return [pods[number] for number in incident.pods] if incident.pods else pods


def _end_pods(cluster: Cluster, incident: Leave | Drain | Restart) -> None:
    after_s = 0.0
    for pod in _named(cluster, incident):
        if isinstance(incident, Restart):
            cluster.loop.after(after_s, _restart, cluster, pod, incident)
            after_s += incident.stagger_s
        elif pod.alive:
            pod.returns = False
            grace_s = incident.grace_s if isinstance(incident, Drain) else 0.0
            cluster.pods.drain(pod, grace_s)


def _restart(cluster: Cluster, pod: SimulatedPod, incident: Restart) -> None:
    # A pod that leaves for good must not return.
    pod.returns = pod.returns or pod.announced

    def ended() -> None:
        if pod.returns:
            cluster.loop.after(incident.startup_s, cluster.pods.restart, pod)

    cluster.pods.drain(pod, incident.grace_s, ended)


def _slow_down(cluster: Cluster, incident: Slow, factor: float) -> None:
    for pod in _named(cluster, incident):
        pod.slow_down(factor)


def _freeze(cluster: Cluster, incident: Freeze, frozen: bool) -> None:
    for pod in _named(cluster, incident):
        if pod.alive:
            pod.freeze_page(frozen)


def _slow_link(cluster: Cluster, incident: SlowLink, factor: float) -> None:
    for pod in _named(cluster, incident):
        cluster.gateway.handovers.slow_down(pod, factor)
