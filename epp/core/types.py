"""The basic types that the shells and the core exchange."""

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from msgspec import Struct, field

from epp.core.address import host_of, port_of

Seconds: TypeAlias = float
"""Monotonic seconds since any origin. The core never reads a clock; callers pass the time."""

BYTES_PER_TOKEN = 4
"""Bytes of prompt that count as one token without a tokenizer, as in the reference picker."""


class ApiKind(StrEnum):
    """The API of a request. It is part of the hash seed, so prompts of two APIs never share blocks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENS = "tokens"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OPAQUE = "opaque"
    """Unknown API or unread body: routed by load alone."""


class Stage(StrEnum):
    """A part of the work on a request, for which an endpoint is chosen."""

    DECODE = "decode"
    """Generation of the answer, and every other stage without an endpoint of its own. The gateway
    sends the request to the endpoint of this stage.
    """
    PREFILL = "prefill"
    """Computation of the prompt's KV cache."""
    ENCODE = "encode"
    """Encoding of images, audio and video."""


CORE_EXTRACTOR: Final = "core-metrics-extractor"
"""Producer of attributes for which a configuration names no producer."""
NO_ATTRIBUTES: Final[Mapping[str, float]] = MappingProxyType({})


def attribute_key(attribute: str, producer: str = CORE_EXTRACTOR) -> str:
    """Return the key of an endpoint attribute: its name and its producer, "" for any producer."""
    return f"{attribute}/{producer}"


class MetricsTarget(Struct, frozen=True, kw_only=True):
    """The address at which the shell scrapes an endpoint. The core does not use it."""

    port: int
    scheme: str = "http"
    path: str = "/metrics"


class Endpoint(Struct, frozen=True, kw_only=True):
    """A place that serves requests: one pod and port."""

    endpoint_id: str
    """Identity: (pod UID, port), or (name, port) without Kubernetes."""
    name: str
    address: str
    """"ip:port", with IPv6 in brackets: the exact text that the gateway receives."""
    incarnation: str = ""
    """Value that changes when the container restarts; knowledge about the old container is then
    dropped.
    """
    labels: Mapping[str, str] = field(default_factory=dict)
    node_address: str = ""
    """IP address of the endpoint's node, with IPv6 in brackets, or "" if unknown."""
    metrics: MetricsTarget | None = None
    ready_after_s: float = 0.0
    """Time after joining, in seconds, at which an endpoint is ready without any scrape (static
    endpoints: 5 s).
    """

    @property
    def host(self) -> str:
        """Return the host of `address`, without brackets."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        """Return the port of `address`."""
        return port_of(self.address)


def pod_of(endpoint: Endpoint) -> tuple[str, str]:
    """Return what all endpoints of one pod share: their identity without the port, and their host."""
    return endpoint.endpoint_id.rpartition(":")[0], endpoint.host


def ranks_of(endpoints: Iterable[Endpoint]) -> dict[str, int]:
    """Return the data-parallel rank of each endpoint, by identity; ranks of a pod ascend with its
    ports.
    """
    pods: dict[tuple[str, str], list[Endpoint]] = {}
    for endpoint in endpoints:
        pods.setdefault(pod_of(endpoint), []).append(endpoint)
    return {
        endpoint.endpoint_id: rank
        for pod in pods.values()
        for rank, endpoint in enumerate(sorted(pod, key=lambda one: one.port))
    }


class AdapterReport(Struct, frozen=True, kw_only=True):
    """The LoRA adapters that one scrape reports (vLLM; both metric generations).

    `lora_requests_info` (old) gives `active` and `slots_max`. `lora_adapter_loaded` and its
    companions (new) give `gpu`, `cpu` and `pinned`; then `resident_known` is True.
    """

    active: frozenset[str] = frozenset()
    """Adapters with a running or waiting request."""
    slots_max: int = 0
    resident_known: bool = False
    gpu: frozenset[str] = frozenset()
    cpu: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()

    @property
    def serves_adapters(self) -> bool:
        """Return whether the engine can serve adapters."""
        return self.slots_max > 0 or self.resident_known or bool(self.active)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all reported adapters."""
        return self.active | self.gpu | self.cpu


class EndpointMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one successful scrape. NaN and None mean that the page does not report a value."""

    waiting_requests: float = math.nan
    running_requests: float = math.nan
    kv_cache_usage: float = math.nan
    """Share of the KV blocks that running requests reference, from 0 to 1; not the fill level of
    the prefix cache.
    """
    cache_queried_tokens: float = math.nan
    """Prompt tokens looked up in the prefix cache since the engine started."""
    cache_hit_tokens: float = math.nan
    """Prompt tokens found in the prefix cache, in all tiers that the engine reports as one sum."""
    tier_hit_tokens: Mapping[str, float] | None = None
    """Prompt tokens found in the prefix cache, by tier, with "device" among the tiers; None if not
    reported.
    """
    ttft_sum_s: float = math.nan
    """Sum of the times to first token of all requests since the engine started."""
    ttft_count: float = math.nan
    """Number of requests in `ttft_sum_s`."""
    first_outputs_total: float = math.nan
    """Number of requests that produced their first token since the engine started, counted at that
    time.
    """
    answers_total: float = math.nan
    """Number of answers that ended since the engine started."""
    answer_tokens_total: float = math.nan
    """Total number of tokens in these answers."""
    adapters: AdapterReport | None = None
    block_size_tokens: int | None = None
    blocks_total: int | None = None
    process_started_at_s: float | None = None
    """Start of the process by the wall clock (`process_start_time_seconds`); a change means a
    restart.
    """
    requests_total: float | None = None
    """Sum of a counter that only a restart can lower."""
    rejections_total: float | None = None
    """Number of requests that the engine refused because it was full, since it started."""
    attributes: Mapping[str, float] = field(default_factory=dict)
    """Values that a configuration requests in addition to the load, by `attribute_key`. A missing
    value is unknown.
    """
    asleep: bool = False
    """True in vLLM's sleep mode: every rank has its weights off the GPU and serves no request."""


class RefusalReason(StrEnum):
    BAD_REQUEST = "bad-request"
    BODY_TOO_LARGE = "body-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    NO_PREFILL_ENDPOINTS = "rejected-no-prefill-endpoints"
    NO_ENCODE_ENDPOINTS = "rejected-no-encode-endpoints"
    OVERLOADED = "rejected-overloaded"
    """The picker is overloaded; the endpoints were not considered."""
    SATURATED = "rejected-saturated"
    SHUTTING_DOWN = "rejected-shutting-down"
    BODIES_HELD = "rejected-bodies-held"
    REQUEST_TIMEOUT = "request-timeout"


class Refusal(Struct, frozen=True, kw_only=True):
    """The reason why a request is not routed. It is a value, because a refusal is ordinary;
    exceptions are for bugs and I/O.
    """

    reason: RefusalReason
    status: int
    """HTTP status: 400, 408, 413, 429 or 503."""
    message: str
    """One sentence for the client: what happened, where, and what was expected."""
    param: str | None = None
    """Member of the body that is at fault, or None."""
    eliminated: Mapping[str, int] = field(default_factory=dict)
    """Number of endpoints dropped, by name of the step or filter."""
    stage: Stage | None = None
    """Stage that has no endpoint, or None if the configuration has only one stage."""
