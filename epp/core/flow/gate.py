"""The gate of flow control: whether endpoints have room, for the queue and for a decision.

The gate is open for a request if any endpoint that may serve it is loaded to less than the ceiling
of its priority. A mean over the pool would hide a full endpoint behind idle ones, and an idle one
behind full ones. A decision then prefers endpoints below the ceiling.

Most requests need no look at the endpoints: `certainly_open` compares two numbers. These say how
many requests and tokens may be placed, wherever they go, before any endpoint can be full.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from epp.core.flow.ceilings import CeilingPolicy, StaticCeiling
from epp.core.flow.detectors import Detector, RoomDetector
from epp.core.flow.rooms import Rooms
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.candidates import Bools, Candidates, Columns, Floats
from epp.core.knowledge.inflight import Lease
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Seconds, Stage


class Gate:
    """What flow control knows of the endpoints' room."""

    def __init__(self, settings: FlowSettings, columns: Columns) -> None:
        self.rooms = Rooms(columns)
        self.saturation = 0.0
        """Mean load of the endpoints at the last look; above 1 if they are overloaded."""
        self._priorities: frozenset[int] = frozenset()
        self._version = -1
        """Version of `rooms` for which the following two numbers are valid."""
        self._spare_requests = 0.0
        self._spare_tokens = 0.0
        self.configure(settings)

    def configure(self, settings: FlowSettings) -> None:
        """Apply `settings`; what was learned of endpoints stays."""
        self.settings = settings
        self._version = -1
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
        """Return whether no endpoint can be full, so that no look is needed. False means unknown."""
        return (
            self._version == self.rooms.version
            and self._spare_requests >= 1.0
            and self._spare_tokens >= request.prompt_tokens
        )

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
                spare = self.rooms.spare(candidates)
                if spare[0] >= 1.0 and spare[1] >= request.prompt_tokens:
                    if stage is None and request.subset is None:
                        self._version = self.rooms.version
                        self._spare_requests, self._spare_tokens = spare
                    continue
            load = self.load(stage, candidates)
            if not (load < self.ceiling(request, load)).any():
                return False
        return True

    def with_room(self, candidates: Candidates, request: InferenceRequest) -> Bools:
        """Return bool[n]: whether each candidate may be chosen for `request`.

        The learned prefill tokens do not count here, because a scorer weighs a wait for them against
        a cached prefix. Slots and KV cache do.
        """
        if self._learns:
            load = self.rooms.hard_load(candidates)
        else:
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
        self.rooms.scraped(slot, metrics, now)

    def sent(self, lease: Lease) -> None:
        """Count the request of `lease`, which was placed."""
        self.rooms.sent(lease)
        self._spare_requests -= 1.0
        self._spare_tokens -= lease.uncached_tokens + self.rooms.answer_tokens

    def forget(self, slot: int) -> None:
        """Drop what was learned of `slot`, because its endpoint left or restarted."""
        self.rooms.forget(slot)

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
