"""An autoscaler of simulated pods, by the rule of Kubernetes' HorizontalPodAutoscaler.

Every `interval_s` it compares what pods show on average with what is wanted:

    desired = ceil(pods x mean / target)

and does nothing where mean / target is within `tolerance` of 1. A pod that shows nothing, because it
starts or restarts, counts as idle when there would be more pods and as right on target when there
would be fewer; if that turns the direction round, nothing is done. More pods are asked for at once,
fewer only as the highest of the recommendations of the last `stabilization_s` says.
Source: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/, "Algorithm
details" and "Stabilization window", with the defaults given there. Policies that limit how many pods
come or go at a time are left out, and so is how long a metric takes to the autoscaler.
"""

import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.cluster.settings import ClusterSettingsError
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.cluster.windows import Duration, Share

_DIGITS: Final = 9
"""Of a ratio or a number of pods: more are rounding, which must not cost a pod."""


class ScaledBy(StrEnum):
    """What of a pod's page an autoscaler looks at."""

    WAITING_REQUESTS = "waiting-requests"
    INFLIGHT_REQUESTS = "inflight-requests"
    """Running and waiting."""


class AutoscalerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many pods there are is up to the load. Raises `ValueError`."""

    metric: ScaledBy
    target: Annotated[float, Meta(gt=0.0, le=1e6)]
    """Requests, mean of the pods."""
    pods_min: Annotated[int, Meta(ge=1, le=1_000)] = 1
    pods_max: Annotated[int, Meta(ge=1, le=1_000)]
    labels: dict[str, str] = field(default_factory=dict)
    """Of the pods that it looks at, starts and ends, as one Deployment has them; none: all pods."""
    interval_s: Annotated[float, Meta(ge=1.0, le=3_600.0)] = 15.0
    tolerance: Share = 0.1
    stabilization_s: Annotated[float, Meta(ge=0.0, le=3_600.0)] = 300.0
    startup_s: Duration = 30.0
    """From the decision to a pod that serves."""
    grace_s: Duration = 30.0
    """A pod that goes is drained for so long at most."""

    def __post_init__(self) -> None:
        if self.pods_min > self.pods_max:
            raise ValueError(
                f"expected pods_max from pods_min, {self.pods_min}, on, got {self.pods_max}"
            )

    def scales(self, kind: PodKind) -> bool:
        """Whether a pod of this kind is one of its pods."""
        return kind.labels.items() >= self.labels.items()

    def check(self, kinds: Sequence[PodKind]) -> None:
        """`ClusterSettingsError` unless so many of the pods at the beginning are its own."""
        own = sum(map(self.scales, kinds))
        if not self.pods_min <= own <= self.pods_max:
            which = f" with {self.labels}" if self.labels else ""
            raise ClusterSettingsError(
                f"[autoscaler]: expected {self.pods_min} to {self.pods_max} pods{which} at the "
                f"beginning, got {own}"
            )


def desired_pods(shown: Sequence[float], *, silent: int, target: float, tolerance: float) -> int:
    """How many pods there should be: `shown` is the metric of each pod that shows it.

    `silent`: those that show nothing. What there are, if nothing should change.
    """
    pods = len(shown) + silent
    if not shown:
        return pods
    ratio = sum(shown) / len(shown) / target
    assumed = 0.0 if ratio > 1.0 else target
    total = sum(shown) + silent * assumed
    of_all = total / pods / target
    if round(abs(of_all - 1.0), _DIGITS) <= tolerance or (ratio > 1.0) is not (of_all > 1.0):
        return pods
    return math.ceil(round(total / target, _DIGITS))


class Autoscaler:
    """Starts and drains pods of `cluster`, which is at its beginning.

    A pod that it starts is like the first of its pods, and takes the name of one that it has ended
    if there is one, so that names stay few. Who joined last goes first, who has not yet started
    before all. What left for another reason is replaced, as a Deployment does it.
    """

    def __init__(self, settings: AutoscalerSettings, cluster: Cluster) -> None:
        self.settings = settings
        self.pods = len(self._own(cluster))
        """How many it wants."""
        self._cluster = cluster
        self._kind = next(kind for kind in cluster.settings.pods if settings.scales(kind))
        self._recommended: deque[tuple[Seconds, int]] = deque([(cluster.loop.now, self.pods)])
        """Within the stabilization window."""
        self._asked = 0
        self._starting: list[int] = []
        """Numbers of what was asked for and is not there, in this order."""
        self._ended: set[int] = set()
        """Numbers of the pods that it has ended."""
        cluster.loop.after(settings.interval_s, self._evaluate)

    def _own(self, cluster: Cluster) -> list[SimulatedPod]:
        """Its pods that are there or come back."""
        return [
            pod
            for pod in cluster.pods
            if (pod.announced or pod.returns) and self.settings.scales(pod.kind)
        ]

    def _evaluate(self) -> None:
        settings, loop = self.settings, self._cluster.loop
        own = self._own(self._cluster)
        pages = [pod.page(loop.now) for pod in own if pod.announced]
        shown = [
            page.waiting_requests
            + (page.running_requests if settings.metric is ScaledBy.INFLIGHT_REQUESTS else 0)
            for page in pages
            if page is not None
        ]
        desired = desired_pods(
            shown,
            silent=max(0, self.pods - len(shown)),
            target=settings.target,
            tolerance=settings.tolerance,
        )
        self.pods = self._stabilized(min(max(desired, settings.pods_min), settings.pods_max))
        surplus = len(own) + len(self._starting) - self.pods
        for _ in range(-surplus):
            self._start()
        for _ in range(surplus):
            self._end_one(own)
        loop.after(settings.interval_s, self._evaluate)

    def _stabilized(self, desired: int) -> int:
        now, recommended = self._cluster.loop.now, self._recommended
        recommended.append((now, desired))
        while recommended[0][0] < now - self.settings.stabilization_s:
            recommended.popleft()
        return max(desired, min(self.pods, max(pods for _, pods in recommended)))

    def _start(self) -> None:
        self._asked += 1
        self._starting.append(self._asked)
        self._cluster.pods.expect(1)
        self._cluster.loop.after(self.settings.startup_s, self._started, self._asked)

    def _started(self, asked: int) -> None:
        if asked not in self._starting:
            # It was given up meanwhile.
            return
        self._starting.remove(asked)
        cluster = self._cluster
        for number in sorted(self._ended):
            pod = cluster.pods[number]
            if not pod.alive and not pod.returns and pod.kind == self._kind:
                self._ended.remove(number)
                cluster.pods.expect(-1)
                cluster.pods.restart(pod)
                return
        cluster.pods.add([self._kind])

    def _end_one(self, own: list[SimulatedPod]) -> None:
        """One of `own`, which leaves that list, if there is one that can be ended."""
        if self._starting:
            self._starting.pop()
            self._cluster.pods.expect(-1)
            return
        last = next((pod for pod in reversed(own) if pod.announced), None)
        if last is not None:
            own.remove(last)
            self._ended.add(last.number)
            self._cluster.pods.drain(last, self.settings.grace_s)
