"""Names in configurations outside profiles, some of which have no effect here.

A type in `ACCEPTED` loads and its parameters are checked, so that an existing ConfigMap works
unchanged. A type in `REFUSED` is refused with a recommended replacement. Names and parameters are
those of llm-d-router v0.10 and of gateway-api-inference-extension v1.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from epp.configuration.disaggregation import (
    DECIDERS,
    HEADER_HANDLER,
    STAGE_HANDLERS,
    STAGE_HEADERS,
    HeaderHandler,
    StageHeaders,
)
from epp.configuration.flow_plugins import FLOW_PLUGINS
from epp.configuration.token_producer import TokenProducer
from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.duration import parse_duration
from epp.core.knowledge.candidates import ATTRIBUTES_MAX
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.prefill_speed import LabelledSpeed
from epp.core.knowledge.topology import TopologyLabels
from epp.core.parameters import Parameters
from epp.core.types import Seconds
from epp.plugins.agents import AgentIdentity
from epp.plugins.conformance import DestinationEndpointServedVerifier
from epp.plugins.data_parallel_rank import DataParallelRank
from epp.plugins.latency import LatencySloAdmitter, PredictedLatency
from epp.plugins.pull_source import PullSource
from epp.plugins.rollout import RolloutScreener

API_VERSION: Final = "llm-d.ai/v1alpha1"
API_VERSIONS: Final = ("llm-d.ai/v1", API_VERSION)
"""Values of `apiVersion` that are accepted. They differ only in sections that are refused here."""
API_VERSION_DEPRECATED: Final = "inference.networking.x-k8s.io/v1alpha1"

PARSERS: Final = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
"""Values of `type` of all plugins that parse requests, in the order in which llm-d-router tries
them. All are in use if the configuration names none.
"""

_SPEC: Final = re.compile(r"[A-Za-z_:][\w:]*(?:\{([^{}]*)\})?", re.ASCII)
_LABEL: Final = re.compile(r"\s*[A-Za-z_]\w*\s*=\s*(?:\"[^\",]*\"|[^\",]*)", re.ASCII)


class MetricSpec(str):
    """A reference to a series on an endpoint's metrics page, as `name` or `name{label=value,...}`;
    "" for no series.
    """

    __slots__ = ()


def parse_metric_spec(text: str) -> MetricSpec:
    """Return the reference to a series of a metrics page in `text`.

    Raises `ValueError`, with one sentence, if `text` is neither empty nor such a reference.
    """
    spec = _SPEC.fullmatch(text)
    labels = (spec[1] or "").split(",") if spec else []
    if text and not (spec and all(_LABEL.fullmatch(label) for label in labels if label)):
        raise ValueError(f"{text!r} is not a metric such as name or name{{label=value}}")
    return MetricSpec(text)


class NoParameters(Parameters, frozen=True):
    """A plugin type that is accepted and has no parameters."""


class DataParallelHandler(Parameters, frozen=True):
    """`data-parallel-profile-handler`: the gateway sends requests for every data-parallel rank of a
    pod to one port, and a header names the rank.

    Ranks with a port each are separate endpoints. The gateway sends a request to the port of its
    rank, and no handler is needed. Some gateways reach only one port of a pod. They
    get `primary_port`, the port of the pod's sidecar, and the header `x-data-parallel-host-port` with
    the address of the rank. A request then has no fallback endpoints.

    Data-parallel ranks behind one address are one endpoint, of which `data-parallel-rank-producer`
    selects a rank.
    """

    primary_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    """Port of the sidecar that obeys the header, or None to send each request to its rank."""


class InflightLoadProducer(Parameters, frozen=True):
    """`inflight-load-producer`: the prefill speeds of endpoints, by which the picker estimates how
    fast prompt tokens in flight are computed. The picker always counts requests and uncached prompt
    tokens in flight, even if the document does not declare `inflight-load-producer`.

    The picker assumes that an endpoint computes prompt tokens at `peak_prefill_throughput`
    (tokens/s). Scorers of times always use this speed. The estimate of prompt tokens in flight
    uses it until the picker has measured the endpoint's prefill speed. If labels of an endpoint
    match entries of `peak_prefill_throughputs`, the first matching entry applies instead. If
    neither parameter applies to an endpoint, the prefill speed of `prefix-cache-affinity-filter`
    does, and without that filter 15,928 tokens/s. The default prefill speed in the simulator is
    that of the pods' profile.
    """

    peak_prefill_throughput: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    peak_prefill_throughputs: tuple[LabelledSpeed, ...] = ()
    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, Meta(ge=0)] = 1.5
    max_estimated_output_tokens: Annotated[int, Meta(ge=0)] | None = None
    """No effect, because the tokens of answers do not count as load in flight."""
    prefix_match_info_producer_name: str = ""
    """Name of the prefix index that estimates a prompt's uncached tokens; only the default prefix
    index is possible.
    """
    sync_cross_replica_state: bool = True


INTERVAL_MAX_S: Final = 3_600.0
GPU_UTILIZATION: Final = "GPUUtilization"
"""Name of the attribute of an endpoint that `dcgm-extractor` provides."""
DCGM_EXTRACTOR: Final = "dcgm-extractor"
MODELS_EXTRACTOR: Final = "models-data-extractor"
TOPOLOGY_EXTRACTOR: Final = "topology-extractor"
POD_EXTRACTOR: Final = "disaggregatedset-rollout-pod-extractor"


class MetricsScheme(StrEnum):
    HTTP = "http"
    HTTPS = "https"


class _PageSource(Parameters, frozen=True):
    """Settings for requesting a page, such as that of the metrics, from each endpoint."""

    scheme: MetricsScheme = MetricsScheme.HTTP
    insecure_skip_verify: bool = True
    """True to accept any certificate of the endpoint, if `scheme` is `https`."""
    interval: str = ""
    """Time between two requests of the page from an endpoint, as a duration such as "5s".

    It has an effect only if it is longer than the default interval.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.interval_s <= INTERVAL_MAX_S:
            raise ValueError(
                f"interval is {self.interval_s:g}s; it must be from 0s to {INTERVAL_MAX_S:g}s"
            )

    @property
    def interval_s(self) -> Seconds:
        """Return the seconds between two requests of the page from one endpoint, or 0 for the
        default interval.
        """
        return float(parse_duration(self.interval)) if self.interval else 0.0


class _TrustingSource(_PageSource, frozen=True):
    """Settings for requesting a page, with PEM files for the certificates of `https` connections."""

    ca_cert_path: str = ""
    """PEM file of the authority that signed the endpoints' certificates, for `https` without
    `insecureSkipVerify`.

    If empty, the system's authorities apply.
    """
    client_cert_path: str = ""
    """PEM file of the certificate that the picker presents to endpoints that request one, for
    `https`.
    """
    client_key_path: str = ""
    """PEM file of the private key of the certificate that the picker presents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath must be given together")


class MetricsDataSource(_TrustingSource, frozen=True):
    """`metrics-data-source`: the scheme, port and path at which each endpoint serves its
    metrics.
    """

    path: Annotated[str, Meta(pattern="^/")] = "/metrics"
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    """Port at which each endpoint serves its metrics, or None for the port that serves requests."""


class ModelsDataSource(_TrustingSource, frozen=True):
    """`models-data-source`: the scheme and path at which each endpoint lists its models, which
    `/debug/endpoints` shows.

    `models-data-source` needs a `models-data-extractor` in the document, and does not affect
    decisions.
    """

    path: Annotated[str, Meta(pattern="^/")] = "/v1/models"
    """URL path at which each endpoint lists its models."""


class DcgmDataSource(_PageSource, frozen=True):
    """`dcgm-data-source`: the address of the DCGM exporter that serves metrics of each endpoint's
    GPUs.

    The highest `DCGM_FI_DEV_GPU_UTIL` of an endpoint's GPUs, as a share from 0 to 1, becomes its
    attribute `GPUUtilization` if there is a `dcgm-extractor`. `endpoint-attribute-filter` and
    `endpoint-attribute-scorer` can read this attribute. Samples of the DCGM exporter with a label
    `pod` count only for the pod of that name.
    """

    path: Annotated[str, Meta(pattern="^/")] = "/metrics"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 9400
    """Port of the DCGM exporter."""
    use_node_address: bool = False
    """True to use the DCGM exporter of the endpoint's node, if the node's address is known.

    If False, the exporter runs within the pod.
    """


class ExtraMetric(Parameters, frozen=True):
    """A series of an endpoint's metrics page, and the name under which attribute filters and
    scorers read it.
    """

    attribute_key: Annotated[str, Meta(min_length=1)]
    metric_spec: MetricSpec


class EngineMetrics(Parameters, frozen=True):
    """The names of the metrics of one inference engine.

    A configured engine replaces the built-in engine of the same name as a whole.
    """

    name: Annotated[str, Meta(min_length=1)]
    queued_requests_spec: MetricSpec = MetricSpec("")
    running_requests_spec: MetricSpec = MetricSpec("")
    kv_usage_spec: MetricSpec = MetricSpec("")
    lora_spec: MetricSpec = MetricSpec("")
    cache_info_spec: MetricSpec = MetricSpec("")
    cache_block_size_spec: MetricSpec = MetricSpec("")
    cache_num_blocks_spec: MetricSpec = MetricSpec("")
    custom_metrics: Annotated[tuple[ExtraMetric, ...], Meta(max_length=ATTRIBUTES_MAX)] = ()
    tiered_offloading_specs: tuple[ExtraMetric, ...] = ()

    def __post_init__(self) -> None:
        if not self.queued_requests_spec:
            raise ValueError(
                f"engine {self.name} has no queuedRequestsSpec, which identifies its page"
            )


ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
"""Labels of a pod that name its inference engine; the second is deprecated."""

BUILT_IN_ENGINES: Final = (
    "vllm",
    "sglang",
    "trtllm-serve",
    "triton-tensorrt-llm",
    "triton",
    "llama.cpp",
)


class CoreMetricsExtractor(Parameters, frozen=True):
    """`core-metrics-extractor`: the label that names the engine of an endpoint, and the metric
    names of each engine.
    """

    engine_label_key: Annotated[str, Meta(min_length=1)] = ENGINE_LABELS[0]
    default_engine: Annotated[str, Meta(min_length=1)] = "vllm"
    engine_configs: tuple[EngineMetrics, ...] = ()

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engine_configs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"engineConfigs has engine {name} {names.count(name)} times")
        known = {*BUILT_IN_ENGINES, *names}
        if self.default_engine not in known:
            raise ValueError(
                f"defaultEngine {self.default_engine} is not one of {', '.join(sorted(known))}"
            )


class KubernetesNotificationSource(Parameters, frozen=True):
    """`k8s-notification-source`: accepted without effect, because the picker always watches the
    objects that it needs.
    """

    group: str = ""
    """No effect: API group of the Kubernetes objects to watch."""
    version: str = ""
    """No effect: API version of the Kubernetes objects to watch."""
    kind: str = ""
    """No effect: kind of the Kubernetes objects to watch."""


HANDLERS: Final[Mapping[str, type[Parameters]]] = {
    "single-profile-handler": NoParameters,
    "data-parallel-profile-handler": DataParallelHandler,
    **STAGE_HANDLERS,
    HEADER_HANDLER: HeaderHandler,
}

NOTIFICATION_SOURCES: Final = ("endpoint-notification-source", "k8s-notification-source")
"""Types of data sources that subscribe to changes of endpoints.

They have no effect, because the picker always receives these changes.
"""

ACCEPTED: Final[Mapping[str, type[Parameters]]] = {
    **HANDLERS,
    **dict.fromkeys(STAGE_HEADERS, StageHeaders),
    **DECIDERS,
    "endpoint-notification-source": NoParameters,
    "k8s-notification-source": KubernetesNotificationSource,
    "token-producer": TokenProducer,
    "tokenizer": TokenProducer,
    "inflight-load-producer": InflightLoadProducer,
    "metrics-data-source": MetricsDataSource,
    "core-metrics-extractor": CoreMetricsExtractor,
    "models-data-source": ModelsDataSource,
    MODELS_EXTRACTOR: NoParameters,
    "dcgm-data-source": DcgmDataSource,
    DCGM_EXTRACTOR: NoParameters,
    TOPOLOGY_EXTRACTOR: TopologyLabels,
    "local-syncer": NoParameters,
    "sheddable-eviction-filter": NoParameters,
    "priority-then-time-eviction-order-policy": NoParameters,
    "model-server-protocol-metrics": CoreMetricsExtractor,
    OutlierEjection.type_name: OutlierEjection,
    DestinationEndpointServedVerifier.type_name: DestinationEndpointServedVerifier,
    **FLOW_PLUGINS,
    PullSource.type_name: PullSource,
    DataParallelRank.type_name: DataParallelRank,
    RolloutScreener.type_name: RolloutScreener,
    POD_EXTRACTOR: NoParameters,
    PredictedLatency.type_name: PredictedLatency,
    LatencySloAdmitter.type_name: LatencySloAdmitter,
    ProbabilisticAdmitter.type_name: ProbabilisticAdmitter,
    AgentIdentity.type_name: AgentIdentity,
    **dict.fromkeys(PARSERS, NoParameters),
}

DEPRECATED: Final[Mapping[str, str]] = {
    "model-server-protocol-metrics": "core-metrics-extractor",
    "tokenizer": "token-producer",
}
"""Current name of each deprecated plugin type. The deprecated names are still accepted."""

MOVED_TO_INDEX: Final = (
    "autoTune",
    "blockSize",
    "blockSizeTokens",
    "hashBlockSize",
    "lruCapacityPerServer",
    "maxPrefixBlocksToMatch",
    "maxPrefixTokensToMatch",
)
"""Parameters that `prefix-cache-scorer` had before the prefix index became a separate plugin."""


REFUSED: Final[Mapping[str, str]] = {
    "predicted-latency-scorer": "use latency-scorer",
    "slo-headroom-tier-filter": "use latency-scorer, which prefers endpoints that meet the SLO",
    "request-attribute-reporter": "nothing is computed from usage: use --parse-response-usage",
    "outlier-ejection-filter": (
        f"outlier ejection needs no filter: remove it, or declare {OutlierEjection.type_name}"
    ),
    "file-discovery": "endpoints are given with --endpoints-file: remove it",
    "round-robin-picker": "use max-score-picker, which picks equal scores round robin",
    "sglanghttp-parser": "this API is not read: use passthrough-parser",
    "vllmgrpc-parser": "gRPC requests are not read: use passthrough-parser",
    "vertexai-parser": "gRPC requests are not read: use passthrough-parser",
}

FEATURE_GATES: Final[Mapping[str, str]] = {
    "haPopulateNonLeaderDatastore": "followers always know all endpoints",
    "prepareDataPlugins": "producers are always prepared",
    "dataLayer": "metrics are always collected by the data layer",
}
"""Feature gates that are accepted without effect, with the reason."""

FLOW_SECTION_MEMBERS: Final = (
    "maxBytes",
    "maxRequests",
    "defaultRequestTTL",
    "noEndpointRequestTTL",
    "defaultPriorityBand",
    "defaultNegativePriorityBand",
    "priorityBands",
    "usageLimitPolicyPluginRef",
    "bandSelectionPolicyPluginRef",
    "enableEviction",
)
"""Members of the section `flowControl` that have an effect only if the feature gate `flowControl` is
on.
"""

_BY_FLAGS: Final = "replicas share by --peer-service, --peers or --peer-url"

IGNORED_SECTIONS: Final[Mapping[str, str]] = {
    "dataLayer.peerDiscovery": "replicas find each other by --peer-service or --peers",
    "dataLayer.crossReplicaSyncerPluginRef": _BY_FLAGS,
    "dataLayer.crossReplicaSyncInterval": "replicas share changes within 20ms",
    "dataLayer.crossReplicaPublishTimeout": "sharing never waits for replicas",
    "dataLayer.crossReplica": _BY_FLAGS,
}
"""Members of the configuration document that are accepted without effect, with the reason.

Some of them correspond to flags, which take effect only at a restart.
"""

REFUSED_SECTIONS: Final[Mapping[str, str]] = {
    "dataLayer.discovery": "endpoints are given with --endpoints-file",
    "discovery": "endpoints are given with --endpoints-file",
}
"""Members of the configuration document that are refused and must be removed, with the reason."""


RIVALS: Final = frozenset(
    {
        "adapter-first-filter",
        "answered-blocks-producer",
        "block-load-producer",
        "bounded-prefix-hash-scorer",
        "bounded-session-scorer",
        "data-parallel-load-scorer",
        "decayed-misses-scorer",
        "dynamo-busy-filter",
        "dynamo-cost-scorer",
        "dynamo-queue-filter",
        "dynamo-two-tier-scorer",
        "early-blocks-hash-scorer",
        "explore-exploit-scorer",
        "free-kv-cache-points-scorer",
        "guarded-prefix-scorer",
        "least-kv-cache-filter",
        "least-pending-work-scorer",
        "least-queue-filter",
        "llm-d-gate-filter",
        "load-aware-prefix-filter",
        "longest-prefix-scorer",
        "noisy-max-score-picker",
        "power-of-two-picker",
        "preble-history-producer",
        "prefix-popularity-producer",
        "prompt-blocks-producer",
        "radix-tree-producer",
        "random-tie-picker",
        "ray-prefix-affinity-scorer",
        "relative-load-scorer",
        "rendezvous-session-scorer",
        "routed-blocks-producer",
        "simhash-ring-scorer",
        "smg-cache-aware-1-scorer",
        "smg-cache-aware-4-scorer",
        "softmax-picker",
        "stay-in-time-scorer",
        "top-matches-scorer",
        "two-hashes-scorer",
        "two-of-best-picker",
        "unstarted-requests-scorer",
        "user-token-place-scorer",
        "user-tokens-producer",
        "work-times-batch-scorer",
    }
)
"""Plugin types of the distribution homing-rivals; if it is not installed, the error
recommends it.
"""


def refusal_of(type_name: str) -> str | None:
    """Return why a plugin type cannot be used, and what to do: a type of llm-d-router that is not
    supported, or one of homing-rivals, which is not installed. None for any other type.
    """
    if type_name.startswith("multicluster-"):
        return "one picker serves one pool: remove it"
    if type_name in RIVALS:
        return "it is in homing-rivals, which is not installed: pip install 'homing-epp[rivals]'"
    return REFUSED.get(type_name)
