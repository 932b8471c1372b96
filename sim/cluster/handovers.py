"""The prefill legs of disaggregated requests, and the transfers of their KV blocks to decode pods.

A request goes to the sidecar of its decode pod. With the serial connector, which is the default,
the sidecar sends a prefill leg to the prefill pod, waits for its end, and then gives the request to
its own engine. With a concurrent connector, both legs are sent at once. The decode engine then
reserves blocks for the whole prompt while the prefill pod still computes.

A transfer begins when the prompt is computed and the decode engine has reserved its blocks. It
moves the blocks that the decode engine's cache lacks. Both pods keep the blocks cached afterwards.

The prefill pod holds the blocks of a finished leg until the transfer has ended, or until the lease
ends. The lease starts at the end of the prefill with `KVConnector.lease_s`. While the decode engine
has the request, it sends a heartbeat every `heartbeat_s`, and each one renews the lease to at least
`renewal_s` from then. A request that leaves the decode engine before its transfer began, because
the client or the engine is gone, sends no more heartbeats; the prefill pod thus holds the blocks
until the lease ends. If the client leaves during a transfer, the transfer goes on to its end, as in
vLLM. A prefill leg whose client leaves before its end is aborted.

If the prefill pod dies, its legs fail with 502, and requests that would read from it with 500, as
with vLLM's default `kv_load_failure_policy`. A transfer that began for a decode pod that died ends.
"""

from typing import Final, Protocol

from msgspec import Struct

from epp.core.types import Endpoint, Seconds
from sim.cluster.links import KVTransferSettings, Network, Nics, Transfer, exposed_share
from sim.cluster.loop import Loop
from sim.cluster.pods import Pods
from sim.cluster.simulated_pod import SimulatedPod
from sim.cluster.simulated_request import Failure, SimulatedRequest
from sim.engine.legs import KVConnector
from sim.engine.links import ACROSS_ZONES_S
from sim.engine.request import EngineRequest

ZONE_LABEL: Final = "topology.kubernetes.io/zone"
PREFILL_DIED_STATUS: Final = 502
LOAD_FAILED_STATUS: Final = 500


class HandoverTotals(Struct):
    """Totals over all handovers (transfers of KV blocks from a prefill pod to a decode pod) of a
    run.
    """

    transfers: int = 0
    """Number of KV transfers that delivered all their bytes."""
    tokens: int = 0
    """Number of prompt tokens whose KV blocks the completed KV transfers moved."""
    size_bytes: float = 0.0
    """Number of bytes that the completed KV transfers moved."""
    transfer_s: Seconds = 0.0
    """Sum over the completed KV transfers of the seconds from the start of a transfer to its end."""
    reservation_s: Seconds = 0.0
    """Sum over the decode legs whose blocks were reserved of the seconds from a leg's arrival at its
    engine to that reservation.
    """
    leases_expired: int = 0
    """Number of leases that ended before the decode engine had read the blocks of the prefill pod.
    """


class Gate(Protocol):
    """The methods of the gateway that handovers call."""

    def decode(self, handover: "Handover") -> None:
        """Give the request of `handover` to the engine of its decode pod, after the time of that
        server's front end.
        """
        ...

    def unfit(self, request: SimulatedRequest, pod: SimulatedPod) -> Failure | None:
        """Return the reason why the server of the prefill pod `pod` would reject the prefill leg of
        `request`, or None if it would accept the leg.
        """
        ...

    def prefill_request(self, request: SimulatedRequest, pod: SimulatedPod) -> EngineRequest:
        """Return the prefill leg of `request` in the form that the engine of `pod` receives."""
        ...

    def fail(self, request: SimulatedRequest, failure: Failure, status: int) -> None:
        """End `request` for the reason `failure`; `status` is its HTTP status."""
        ...


class Handover:
    """One disaggregated request: its prefill leg, and the transfer to its decode leg."""

    __slots__ = (
        "began_at", "cancelled", "decode", "decode_life", "decode_lost_at", "decode_pod",
        "decode_since", "engine", "lease_ends_at", "life", "pod", "prefilled_at", "received_at", "request", "reserved_at",
        "size_bytes", "transfer",
    )  # fmt: skip

    def __init__(self, request: SimulatedRequest, pod: SimulatedPod) -> None:
        self.request = request
        self.pod = pod
        """Prefill pod that computes the prompt of the request."""
        self.life = pod.life
        """Value of the prefill pod's `life` when the picker chose the pod. If the pod's `life` is
        different now, the engine has lost its state since then.
        """
        self.engine: EngineRequest | None = None
        """Prefill leg in the prefill pod's engine; None before it arrives."""
        self.prefilled_at: Seconds | None = None
        """Time when the prefill leg ended, from which on the prefill pod holds its blocks; None
        before.
        """
        self.decode_pod: SimulatedPod | None = None
        """Pod that decodes the request; None until its sidecar has the request."""
        self.decode_life = 0
        self.decode: EngineRequest | None = None
        """Decode leg in the decode pod's engine; None before it arrives."""
        self.decode_since: Seconds | None = None
        """Time when the decode leg arrived at its engine, which sends heartbeats from then on; None
        before.
        """
        self.decode_lost_at: Seconds | None = None
        """Time when the decode engine lost the leg: when its process died, or when the request
        ended outside its KV transfer. None before.
        """
        self.reserved_at: Seconds | None = None
        """Time when the decode engine reserved the blocks of the whole prompt; None before."""
        self.began_at: Seconds = 0.0
        """Time in seconds at which the KV transfer of the request started; 0 if it has not started.
        """
        self.received_at: Seconds | None = None
        """Time when the KV transfer ended; None before, or if it failed."""
        self.size_bytes = 0.0
        """Size in bytes of the KV transfer, including bytes that moved during the prefill."""
        self.transfer: Transfer | None = None
        """KV transfer in progress, or None if none is."""
        self.lease_ends_at: Seconds = 0.0
        self.cancelled = False
        """True if the request no longer needs its prefill leg, because it was aborted or evicted,
        or failed.
        """

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefill pod had cached. The sidecar reports them to the client."""
        return 0 if self.engine is None else self.engine.cached_tokens

    @property
    def connector(self) -> KVConnector:
        connector = self.pod.kind.engine.kv_connector
        assert connector is not None, "a pod with a role has one"
        return connector


class Handovers:
    """The handovers of all disaggregated requests of a cluster, from the prefill to the decode pod.
    `gate` is the gateway.
    """

    def __init__(
        self, settings: KVTransferSettings | None, loop: Loop, pods: Pods, gate: Gate
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._pods = pods
        self._gate = gate
        self._network = Network(loop)
        self._sending: dict[int, Nics] = {}
        self._receiving: dict[int, Nics] = {}
        """Network interfaces (NICs) of each pod that receive KV blocks, by the pod's number;
        `_sending` has those that send.
        """
        self._slowness: dict[int, float] = {}
        """Factor by which the NICs of a pod are slower than usual, by the number of the pod. Pods with
        usual NICs are missing.
        """
        self._met: set[tuple[int, int, int, int]] = set()
        """Pairs of processes that have connected to each other for a transfer, each as (number and
        `life` of the sending pod, number and `life` of the receiving pod).
        """
        self._open: dict[Handover, None] = {}
        """Handovers whose request needs the prefill leg, or whose blocks the prefill pod holds."""
        self.totals = HandoverTotals()

    def __len__(self) -> int:
        return len(self._open)

    def slow_down(self, pod: SimulatedPod, factor: float) -> None:
        """Divide the usual bandwidth of the NICs of `pod` by `factor` from now on; 1 restores it."""
        self._slowness[pod.number] = factor
        for known in (self._sending, self._receiving):
            nics = known.get(pod.number)
            if nics is not None:
                self._network.change(nics, self._bytes_per_s(pod))

    # Calls from the gateway.

    def plan(self, request: SimulatedRequest, prefill: Endpoint) -> Handover | None:
        """Return a new handover of `request` from the pod of `prefill`, or None if that pod itself
        decodes the request.
        """
        assert request.route is not None
        if request.route.endpoint.endpoint_id == prefill.endpoint_id:
            return None
        assert self._settings is not None, "a cluster with a prefill rule has them"
        return Handover(request, self._pods.at(prefill))

    def begin(self, handover: Handover) -> None:
        """Send the prefill leg from the sidecar of the decode pod, and the decode leg too if both
        run concurrently.
        """
        request, settings = handover.request, self._settings
        assert request.pod is not None
        assert settings is not None
        handover.decode_pod, handover.decode_life = request.pod, request.pod.life
        self._open[handover] = None
        frontend_s = handover.pod.kind.profile.frontend_delay_s(request.arrival.prompt_tokens)
        self._loop.after(settings.hop_s + frontend_s, self._prefill, handover)
        if settings.concurrent:
            self._gate.decode(handover)

    def decoding(self, handover: Handover, engine: EngineRequest) -> None:
        """Record that the decode engine receives `engine`, the decode leg of this handover, now."""
        handover.decode = engine
        handover.decode_since = self._loop.now

    def prefilled(self, handover: Handover) -> None:
        """Record that the prefill leg has ended in its engine, which holds the blocks for the
        lease. Start the next stage: the decode leg, or the transfer if its blocks are reserved.
        """
        now, settings = self._loop.now, self._settings
        assert handover.engine is not None
        assert settings is not None
        del handover.pod.requests[handover.engine.request_id]
        handover.prefilled_at = now
        handover.lease_ends_at = now + handover.connector.lease_s
        self._loop.at(handover.lease_ends_at, self._look_at_lease, handover)
        if handover.cancelled:
            return
        if not settings.concurrent:
            self._loop.after(settings.hop_s, self._answered, handover)
        elif handover.reserved_at is not None:
            self._transfer(handover)

    def hang_up(self, handover: Handover) -> None:
        """Abort the prefill leg of a request that has ended, and give up its decode leg unless its
        KV transfer is in progress. The gateway has removed the request from the decode pod.
        """
        self._abort_prefill(handover)
        self._lose_decode(handover)

    def decode_failed(self, handover: Handover) -> None:
        """Abort the prefill leg, because the decode pod died with its engine and its sidecar;
        `pod_died` follows.
        """
        self._abort_prefill(handover)

    def prefill_failed(self, handover: Handover) -> None:
        """Fail the request, because the prefill pod died before the end of the prefill leg."""
        self._fail(handover, Failure.PREFILL_POD_DIED, PREFILL_DIED_STATUS)

    # Calls from the pods.

    def reserved(self, pod: SimulatedPod, engine: EngineRequest) -> None:
        """Record that the decode engine of `pod` has reserved the blocks of the decode leg
        `engine`. Begin the KV transfer if the prompt is computed.
        """
        handover: Handover = pod.requests[engine.request_id].handover
        assert handover.decode is engine
        assert handover.decode_since is not None
        handover.reserved_at = self._loop.now
        self.totals.reservation_s += self._loop.now - handover.decode_since
        if handover.prefilled_at is not None:
            self._transfer(handover)

    def pod_died(self, pod: SimulatedPod) -> None:
        """End the KV transfers from and to `pod`, which died. Requests that were reading blocks
        from it fail. The gateway has already failed the pod's own requests and prefill legs.
        """
        unread: list[Handover] = []
        for handover in [one for one in self._open if pod in (one.pod, one.decode_pod)]:
            transfer, handover.transfer = handover.transfer, None
            if transfer is not None:
                self._network.cancel(transfer)
            if handover.pod is pod:
                del self._open[handover]
                if transfer is not None:
                    unread.append(handover)
            elif handover.decode_lost_at is None:
                handover.decode_lost_at = self._loop.now
        # This may let other legs reserve blocks, whose transfers fail at once.
        for handover in unread:
            self._lose_decode(handover)
            self._fail(handover, Failure.KV_TRANSFER, LOAD_FAILED_STATUS)

    # The course of a handover.

    def _prefill(self, handover: Handover) -> None:
        """Give the prefill leg to the engine of the prefill pod, or fail the request if that pod
        died or rejects the leg.
        """
        request, pod = handover.request, handover.pod
        if handover.cancelled:
            self._open.pop(handover, None)
            return
        if not self._there(handover):
            self._fail(handover, Failure.PREFILL_POD_DIED, PREFILL_DIED_STATUS)
            return
        failure = self._gate.unfit(request, pod)
        if failure is not None:
            self._fail(handover, failure, 400)
            return
        handover.engine = self._gate.prefill_request(request, pod)
        pod.requests[handover.engine.request_id] = handover
        pod.submit(handover.engine)

    def _answered(self, handover: Handover) -> None:
        """Give the request to the decode engine, because the sidecar has received the answer to the
        prefill leg. Do nothing if the request was cancelled or has failed.
        """
        if not handover.cancelled:
            self._gate.decode(handover)

    def _transfer(self, handover: Handover) -> None:
        """Begin the KV transfer of a handover whose prompt is computed and whose blocks are
        reserved. Fail the request if the prefill pod no longer has the blocks.
        """
        decode_pod, leg, settings = handover.decode_pod, handover.decode, self._settings
        assert decode_pod is not None
        assert leg is not None
        assert settings is not None
        if not self._there(handover) or handover not in self._open:
            self._fail(handover, Failure.KV_TRANSFER, LOAD_FAILED_STATUS)
            return
        source = self._nics(self._sending, handover.pod)
        target = self._nics(self._receiving, decode_pod)
        handover.began_at = self._loop.now
        handover.size_bytes = decode_pod.kind.profile.kv_bytes(leg.fetched_tokens)
        handover.transfer = self._network.start(
            source,
            target,
            size_bytes=handover.size_bytes * self._exposed(handover, source, target),
            setup_s=self._setup_s(handover.pod, decode_pod),
            done=lambda: self._transferred(handover),
        )

    def _exposed(self, handover: Handover, source: Nics, target: Nics) -> float:
        """Return the share (0 to 1) of the transfer's bytes that remain to be moved after the
        prefill. It is 1 if the prefill engine does not push each layer as soon as it is computed.

        Bytes that move during the prefill take no bandwidth from other transfers here.
        """
        settings, leg = self._settings, handover.engine
        assert settings is not None
        assert leg is not None
        assert handover.reserved_at is not None
        assert handover.prefilled_at is not None
        layers = handover.pod.kind.profile.layers
        if not settings.push or not layers or leg.scheduled_at is None:
            return 1.0
        bytes_per_s = min(
            source.share_with_another_bytes_per_s(), target.share_with_another_bytes_per_s()
        )
        overlap_from_s = max(leg.scheduled_at, handover.reserved_at)
        return exposed_share(
            transfer_s=handover.size_bytes / bytes_per_s,
            overlap_s=max(0.0, handover.prefilled_at - overlap_from_s),
            layers=layers,
        )

    def _transferred(self, handover: Handover) -> None:
        """Count the completed KV transfer, release the blocks of the prefill pod, and let the
        decode leg continue.
        """
        leg, totals = handover.decode, self.totals
        assert leg is not None
        assert handover.decode_pod is not None
        handover.transfer = None
        handover.received_at = self._loop.now
        totals.transfers += 1
        totals.tokens += leg.fetched_tokens
        totals.size_bytes += handover.size_bytes
        totals.transfer_s += self._loop.now - handover.began_at
        self._release(handover)
        assert self._settings is not None
        if not self._settings.push:
            # A prefill engine that writes the blocks counts the transfer itself.
            handover.decode_pod.pulled(handover.size_bytes, self._loop.now - handover.began_at)
        handover.decode_pod.received(leg)

    def _look_at_lease(self, handover: Handover) -> None:
        """Release the blocks of the prefill pod and count an expired lease if the lease, with all
        renewals by heartbeats, has ended; else check again when it ends. Do nothing if the blocks
        were released before.
        """
        if handover not in self._open:
            return
        connector, now = handover.connector, self._loop.now
        since = handover.decode_since
        if since is not None:
            until = now if handover.decode_lost_at is None else handover.decode_lost_at
            heartbeats = int((until - since) / connector.heartbeat_s)
            renewed_at = since + heartbeats * connector.heartbeat_s
            handover.lease_ends_at = max(handover.lease_ends_at, renewed_at + connector.renewal_s)
        if handover.lease_ends_at > now:
            self._loop.at(handover.lease_ends_at, self._look_at_lease, handover)
            return
        self.totals.leases_expired += 1
        self._release(handover)

    def _release(self, handover: Handover) -> None:
        assert handover.engine is not None
        del self._open[handover]
        handover.pod.release(handover.engine)

    def _abort_prefill(self, handover: Handover) -> None:
        """Abort a prefill leg whose request is gone. Do nothing in the engine if the leg was not
        sent, or if it has ended and its lease keeps the blocks.
        """
        handover.cancelled = True
        leg, pod = handover.engine, handover.pod
        if leg is None or handover.prefilled_at is not None:
            # It was not sent, or its lease ends later.
            return
        self._open.pop(handover, None)
        if pod.requests.pop(leg.request_id, None) is not None:
            pod.abort(leg.request_id)

    def _lose_decode(self, handover: Handover) -> None:
        """Record that the decode engine lost the decode leg, and remove the leg if its blocks are
        reserved. Do nothing while its KV transfer is in progress.
        """
        if handover.transfer is not None:
            return
        handover.decode_lost_at = self._loop.now
        leg, pod = handover.decode, handover.decode_pod
        if leg is None or pod is None or pod.life != handover.decode_life:
            return
        if pod.awaits(leg):
            pod.give_up(leg)

    def _fail(self, handover: Handover, failure: Failure, status: int) -> None:
        """End a handover. Unless its request was cancelled or failed before, also fail the request
        and abort it at its decode pod.
        """
        self._open.pop(handover, None)
        if handover.cancelled:
            return
        handover.cancelled = True
        request, pod = handover.request, handover.decode_pod
        if pod is not None and pod.life == handover.decode_life:
            pod.requests.pop(request.request_id, None)
            pod.abort(request.request_id)
            self._lose_decode(handover)
        self._gate.fail(request, failure, status)

    def _there(self, handover: Handover) -> bool:
        """Return whether the process of the prefill pod that the picker chose still runs."""
        return handover.pod.alive and handover.pod.life == handover.life

    # The network.

    def _nics(self, known: dict[int, Nics], pod: SimulatedPod) -> Nics:
        nics = known.get(pod.number)
        if nics is None:
            nics = known[pod.number] = Nics(self._bytes_per_s(pod))
        return nics

    def _bytes_per_s(self, pod: SimulatedPod) -> float:
        assert self._settings is not None
        usual = pod.kind.nics * self._settings.link.bytes_per_s
        return usual / self._slowness.get(pod.number, 1.0)

    def _setup_s(self, source: SimulatedPod, target: SimulatedPod) -> Seconds:
        settings = self._settings
        assert settings is not None
        setup_s = settings.link.setup_s
        zones = source.kind.labels.get(ZONE_LABEL), target.kind.labels.get(ZONE_LABEL)
        if None not in zones and zones[0] != zones[1]:
            setup_s += ACROSS_ZONES_S
        met = (source.number, source.life, target.number, target.life)
        if met not in self._met:
            self._met.add(met)
            setup_s += settings.first_contact_s
        return setup_s
