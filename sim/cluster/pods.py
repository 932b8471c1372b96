"""The pods of a simulated cluster: running, starting and ending pods, and the callbacks when they
change.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from epp.core.types import Endpoint, Seconds
from sim.caches.behaviour import Stores
from sim.cluster.loop import Loop
from sim.cluster.pod_count import PodCount
from sim.cluster.settings import TICK_S, ClusterSettings
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.engine.engine import Step
from sim.engine.request import EngineRequest


class Pods:
    """All pods of a simulated cluster, ended ones included, by their number.

    `stepped` gets each step when it ends. `cut` gets each request, or handover for a
    prefill leg, that a dying pod had. `changed`
    is called when discovery knows of a change, which is some time after it. `died` gets each dead
    pod after its requests were cut. `reserved` gets each decode leg when its engine has reserved
    blocks.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        loop: Loop,
        *,
        seed: int,
        stepped: Callable[[SimulatedPod, Step], None],
        cut: Callable[[Any], None],
        changed: Callable[[], None],
        died: Callable[[SimulatedPod], None] | None = None,
        reserved: Callable[[SimulatedPod, EngineRequest], None] | None = None,
    ) -> None:
        self.count = PodCount(loop)
        self._settings = settings
        self._loop = loop
        self._seed = seed
        self._stepped = stepped
        self._cut = cut
        self._changed = changed
        self._died = died
        self._reserved = reserved
        self._pods: list[SimulatedPod] = []
        self._by_endpoint: dict[str, SimulatedPod] = {}
        self._expected = 0
        self._stores: Stores = {}
        for kind in settings.pods:
            self._add(kind)
        self._count()

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[SimulatedPod]:
        return iter(self._pods)

    def __getitem__(self, number: int) -> SimulatedPod:
        return self._pods[number]

    def at(self, endpoint: Endpoint) -> SimulatedPod:
        """Return the pod that was announced as `endpoint`."""
        return self._by_endpoint[endpoint.endpoint_id]

    def tier_tokens(self) -> dict[str, float] | None:
        """Return the prompt tokens found in each tier of the caches, summed over all pods with the
        cache `offload`; None if no pod has it.
        """
        told: dict[str, float] = {}
        for pod in self._pods:
            for tier, tokens in (pod.tier_tokens or {}).items():
                told[tier] = told.get(tier, 0.0) + tokens
        return told or None

    def announced(self) -> list[SimulatedPod]:
        """Return the pods that discovery lists at present."""
        return [pod for pod in self._pods if pod.announced]

    def expect(self, count: int) -> None:
        """Add `count` to the number of pods that are starting; a negative `count` reduces it."""
        self._expected += count
        self._count()

    def add(self, kinds: Sequence[PodKind]) -> None:
        """Add pods that have started and that `expect` had counted. Discovery announces them
        later.
        """
        self._expected -= len(kinds)
        for kind in kinds:
            self._add(kind)
        self._count()
        self._announce_later()

    def drain(
        self, pod: SimulatedPod, grace_s: Seconds, ended: Callable[[], None] | None = None
    ) -> None:
        """Withdraw `pod` from discovery, and end it when it is idle, or after `grace_s` seconds.

        With a `grace_s` of 0, the pod ends at once. Nothing happens if the pod does not run.
        `ended` is called when this drain has ended the pod, but not if the pod died for another
        reason before.
        """
        if not pod.alive:
            return
        loop, life = self._loop, pod.life
        ends_at, known_at = loop.now + grace_s, loop.now + self._settings.discovery_delay_s
        was_idle = False

        def look() -> None:
            nonlocal was_idle
            if pod.life != life:
                return
            # The pod must be idle twice in a row, because a picker that knows of no change may have
            # sent a request.
            idle = loop.now >= known_at and not pod.requests
            if loop.now >= ends_at or (idle and was_idle):
                self.end(pod)
                if ended is not None:
                    ended()
                return
            was_idle = idle
            loop.at(min(loop.now + TICK_S, ends_at), look)

        if grace_s:
            pod.draining = True
            self._announce_later()
        look()

    def end(self, pod: SimulatedPod) -> None:
        """End `pod` and fail its requests; do nothing if it does not run."""
        if pod.alive:
            self.kill(pod)

    def kill(self, pod: SimulatedPod) -> None:
        """Kill the process of `pod` and fail its requests, whether or not the process still runs."""
        pod.die()
        self._count()
        cut = list(pod.requests.values())
        pod.requests.clear()
        for request in cut:
            self._cut(request)
        if self._died is not None:
            self._died(pod)
        self._announce_later()

    def restart(self, pod: SimulatedPod) -> None:
        """Start an ended pod again with an empty KV cache; do nothing if the pod runs. Prompt
        caches on a disk and stores that pods share keep their content.
        """
        if not pod.alive:
            pod.restart()
            self._count()
            self._announce_later()

    def _announce_later(self) -> None:
        self._loop.after(self._settings.discovery_delay_s, self._changed)

    def _add(self, kind: PodKind) -> None:
        number = len(self._pods)
        # Like UIDs of real pods, they differ in each run, so that placement by a hash of them is
        # random.
        uid = f"pod-{number}.{self._seed}"
        tells = self._settings.kv_events is not None
        pod = SimulatedPod(
            number,
            uid,
            kind,
            self._loop,
            self._stepped,
            tells=tells,
            stores=self._stores,
            reserved=self._reserved,
        )
        self._pods.append(pod)
        self._by_endpoint[pod.endpoint.endpoint_id] = pod

    def _count(self) -> None:
        there = sum(pod.alive or pod.returns for pod in self._pods)
        self.count.change(there + self._expected)
