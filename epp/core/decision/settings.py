"""All that a scheduler decides by."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.decision.profile import SchedulingProfile
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S, LabelledSpeed
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.session_tokens import NO_TOKENS, SessionTokens
from epp.core.types import Seconds


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """All that decides. Replaced as a whole by `Reconfigured`."""

    profile: SchedulingProfile
    indexes: Mapping[str, AffinityIndexSettings] = field(default_factory=dict)
    """By the name of the producer in the configuration, in the order in which they match."""
    prefix: str = ""
    """Which of `indexes` fills `matched_blocks`; "" if none does."""
    joined: tuple[str, ...] = ()
    """Those that fill it together, each of another origin, `prefix` among them; (): it alone."""
    block_tokens: int = 64
    """Tokens in a block of that index."""
    beliefs: tuple[str, ...] = ()
    """Those of `indexes` that say what endpoints hold: a request that is not served teaches them nothing."""
    ejection: OutlierEjection = field(default_factory=OutlierEjection)
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    metrics_staleness_s: Seconds = 2.0
    """Endpoints with older metrics rank below every fresh one."""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    """`peakPrefillThroughput` of the field, of each endpoint that nothing more is said of."""
    labelled_speeds: tuple[LabelledSpeed, ...] = ()
    """Of others; of an endpoint that several match, the first."""
    fallback_endpoints_max: int = 0
    lease_ttl_without_response_phase_s: Seconds = 60.0
    session_tokens: SessionTokens = NO_TOKENS
    shadow: SchedulingProfile | None = None
    """Judges decisions and acts on none."""
    shadow_share: float = 1.0
    """Of the decisions, above 0: those that `shadow` judges."""

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Of every plugin that decides, as in the configuration."""
        return (*self.profile.plugin_names, *self.indexes)
