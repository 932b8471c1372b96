"""The pods of a cluster: who is there, who is coming, who is going, and who is told of it."""

from collections.abc import Callable, Iterator, Sequence

from epp.core.types import Endpoint, Seconds
from sim.caches.behaviour import Stores
from sim.cluster.loop import Loop
from sim.cluster.pod_count import PodCount
from sim.cluster.settings import TICK_S, ClusterSettings
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.cluster.simulated_request import SimulatedRequest
from sim.engine.engine import Step


class Pods:
    """Every pod that is or was there, by its number.

    `stepped` gets each step when it ends, `cut` each request that a dying pod had, and `changed` is
    called when discovery knows of a change, some time after it.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        loop: Loop,
        *,
        seed: int,
        stepped: Callable[[SimulatedPod, Step], None],
        cut: Callable[[SimulatedRequest], None],
        changed: Callable[[], None],
    ) -> None:
        self.count = PodCount(loop)
        self._settings = settings
        self._loop = loop
        self._seed = seed
        self._stepped = stepped
        self._cut = cut
        self._changed = changed
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
        """The pod that was announced as `endpoint`."""
        return self._by_endpoint[endpoint.endpoint_id]

    def tier_tokens(self) -> dict[str, float] | None:
        """Tier -> prompt tokens found there, by all pods; None: all have the GPU's alone."""
        told: dict[str, float] = {}
        for pod in self._pods:
            for tier, tokens in (pod.tier_tokens or {}).items():
                told[tier] = told.get(tier, 0.0) + tokens
        return told or None

    def announced(self) -> list[SimulatedPod]:
        """Those of which discovery tells."""
        return [pod for pod in self._pods if pod.announced]

    def expect(self, count: int) -> None:
        """So many more pods are starting; fewer, if it is negative."""
        self._expected += count
        self._count()

    def add(self, kinds: Sequence[PodKind]) -> None:
        """New pods, which were expected and which discovery announces."""
        self._expected -= len(kinds)
        for kind in kinds:
            self._add(kind)
        self._count()
        self._tell_later()

    def drain(
        self, pod: SimulatedPod, grace_s: Seconds, ended: Callable[[], None] | None = None
    ) -> None:
        """End `pod`, which is announced no more, when it is done, after `grace_s` at most.

        Without a grace at once. Then `ended` is called; not if it has died of something else before:
        it comes back, if it does, for that reason.
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
            # Twice in a row: a request may be on its way from a picker that did not know yet.
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
            self._tell_later()
        look()

    def end(self, pod: SimulatedPod) -> None:
        """A pod is gone with the requests that it has, if it is there."""
        if pod.alive:
            self.kill(pod)

    def kill(self, pod: SimulatedPod) -> None:
        """A pod dies with the requests that it has; one that was dead before dies again."""
        pod.die()
        self._count()
        cut = list(pod.requests.values())
        pod.requests.clear()
        for request in cut:
            self._cut(request)
        self._tell_later()

    def restart(self, pod: SimulatedPod) -> None:
        """A pod that was ended is there again, empty; one that lives is left alone."""
        if not pod.alive:
            pod.restart()
            self._count()
            self._tell_later()

    def _tell_later(self) -> None:
        self._loop.after(self._settings.discovery_delay_s, self._changed)

    def _add(self, kind: PodKind) -> None:
        number = len(self._pods)
        # As uids of real pods, other ones each time: what is placed by a hash of them is placed by luck.
        uid = f"pod-{number}.{self._seed}"
        tells = self._settings.kv_events is not None
        pod = SimulatedPod(
            number, uid, kind, self._loop, self._stepped, tells=tells, stores=self._stores
        )
        self._pods.append(pod)
        self._by_endpoint[pod.endpoint.endpoint_id] = pod

    def _count(self) -> None:
        there = sum(pod.alive or pod.returns for pod in self._pods)
        self.count.change(there + self._expected)
