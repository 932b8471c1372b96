"""The gate of flow control: whether endpoints have room, for the queue and for a decision.

The gate is open for a request if any endpoint that may serve it is loaded to less than the ceiling
of its priority. A mean over the pool would hide a full endpoint behind idle ones, and an idle one
behind full ones. A decision then prefers endpoints below the ceiling.

Most requests need no look at the endpoints. The gate knows how many requests and tokens may be
placed, wherever they go, before all endpoints can be full (`certainly_open`), and before any can be
(`none_full`).
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from epp.core.flow.ceilings import CeilingPolicy, StaticCeiling
from epp.core.flow.detectors import Detector, RoomDetector
from epp.core.flow.rooms import NO_SPARE, Rooms, Spare
from epp.core.flow.settings import FlowSettings
from epp.core.flow.shares import FlowShares
from epp.core.knowledge.candidates import Bools, Candidates, Columns, Floats
from epp.core.knowledge.inflight import Lease
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Seconds, Stage


class Gate:
    """The estimate of flow control of how much room the endpoints have."""

    def __init__(
        self, settings: FlowSettings, columns: Columns, shares: FlowShares | None = None
    ) -> None:
        self._shares = shares or FlowShares()
        self.rooms = Rooms(columns, self._shares)
        self.saturation = 0.0
        """Mean load of the endpoints at the last look; above 1 if they are overloaded."""
        self._priorities: frozenset[int] = frozenset()
        self._loads_heard = 0
        """Number of reports of peers at the last look."""
        self._spare = NO_SPARE
        self._endpoints = 0.0
        """Number of open endpoints at the last look, minus what may have been filled since."""
        self._requests = 0.0
        self._tokens = 0.0
        """Requests and tokens for which every endpoint has slots and KV cache."""
        self.configure(settings)

    def configure(self, settings: FlowSettings) -> None:
        """Apply `settings`; what was learned of endpoints stays."""
        self.settings = settings
        self._endpoints = self._requests = self._tokens = 0.0
        self._detector: Detector = settings.detector
        self._policy: CeilingPolicy = settings.policy
        self._learns = isinstance(settings.detector, RoomDetector)
        self._plain = settings.policy == StaticCeiling()
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

    def none_full(self, request: InferenceRequest) -> bool:
        """Return whether every endpoint has slots and KV cache for `request`; False means unknown."""
        known = self._loads_heard == self._shares.loads_heard
        return known and self._requests >= 1.0 and self._tokens >= request.prompt_tokens

    def has_room(
        self, stages: Iterable[tuple[Stage | None, Candidates]], request: InferenceRequest
    ) -> bool:
        """Return whether each stage has an endpoint with room for the priority of `request`.

        `stages` are the candidates of each stage that `request` may need. A stage without candidates
        does not close the gate, because a decision then refuses the request or does without it.
        """
        for stage, candidates in stages:
            if not len(candidates):
                continue
            if self._learns and self._plain:
                spare, _ = self.rooms.spare(candidates)
                if stage is None and request.subset is None:
                    self._look(spare)
                if not spare.endpoints:
                    return False
                continue
            load = self.load(stage, candidates)
            if not (load < self.ceiling(request, load)).any():
                return False
        return True

    def with_room(self, candidates: Candidates, request: InferenceRequest) -> Bools:
        """Return bool[n]: whether each candidate may be chosen for `request`.

        With learned room and without ceilings, prefill tokens do not count here, because a scorer
        weighs a wait for them against a cached prefix. Slots and KV cache do.
        """
        if self._learns and self._plain:
            spare, lasting = self.rooms.spare(candidates)
            if request.subset is None:
                self._look(spare)
            return lasting
        load = self.load(None, candidates)
        ceiling = self.ceiling(request, load) * (1.0 + self._detector.headroom)
        found: Bools = load < ceiling
        return found

    def load(self, stage: Stage | None, candidates: Candidates) -> Floats:
        """Return float64[n]: the load of each candidate for `stage`."""
        load = self._detector.load(candidates, self.rooms, stage)
        self.saturation = float(load.mean())
        return load

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

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Learn from a good page of the endpoint in `slot`."""
        requests, tokens = self.rooms.scraped(slot, metrics, now)
        if requests < self._requests or tokens < self._tokens:
            # It has less room than was known, so that it may be full.
            self._requests = self._tokens = 0.0
            self._endpoints -= 1.0

    def sent(self, lease: Lease) -> None:
        """Count the request of `lease`, which was placed."""
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
        self._endpoints -= 1.0

    def _look(self, spare: Spare) -> None:
        self._spare = spare
        self._endpoints = spare.endpoints
        self._requests, self._tokens = spare.requests, spare.tokens
        self._loads_heard = self._shares.loads_heard

    def why_full(self, candidates: Candidates, name_of: Callable[[int], str]) -> str:
        """Return a phrase about the load of `candidates`; `name_of` returns the name of an endpoint
        by its slot.
        """
        count = len(candidates)
        if not count:
            return "no endpoint may serve it"
        load = self.load(None, candidates)
        full = int((load >= 1.0).sum())
        phrase = f"{full} of {count} endpoints are full"
        least = int(load.argmin())
        if not self._learns or not math.isfinite(load.item(least)):
            return f"{phrase}, the least loaded one to {load.item(least):.2f}"
        name = name_of(candidates.slot.item(least))
        return f"{phrase}; {self.rooms.of(candidates.take(np.array([least])))[0].sentence(name)}"
