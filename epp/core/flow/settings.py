"""Settings of flow control: limits, waits, fairness and order of the queue, and when it opens.

The defaults of limits, waits and policies are those of llm-d-router. The detector is another one.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field, structs

from epp.core.flow.agent_admission import AgentAdmission
from epp.core.flow.band_selection import StrictBandSelection
from epp.core.flow.ceilings import StaticCeiling
from epp.core.flow.detectors import RoomDetector
from epp.core.types import Seconds

WAIT_S_MAX: Final = 60.0
BAND_REQUESTS_MAX: Final = 5_000
BAND_BYTES_MAX: Final = 1_000_000_000
HALF_LIFE_S: Final = 60.0


class Fairness(StrEnum):
    """The rule by which the flows of one band take turns."""

    NONE = "none"
    """The band is one queue, whatever flow a request belongs to."""
    REQUESTS = "requests"
    """The flow that was charged the fewest requests, divided by its weight, is next."""
    TOKENS = "tokens"
    """The flow that was charged the fewest tokens, divided by its weight, is next."""
    DECAYING_TOKENS = "decaying-tokens"
    """The flow that was charged the fewest tokens, divided by its weight, is next. Charges halve in
    each `half_life_s`, and a flow keeps them while it does not wait.
    """
    SESSIONS = "agent-sessions"
    """Each flow is an agent session. Admitted sessions are first. Others wait until an endpoint has
    room for their tokens, or have waited long: overdue ones first, then paused ones, then new ones.
    """


class Ordering(StrEnum):
    """The order of the waiting requests of one flow."""

    ARRIVAL = "arrival"
    DEADLINE = "deadline"
    """The request whose maximum wait is over first is next."""
    FIRST_OUTPUT = "first-output"
    """The request whose first token is due first is next. A request without a limit
    for its first token is due when its maximum wait is over.
    """


class BandSettings(Struct, frozen=True, kw_only=True):
    """Limits, turns and order of the waiting requests of one priority."""

    requests_max: Annotated[int, Meta(ge=1)] = BAND_REQUESTS_MAX
    bytes_max: Annotated[int, Meta(ge=1)] = BAND_BYTES_MAX
    """Maximum number of body bytes of the band's waiting requests; the pickers of a pool divide it.
    """
    wait_s_max: Annotated[float, Meta(ge=0)] | None = None
    """Maximum wait in seconds of a request of the band while the pool has endpoints; 0 for no
    limit, or None for that of the queue.
    """
    fairness: Fairness = Fairness.NONE
    half_life_s: Annotated[float, Meta(gt=0)] = HALF_LIFE_S
    """Seconds in which the charges of a flow halve under `Fairness.DECAYING_TOKENS`."""
    ordering: Ordering = Ordering.ARRIVAL
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a flow by its id, above 0: its charges are divided by it. A flow without an entry
    has weight 1.
    """


class FlowSettings(Struct, frozen=True, kw_only=True):
    """The settings of the picker's queue: its limits, bands, order and measure of load."""

    requests_max: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of waiting requests of all bands; 0 for no limit. The pickers of a pool divide
    it.
    """
    bytes_max: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of body bytes of all waiting requests; 0 for no limit. The pickers of a pool
    divide it.
    """
    wait_s_max: Annotated[float, Meta(ge=0)] = WAIT_S_MAX
    """Maximum wait of a request in the queue in seconds while the pool has endpoints; 0 for no
    limit. A band may have a limit of its own.
    """
    empty_pool_wait_s_max: Annotated[float, Meta(ge=0)] = WAIT_S_MAX
    """Maximum wait of a request in the queue in seconds while the pool has no endpoint; 0 for no
    limit.
    """
    waits_for_endpoints: bool = True
    """True if requests wait while the pool has no endpoint; False to refuse them at once."""
    memory_bytes_max: int = 0
    """Maximum number of body bytes in the queue of one picker, whose memory it protects; 0 for no
    limit. Pickers divide `bytes_max`, but not this limit.
    """
    agents: AgentAdmission | None = None
    """Settings of the admission of agent sessions, or None if no band has `Fairness.SESSIONS`."""
    identity_headers: tuple[str, ...] = ()
    """Headers, in lower case, that name the flow of a request without a fairness id
    (`x-llm-d-inference-fairness-id`); the first that the request has decides.
    """
    evicts: bool = False
    """True if running requests of negative priority may be evicted for waiting ones of higher
    priority.
    """
    by_priority: bool = True
    """True if each priority has a band of its own; False for one band of all requests."""
    bands: Mapping[int, BandSettings] = field(default_factory=dict)
    """Settings of a band by its priority."""
    default_band: BandSettings = BandSettings()
    """Settings of bands that `bands` does not name; `default_negative_band` may replace it below
    priority 0.
    """
    default_negative_band: BandSettings | None = None
    """Settings of bands with a priority below 0 that `bands` does not name, or None for those of
    `default_band`.
    """
    selection: Any = StrictBandSelection()
    """The `BandSelection` by which bands take turns."""
    policy: Any = StaticCeiling()
    """The `CeilingPolicy` that keeps room for requests of higher priority."""
    detector: Any = RoomDetector()
    """The `Detector` that measures the load of an endpoint, by which the gate opens."""

    def band(self, priority: int) -> BandSettings:
        """Return the settings of the band with `priority`."""
        known = self.bands.get(priority)
        if known is not None:
            return known
        if priority < 0 and self.default_negative_band is not None:
            return self.default_negative_band
        return self.default_band

    def within(self, memory_bytes_max: int) -> "FlowSettings":
        """Return these settings with at most `memory_bytes_max` body bytes in the queue of each
        picker; 0 for no such limit.
        """
        return structs.replace(self, memory_bytes_max=memory_bytes_max)

    def budget_s(self, band: BandSettings, *, empty_pool: bool) -> Seconds:
        """Return the maximum wait in seconds of the requests of `band` for the present state of the
        pool; 0 for no limit.
        """
        if empty_pool:
            return self.empty_pool_wait_s_max
        return self.wait_s_max if band.wait_s_max is None else band.wait_s_max

    def longest_wait_s(self, priority: int) -> Seconds:
        """Return the larger of the maximum waits in seconds, with and without endpoints in the
        pool, of requests with `priority`; 0 if one of the two has no limit.
        """
        band = self.band(priority if self.by_priority else 0)
        limits_s = [self.budget_s(band, empty_pool=empty) for empty in (False, True)]
        return max(limits_s) if all(limits_s) else 0.0


HELD_BY_PLUGINS: Final = FlowSettings(
    requests_max=16_384,
    wait_s_max=0.0,
    waits_for_endpoints=False,
    by_priority=False,
    default_band=BandSettings(requests_max=16_384),
)
"""Settings of a queue for requests that only plugins make wait (`HoldsRequests`): one line, first
come, first served, without a limit of time.
"""
