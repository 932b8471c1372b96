"""A simulated cluster: a pool of pods, the pickers that route to it and the clients that use it.

`Clients` send requests through a `Gateway`. The gateway asks `Pickers` for a pod among `Pods`, and
`Faults` affect the pods. Each object changes only its own state. Simulated time passes only in the
`Loop`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.waiting import Resolver
from epp.core.types import Seconds
from sim.cluster.clients import Clients
from sim.cluster.faults import Fault, Faults
from sim.cluster.gateway import Gateway
from sim.cluster.handovers import Handover
from sim.cluster.loop import Loop
from sim.cluster.pickers import Pickers
from sim.cluster.pods import Pods
from sim.cluster.policies import Policy
from sim.cluster.prefill_rules import PrefillRule
from sim.cluster.settings import TICK_S, ClusterSettings, ClusterSettingsError
from sim.cluster.simulated_pod import SimulatedPod
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.cluster.tokenizing import SimulatedRenderer
from sim.engine.engine import Step
from sim.engine.request import EngineRequest
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

REST_S_MIN: Final[Seconds] = 600.0
"""Minimum time in seconds without a request for which pickers stop scraping and exchanging
messages. They resume `_LOOK_AHEAD_S` before the next request. What they would do in between would
have no effect any more.
"""

_LOOK_AHEAD_S: Final[Seconds] = 60.0


class Cluster:
    """A simulation of `arrivals` through pickers and pods. `ended` is called with each request when
    it ends.

    `stepped` is called with each engine step when it ends, and `decided` with each request when it
    is routed, at each attempt of its client. `open_policy(seed)` creates a picker, and `request_of`
    returns a request in the form that pickers parse. `seed` alone determines all random numbers.
    """

    def __init__(  # noqa: PLR0913  the parts of a run
        self,
        settings: ClusterSettings,
        open_policy: Callable[[int], Policy],
        request_of: Callable[[Arrival, PromptHashes], InferenceRequest],
        arrivals: Iterable[Arrival],
        *,
        seed: int,
        ended: Callable[[SimulatedRequest], None],
        stepped: Callable[[Step], None] | None = None,
        decided: Callable[[SimulatedRequest], None] | None = None,
        faults: Iterable[Fault] = (),
        resolver: Resolver | None = None,
        prefill_rule: PrefillRule | None = None,
    ) -> None:
        """Set up the cluster; `resolver` delays requests before pickers place them. None for the
        renderer that `settings.tokenize` describes, or for no delay without it. `prefill_rule`
        chooses prefill pods; None if the pickers' configuration chooses them, or if all pods serve
        whole requests. Raises `ClusterSettingsError` for a rule without `kv_transfer`.
        """
        if prefill_rule is not None and settings.kv_transfer is None:
            raise ClusterSettingsError("a prefill rule needs kv_transfer, got None")
        self.settings = settings
        self.loop = Loop()
        self._tell_stepped = stepped
        self.pods = Pods(
            settings,
            self.loop,
            seed=seed,
            stepped=self._stepped,
            cut=self._cut,
            changed=self._announce,
            died=self._died,
            reserved=self._reserved,
        )
        self.pickers = Pickers(
            settings, self.loop, self.pods, open_policy, seed=seed, prefill_rule=prefill_rule
        )
        if resolver is None and settings.tokenize is not None:
            resolver = SimulatedRenderer(settings.tokenize, self.loop)
        self.gateway = Gateway(
            settings,
            self.loop,
            self.pods,
            self.pickers,
            seed=seed,
            request_of=request_of,
            resolver=resolver,
            ended=self._end,
        )
        self.gateway.decided = decided
        self.loop.after(TICK_S, self._tick)
        self.clients = Clients(
            settings, self.loop, self.gateway, arrivals, seed=seed, tell_ended=ended
        )
        self.faults = Faults(faults, self.loop, self.pods)

    def __repr__(self) -> str:
        requests = len(self.clients.requests)
        return f"<Cluster [{len(self.pods)} pods, {requests} requests, {self.loop.now} s]>"

    def run(self, after_event: Callable[[], None] | None = None) -> None:
        """Simulate until the last request has ended or the loop is stopped. `after_event` is called
        after each event.
        """
        if not self.clients.done:
            self.loop.run(after_event)

    # Notifications from the pods towards the clients.

    def _stepped(self, pod: SimulatedPod, step: Step) -> None:
        if self._tell_stepped is not None:
            self._tell_stepped(step)
        self.gateway.stepped(pod, step)

    def _cut(self, request: SimulatedRequest | Handover) -> None:
        if isinstance(request, Handover):
            self.gateway.handovers.prefill_failed(request)
        else:
            self.gateway.cut(request)

    def _died(self, pod: SimulatedPod) -> None:
        self.gateway.handovers.pod_died(pod)

    def _reserved(self, pod: SimulatedPod, engine: EngineRequest) -> None:
        self.gateway.handovers.reserved(pod, engine)

    def _announce(self) -> None:
        self.pickers.announce()

    def _end(self, request: SimulatedRequest, fate: Fate) -> None:
        self.clients.end(request, fate)

    # Events that no request causes.

    def _tick(self) -> None:
        self.pickers.tick()
        if not self.clients.requests:
            sent_at = self.clients.next_sent_at
            if self.loop.now + REST_S_MIN < sent_at < math.inf:
                self.pickers.rest()
                self.loop.at(sent_at - _LOOK_AHEAD_S, self._wake)
                return
        self.loop.after(TICK_S, self._tick)

    def _wake(self) -> None:
        self.pickers.wake()
        self._tick()
