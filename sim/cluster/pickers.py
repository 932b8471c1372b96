"""The pickers of a simulated cluster: their knowledge of the pods, their decisions, and their
restarts.

Pickers see pods only as production does: discovery announces them some time after they change, and
pages are scraped one by one, with the interval and jitter of `epp/shell/engines/scrape`. A dead pod
refuses connections and is scraped as often as a live one. Pickers know each other's decisions only
as far as they share them (`sim/cluster/peering`).

Each picker has its own queue (`core/protocol/flow_queue`), if its configuration or a plug-in makes
requests wait. The queue is called soon after each event that changes the picker's state. Pages are
read when they are needed, so a queue with requests reads them at each scrape interval.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.pool import UPSTREAM_FAILURES
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.flow_queue import FlowQueue, Place
from epp.core.protocol.waiting import Resolution, Resume
from epp.core.types import Endpoint, Refusal, Seconds
from sim.cluster.assignment import Assigner
from sim.cluster.kv_events import Listener
from sim.cluster.loop import Loop
from sim.cluster.peering import Peering
from sim.cluster.pods import Pods
from sim.cluster.policies import Policy, PolicySource, Route, route_of, scheduler_of
from sim.cluster.prefill_rules import PrefillRule, decodes, prefills
from sim.cluster.scraping import Scraper
from sim.cluster.settings import Absence, ClusterSettings
from sim.cluster.simulated_pod import SimulatedPod
from sim.cluster.simulated_request import SimulatedRequest


class Pickers:
    """All pickers of a simulated cluster, numbered from 0 (their replica number).
    `open_policy(seed)` creates the policy of one.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        loop: Loop,
        pods: Pods,
        open_policy: Callable[[int], Policy],
        *,
        seed: int,
        prefill_rule: PrefillRule | None = None,
    ) -> None:
        """Create the pickers. With a `prefill_rule`, they choose among pods that decode, and the
        rule chooses prefill pods.
        """
        self._settings = settings
        self._loop = loop
        self._pods = pods
        self._prefill_rule = prefill_rule
        self._prefill: list[Endpoint] = []
        """Announced endpoints with a prefill role; empty if the cluster has no rule that chooses
        prefill pods.
        """
        self._open_policy = open_policy
        self._seed = seed
        self.policies = [self._open(at) for at in range(settings.replicas)]
        self.assigner = Assigner(settings.assignment, settings.replicas, seed)
        """Chooser of the picker for each request, among the pickers that run."""
        self.peering = Peering(loop, settings.peers, replicas=settings.replicas, seed=seed)
        self._scrapers: list[dict[str, Scraper]] = [{} for _ in self.policies]
        """Scrapers of pods by id of the endpoint, one dictionary for each picker."""
        self._listeners = [self._listener(replica) for replica in range(settings.replicas)]
        self.queues = [self._queue(replica) for replica in range(settings.replicas)]
        """Queue of each picker, or None for a baseline, which has none."""
        self._resting = False
        """True while pickers neither scrape nor send to peers, until `wake` is called."""
        self.announce()
        # The pickers ran before the traffic, so each has scraped every pod once.
        for policy, scrapers in zip(self.policies, self._scrapers, strict=True):
            for scraper in scrapers.values():
                page = scraper.pod.page(loop.now)
                assert page is not None, "a pod begins alive"
                policy.observe(scraper.endpoint, page, loop.now)
        self._start_all()

    @property
    def evict(self) -> bool:
        """True if the configuration of a picker allows evictions."""
        return any(queue is not None and queue.control.settings.evicts for queue in self.queues)

    # Requests to the pickers.

    def enter(
        self, request: SimulatedRequest, resolution: Resolution, resume: Resume
    ) -> Route | Refusal | Place:
        """Return the decision of the picker of `request`, or the place of the request in the
        picker's queue. `resume` is then called with the decision or refusal later. The picker first
        reads all pages and KV-cache events that have arrived.

        If `resolution` is a refusal, return that without asking the policy.
        """
        replica, now = request.replica, self._loop.now
        assert replica is not None
        self.read_pages(replica)
        policy = request.policy = self.policies[replica]
        if isinstance(resolution, Refusal):
            return resolution
        assert isinstance(resolution, InferenceRequest)
        queue = self.queues[replica]
        if queue is None or not queue.active:
            return self._routed(request, resolution, policy.route(resolution, now))
        entered = queue.enter(resolution, resume, now)
        if isinstance(entered, Place):
            self.peering.touched(replica)
            return entered
        routed = entered if isinstance(entered, Refusal) else route_of(entered)
        return self._routed(request, resolution, routed)

    def decided(self, request: SimulatedRequest, result: Resolution) -> Route | Refusal:
        """Return the route or the refusal by `result`, the verdict of the queue about `request`,
        which waited.
        """
        assert request.place is not None
        assert not isinstance(result, InferenceRequest)
        routed = result if isinstance(result, Refusal) else route_of(result)
        return self._routed(request, request.place.ticket.request, routed)

    def _routed(
        self, request: SimulatedRequest, asked: InferenceRequest, routed: Route | Refusal
    ) -> Route | Refusal:
        """Return `routed`, unchanged if it is a refusal. A route gets the prefill pod that the
        prefill rule chooses. Without a rule, it gets that of the picker's decision if the cluster
        transfers KV blocks.
        """
        rule = self._prefill_rule
        if rule is not None and isinstance(routed, Route):
            routed.prefill = rule.choose(asked, routed.endpoint, self._prefill)
        elif self._settings.kv_transfer is not None and isinstance(routed, Route):
            routed.prefill = None if routed.decision is None else routed.decision.prefiller
        assert request.replica is not None
        self.peering.touched(request.replica)
        return routed

    def response_started(self, request: SimulatedRequest) -> None:
        """Report to the picker that routed `request`, which several endpoints serve, that the
        gateway has received the response headers.
        """
        policy, route, replica = _routed(request)
        policy.response_started(route, self._loop.now)
        self.peering.touched(replica)

    def first_output(self, request: SimulatedRequest) -> None:
        """Report to the picker that routed `request` that the answer has begun."""
        policy, route, replica = _routed(request)
        policy.first_output(route, self._loop.now)
        self.peering.touched(replica)

    def reschedule(self, request: SimulatedRequest, served: Endpoint) -> None:
        """Report to the picker that routed `request` that the gateway reached the fallback endpoint
        `served` instead of the first one.
        """
        policy, route, replica = _routed(request)
        policy.reschedule(route, served, self._loop.now)
        self.peering.touched(replica)

    def complete(self, request: SimulatedRequest, outcome: Outcome) -> None:
        """Report to the picker that routed `request` that the request has ended with `outcome`."""
        policy, route, replica = _routed(request)
        if outcome.status in UPSTREAM_FAILURES:
            # A successful scrape between two failures must be processed before the second failure.
            self.read_pages(replica)
        queue, place = self.queues[replica], request.place
        if queue is not None and place is not None:
            queue.settled(place, outcome, self._loop.now)
        policy.complete(route, outcome, self._loop.now)
        self.peering.touched(replica)

    def offer(self, request: SimulatedRequest, evict: Callable[[Refusal], None]) -> None:
        """Let the picker that routed `request` evict it until `spare` is called, if the picker's
        settings allow it and the request has a negative priority. `evict` then ends the request
        with a refusal.
        """
        _, route, replica = _routed(request)
        queue = self.queues[replica]
        if route.decision is None or queue is None or route.decision.lease.request.priority >= 0:
            return
        running = queue.placed(route.decision, evict)
        if running is not None:
            request.spare = partial(queue.spare, running)

    def spare(self, request: SimulatedRequest) -> None:
        """Protect `request` against eviction, because its response begins or it ends."""
        if request.spare is not None:
            request.spare()
            request.spare = None

    def configure(self, source: PolicySource) -> None:
        """Switch all pickers, and those that start later, to the configuration of `source`, which
        must not be a baseline.
        """
        self._open_policy = self._settings.opener(source)
        settings = self._open_policy(0).settings
        assert settings is not None, f"{source.name} has no configuration"
        for replica, policy in enumerate(self.policies):
            self.read_pages(replica)
            policy.configure(settings, self._loop.now)
            queue = self.queues[replica]
            assert queue is not None, "a policy with settings has a scheduler"
            queue.configure(self._loop.now)
            self._listen(replica)

    def tick(self) -> None:
        """Let time pass in all pickers; called about once a second."""
        for policy, listener in zip(self.policies, self._listeners, strict=True):
            if listener is not None:
                listener.catch_up(self._loop.now)
            policy.tick(self._loop.now)
        self.peering.tick()

    # Knowledge of the pods.

    def announce(self) -> None:
        """Announce the pods that discovery lists now to every picker, which scrapes them from now
        on; baselines scrape none. With a prefill rule, only pods that decode are announced. Do
        nothing while the pickers rest.
        """
        if self._resting:
            return
        if self._prefill_rule is not None:
            self._prefill = [
                pod.endpoint for pod in self._pods.announced() if prefills(pod.kind.labels)
            ]
        announced = self._routable()
        endpoints = [pod.endpoint for pod in announced]
        for replica, policy in enumerate(self.policies):
            policy.replace(endpoints, self._loop.now)
            self._listen(replica)
            if policy.settings is None:
                # A plain proxy scrapes no pods.
                continue
            scrapers = self._scrapers[replica]
            for gone in scrapers.keys() - {endpoint.endpoint_id for endpoint in endpoints}:
                scrapers.pop(gone).stop()
            for pod, endpoint in zip(announced, endpoints, strict=True):
                self._scrape(replica, pod, endpoint)

    def read_pages(self, replica: int) -> None:
        """Pass to picker `replica` the scrape results that it can read by now: of each pod the last
        page, and failed scrapes after it. Pass also all KV-cache events that have arrived.
        """
        policy = self.policies[replica]
        for scraper in self._scrapers[replica].values():
            for read_at, page in scraper.read(self._loop.now):
                if page is None:
                    policy.refused(scraper.endpoint, read_at)
                else:
                    policy.observe(scraper.endpoint, page, read_at)
        listener = self._listeners[replica]
        if listener is not None:
            listener.catch_up(self._loop.now)

    def rest(self) -> None:
        """Stop all scraping by pickers and all sending between them until `wake` is called."""
        self._resting = True
        self.peering.rest()
        for scrapers in self._scrapers:
            for scraper in scrapers.values():
                scraper.stop()
            scrapers.clear()

    def wake(self) -> None:
        """Resume the scraping and sending that `rest` stopped."""
        self._resting = False
        self.peering.wake()
        self.announce()

    def _scrape(self, replica: int, pod: SimulatedPod, endpoint: Endpoint) -> None:
        """Make picker `replica` scrape the pod of `endpoint` from now on, unless it already scrapes
        this incarnation of the pod.
        """
        scrapers, settings = self._scrapers[replica], self._settings
        known = scrapers.get(endpoint.endpoint_id)
        if known is not None:
            if known.endpoint.incarnation == endpoint.incarnation:
                return
            known.stop()
        purpose = f"scrape:{replica}:{pod.place}:{endpoint.incarnation}"
        scrapers[endpoint.endpoint_id] = Scraper(
            pod,
            endpoint,
            Random(f"{self._seed}:{purpose}"),
            self._loop.now,
            interval_s=settings.refresh_interval_s,
            delay_s=settings.scrape_delay_s,
            troubles=[
                trouble
                for trouble in settings.scrape_troubles
                if trouble.concerns(replica, pod.number)
            ],
        )

    def _queue(self, replica: int) -> FlowQueue | None:
        """Return a new queue for the policy of picker `replica`, or None for a baseline."""
        scheduler = scheduler_of(self.policies[replica])
        if scheduler is None:
            return None
        waker = _Waker(self._loop, self._settings.refresh_interval_s)
        queue = FlowQueue(scheduler, waker, self._loop.now)
        waker.drives(queue, lambda: self.read_pages(replica))
        return queue

    def _listener(self, replica: int) -> Listener | None:
        """Return a new listener to KV-cache events for picker `replica`, or None if it receives no
        events.
        """
        scheduler, told = scheduler_of(self.policies[replica]), self._settings.kv_events
        if scheduler is None or told is None:
            return None
        return Listener(scheduler, told, seed=self._seed, replica=replica)

    def _listen(self, replica: int) -> None:
        """Subscribe picker `replica` to the KV-cache events of the announced pods, if it has a
        listener.
        """
        listener = self._listeners[replica]
        if listener is not None:
            listener.replace(self._routable(), self._loop.now)

    def _routable(self) -> list[SimulatedPod]:
        """Return the announced pods that pickers choose among."""
        announced = self._pods.announced()
        if self._prefill_rule is None:
            return announced
        return [pod for pod in announced if decodes(pod.kind.labels)]

    # Start and end of pickers.

    def _open(self, replica: int) -> Policy:
        policy = self._open_policy(_replica_seed(self._seed, replica))
        policy.replicas_unheard(self._settings.replicas - 1)
        return policy

    def _start_all(self) -> None:
        absences = self._settings.absences
        late = {absence.replica for absence in absences if absence.from_s <= 0}
        for replica, policy in enumerate(self.policies):
            if replica not in late:
                self.peering.start(replica, scheduler_of(policy))
        self.peering.greet()
        for absence in absences:
            if absence.from_s <= 0:
                self.assigner.leave(absence.replica)
                self._loop.at(absence.to_s, self._start, absence.replica)
            else:
                self._loop.at(absence.from_s, self._stop, absence)

    def _stop(self, absence: Absence) -> None:
        replica = absence.replica
        self.assigner.leave(replica)
        self.peering.stop(replica)
        queue = self.queues[replica]
        policy = self.policies[replica] = self._open(replica)
        self.queues[replica] = self._queue(replica)
        policy.replace([pod.endpoint for pod in self._routable()], self._loop.now)
        self._listeners[replica] = self._listener(replica)
        self._listen(replica)
        # The streams end with the picker, and so do the waits of their requests.
        if queue is not None:
            queue.drain(self._loop.now)
        self._loop.at(absence.to_s, self._start, replica)

    def _start(self, replica: int) -> None:
        self.peering.start(replica, scheduler_of(self.policies[replica]))
        self.peering.warm(replica, lambda: self.assigner.join(replica))


class _Waker:
    """The `Waker` of a queue in simulated time."""

    def __init__(self, loop: Loop, look_s: Seconds) -> None:
        self._loop = loop
        self._look_s = look_s
        self._soon = False
        self._looking = False
        """True while the picker's metrics pages are read at each scrape interval, because requests
        wait in its queue.
        """
        self._timer = 0
        """Number of the waker's timer that calls the queue; earlier timers do nothing."""
        self._at_s: Seconds | None = None

    def drives(self, queue: FlowQueue, read_pages: Callable[[], None]) -> None:
        """Set the queue that this waker calls when it is due, and the function that reads the
        picker's metrics pages before each call.
        """
        self._queue = queue
        self._read_pages = read_pages

    def soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._loop.after(0.0, self._run)

    def at(self, time_s: Seconds | None) -> None:
        if time_s == self._at_s:
            return
        self._timer += 1
        self._at_s = time_s
        if time_s is not None:
            self._loop.at(time_s, self._ring, self._timer)

    def _ring(self, timer: int) -> None:
        if timer == self._timer:
            self._at_s = None
            self._run()

    def _look(self) -> None:
        self._looking = False
        if self._queue.control.requests:
            # A new page asks for a call of the queue itself.
            self._read_pages()
            self._keep_looking()

    def _keep_looking(self) -> None:
        if not self._looking and self._queue.control.requests:
            self._looking = True
            self._loop.after(self._look_s, self._look)

    def _run(self) -> None:
        self._soon = False
        self._read_pages()
        self._queue.pump(self._loop.now)
        self._keep_looking()


def _routed(request: SimulatedRequest) -> tuple[Policy, Route, int]:
    """Return the policy of the picker that routed `request`, the route, and the picker's number."""
    assert request.policy is not None
    assert request.route is not None
    assert request.replica is not None
    return request.policy, request.route, request.replica


def _replica_seed(seed: int, replica: int) -> int:
    """Return the seed of the policy of picker `replica`. The first picker has the run's `seed`
    itself, as with `epp serve --seed`.
    """
    return seed if replica == 0 else Random(f"{seed}:replica:{replica}").getrandbits(32)
