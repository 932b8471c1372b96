"""Measures of the load of an endpoint, as a share of its room: 1.0 is full, and more is overload.

A detector reads candidates, whose columns have the picker's own counts of requests and tokens in
flight, and the pages of engines. The own counts change with each decision, so that a burst between
two pages cannot exceed the limits.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Protocol

import numpy as np
from msgspec import Meta, Struct, field

from epp.core.abilities import Abilities
from epp.core.flow.rooms import Rooms
from epp.core.knowledge.candidates import Bools, Candidates, Floats, Ints
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.parameters import Parameters
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Stage

BLIND_REQUESTS_MAX: Final = 100
"""Number of requests in flight at which an endpoint without fresh metrics is full. It is the default
`maxConcurrency` of llm-d-router.
"""


class Detector(Protocol):
    """A measure of the load of endpoints. Plugin types of llm-d-router that implement it keep their
    parameters.
    """

    @property
    def headroom(self) -> float:
        """Return the share by which a decision may exceed the load at which the gate closes, for the
        sake of a cached prefix.
        """
        ...

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        """Return float64[n] >= 0: the load of each candidate.

        `stage` is the stage that the candidates serve, or None without stages. Never called with
        n = 0.
        """
        ...


class RoomDetector(Parameters, frozen=True):
    """The load by what each endpoint was seen to have room for (`epp/core/flow/rooms`).

    The load is the largest of three used shares: of slots, of tokens of the KV cache and of prefill
    tokens. Prefill tokens are pending until the first output of a request. Slots and tokens of the
    KV cache are used until its end.
    """

    type_name: ClassVar[str] = "endpoint-room-detector"

    reserved_share: Annotated[float, Meta(ge=0, lt=1)] = 1 / 8
    """Share of the endpoints that heavy flows leave to light ones in an overload, rounded down, but
    at least one of four or more. With 0, no endpoint is reserved.
    """

    @property
    def headroom(self) -> float:
        return 0.0

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        return rooms.load(candidates)


class ConcurrencyMode(StrEnum):
    """The quantity that `concurrency-detector` counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    HYBRID = "hybrid"


class ConcurrencyDetector(Parameters, frozen=True):
    """Drop endpoints at which as many requests or tokens of this picker and its peers are in flight
    as a fixed capacity allows, or more; it may drop all.

    The capacity is (1 + `headroom`) times `max_concurrency` requests or `max_token_concurrency`
    prompt tokens, or both (`hybrid`). Names and defaults are those of llm-d-router.
    """

    type_name: ClassVar[str] = "concurrency-detector"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("inflight_requests", "inflight_context_tokens"), sheds_load=True
    )

    concurrency_mode: ConcurrencyMode = ConcurrencyMode.REQUESTS
    """Quantity whose capacity limits an endpoint: requests, tokens or both."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 100
    max_token_concurrency: Annotated[int, Meta(ge=1)] = 1_000_000
    headroom: Annotated[float, Meta(ge=0)] = 0.0
    in_flight_load_producer_name: str = ""
    """Name of the `inflight-load-producer`; the picker always counts, so this has no effect."""

    def keep(self, request: InferenceRequest, candidates: Candidates) -> Bools:
        kept: Bools = self._load(candidates) < 1.0 + self.headroom
        return kept

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        if rooms.pickers == 1:
            return self._load(candidates)
        requests, tokens = candidates.inflight_requests, candidates.inflight_context_tokens
        divided = rooms.divided_requests(candidates)
        # The requests that are counted for peers in addition have prompts of the mean length.
        return self._larger(divided, tokens * (divided / np.maximum(requests, 1)))

    def _load(self, candidates: Candidates) -> Floats:
        return self._larger(candidates.inflight_requests, candidates.inflight_context_tokens)

    def _larger(self, requests: Floats | Ints, tokens: Floats | Ints) -> Floats:
        by_requests: Floats = requests / self.max_concurrency
        if self.concurrency_mode is ConcurrencyMode.REQUESTS:
            return by_requests
        by_tokens: Floats = tokens / self.max_token_concurrency
        if self.concurrency_mode is ConcurrencyMode.TOKENS:
            return by_tokens
        return np.maximum(by_requests, by_tokens)


class Utilization(Struct, frozen=True, kw_only=True):
    """The load by a `utilization-detector`: queue and KV cache against fixed thresholds.

    The queue of an engine is the one on its last page, plus the requests that were sent to it since
    and whose prompts are still pending. An endpoint without fresh metrics is judged by the requests
    in flight alone. An endpoint whose engine answered 503 without `retry-after` since its last
    page counts as full at least.
    """

    type_name: ClassVar[str] = UtilizationDetector.type_name
    abilities: ClassVar[Abilities] = Abilities(reads=())

    detector: UtilizationDetector = field(default_factory=UtilizationDetector)
    staleness_given: bool = False
    """True if the configuration sets the age of metrics above which they do not count."""

    @property
    def headroom(self) -> float:
        return self.detector.headroom

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        detector = self.detector
        reported = candidates.waiting_requests
        queue = reported + rooms.unstarted_requests(candidates)
        cache = candidates.kv_cache_usage / detector.kv_cache_util_threshold
        load: Floats = np.fmax(queue / detector.queue_depth_threshold, cache)
        load[np.isnan(load)] = 0.0
        blind = candidates.metrics_age_s > float(detector.metrics_staleness_threshold)
        if blind.any():
            load[blind] = (candidates.inflight_requests / BLIND_REQUESTS_MAX)[blind]
        return np.where(candidates.saturated, np.fmax(load, 1.0), load)


class NeverSaturated(Struct, frozen=True, kw_only=True):
    """A load of 0 at every endpoint, so that only agent sessions have to wait (`thunder-agent`)."""

    type_name: ClassVar[str] = "thunder-agent"
    abilities: ClassVar[Abilities] = Abilities(reads=())

    @property
    def headroom(self) -> float:
        return 0.0

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        return np.zeros(len(candidates))


class MaxSaturation(Struct, frozen=True, kw_only=True):
    """The largest load of several detectors (`max-saturation-detector`)."""

    type_name: ClassVar[str] = "max-saturation-detector"
    abilities: ClassVar[Abilities] = Abilities(reads=())

    detectors: tuple[Any, ...]
    """Detectors whose loads are compared, at least one."""
    stages: Mapping[int, frozenset[Stage]] = field(default_factory=dict)
    """Stages that a detector judges, by the position of the detector in `detectors`. A detector
    without an entry judges all stages.
    """

    @property
    def headroom(self) -> float:
        return min(float(detector.headroom) for detector in self.detectors)

    def load(self, candidates: Candidates, rooms: Rooms, stage: Stage | None) -> Floats:
        load = np.zeros(len(candidates))
        for position, detector in enumerate(self.detectors):
            judged = self.stages.get(position)
            if stage is None or judged is None or stage in judged:
                load = np.maximum(load, detector.load(candidates, rooms, stage))
        return load
