"""The straight line, and the verbs that both shells drive."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.candidates import Candidates
from epp.core.inflight import Lease
from epp.core.plugin import AffinityIndexSettings
from epp.core.profile import SchedulingProfile, Scored
from epp.core.saturation import UtilizationDetector
from epp.core.types import Endpoint, Seconds


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """All that decides. Replaced as a whole by `Scheduler.configure`."""

    profile: SchedulingProfile
    indexes: Mapping[str, AffinityIndexSettings] = field(default_factory=dict)
    """By the name of the producer in the configuration, in the order in which they match."""
    prefix: str = ""
    """Which of `indexes` fills `matched_blocks`; "" if none does."""
    block_tokens: int = 64
    """Tokens in a block of that index."""
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    metrics_staleness_s: Seconds = 2.0
    """Endpoints with older metrics rank below every fresh one."""
    prefill_tokens_per_s: float = 15_928.0
    """`peakPrefillThroughput` of the field, until better is known."""
    fallback_endpoints_max: int = 0


class Decision(Struct, frozen=True, kw_only=True):
    """Where a request goes, and why."""

    number: int
    """Counts decisions of this scheduler from 1."""
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    lease: Lease
    matched_blocks: int
    """Leading full blocks of the prompt that `endpoint` is believed to hold."""
    total_blocks: int
    block_tokens: int
    ready: int
    """Endpoints that were ready and in the subset, before filters."""
    eliminated: Mapping[str, int]
    """Name of the filter -> how many endpoints it dropped."""
    candidates: Candidates
    """Those that were scored."""
    picked: int
    """Position of `endpoint` among them."""
    scorers: tuple[str, ...]
    scored: Scored
    """`scored.parts[i, j]`: weighted score of candidate j by scorer i."""
    response_headers: Mapping[str, str]
    """To be set on the response, e.g. the session token."""
