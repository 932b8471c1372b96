"""The gate of flow control: whether a request must wait.

The gate is open for a request if each stage that it may need has an endpoint that is loaded to less
than the ceiling of the request's priority. A mean over the pool would hide a full endpoint behind
idle ones, and an idle one behind full ones.

While requests compete and wait, a decision may only choose an endpoint with room, so that no request
waits in an engine where none can pass it. Flow control lets a request wait in the queue for an
endpoint that has its prefix (`Pool.hold_s`). Other detectors and ceilings always restrict the choice.
All of this needs a configuration with one stage.

Requests wait in the picker so that those of other flows and priorities can pass them. If none can,
an endpoint has room for more (`epp/core/flow/rivalry`).

In an overload in which a light flow competes with heavy ones, these leave some endpoints to it
(`RoomDetector.reserved_share`, `epp/core/flow/demand`).

Most requests need no look at the endpoints. The gate knows how many requests and tokens may be
placed, wherever they go, before all endpoints can be full (`certainly_open`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from msgspec import structs

from epp.core.flow.ceilings import CeilingPolicy, StaticCeiling
from epp.core.flow.detectors import Detector, RoomDetector
from epp.core.flow.rivalry import Rivalry
from epp.core.flow.rooms import NO_SPARE, Lead, Rooms, Spare
from epp.core.flow.settings import FlowSettings
from epp.core.flow.shares import FlowShares
from epp.core.knowledge.candidates import Bools, Candidates, Columns, Floats, Ints
from epp.core.knowledge.inflight import Lease
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Seconds, Stage

RESERVED_ENDPOINTS_MIN: Final = 4
"""Number of endpoints from which heavy flows leave some to light ones."""
_RESERVED_KEY: Final = 0x9E3779B97F4A7C15
"""Key by whose rendezvous weights all pickers reserve the same endpoints."""


class Gate:
    """An estimate of how many requests the endpoints have room for, and of whether a request must
    wait.
    """

    def __init__(
        self, settings: FlowSettings, columns: Columns, shares: FlowShares | None = None
    ) -> None:
        self._shares = shares or FlowShares()
        self.rooms = Rooms(columns, self._shares)
        self._priorities: frozenset[int] = frozenset()
        self._loads_heard = 0
        """Value of `FlowShares.loads_heard` when the endpoints were last examined."""
        self._spare = NO_SPARE
        self._endpoints = 0.0
        """Number of open endpoints when they were last examined, minus those that may be full
        since.
        """
        self._open: set[int] = set()
        """Slots of the endpoints that were open when they were last examined, without those that
        were subtracted from `_endpoints`.
        """
        self._requests = self._tokens = 0.0
        """Numbers of requests and of tokens of the KV cache that each open endpoint has room for at
        least.
        """
        self.rivalry = Rivalry(settings)
        self.configure(settings)

    def configure(self, settings: FlowSettings) -> None:
        """Apply `settings`, and keep the room that was learned of each endpoint."""
        self.settings = self.rivalry.settings = settings
        self._endpoints = 0.0
        self._detector: Detector = settings.detector
        self._policy: CeilingPolicy = settings.policy
        self._learns = isinstance(settings.detector, RoomDetector)
        self._reserved_share = 0.0
        if isinstance(settings.detector, RoomDetector):
            self._reserved_share = settings.detector.reserved_share
        self._plain = settings.policy == StaticCeiling()
        self.restricts = not (self._learns and self._plain)
        """True if the configuration has another detector or ceiling than the defaults, which then
        says which endpoints a decision without stages may choose.
        """
        self.know_priorities(self._priorities)

    def know_priorities(self, priorities: Iterable[int]) -> None:
        """Note the priorities that objectives give to requests. Each has a band."""
        self._priorities = frozenset(priorities)
        self._bands = self._priorities | self.settings.bands.keys() | {0}

    def certainly_open(self, request: InferenceRequest) -> bool:
        """Return whether some endpoint has room for `request`; False means unknown."""
        spare = self._spare
        share = spare.per_request + spare.per_token * request.prompt_tokens
        known = self._loads_heard == self._shares.loads_heard
        return known and self._endpoints > share and request.subset is None

    def has_room(
        self,
        stages: Iterable[tuple[Stage | None, Candidates]],
        request: InferenceRequest,
        now: Seconds,
    ) -> bool:
        """Return whether each stage has an endpoint with room for the priority of `request`.

        `stages` are the candidates of each stage that `request` may need. A stage without candidates
        does not close the gate, because a decision then refuses the request or does without it.

        If the room is learned and the ceiling is the default (`restricts` is False), the gate records
        the room that it saw. The limit of prefill tokens then closes the gate only if other requests
        would pass `request`, and only once endpoints have been full again and again for `STANDING_S`
        or requests wait in the queue.
        """
        offered = [(stage, candidates) for stage, candidates in stages if len(candidates)]
        if self.restricts:
            return all(self._is_below(stage, candidates, request) for stage, candidates in offered)
        rivalry = self.rivalry
        lead = self.lead(request, now)
        reserves, allowed = self._reserves(now), offered
        if reserves and rivalry.keeps_off(request, now):
            allowed = [
                (stage, self._unreserved(candidates) if stage is None else candidates)
                for stage, candidates in offered
            ]
        found = self._is_open(allowed, request, lead)
        if reserves and rivalry.is_light(request, now):
            # Other requests may not use the room of reserved endpoints.
            self._endpoints = 0.0
        if found:
            rivalry.found_room()
        if found or lead.alone or rivalry.must_wait(now):
            return found
        found = self._is_open(offered, request, structs.replace(lead, alone=True))
        # The next request must look again, because it may have to wait.
        self._endpoints = 0.0
        return found

    def lead(self, request: InferenceRequest, now: Seconds) -> Lead:
        """Return the prefill work that may be pending at an endpoint that has room for `request`."""
        rivalry = self.rivalry
        return Lead(
            prompt_tokens=request.prompt_tokens,
            alone=rivalry.is_alone(request, now),
            outranked=rivalry.is_outranked(request, now),
            first=self._shares.pickers > 1 and rivalry.is_first(request, now),
        )

    def _is_open(
        self, offered: list[tuple[Stage | None, Candidates]], request: InferenceRequest, lead: Lead
    ) -> bool:
        """Return whether each stage has an endpoint with room by `lead`. Record the room of a pool
        without stages for `certainly_open`, unless the request has a subset hint.
        """
        for stage, candidates in offered:
            spare, any_open = self.rooms.spare(candidates, lead)
            if stage is None and request.subset is None:
                self._look(spare)
            if not any_open:
                return False
        return True

    def _is_below(
        self, stage: Stage | None, candidates: Candidates, request: InferenceRequest
    ) -> bool:
        """Return whether any of `candidates` is loaded to less than the ceiling of `request`."""
        load = self.load(stage, candidates)
        return bool((load < self.ceiling(request, load)).any())

    def keeps_to_room(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether a decision for `request` without stages may only choose the endpoints of
        `with_room`, if there are any.
        """
        rivalry = self.rivalry
        return self.restricts or (rivalry.holding and not rivalry.is_alone(request, now))

    def with_room(self, candidates: Candidates, request: InferenceRequest, now: Seconds) -> Bools:
        """Return bool[n]: whether each candidate has room for `request`."""
        if not self.restricts:
            load, ceiling = self.rooms.load(candidates, self.lead(request, now)), 1.0
            if self._keeps_off(request, now):
                load[self._reserved(candidates)] = math.inf
        else:
            load = self.load(None, candidates)
            ceiling = self.ceiling(request, load) * (1.0 + self._detector.headroom)
        found: Bools = load < ceiling
        return found

    def _keeps_off(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` leaves the reserved endpoints to lighter flows."""
        return self._reserves(now) and self.rivalry.keeps_off(request, now)

    def _reserves(self, now: Seconds) -> bool:
        """Return whether endpoints may be reserved, because the pool is overloaded."""
        return self._reserved_share > 0.0 and self.rivalry.is_overloaded(now)

    def _reserved(self, candidates: Candidates) -> Ints:
        """Return the positions of the endpoints that heavy flows leave to light ones. They are the
        same for all pickers.
        """
        count = len(candidates)
        if count < RESERVED_ENDPOINTS_MIN:
            return np.zeros(0, dtype=np.int64)
        reserved = max(1, int(self._reserved_share * count))
        return np.argsort(candidates.rendezvous(_RESERVED_KEY), kind="stable")[-reserved:]

    def _unreserved(self, candidates: Candidates) -> Candidates:
        """Return `candidates` without the endpoints that heavy flows leave to light ones."""
        keep = np.ones(len(candidates), dtype=np.bool_)
        keep[self._reserved(candidates)] = False
        return candidates.take(keep)

    def load(self, stage: Stage | None, candidates: Candidates) -> Floats:
        """Return float64[n]: the load of each candidate for `stage`."""
        return self._detector.load(candidates, self.rooms, stage)

    def ceiling(self, request: InferenceRequest, load: Floats) -> float:
        """Return the load up to which requests with the priority of `request` may use endpoints
        with `load`.
        """
        if self._plain:
            return 1.0
        priority = request.priority if self.settings.by_priority else 0
        priorities = sorted(self._bands | {priority}, reverse=True)
        return self._policy.ceilings(float(load.mean()), priorities)[priority]

    # Events.

    def look_again(self) -> None:
        """Forget how much room was seen, because flows or priorities begin to compete, so that the
        limit of prefill tokens applies again.
        """
        self._endpoints = 0.0

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Learn from a good page of the endpoint in `slot`."""
        requests, tokens = self.rooms.scraped(slot, metrics, now)
        if slot in self._open and (requests < self._requests or tokens < self._tokens):
            # It has less room than was known, so that it may be full.
            self._subtract(slot)

    def sent(self, lease: Lease) -> None:
        """Count the request of `lease`, which was placed, and subtract it from the room that the gate
        knows. Each peer is assumed to have placed as much.
        """
        rooms, spare = self.rooms, self._spare
        rooms.sent(lease)
        tokens = lease.uncached_tokens + rooms.answer_tokens
        # Each peer may have sent as much.
        pickers = self._shares.pickers
        self._endpoints -= pickers * (spare.per_request + spare.per_token * tokens)
        self._requests -= pickers
        self._tokens -= pickers * tokens

    def forget(self, slot: int) -> None:
        """Drop what was learned of `slot`, because its endpoint left or restarted."""
        self.rooms.forget(slot)
        if slot in self._open:
            self._subtract(slot)

    def _subtract(self, slot: int) -> None:
        self._open.remove(slot)
        self._endpoints -= 1.0

    def _look(self, spare: Spare) -> None:
        self._spare = spare
        self._endpoints, self._open = spare.endpoints, set(spare.slots)
        self._requests, self._tokens = spare.requests, spare.tokens
        self._loads_heard = self._shares.loads_heard

    def why_full(
        self,
        candidates: Candidates,
        request: InferenceRequest,
        name_of: Callable[[int], str],
        now: Seconds,
    ) -> str:
        """Return a phrase about the load of `candidates` for `request`; `name_of` returns the name
        of an endpoint by its slot.
        """
        left = ""
        if self._learns and self._keeps_off(request, now):
            offered, candidates = len(candidates), self._unreserved(candidates)
            if len(candidates) < offered:
                left = f", and {offered - len(candidates)} left to flows that use less"
        count = len(candidates)
        if not count:
            return "no endpoint may serve it"
        load = self.load(None, candidates)
        lead = self.lead(request, now)
        if self._learns:
            load = self.rooms.load(candidates, lead)
        full = int((load >= 1.0).sum())
        phrase = f"{full} of {count} endpoints are full{left}"
        least = int(load.argmin())
        if not self._learns or not math.isfinite(load.item(least)):
            return f"{phrase}, the least loaded one to {load.item(least):.2f}"
        name = name_of(candidates.slot.item(least))
        (room,) = self.rooms.of(candidates.take(np.array([least])), lead)
        return f"{phrase}; {room.sentence(name)}"
