"""An autoscaler of simulated pods, by the rule of Kubernetes' HorizontalPodAutoscaler.

Every `interval_s` it compares the mean of the pods' metric with the target:

    desired = ceil(pods x mean / target)

The number of pods does not change while mean / target is within `tolerance` of 1. A pod without a
metric, because it starts or restarts, counts as idle if the number of pods would rise, and as on
target if it would fall. If this reverses the direction, the number does not change. An increase
takes effect at once. A decrease goes down to the highest recommendation of the last
`stabilization_s`.

Source: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/,
"Algorithm details" and "Stabilization window", with the defaults given there. Policies that limit
how many pods change at a time are left out, and so is the delay of the metric.
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
"""Number of decimal digits to which ratios and numbers of pods are rounded. Further digits are
rounding errors, which must not change the number of pods.
"""


class ScaledBy(StrEnum):
    """The metric on a pod's metrics page by which an autoscaler scales."""

    WAITING_REQUESTS = "waiting-requests"
    INFLIGHT_REQUESTS = "inflight-requests"
    """Number of running and waiting requests of the pod."""


class AutoscalerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a simulated autoscaler. Raises `ValueError` if `pods_min` exceeds
    `pods_max`.
    """

    metric: ScaledBy
    target: Annotated[float, Meta(gt=0.0, le=1e6)]
    """Number of requests per pod that the autoscaler aims at, by `metric`."""
    pods_min: Annotated[int, Meta(ge=1, le=1_000)] = 1
    pods_max: Annotated[int, Meta(ge=1, le=1_000)]
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the pods that the autoscaler scales, like those of one Deployment. No labels select
    all pods.
    """
    interval_s: Annotated[float, Meta(ge=1.0, le=3_600.0)] = 15.0
    tolerance: Share = 0.1
    stabilization_s: Annotated[float, Meta(ge=0.0, le=3_600.0)] = 300.0
    startup_s: Duration = 30.0
    """Time in seconds from the decision to start a pod until the pod serves."""
    grace_s: Duration = 30.0
    """Maximum time in seconds for which a surplus pod may finish its requests before it ends."""

    def __post_init__(self) -> None:
        if self.pods_min > self.pods_max:
            raise ValueError(
                f"expected pods_max of at least pods_min, {self.pods_min}, got {self.pods_max}"
            )

    def scales(self, kind: PodKind) -> bool:
        """Return whether the autoscaler scales pods of this kind, by their labels."""
        return kind.labels.items() >= self.labels.items()

    def check(self, kinds: Sequence[PodKind]) -> None:
        """Raise `ClusterSettingsError` unless the number of scaled pods among `kinds`, the pods at
        the start of the run, is between `pods_min` and `pods_max`.
        """
        own = sum(map(self.scales, kinds))
        if not self.pods_min <= own <= self.pods_max:
            which = f" with {self.labels}" if self.labels else ""
            raise ClusterSettingsError(
                f"[autoscaler]: expected {self.pods_min} to {self.pods_max} pods{which} at the "
                f"beginning, got {own}"
            )


def desired_pods(shown: Sequence[float], *, silent: int, target: float, tolerance: float) -> int:
    """Return the number of pods that the autoscaler's rule recommends, before limits and
    stabilization.

    `shown` has the metric of each pod that reports it, and `silent` is the number of pods that
    report nothing. The result is the present number of pods if nothing should change, or if no pod
    reports its metric.
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
    """An autoscaler that starts and drains pods of `cluster`. It must be created before the run
    starts.

    A new pod has the kind of the first pod that the autoscaler scales. It reuses the name of a pod
    of this kind that the autoscaler has ended, if there is one, so that there are few names. If
    there are too many pods, those that have not started yet are cancelled first, then the running
    pod with the highest number is drained. Pods that ended for another reason are replaced, as by a
    Deployment.
    """

    def __init__(self, settings: AutoscalerSettings, cluster: Cluster) -> None:
        self.settings = settings
        self.pods = len(self._own(cluster))
        """Number of pods that the autoscaler aims for at present."""
        self._cluster = cluster
        self._kind = next(kind for kind in cluster.settings.pods if settings.scales(kind))
        self._recommended: deque[tuple[Seconds, int]] = deque([(cluster.loop.now, self.pods)])
        """Recommended numbers of pods within the stabilization window, with the times of the
        recommendations.
        """
        self._asked = 0
        self._starting: list[int] = []
        """Numbers of the start requests whose pods do not serve yet, oldest first."""
        self._ended: set[int] = set()
        """Numbers of the pods that the autoscaler has drained and not started again."""
        cluster.loop.after(settings.interval_s, self._evaluate)

    def _own(self, cluster: Cluster) -> list[SimulatedPod]:
        """Return the pods that the autoscaler scales, and that discovery lists or that will
        restart.
        """
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
            # The pod was cancelled meanwhile.
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
        """Cancel the pod that was requested last and has not started, or else drain the last
        announced pod of `own` and remove it from that list.
        """
        if self._starting:
            self._starting.pop()
            self._cluster.pods.expect(-1)
            return
        last = next((pod for pod in reversed(own) if pod.announced), None)
        if last is not None:
            own.remove(last)
            self._ended.add(last.number)
            self._cluster.pods.drain(last, self.settings.grace_s)
