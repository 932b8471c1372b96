"""Incidents of pods and pickers at given times of a simulation run, as a scenario defines them.

Pods are numbered from 0. Pods that join get the next numbers in the order of their joining. An
incident without pod numbers concerns all pods that exist at its time.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, TypeAlias

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


class Drain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: pods are withdrawn from discovery at `at_s` and finish their requests, for at
    most `grace_s` seconds; then they end.
    """

    at_s: Instant
    pods: Numbers = ()
    grace_s: Duration = 30.0


class Restart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: pods end as with `Drain`, each `stagger_s` seconds after the previous one, and
    restart `startup_s` seconds after their end.

    The pod's name and address stay the same, and its cache is empty. With a `grace_s` of 0, the pod
    crashes.
    """

    at_s: Instant
    pods: Numbers = ()
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

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Freeze(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incident: from `from_s` to `to_s`, the pods' metrics pages stay as they were at
    `from_s`.
    """

    from_s: Instant
    to_s: Instant
    pods: Numbers = ()

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


Incident: TypeAlias = Join | Leave | Drain | Restart | Slow | Freeze | Configure


def begins_at_s(incident: Incident) -> Seconds:
    """Return the time in seconds at which an incident begins."""
    return incident.from_s if isinstance(incident, (Slow, Freeze)) else incident.at_s


def check_incidents(incidents: Sequence[Incident], *, pods: int) -> None:
    """Raise `ClusterSettingsError` if an incident names a pod that does not exist at its time, or
    if two incidents slow down the same pod at the same time, or freeze its page. `pods` is the
    number of pods at the start.
    """
    arrivals_s = [0.0] * pods
    joins = [one for one in incidents if isinstance(one, Join)]
    for join in sorted(joins, key=lambda one: one.at_s + one.startup_s):
        arrivals_s += [join.at_s + join.startup_s] * len(join.kinds)
    windows: dict[tuple[type, int], list[tuple[Seconds, Seconds]]] = {}
    for incident in incidents:
        if isinstance(incident, (Join, Configure)):
            continue
        at_s, kind = begins_at_s(incident), type(incident).__name__.lower()
        for number in incident.pods:
            if number >= len(arrivals_s):
                raise ClusterSettingsError(
                    f"{kind} at {at_s:g} s: expected a pod from 0 to {len(arrivals_s) - 1}, "
                    f"got {number}"
                )
            if at_s < arrivals_s[number]:
                raise ClusterSettingsError(
                    f"{kind} at {at_s:g} s: expected a pod that exists at that time, got "
                    f"{number}, which joins at {arrivals_s[number]:g} s"
                )
        if isinstance(incident, (Slow, Freeze)):
            for number in incident.pods or range(len(arrivals_s)):
                window = incident.from_s, incident.to_s
                windows.setdefault((type(incident), number), []).append(window)
    for (kind_of, number), of_one in windows.items():
        for before, after in pairwise(sorted(of_one)):
            if after[0] < before[1]:
                raise ClusterSettingsError(
                    f"{kind_of.__name__.lower()} at {after[0]:g} s: expected a start after the "
                    f"previous event of this kind for pod {number}, which ends at {before[1]:g} s"
                )


def play(incidents: Sequence[Incident], cluster: Cluster) -> None:
    """Schedule the incidents of a scenario in `cluster`, before the run starts."""
    loop = cluster.loop
    for incident in incidents:
        match incident:
            case Join():
                loop.at(incident.at_s, cluster.pods.expect, len(incident.kinds))
                loop.at(incident.at_s + incident.startup_s, cluster.pods.add, incident.kinds)
            case Leave() | Drain() | Restart():
                loop.at(incident.at_s, _end_pods, cluster, incident)
            case Slow():
                loop.at(incident.from_s, _slow_down, cluster, incident)
            case Freeze():
                loop.at(incident.from_s, _freeze, cluster, incident)
            case Configure():
                loop.at(incident.at_s, cluster.pickers.configure, incident.policy)


def _named(cluster: Cluster, numbers: Numbers) -> list[SimulatedPod]:
    return [cluster.pods[number] for number in numbers] if numbers else list(cluster.pods)


def _end_pods(cluster: Cluster, incident: Leave | Drain | Restart) -> None:
    after_s = 0.0
    for pod in _named(cluster, incident.pods):
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


def _slow_down(cluster: Cluster, incident: Slow) -> None:
    for pod in _named(cluster, incident.pods):
        pod.slow_down(incident.factor)
        cluster.loop.at(incident.to_s, pod.slow_down, 1.0)


def _freeze(cluster: Cluster, incident: Freeze) -> None:
    for pod in _named(cluster, incident.pods):
        if pod.alive:
            pod.freeze_page(True)
            cluster.loop.at(incident.to_s, pod.freeze_page, False)
