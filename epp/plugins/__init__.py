"""The built-in plugins: filters, scorers and pickers.

These tables hold every built-in plugin of these kinds that a configuration can name, one row each.
Installed plugins are added to the tables in `epp.configuration.build`.
"""

from collections.abc import Mapping
from typing import Final

from epp.core.decision.plugin import Filter, Picker, Scorer
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.knowledge.saturation import UtilizationDetector
from epp.plugins import conformance, filters, pickers, scorers, session_affinity
from epp.plugins.added_time import AddedTime
from epp.plugins.agents import ThunderAgent
from epp.plugins.context_length import ContextLengthAware
from epp.plugins.encoder_cache import EncoderCacheAffinity
from epp.plugins.endpoint_attributes import EndpointAttributeFilter, EndpointAttributeScorer
from epp.plugins.header_labels import HeaderLabelAffinity
from epp.plugins.latency import Latency
from epp.plugins.stage_time import DecodeTime, PrefillTime
from epp.plugins.topology import TopologyAffinityFilter, TopologyAffinityScorer

FILTERS: Final[Mapping[str, type[Filter]]] = {
    "label-selector-filter": filters.LabelSelector,
    "by-label-selector": filters.LabelSelector,
    "by-label": filters.LabelValues,
    "decode-filter": filters.DecodeRole,
    "prefill-filter": filters.PrefillRole,
    "encode-filter": filters.EncodeRole,
    "fresh-metrics-filter": filters.FreshMetrics,
    "lora-capacity-filter": filters.LoraCapacity,
    "prefix-cache-affinity-filter": filters.PrefixCacheAffinity,
    "session-affinity-filter": session_affinity.SessionAffinityFilter,
    "utilization-filter": filters.Utilization,
    "endpoint-attribute-filter": EndpointAttributeFilter,
    "topology-affinity-filter": TopologyAffinityFilter,
    "header-based-testing-filter": conformance.HeaderBasedTesting,
    "utilization-detector": UtilizationDetector,
    "concurrency-detector": ConcurrencyDetector,
}

SCORERS: Final[Mapping[str, type[Scorer]]] = {
    "added-time-scorer": AddedTime,
    "decode-time-scorer": DecodeTime,
    "prefill-time-scorer": PrefillTime,
    "prefix-cache-scorer": scorers.PrefixCache,
    "queue-scorer": scorers.Queue,
    "kv-cache-utilization-scorer": scorers.KVCacheUtilization,
    "running-requests-size-scorer": scorers.RunningRequests,
    "active-request-scorer": scorers.ActiveRequests,
    "token-load-scorer": scorers.TokenLoad,
    "load-aware-scorer": scorers.LoadAware,
    "lora-affinity-scorer": scorers.LoraAffinity,
    "no-hit-lru-scorer": scorers.NoHitLru,
    "session-affinity-scorer": session_affinity.SessionAffinityScorer,
    "mm-embeddings-cache-scorer": EncoderCacheAffinity,
    "endpoint-attribute-scorer": EndpointAttributeScorer,
    "context-length-aware": ContextLengthAware,
    "topology-affinity-scorer": TopologyAffinityScorer,
    "header-label-affinity-scorer": HeaderLabelAffinity,
    "latency-scorer": Latency,
    "thunder-agent": ThunderAgent,
}

PICKERS: Final[Mapping[str, type[Picker]]] = {
    "max-score-picker": pickers.MaxScore,
    "weighted-random-picker": pickers.WeightedRandom,
    "random-picker": pickers.UniformRandom,
}

DEPRECATED: Final[Mapping[str, str]] = {
    "by-label": "label-selector-filter",
    "by-label-selector": "label-selector-filter",
}
"""Replacement of each deprecated type name. The old names keep working."""
