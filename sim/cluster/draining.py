"""How a pod ends that is asked to: first it is announced no more, then it serves what it has."""

from collections.abc import Callable

from epp.core.types import Seconds
from sim.cluster.cluster import TICK_S, Cluster
from sim.cluster.simulated_pod import SimulatedPod


def drain(cluster: Cluster, pod: SimulatedPod, grace_s: Seconds, ended: Callable[[], None]) -> None:
    """End `pod` when it is done, after `grace_s` at most, or at once without; then call `ended`."""
    if not pod.alive:
        # It has died of something else, and comes back, if it does, for that reason.
        return
    life, ends_at = pod.life, cluster.loop.now + grace_s
    known_at = cluster.loop.now + cluster.settings.discovery_delay_s
    was_idle = False

    def look() -> None:
        nonlocal was_idle
        if pod.life != life:
            return
        now = cluster.loop.now
        # Twice in a row: a request may be on its way from a picker that did not know yet.
        idle = now >= known_at and not pod.requests
        if now >= ends_at or (idle and was_idle):
            cluster.end_pod(pod)
            ended()
            return
        was_idle = idle
        cluster.loop.at(min(now + TICK_S, ends_at), look)

    if grace_s:
        cluster.drain_pod(pod)
    look()


def nothing() -> None:
    """What follows the end of a pod that does not come back."""
