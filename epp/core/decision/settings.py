"""The settings that determine the decisions of a scheduler."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.stages import Stages
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.indexes import IndexesSettings
from epp.core.knowledge.latency import LatencyPrediction
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S, LabelledSpeed, speed_by_labels
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.knowledge.topology import DEFAULT_TOPOLOGY, TopologyLabels
from epp.core.session_tokens import NO_TOKENS, SessionTokens
from epp.core.types import Endpoint, Seconds


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """The settings that determine the decisions of a scheduler. The input `Reconfigured` replaces
    them as a whole.
    """

    stages: Stages
    indexes: Mapping[str, AffinityIndexSettings] = field(default_factory=dict)
    """Settings of each index by name of its producer in the configuration, in the order in which
    they match.
    """
    prefix: str = ""
    """Name of the index whose match becomes `matched_blocks`, or "" if there is none."""
    joined: tuple[str, ...] = ()
    """Names of the indexes, each of another origin, whose joint match becomes `matched_blocks`,
    `prefix` first. If it has fewer than two names, the match of `prefix` alone does.
    """
    block_tokens: int = 64
    """Number of tokens in a block of the `prefix` index."""
    beliefs: tuple[str, ...] = ()
    """Names of the indexes that count cached blocks. The record of a request in them is undone if
    the request is not served.
    """
    ejection: OutlierEjection = field(default_factory=OutlierEjection)
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    flow: FlowSettings | None = None
    """Settings of the queue, or None if requests do not wait for endpoints to have room."""
    admitter: ProbabilisticAdmitter | None = None
    """Rule by which requests that may be shed are refused at random, or None if there is none."""
    latency: LatencyPrediction | None = None
    """Settings of latency prediction, or None if no latency is predicted."""
    metrics_staleness_s: Seconds = 2.0
    """Age in seconds above which an endpoint's metrics are stale. Such an endpoint is not chosen
    while a reachable endpoint with fresh metrics is left.
    """
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    """Prefill speed in tokens per second of each endpoint whose labels match none of
    `labelled_speeds` (`peakPrefillThroughput`).
    """
    labelled_speeds: tuple[LabelledSpeed, ...] = ()
    """Prefill speeds of endpoints by their labels; if several match an endpoint, the first applies."""
    topology: TopologyLabels = DEFAULT_TOPOLOGY
    """Keys of the endpoint labels whose values name the endpoint's host, rack, zone and region."""
    primary_port: int = 0
    """Port to which the gateway sends the requests for all data-parallel ranks of a pod, or 0 if it
    sends them to the port of the rank.
    """
    fallback_endpoints_max: int = 0
    lease_ttl_without_response_phase_s: Seconds = 60.0
    session_tokens: SessionTokens = NO_TOKENS
    shadow: SchedulingProfile | None = None
    """Second profile, which judges decisions and never acts, or None if there is none."""
    shadow_share: float = 1.0
    """Share of the decisions of `profile` that `shadow` judges, above 0 and at most 1."""

    @property
    def profile(self) -> SchedulingProfile:
        """Return the profile that chooses the endpoint to which the gateway sends a request."""
        return self.stages.decode

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Return the configured names of the plugins of all stages and of the indexes."""
        names = [name for _, one in self.stages.profiles() for name in one.plugin_names]
        return (*dict.fromkeys(names), *self.indexes)

    def prefill_speed_of(self, endpoint: Endpoint) -> float:
        """Return the configured prefill speed of `endpoint` in tokens per second."""
        return speed_by_labels(endpoint.labels, self.labelled_speeds, self.prefill_tokens_per_s)

    @property
    def index_settings(self) -> IndexesSettings:
        """Return the settings of all affinity indexes, and the names of those whose match becomes
        `matched_blocks`.
        """
        return IndexesSettings(self.indexes, self.prefix, self.joined)
