"""A pool of pods, the pickers that route to it and the clients that use it, in simulated time.

The life of a request: it arrives at a client, reaches a picker after the network delay, is routed
by the production scheduler (`sim/cluster/policies`), reaches its pod after the network delay and what the
server's front end takes, waits and runs in the engine, and its answer comes back after the network
delay. The picker is told of the end when the client is.

Pickers see pods only as production does: announced by discovery some time after they change, and
through pages scraped one by one, with the interval and jitter of `epp/shell/engines/scrape`. A dead
pod refuses connections, and is asked as often as one that lives.
Several pickers see each other's decisions only as far as they tell each other
(`sim/cluster/peering`). With Homing's own Envoy configuration response bodies pass the picker by, so
that it is told of first outputs only with `response_chunks`.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import pairwise
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.pool import UPSTREAM_FAILURES
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.waiting import Resolution, Resolver, Wait
from epp.core.types import Endpoint, Refusal, Seconds
from epp.flags.serve import REFRESH_MIN_S, REFRESH_PER_ENDPOINT_S
from sim.cluster.assignment import Assigner, Assignment
from sim.cluster.clients import RETRIED, Clients
from sim.cluster.faults import Fault, FaultKind
from sim.cluster.loop import Loop
from sim.cluster.peering import SNAPSHOT_S_MAX, Peering, PeerSettings
from sim.cluster.pod_count import PodCount
from sim.cluster.policies import Policy, PolicySource, Route, scheduler_of
from sim.cluster.rerouting import Connections, Reschedule
from sim.cluster.scraping import Scraper, ScrapeTrouble
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.engine.engine import EngineRequest, Step
from sim.engine.prompt_cache import PromptParts
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

SCRAPE_INTERVAL_S_MIN: Final = REFRESH_MIN_S
SCRAPE_INTERVAL_S_PER_POD: Final = REFRESH_PER_ENDPOINT_S
"""Both: as `epp/shell/engines/scrape` has them."""

_LOOK_AHEAD_S: Final = 60.0

REST_S_MIN: Final = 600.0
"""So long without a request nothing is asked and told until `_LOOK_AHEAD_S` before the next: of a
scrape or a tick in between nothing would be left by then."""

ENDED_MAX: Final = 65_536
"""Requests of which the end is remembered for the turns that come after them."""

TICK_S: Final = 1.0
"""As `epp serve` calls `Scheduler.tick`."""


class ClusterSettingsError(ValueError):
    """Settings that do not go together: one sentence."""


class Absence(Struct, frozen=True):
    """Picker `replica` dies at `from_s`, and a new process takes its place at `to_s`.

    From 0 on: it joins late. The new process knows nothing, scrapes from `from_s` on and gets
    requests from `to_s` on, or once it has a snapshot of its peers. Requests go to the others
    meanwhile; where there are none the gateway refuses them. Answers that were under way are served.
    """

    replica: int
    from_s: Seconds
    to_s: Seconds


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """The pool and all that separates the picker's view from the truth.

    Raises `ClusterSettingsError`.
    """

    pods: tuple[PodKind, ...]
    replicas: int = 1
    """Pickers."""
    assignment: Assignment = Assignment.RANDOM
    """Which of them a request reaches."""
    peers: PeerSettings | None = None
    """How they tell each other what they decide; None: each is blind to the others."""
    absences: tuple[Absence, ...] = ()
    fallback_endpoints_max: int = 0
    """Endpoints that a picker names besides the first, which the gateway asks if it does not get through."""
    reschedules: tuple[Reschedule, ...] = ()
    scrape_interval_s: Seconds | None = None
    """Mean time between two scrapes of a pod; None: as production, by the number of pods."""
    scrape_delay_s: Seconds = 0.001
    """From the instant that a page shows to the picker that has read it."""
    scrape_troubles: tuple[ScrapeTrouble, ...] = ()
    network_delay_s: Seconds = 0.0005
    """One way, client to picker and picker to pod alike."""
    discovery_delay_s: Seconds = 1.0
    """From a change of the pool to the pickers that know of it."""
    response_chunks: bool = False
    """The gateway shows response bodies to the picker, which thus knows of first tokens."""
    abort_share: float = 0.0
    """Share of the requests whose client leaves if the answer takes too long."""
    abort_after_s: Seconds = 10.0
    """Mean of the exponentially distributed patience of those clients."""
    clients: Clients = Clients()

    @property
    def refresh_interval_s(self) -> Seconds:
        """Mean time between two scrapes of a pod, in effect."""
        if self.scrape_interval_s is not None:
            return self.scrape_interval_s
        return max(SCRAPE_INTERVAL_S_MIN, SCRAPE_INTERVAL_S_PER_POD * len(self.pods))

    @property
    def prefill_tokens_per_s(self) -> float:
        """What pickers are told of every pod unless their configuration tells them: what it does.

        Where pods differ, what a picker assumes that nobody tells anything.
        """
        speeds = {kind.prefill_tokens_per_s for kind in self.pods}
        return speeds.pop() if len(speeds) == 1 else PREFILL_TOKENS_PER_S

    def opener(self, source: PolicySource) -> Callable[[int], Policy]:
        """Seed -> a new picker of this pool, which decides by `source`."""
        return source.opener(
            self.refresh_interval_s, self.prefill_tokens_per_s, self.fallback_endpoints_max
        )

    def __post_init__(self) -> None:
        _check_pickers(self)


class Fate(StrEnum):
    """How a request ended for its client. Each has exactly one."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """By the picker."""
    FAILED = "failed"
    """The pod could not serve it, or died."""
    ABORTED = "aborted"
    """The client left."""


class Failure(StrEnum):
    """Why a pod did not serve a request."""

    CONTEXT = "longer than the model's context"
    KV_CACHE = "longer than the KV cache"
    ADAPTER = "for an adapter, without adapter slots"
    POD_DIED = "the pod died"
    UNREACHABLE = "the gateway did not get through"
    NO_PICKER = "no picker was there"


NO_PICKER_STATUS: Final = 500
"""What Envoy answers for a picker that it does not reach, unless it fails open (docs/protocol.md)."""

_ASKED_AGAIN: Final = frozenset({Failure.POD_DIED, Failure.NO_PICKER})
"""What clients send again besides what they are told to."""


class SimulatedRequest:
    """One request and all that happened to it. Times are simulated seconds."""

    __slots__ = (
        "arrival", "arrived_at", "ended_at", "engine", "failure", "fate", "finished_at", "first_token_at", "hashes",
        "life", "metrics_age_s", "passed_over", "pod", "policy", "predicted_cached_tokens", "refusal", "replica", "retries",
        "route", "routed_at", "sequence", "status", "submitted_at", "wait",
    )  # fmt: skip

    def __init__(
        self, sequence: int, arrival: Arrival, arrived_at: Seconds, replica: int | None
    ) -> None:
        self.sequence = sequence
        """Counts requests from 0, in the order of their arrival."""
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.replica = replica
        """None: there is no picker."""
        self.retries = 0
        """How often it was sent again; what follows is of the last time."""
        self.forget_attempt()

    def forget_attempt(self) -> None:
        """Nothing has happened to it since it was sent."""
        self.routed_at: Seconds | None = None
        self.wait: Wait | None = None
        """It waits at its picker, which has read it and cannot place it yet."""
        self.route: Route | None = None
        self.policy: Policy | None = None
        """The process that routed it, which may be gone since."""
        self.refusal: Refusal | None = None
        self.pod: SimulatedPod | None = None
        """Which serves it, or is asked to."""
        self.passed_over = 0
        """Endpoints that the picker named and that the gateway did not get through to."""
        self.life = 0
        self.predicted_cached_tokens = 0
        self.metrics_age_s: Seconds = math.inf
        """How old the chosen pod's metrics were when it was chosen; infinite if unknown."""
        self.submitted_at: Seconds | None = None
        self.hashes: PromptHashes | None = None
        """From the picker to the engine."""
        self.engine: EngineRequest | None = None
        self.first_token_at: Seconds | None = None
        self.finished_at: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.fate: Fate | None = None
        self.failure: Failure | None = None
        self.status = 0
        """HTTP status, 0 until there is one."""

    @property
    def request_id(self) -> str:
        return str(self.sequence)


class Cluster:
    """Runs `arrivals` through pickers and pods; `ended` gets each request when it ends.

    `stepped` gets each step of each pod when it ends.
    `open_policy(seed)` makes a picker, `request_of` the request as it has parsed it. `seed` decides
    everything that is drawn: nothing else does.
    """

    def __init__(  # noqa: PLR0913, PLR0915  all that a run is made of
        self,
        settings: ClusterSettings,
        open_policy: Callable[[int], Policy],
        request_of: Callable[[Arrival, PromptHashes], InferenceRequest],
        arrivals: Iterable[Arrival],
        *,
        seed: int,
        ended: Callable[[SimulatedRequest], None],
        stepped: Callable[[Step], None] | None = None,
        faults: Iterable[Fault] = (),
        resolver: Resolver | None = None,
    ) -> None:
        """`resolver`: what requests may have to wait for before pickers place them."""
        self.settings = settings
        self._resolver = resolver
        self.loop = Loop()
        self._seed = seed
        self._open_policy = open_policy
        self.policies = [self._open_picker(at) for at in range(settings.replicas)]
        self.pods: list[SimulatedPod] = []
        self.pod_count = PodCount(self.loop)
        self._pods_expected = 0
        self.requests: dict[int, SimulatedRequest] = {}
        """What has arrived and not ended, by sequence number."""
        self.arrived = 0
        self.retried = 0
        """Times that a client has sent a request again."""
        self.rescheduled = 0
        """Requests that a pod took that was not the first that the picker named."""
        self.ended: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self._request_of = request_of
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._pending_arrivals = 0
        self._next_arrival_at: Seconds = 0.0
        self._thinking: list[Seconds] = []
        """Heap of the instants at which the next turns will be sent."""
        self._tell_ended = ended
        self._tell_stepped = stepped
        self._faults = iter(faults)
        self._resting = False
        """Nobody is scraped or told anything until `_wake`."""
        self._under_way: set[int] = set()
        """Indices of the requests that were sent, or are going to be, and have not ended."""
        self._waiting: dict[int, list[Arrival]] = {}
        """Index of a request under way -> the turns that wait for its answer."""
        self._ended_at: dict[int, Seconds] = {}
        """When the last ones ended, by index."""
        self._assigner = Assigner(settings.assignment, settings.replicas, seed)
        self._peering = Peering(self.loop, settings.peers, replicas=settings.replicas, seed=seed)
        self._connections = Connections(settings.reschedules, seed=seed)
        self._random_abort = Random(f"{seed}:abort")
        self._scrapers: list[dict[str, Scraper]] = [{} for _ in self.policies]
        """Of each picker, by endpoint."""
        self._by_endpoint: dict[str, SimulatedPod] = {}
        for kind in settings.pods:
            self._add_pod(kind)
        self._count_pods()
        self._announce()
        # The pickers were there before the traffic: each has scraped every pod once.
        for policy, scrapers in zip(self.policies, self._scrapers, strict=True):
            for scraper in scrapers.values():
                page = scraper.pod.page(self.loop.now)
                assert page is not None, "a pod begins alive"
                policy.observe(scraper.endpoint, page, self.loop.now)
        self._start_pickers()
        self.loop.after(TICK_S, self._tick)
        self._pull()
        self._pull_fault()

    def __repr__(self) -> str:
        return (
            f"<Cluster [{len(self.pods)} pods, {len(self.requests)} requests, {self.loop.now} s]>"
        )

    @property
    def done(self) -> bool:
        """No request is under way and none will arrive."""
        return not self.requests and not self._pending_arrivals

    def run(self, after_event: Callable[[], None] | None = None) -> None:
        """Until the last request has ended. `after_event` is called after each event."""
        if not self.done:
            self.loop.run(after_event)

    # Clients.

    def send(self, arrivals: Iterable[Arrival]) -> None:
        """Go on with these where all that was there before has been sent; `run` again."""
        assert self._next_arrival_at == math.inf, "the arrivals before have come"
        self._arrivals = iter(arrivals)
        self._pull()

    def _pull(self) -> None:
        """Schedule the next arrival of the trace, if there is one."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._next_arrival_at = math.inf
            return
        self._pending_arrivals += 1
        self._next_arrival_at = max(self.loop.now, arrival.time_s)
        self.loop.at(self._next_arrival_at, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._pending_arrivals -= 1
        self._pull()
        first = arrival.after
        if first is None:
            self._send(arrival)
        elif first in self._under_way:
            self._pending_arrivals += 1
            self._under_way.add(arrival.index)
            self._waiting.setdefault(first, []).append(arrival)
        else:
            # Its answer is there already, unless the trace has lost it.
            self._think(arrival, self._ended_at.get(first, -arrival.think_s) + arrival.think_s)

    def _think(self, arrival: Arrival, until: Seconds) -> None:
        self._pending_arrivals += 1
        self._under_way.add(arrival.index)
        send_at = max(self.loop.now, until)
        heapq.heappush(self._thinking, send_at)
        self.loop.at(send_at, self._send_turn, arrival)

    def _send_turn(self, arrival: Arrival) -> None:
        self._pending_arrivals -= 1
        heapq.heappop(self._thinking)
        self._send(arrival)

    def _send(self, arrival: Arrival) -> None:
        replica = self._assigner.choose(arrival.session)
        request = SimulatedRequest(self.arrived, arrival, self.loop.now, replica)
        self.requests[request.sequence] = request
        self._under_way.add(arrival.index)
        self.arrived += 1
        self.loop.after(self.settings.network_delay_s, self._route, request)
        if self.settings.clients.timeout_s is not None:
            self.loop.after(self.settings.clients.timeout_s, self._leave, request)
        if self.settings.abort_share:
            leaves = self._random_abort.random() < self.settings.abort_share
            patience_s = self._random_abort.expovariate(1 / self.settings.abort_after_s)
            if leaves:
                self.loop.after(patience_s, self._leave, request)

    def _leave(self, request: SimulatedRequest) -> None:
        """The client hangs up, unless its answer is already on the way."""
        if request.fate is not None or request.finished_at is not None:
            return
        pod = request.pod
        if pod is not None and pod.requests.pop(request.request_id, None) is not None:
            pod.abort(request.request_id)
        self._complete(request, Ending.CLIENT_LEFT, 200 if request.submitted_at is not None else 0)
        self._end(request, Fate.ABORTED)

    def _retry(self, request: SimulatedRequest) -> None:
        """The client asks again; a turn that waits for the answer goes on waiting."""
        clients = self.settings.clients
        pause_s = clients.pause_before_s(request.retries)
        request.retries += 1
        self.retried += 1
        request.forget_attempt()
        request.replica = self._assigner.choose(request.arrival.session)
        self.loop.after(pause_s + self.settings.network_delay_s, self._route, request)

    def _is_retried(self, request: SimulatedRequest, fate: Fate) -> bool:
        if request.retries >= self.settings.clients.retries or fate is Fate.ABORTED:
            return False
        return request.status in RETRIED or request.failure in _ASKED_AGAIN

    def _end(self, request: SimulatedRequest, fate: Fate) -> None:
        if request.fate is not None:
            return
        if request.wait is not None:
            request.wait.cancel()
            request.wait = None
        if self._is_retried(request, fate):
            self._retry(request)
            return
        request.fate = fate
        request.ended_at = self.loop.now
        self.ended[fate] += 1
        del self.requests[request.sequence]
        index = request.arrival.index
        self._under_way.discard(index)
        self._ended_at[index] = self.loop.now
        if len(self._ended_at) > ENDED_MAX:
            del self._ended_at[next(iter(self._ended_at))]
        for turn in self._waiting.pop(index, ()):
            self._pending_arrivals -= 1
            self._think(turn, self.loop.now + turn.think_s)
        self._tell_ended(request)
        if self.done:
            self.loop.stop()

    # Pickers.

    def _route(self, request: SimulatedRequest) -> None:
        if request.fate is not None:
            return
        now = self.loop.now
        if not self._assigner.is_there(request.replica):
            # It died on the way.
            request.replica = self._assigner.choose(request.arrival.session)
        if request.replica is None:
            self._fail(request, Failure.NO_PICKER, NO_PICKER_STATUS)
            return
        request.routed_at = now
        request.hashes = PromptHashes(request.arrival)
        parsed = self._request_of(request.arrival, request.hashes)
        if self._resolver is not None:
            request.wait = self._resolver.begin(parsed, partial(self._resolved, request))
            if request.wait is not None:
                return
        self._place(request, parsed)

    def _resolved(self, request: SimulatedRequest, resolution: Resolution) -> None:
        """What `request` waited for is there."""
        if request.wait is None:
            return
        request.wait = None
        if not self._assigner.is_there(request.replica):
            # Its stream ended with the picker.
            self._fail(request, Failure.NO_PICKER, NO_PICKER_STATUS)
            return
        self._place(request, resolution)

    def _place(self, request: SimulatedRequest, resolution: Resolution) -> None:
        """Have its picker route `request`, unless it is refused already."""
        assert request.replica is not None
        now = self.loop.now
        self._read_pages(request.replica, now)
        request.policy = self.policies[request.replica]
        routed = (
            resolution if isinstance(resolution, Refusal) else request.policy.route(resolution, now)
        )
        self._peering.touched(request.replica)
        if isinstance(routed, Refusal):
            request.refusal = routed
            request.status = routed.status
            self.loop.after(self.settings.network_delay_s, self._end, request, Fate.REFUSED)
            return
        request.route = routed
        request.predicted_cached_tokens = routed.predicted_cached_tokens
        if routed.decision is not None:
            decision = routed.decision
            request.metrics_age_s = decision.candidates.metrics_age_s_of(decision.picked)
        self._ask(request, routed.endpoint, self.settings.network_delay_s)

    def _complete(self, request: SimulatedRequest, ending: Ending, status: int) -> None:
        """Tell the picker, to which the response has been visible, that it is over."""
        request.status = status
        if request.route is not None:
            assert request.policy is not None
            assert request.replica is not None
            # No pod here says 503 itself: it is what a gateway says of one that is gone.
            outcome = Outcome(ending=ending, status=status or None, by_gateway=status == 503)
            if status in UPSTREAM_FAILURES:
                # A good page between two failures would have parted them.
                self._read_pages(request.replica, self.loop.now)
            request.policy.complete(request.route, outcome, self.loop.now)
            self._peering.touched(request.replica)

    def _announce(self) -> None:
        """Discovery tells every picker which pods there are now."""
        if self._resting:
            return
        alive = [pod for pod in self.pods if pod.announced]
        endpoints = [pod.endpoint for pod in alive]
        now = self.loop.now
        for replica, policy in enumerate(self.policies):
            policy.replace(endpoints, now)
            if policy.settings is None:
                # A plain proxy scrapes nobody.
                continue
            scrapers = self._scrapers[replica]
            for gone in scrapers.keys() - {endpoint.endpoint_id for endpoint in endpoints}:
                scrapers.pop(gone).stop()
            for pod, endpoint in zip(alive, endpoints, strict=True):
                self._scrape(replica, pod, endpoint)

    def _scrape(self, replica: int, pod: SimulatedPod, endpoint: Endpoint) -> None:
        """Have a picker scrape this incarnation of a pod from now on."""
        scrapers = self._scrapers[replica]
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
            self.loop.now,
            interval_s=self.settings.refresh_interval_s,
            delay_s=self.settings.scrape_delay_s,
            troubles=[
                trouble
                for trouble in self.settings.scrape_troubles
                if trouble.concerns(replica, pod.number)
            ],
        )

    def _next_sent_at(self) -> Seconds:
        """When the next request that is known of will be sent."""
        return min(self._next_arrival_at, self._thinking[0] if self._thinking else math.inf)

    def _read_pages(self, replica: int, now: Seconds) -> None:
        """Tell a picker what its scrapes have read by now."""
        policy = self.policies[replica]
        for scraper in self._scrapers[replica].values():
            for read_at, page in scraper.read(now):
                if page is None:
                    policy.refused(scraper.endpoint, read_at)
                else:
                    policy.observe(scraper.endpoint, page, read_at)

    def _tick(self) -> None:
        for policy in self.policies:
            policy.tick(self.loop.now)
        self._peering.tick()
        if not self.requests:
            sent_at = self._next_sent_at()
            if self.loop.now + REST_S_MIN < sent_at < math.inf:
                self._rest(sent_at - _LOOK_AHEAD_S)
                return
        self.loop.after(TICK_S, self._tick)

    def _rest(self, until: Seconds) -> None:
        self._resting = True
        self._peering.rest()
        for scrapers in self._scrapers:
            for scraper in scrapers.values():
                scraper.stop()
            scrapers.clear()
        self.loop.at(until, self._wake)

    def _wake(self) -> None:
        self._resting = False
        self._peering.wake()
        self._announce()
        self._tick()

    # Pickers that come and go.

    def peer_summary(self) -> dict[str, int] | None:
        """What pickers told each other; None if they do not."""
        return self._peering.summary()

    def _open_picker(self, replica: int) -> Policy:
        policy = self._open_policy(_replica_seed(self._seed, replica))
        policy.replicas_unheard(self.settings.replicas - 1)
        return policy

    def _start_pickers(self) -> None:
        late = {absence.replica for absence in self.settings.absences if absence.from_s <= 0}
        for replica, policy in enumerate(self.policies):
            if replica not in late:
                self._peering.start(replica, scheduler_of(policy))
        self._peering.greet()
        for absence in self.settings.absences:
            if absence.from_s <= 0:
                self._assigner.leave(absence.replica)
                self.loop.at(absence.to_s, self._start_picker, absence.replica)
            else:
                self.loop.at(absence.from_s, self._stop_picker, absence)

    def _stop_picker(self, absence: Absence) -> None:
        replica = absence.replica
        self._assigner.leave(replica)
        self._peering.stop(replica)
        policy = self.policies[replica] = self._open_picker(replica)
        policy.replace([pod.endpoint for pod in self.pods if pod.announced], self.loop.now)
        self.loop.at(absence.to_s, self._start_picker, replica)

    def _start_picker(self, replica: int) -> None:
        self._peering.start(replica, scheduler_of(self.policies[replica]))
        self._peering.warm(replica, lambda: self._assigner.join(replica))

    def configure(self, source: PolicySource) -> None:
        """All pickers, and those that start from now on, decide by `source`, which is no baseline."""
        self._open_policy = self.settings.opener(source)
        settings = self._open_policy(0).settings
        assert settings is not None, f"{source.name} has no configuration"
        for replica, policy in enumerate(self.policies):
            self._read_pages(replica, self.loop.now)
            policy.configure(settings, self.loop.now)

    # Pods.

    def expect_pods(self, count: int) -> None:
        """So many more pods are starting; fewer, if it is negative."""
        self._pods_expected += count
        self._count_pods()

    def add_pods(self, kinds: Sequence[PodKind]) -> None:
        """New pods, which were expected and which discovery announces."""
        self._pods_expected -= len(kinds)
        for kind in kinds:
            self._add_pod(kind)
        self._count_pods()
        self._announce_later()

    def drain_pod(self, pod: SimulatedPod) -> None:
        """Discovery announces a pod no more, which goes on serving."""
        pod.draining = True
        self._announce_later()

    def end_pod(self, pod: SimulatedPod) -> None:
        """A pod is gone with the requests that it has, if it is there."""
        if pod.alive:
            self._kill(pod)
            self._announce_later()

    def restart_pod(self, pod: SimulatedPod) -> None:
        """A pod that was ended is there again, empty; one that lives is left alone."""
        if not pod.alive:
            pod.restart()
            self._count_pods()
            self._announce_later()

    def _announce_later(self) -> None:
        self.loop.after(self.settings.discovery_delay_s, self._announce)

    def _add_pod(self, kind: PodKind) -> None:
        number = len(self.pods)
        # As uids of real pods, other ones each time: what is placed by a hash of them is placed by luck.
        uid = f"pod-{number}.{self._seed}"
        pod = SimulatedPod(number, uid, kind, self.loop, self._stepped)
        self.pods.append(pod)
        self._by_endpoint[pod.endpoint.endpoint_id] = pod

    def _count_pods(self) -> None:
        there = sum(pod.alive or pod.returns for pod in self.pods)
        self.pod_count.change(there + self._pods_expected)

    # The gateway between pickers and pods.

    def _ask(self, request: SimulatedRequest, endpoint: Endpoint, delay_s: Seconds) -> None:
        """Have the gateway send `request` to `endpoint`, which it has there after `delay_s`."""
        pod = self._by_endpoint[endpoint.endpoint_id]
        request.pod = pod
        request.life = pod.life
        frontend_s = pod.kind.profile.frontend_delay_s(request.arrival.prompt_tokens)
        self.loop.after(delay_s + frontend_s, self._submit, request)

    def _pass_over(self, request: SimulatedRequest, failure: Failure) -> None:
        """The gateway asks the next endpoint that the picker has named, if there is one."""
        assert request.route is not None
        decision = request.route.decision
        others = () if decision is None else decision.fallbacks
        if request.passed_over == len(others):
            self._fail(request, failure, 503)
            return
        request.passed_over += 1
        # Its connection came back refused.
        delay_s = 2 * self.settings.network_delay_s
        self._ask(request, others[request.passed_over - 1], delay_s)

    def _reschedule(self, request: SimulatedRequest, route: Route) -> None:
        """The head of a response tells its picker which endpoint has sent it."""
        if request.fate is None and request.route is route:
            assert request.pod is not None
            assert request.policy is not None
            assert request.replica is not None
            request.policy.reschedule(route, request.pod.endpoint, self.loop.now)
            self._peering.touched(request.replica)

    def _gets_through(self, request: SimulatedRequest, pod: SimulatedPod) -> bool:
        """Only of the endpoint named first is it said in a scenario that it cannot be reached."""
        if request.passed_over or not self.settings.reschedules:
            return True
        index = request.arrival.index
        return not self._connections.fails(pod.number, index, request.retries, self.loop.now)

    def _submit(self, request: SimulatedRequest) -> None:
        if request.fate is not None:
            return
        pod, arrival = request.pod, request.arrival
        assert pod is not None
        if not pod.alive or pod.life != request.life:
            self._pass_over(request, Failure.POD_DIED)
            return
        if not self._gets_through(request, pod):
            self._pass_over(request, Failure.UNREACHABLE)
            return
        if request.passed_over:
            self.rescheduled += 1
            self.loop.after(self.settings.network_delay_s, self._reschedule, request, request.route)
        failure = _unfit(pod.kind, arrival)
        if failure is not None:
            # The server says so before it computes anything.
            self._fail(request, failure, 400)
            return
        assert request.hashes is not None
        keys, ends = request.hashes.engine_pieces(pod.kind.engine.block_size_tokens)
        parts = None
        if pod.kind.cache is not None:
            parts = PromptParts(*request.hashes.engine_pieces(1))
        request.hashes = None
        request.engine = EngineRequest(
            request.request_id,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            chain=keys,
            chain_ends=ends,
            adapter=arrival.adapter,
            parts=parts,
        )
        request.submitted_at = self.loop.now
        pod.requests[request.request_id] = request
        pod.submit(request.engine)

    def _stepped(self, pod: SimulatedPod, step: Step) -> None:
        if self._tell_stepped is not None:
            self._tell_stepped(step)
        for engine in step.outputs:
            request = pod.requests.get(engine.request_id)
            if request is None or request.engine is not engine:
                continue
            if request.first_token_at is None:
                request.first_token_at = self.loop.now
                if self.settings.response_chunks:
                    self.loop.after(self.settings.network_delay_s, self._first_output, request)
            if engine.finished:
                request.finished_at = self.loop.now
                del pod.requests[engine.request_id]
                self.loop.after(self.settings.network_delay_s, self._answer, request)

    def _first_output(self, request: SimulatedRequest) -> None:
        if request.fate is None and request.route is not None:
            assert request.policy is not None
            assert request.replica is not None
            request.policy.first_output(request.route, self.loop.now)
            self._peering.touched(request.replica)

    def _answer(self, request: SimulatedRequest) -> None:
        self._complete(request, Ending.COMPLETE, 200)
        self._end(request, Fate.COMPLETE)

    def _fail(self, request: SimulatedRequest, failure: Failure, status: int) -> None:
        request.failure = failure
        self.loop.after(self.settings.network_delay_s, self._failed, request, status)

    def _failed(self, request: SimulatedRequest, status: int) -> None:
        if request.fate is None:
            self._complete(request, Ending.ERROR, status)
            self._end(request, Fate.FAILED)

    # Faults.

    def _pull_fault(self) -> None:
        fault = next(self._faults, None)
        if fault is not None:
            self.loop.at(max(self.loop.now, fault.at_s), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._pull_fault()
        announce = True
        pod = self.pods[fault.pod % len(self.pods)]
        match fault.kind:
            case FaultKind.JOIN:
                self._add_pod(pod.kind)
                self._count_pods()
            case FaultKind.DIE if pod.alive and sum(other.alive for other in self.pods) > 1:
                pod.returns = False
                self._kill(pod)
            case FaultKind.RESTART:
                pod.returns = True
                self._kill(pod)
                self.loop.after(fault.duration_s, self.restart_pod, pod)
            case FaultKind.LAG:
                pod.slow_down(fault.factor)
                self.loop.after(fault.duration_s, self._recover, pod)
                announce = False
            case FaultKind.STALE:
                pod.freeze_page(True)
                self.loop.after(fault.duration_s, pod.freeze_page, False)
                announce = False
            case _:
                announce = False
        if announce:
            self._announce_later()

    def _kill(self, pod: SimulatedPod) -> None:
        pod.die()
        self._count_pods()
        cut = list(pod.requests.values())
        pod.requests.clear()
        for request in cut:
            # The client has seen the head of a response, and then the connection broke.
            self._fail(request, Failure.POD_DIED, 200)

    def _recover(self, pod: SimulatedPod) -> None:
        pod.slow_down(1.0)


def _unfit(kind: PodKind, arrival: Arrival) -> Failure | None:
    """Why a server of this kind answers 400: as `sim/pods/pods` and the engine decide it."""
    tokens = arrival.prompt_tokens + arrival.output_tokens
    if tokens > kind.profile.max_model_len_tokens:
        return Failure.CONTEXT
    if tokens > kind.request_tokens_max:
        return Failure.KV_CACHE
    if arrival.adapter and not kind.engine.max_loras:
        return Failure.ADAPTER
    return None


def _replica_seed(seed: int, replica: int) -> int:
    """The first picker has the seed itself, as `epp serve --seed` would."""
    return seed if replica == 0 else Random(f"{seed}:replica:{replica}").getrandbits(32)


def _check_pickers(settings: ClusterSettings) -> None:
    """`ClusterSettingsError` if something is said of pickers that there are not or cannot be."""
    named = [absence.replica for absence in settings.absences]
    peers = settings.peers
    if peers is not None and settings.replicas > 1:
        named += [slow.replica for slow in peers.slow]
        named += [replica for partition in peers.partitions for replica in partition.side]
    unknown = [replica for replica in named if not 0 <= replica < settings.replicas]
    if unknown:
        raise ClusterSettingsError(
            f"expected a picker from 0 to {settings.replicas - 1}, got {unknown[0]}"
        )
    if settings.reschedules and not settings.fallback_endpoints_max:
        raise ClusterSettingsError(
            f"reschedule at {settings.reschedules[0].from_s:g} s: expected fallback_endpoints_max "
            "(--fallback-endpoints-max) of 1 or more, got 0: pickers name one endpoint alone"
        )
    away_s_min = 2 * settings.refresh_interval_s
    by_replica = sorted(settings.absences, key=lambda absence: (absence.replica, absence.from_s))
    for absence in by_replica:
        if absence.to_s - absence.from_s < away_s_min:
            raise ClusterSettingsError(
                f"picker {absence.replica} scrapes every pod before it is there again: expected an "
                f"absence of {away_s_min:g} s at least, got {absence.to_s - absence.from_s:g} s"
            )
    for before, after in pairwise(by_replica):
        if before.replica == after.replica and after.from_s < before.to_s + SNAPSHOT_S_MAX:
            raise ClusterSettingsError(
                f"picker {after.replica} dies at {after.from_s:g} s: expected that to be "
                f"{SNAPSHOT_S_MAX:g} s at least after it came back, at {before.to_s:g} s"
            )
