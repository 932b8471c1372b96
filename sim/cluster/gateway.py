"""The simulated gateway between clients, pickers and pods. It takes a request through all its
stages.

A request reaches a picker after the network delay. It reaches its pod after another network delay
plus the time of the server's front end. The answer returns after the network delay. The picker sees
the end of a request when the client does. With Homing's own Envoy configuration, response bodies do
not pass through the picker. It therefore sees first outputs only with `response_chunks`.

A picker that evicts a request makes the gateway refuse it and cancel it at its pod. Here a request
may be evicted until its first token or, with a prefill pod, until its decode engine accepts it.

A request with a prefill pod reaches the sidecar of its decode pod first, and its prompt is computed
elsewhere (`sim/cluster/handovers.py`). Without a prefill pod, the sidecar takes no time. The picker
sees the response headers of a request with a prefill pod when the decode engine has accepted it.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import structs

from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.flow_queue import Place
from epp.core.protocol.waiting import Resolution, Resolver
from epp.core.types import Endpoint, Refusal, Seconds
from sim.cluster.handovers import Handover, Handovers
from sim.cluster.loop import Loop
from sim.cluster.pickers import Pickers
from sim.cluster.pods import Pods
from sim.cluster.policies import Route
from sim.cluster.rerouting import Connections
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind, SimulatedPod
from sim.cluster.simulated_request import Failure, Fate, SimulatedRequest
from sim.engine.engine import Step
from sim.engine.request import EngineRequest, PromptParts
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

NO_PICKER_STATUS: Final = 500
"""HTTP status that Envoy returns if it cannot reach a picker, unless it fails open
(docs/protocol.md).
"""


class Gateway:
    """The gateway of a simulated cluster. `ended` is called with each attempt of a request and its
    result, when the client receives the result.

    `request_of` returns a request in the form that pickers parse. `resolver` delays requests before
    pickers place them; None for no delay.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        loop: Loop,
        pods: Pods,
        pickers: Pickers,
        *,
        seed: int,
        request_of: Callable[[Arrival, PromptHashes], InferenceRequest],
        resolver: Resolver | None,
        ended: Callable[[SimulatedRequest, Fate], None],
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._pods = pods
        self._pickers = pickers
        self._request_of = request_of
        self._resolver = resolver
        self._ended = ended
        self.handovers = Handovers(settings.kv_transfer, loop, pods, self)
        """Prefill legs and KV transfers of requests that have a prefill pod."""
        self.decided: Callable[[SimulatedRequest], None] | None = None
        """Function that is called with each request as soon as an attempt of its client is routed,
        before it is sent to its pod; None for none.
        """
        self._connections = Connections(settings.reschedules, seed=seed)
        self.rescheduled = 0
        """Number of attempts of clients, over all requests, that reached a fallback pod because the
        gateway could not connect to the first one that the picker named.
        """
        self.evicted = 0
        """Number of evictions of requests by pickers; each attempt of a client counts."""

    # Calls from clients.

    def take(self, request: SimulatedRequest, pause_s: Seconds = 0.0) -> None:
        """Send `request` to one of the running pickers after `pause_s` seconds and the network
        delay.
        """
        request.replica = self._pickers.assigner.choose(request.arrival.session)
        request.sent_at = self._loop.now + pause_s
        self._loop.after(pause_s + self._settings.network_delay_s, self._route, request)

    def hang_up(self, request: SimulatedRequest) -> None:
        """End `request` as aborted and cancel it at its pods, because its client closes the
        connection. Do nothing if it has ended or its complete answer is on the way.
        """
        if request.fate is not None or request.finished_at is not None:
            return
        self._cancel(request)
        self._complete(request, Ending.CLIENT_LEFT, 200 if request.submitted_at is not None else 0)
        self._end(request, Fate.ABORTED)

    def _cancel(self, request: SimulatedRequest) -> None:
        """Cancel `request` at the pods that have it."""
        pod = request.pod
        if pod is not None and pod.requests.pop(request.request_id, None) is not None:
            pod.abort(request.request_id)
        if request.handover is not None:
            self.handovers.hang_up(request.handover)

    # Calls to pickers.

    def _route(self, request: SimulatedRequest) -> None:
        if request.fate is not None:
            return
        assigner = self._pickers.assigner
        if not assigner.is_running(request.replica):
            # The picker died while the request was on the way.
            request.replica = assigner.choose(request.arrival.session)
        if request.replica is None:
            self._fail(request, Failure.NO_PICKER, NO_PICKER_STATUS)
            return
        request.routed_at = self._loop.now
        request.hashes = PromptHashes(request.arrival)
        parsed = self._request_of(request.arrival, request.hashes)
        if self._resolver is not None:
            request.wait = self._resolver.begin(parsed, b"", partial(self._resolved, request))
            if request.wait is not None:
                return
        self._enter(request, parsed)

    def _resolved(self, request: SimulatedRequest, resolution: Resolution) -> None:
        """Continue with `request` after the resolver's delay; `resolution` is the parsed request or
        a refusal.
        """
        if not self._end_wait(request):
            return
        self._enter(request, resolution)

    def _enter(self, request: SimulatedRequest, resolution: Resolution) -> None:
        """Let the picker place or refuse `request` now, or later if it waits in the picker's queue."""
        entered = self._pickers.enter(request, resolution, partial(self._released, request))
        if isinstance(entered, Place):
            request.wait = request.place = entered
        else:
            self._place(request, entered)

    def _released(self, request: SimulatedRequest, resolution: Resolution) -> None:
        """Send `request` on after its picker has placed or refused it in the queue."""
        if self._end_wait(request):
            self._place(request, self._pickers.decided(request, resolution))

    def _end_wait(self, request: SimulatedRequest) -> bool:
        """End the wait of `request` at its picker. Return False if the request need not continue,
        because it has ended or its picker is gone; in the latter case it fails.
        """
        if request.wait is None:
            return False
        request.wait = None
        if not self._pickers.assigner.is_running(request.replica):
            # The stream ended with the picker.
            self._fail(request, Failure.NO_PICKER, NO_PICKER_STATUS)
            return False
        return True

    def _place(self, request: SimulatedRequest, routed: Route | Refusal) -> None:
        """Send `request` to the endpoint that its picker chose, or end it as refused. `decided` is
        called before it is sent, and the picker may evict it from then on.
        """
        delay_s = self._settings.network_delay_s
        if isinstance(routed, Refusal):
            request.refusal = routed
            request.status = routed.status
            self._loop.after(delay_s, self._end, request, Fate.REFUSED)
            return
        request.route = routed
        request.predicted_cached_tokens = routed.predicted_cached_tokens
        if self.decided is not None:
            self.decided(request)
        decision = routed.decision
        if decision is not None:
            leg = decision.leg
            request.metrics_age_s = leg.candidates.metrics_age_s_of(leg.picked)
        if routed.prefill is not None:
            request.handover = self.handovers.plan(request, routed.prefill)
        self._pickers.offer(request, partial(self._evict, request))
        self._ask(request, routed.endpoint, delay_s)

    def _evict(self, request: SimulatedRequest, refusal: Refusal) -> None:
        """End `request`, whose response has not begun, with `refusal` of the picker that placed it,
        and cancel it at its pods.
        """
        self.evicted += 1
        self._cancel(request)
        self._complete(request, Ending.EVICTED, 0)
        request.forget_placement()
        request.refusal = refusal
        request.status = refusal.status
        self._loop.after(self._settings.network_delay_s, self._end, request, Fate.REFUSED)

    # Calls to pods.

    def _ask(self, request: SimulatedRequest, endpoint: Endpoint, delay_s: Seconds) -> None:
        """Send `request` to the pod of `endpoint`. It arrives at the engine after `delay_s` and the
        time of the server's front end, or, if it has a prefill pod, at the sidecar after `delay_s`.
        """
        pod = self._pods.at(endpoint)
        request.pod = pod
        request.life = pod.life
        if request.handover is not None:
            self._loop.after(delay_s, self._reach_sidecar, request, request.route)
            return
        frontend_s = pod.kind.profile.frontend_delay_s(request.arrival.prompt_tokens)
        self._loop.after(delay_s + frontend_s, self._arrive, request, request.route)

    def _arrive(self, request: SimulatedRequest, route: Route) -> None:
        """Submit `request`, unless it was evicted on its way to the pod of `route`."""
        if request.route is route:
            self._submit(request)

    def _reach_sidecar(self, request: SimulatedRequest, route: Route) -> None:
        """Let the sidecar of the decode pod, which now has `request`, send the prefill leg, unless
        the request was evicted on its way to the pod of `route`.
        """
        if request.route is route and request.fate is None and self._connects(request):
            assert request.pod is not None
            assert request.handover is not None
            request.pod.requests[request.request_id] = request
            self.handovers.begin(request.handover)

    def _submit(self, request: SimulatedRequest) -> None:
        """Give `request` to the engine of its pod, or fail it with 400 if the pod's server rejects
        it. If the pod does not accept the connection, the request goes to the next endpoint or
        fails. The sidecar of the decode pod calls this for a disaggregated request.
        """
        if request.fate is not None:
            return
        handover = request.handover
        if handover is None and not self._connects(request):
            return
        pod, arrival = request.pod, request.arrival
        assert pod is not None
        decision = None if request.route is None else request.route.decision
        rank = None if decision is None else decision.rank
        failure = _unfit(pod.kind, arrival, rank)
        if failure is not None:
            # The server rejects it before it computes anything.
            if handover is not None:
                del pod.requests[request.request_id]
                self.handovers.hang_up(handover)
            self._fail(request, failure, 400)
            return
        request.engine = _engine_request(request, pod.kind)
        if handover is not None:
            request.engine.fetches = True
            self.handovers.decoding(handover, request.engine)
        if handover is None or handover.engine is not None:
            request.hashes = None
        request.submitted_at = self._loop.now
        if handover is not None and _several_endpoints(request):
            # vLLM sends the headers of a streamed answer as soon as it accepts the request. With a
            # serial connector, the prefill leg has ended then.
            self._respond(request)
        pod.requests[request.request_id] = request
        pod.submit(request.engine, rank)

    def _connects(self, request: SimulatedRequest) -> bool:
        """Return whether the pod of `request` accepts the connection. If it does not, the request
        goes to the next endpoint or fails. If a fallback pod accepts it, that is counted and
        reported to the picker. Failures that a scenario defines affect only the endpoint named
        first.
        """
        pod, settings = request.pod, self._settings
        assert pod is not None
        if not pod.alive or pod.life != request.life:
            self._pass_over(request, Failure.POD_DIED)
            return False
        if request.passed_over:
            self.rescheduled += 1
            self._loop.after(settings.network_delay_s, self._reschedule, request, request.route)
        elif settings.reschedules:
            index = request.arrival.index
            if self._connections.fails(pod.number, index, request.retries, self._loop.now):
                self._pass_over(request, Failure.UNREACHABLE)
                return False
        return True

    def _pass_over(self, request: SimulatedRequest, failure: Failure) -> None:
        """Send `request` to the next fallback endpoint that the picker named, or fail it with 503
        if there is none.
        """
        assert request.route is not None
        decision = request.route.decision
        others = () if decision is None else decision.leg.fallbacks
        if request.passed_over == len(others):
            self._fail(request, failure, 503)
            return
        request.passed_over += 1
        # The refused connection took one round trip.
        delay_s = 2 * self._settings.network_delay_s
        self._ask(request, others[request.passed_over - 1], delay_s)

    # Calls from handovers.

    def decode(self, handover: Handover) -> None:
        """Give the request of `handover` to the engine of its decode pod, after the time of that
        server's front end.
        """
        request = handover.request
        assert handover.decode_pod is not None
        profile = handover.decode_pod.kind.profile
        frontend_s = profile.frontend_delay_s(request.arrival.prompt_tokens)
        self._loop.after(frontend_s, self._decode, handover)

    def _decode(self, handover: Handover) -> None:
        # The request may have ended, and its client may have sent it again.
        if not handover.cancelled:
            self._submit(handover.request)

    def unfit(self, request: SimulatedRequest, pod: SimulatedPod) -> Failure | None:
        """Return the reason why the server of the prefill pod `pod` answers 400 to the prefill leg
        of `request`, or None if it accepts the leg.
        """
        return _unfit(pod.kind, structs.replace(request.arrival, output_tokens=1), None)

    def prefill_request(self, request: SimulatedRequest, pod: SimulatedPod) -> EngineRequest:
        """Return the prefill leg of `request` for the engine of `pod`. Drop the hashes of the
        prompt if the decode engine already has the request.
        """
        assert request.hashes is not None
        keys, ends = request.hashes.engine_pieces(pod.kind.engine.block_size_tokens)
        if request.engine is not None:
            request.hashes = None
        leg = EngineRequest(
            f"{request.request_id}-prefill",
            prompt_tokens=request.arrival.prompt_tokens,
            output_tokens=1,
            chain=keys,
            chain_ends=ends,
            adapter=request.arrival.adapter,
        )
        leg.hands_over = True
        return leg

    def fail(self, request: SimulatedRequest, failure: Failure, status: int) -> None:
        """Fail a request whose prefill or KV transfer failed."""
        self._fail(request, failure, status)

    # Calls from pods.

    def stepped(self, pod: SimulatedPod, step: Step) -> None:
        """Process the end of an engine step of `pod`: first tokens and complete answers of its
        requests.
        """
        for engine in step.outputs:
            request = pod.requests.get(engine.request_id)
            if request is None or request.engine is not engine:
                continue
            if engine.hands_over:
                self.handovers.prefilled(request)
                continue
            if request.first_token_at is None:
                request.first_token_at = self._loop.now
                self._pickers.spare(request)
                if request.handover is None and _several_endpoints(request):
                    self._respond(request)
                if self._settings.response_chunks:
                    self._loop.after(self._settings.network_delay_s, self._first_output, request)
            if engine.finished:
                request.finished_at = self._loop.now
                del pod.requests[engine.request_id]
                self._loop.after(self._settings.network_delay_s, self._answer, request)

    def cut(self, request: SimulatedRequest) -> None:
        """Fail a request whose pod died. The status is 200 if the engine had the request, because
        the client has then received the head of a response; else 503, because a sidecar sends no
        head before the prefill has ended.
        """
        if request.handover is not None:
            self.handovers.decode_failed(request.handover)
        self._fail(request, Failure.POD_DIED, 503 if request.submitted_at is None else 200)

    def _respond(self, request: SimulatedRequest) -> None:
        """Send the response headers of `request`, which the picker receives after the network
        delay. The request can no longer be evicted.
        """
        self._pickers.spare(request)
        self._loop.after(self._settings.network_delay_s, self._response_started, request)

    def _reschedule(self, request: SimulatedRequest, route: Route) -> None:
        if request.fate is None and request.route is route:
            assert request.pod is not None
            self._pickers.reschedule(request, request.pod.endpoint)

    def _response_started(self, request: SimulatedRequest) -> None:
        if request.fate is None and request.route is not None:
            self._pickers.response_started(request)

    def _first_output(self, request: SimulatedRequest) -> None:
        if request.fate is None and request.route is not None:
            self._pickers.first_output(request)

    def _answer(self, request: SimulatedRequest) -> None:
        self._complete(request, Ending.COMPLETE, 200)
        self._end(request, Fate.COMPLETE)

    def _fail(self, request: SimulatedRequest, failure: Failure, status: int) -> None:
        request.failure = failure
        self._pickers.spare(request)
        self._loop.after(self._settings.network_delay_s, self._failed, request, status)

    def _failed(self, request: SimulatedRequest, status: int) -> None:
        if request.fate is None:
            self._complete(request, Ending.ERROR, status)
            self._end(request, Fate.FAILED)

    def _complete(self, request: SimulatedRequest, ending: Ending, status: int) -> None:
        """Set the HTTP `status` of the request, and report to the picker that routed it, if any,
        that it ended with `ending` and this status.
        """
        request.status = status
        self._pickers.spare(request)
        if request.route is not None:
            # Pods never return 503 here, so it comes from the gateway, for a pod that is gone.
            tokens = None
            if self._settings.response_chunks and request.engine is not None:
                tokens = request.engine.generated_tokens
            outcome = Outcome(
                ending=ending,
                status=status or None,
                by_gateway=status == 503,
                output_tokens=tokens,
            )
            self._pickers.complete(request, outcome)

    def _end(self, request: SimulatedRequest, fate: Fate) -> None:
        if request.fate is not None:
            return
        if request.wait is not None:
            request.wait.cancel()
            request.wait = None
        self._ended(request, fate)


def _engine_request(request: SimulatedRequest, kind: PodKind) -> EngineRequest:
    """Return `request` in the form that the engine of a pod of this kind receives."""
    hashes, arrival = request.hashes, request.arrival
    assert hashes is not None
    keys, ends = hashes.engine_pieces(kind.engine.block_size_tokens)
    return EngineRequest(
        request.request_id,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        chain=keys,
        chain_ends=ends,
        adapter=arrival.adapter,
        parts=None if kind.cache is None else PromptParts(*hashes.engine_pieces(1)),
    )


def _several_endpoints(request: SimulatedRequest) -> bool:
    """Return whether the picker's decision on `request` has several legs, which may be at one
    endpoint.
    """
    decision = None if request.route is None else request.route.decision
    return decision is not None and bool(decision.earlier)


def _unfit(kind: PodKind, arrival: Arrival, rank: int | None) -> Failure | None:
    """Return the reason why an inference server of this kind answers 400, or None if it accepts the
    request. The rules are those of `sim/pods/pods`.
    """
    tokens = arrival.prompt_tokens + arrival.output_tokens
    if tokens > kind.profile.max_model_len_tokens:
        return Failure.CONTEXT
    if tokens > kind.request_tokens_max:
        return Failure.KV_CACHE
    if arrival.adapter and not kind.engine.max_loras:
        return Failure.ADAPTER
    if rank is not None and rank >= kind.ranks:
        return Failure.RANK
    return None
