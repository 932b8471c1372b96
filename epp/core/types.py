"""The nouns: what the shells hand to the core and what the core hands back."""

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from msgspec import Struct, field

from epp.core.address import host_of, port_of

Seconds: TypeAlias = float
"""Monotonic seconds since any origin; the core never asks for the time, it is told."""

BYTES_PER_TOKEN = 4
"""Without a tokenizer four bytes of prompt count as one token, as in the reference picker."""


class ApiKind(StrEnum):
    """Which API a prompt came through. Part of the hash seed: prompts of two kinds never share."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENS = "tokens"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OPAQUE = "opaque"
    """Not understood, or not looked at: routed by load alone."""


CORE_EXTRACTOR: Final = "core-metrics-extractor"
"""Who tells the attributes that a configuration names without saying who does."""
NO_ATTRIBUTES: Final[Mapping[str, float]] = MappingProxyType({})


def attribute_key(attribute: str, producer: str = CORE_EXTRACTOR) -> str:
    """Under which an attribute of endpoints is kept: its name, and who tells it, "" for anybody."""
    return f"{attribute}/{producer}"


class MetricsTarget(Struct, frozen=True, kw_only=True):
    """Where the shell scrapes an endpoint; the core does not look."""

    port: int
    scheme: str = "http"
    path: str = "/metrics"


class Endpoint(Struct, frozen=True, kw_only=True):
    """A place that serves requests: one pod and port."""

    endpoint_id: str
    """Identity: (pod UID, port), or (name, port) without Kubernetes."""
    name: str
    address: str
    """"ip:port", IPv6 in brackets: exactly what the gateway is told."""
    incarnation: str = ""
    """Changes when the container restarts; what was known of the old one is forgotten."""
    labels: Mapping[str, str] = field(default_factory=dict)
    node_address: str = ""
    """IP of the node that it runs on, IPv6 in brackets; "": not known."""
    metrics: MetricsTarget | None = None
    ready_after_s: float = 0.0
    """Ready this long after it joined even if it was never scraped (static endpoints: 5 s)."""

    @property
    def host(self) -> str:
        """Of `address`, without brackets."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        """Of `address`."""
        return port_of(self.address)


def pod_of(endpoint: Endpoint) -> tuple[str, str]:
    """What endpoints of one pod share: what identifies them but for the port, and their host."""
    return endpoint.endpoint_id.rpartition(":")[0], endpoint.host


def ranks_of(endpoints: Iterable[Endpoint]) -> dict[str, int]:
    """By its identity, the data-parallel rank of each endpoint: ranks of a pod count up with its ports."""
    pods: dict[tuple[str, str], list[Endpoint]] = {}
    for endpoint in endpoints:
        pods.setdefault(pod_of(endpoint), []).append(endpoint)
    return {
        endpoint.endpoint_id: rank
        for pod in pods.values()
        for rank, endpoint in enumerate(sorted(pod, key=lambda one: one.port))
    }


class AdapterReport(Struct, frozen=True, kw_only=True):
    """What one scrape says of LoRA adapters (vLLM; both metric generations).

    `lora_requests_info` (old) gives `active` and `slots_max`. `lora_adapter_loaded` and its
    companions (new) give `gpu`, `cpu`, `pinned`; then `resident_known` is true.
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
        """The engine can."""
        return self.slots_max > 0 or self.resident_known or bool(self.active)

    @property
    def names(self) -> frozenset[str]:
        """Of all adapters that it tells."""
        return self.active | self.gpu | self.cpu


class EndpointMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One good scrape. NaN and None: the page does not tell."""

    waiting_requests: float = math.nan
    running_requests: float = math.nan
    kv_cache_usage: float = math.nan
    """0 to 1; blocks referenced by running requests, not how full the prefix cache is."""
    cache_queried_tokens: float = math.nan
    """Prompt tokens looked up in the prefix cache since the engine started."""
    cache_hit_tokens: float = math.nan
    """Those among them that were there, in all tiers that the engine tells of together."""
    tier_hit_tokens: Mapping[str, float] | None = None
    """Tier -> those among them that were there, "device" among the tiers; None: it does not tell."""
    ttft_sum_s: float = math.nan
    """Time to first token, all requests since the engine started together."""
    ttft_count: float = math.nan
    """Of how many requests that is."""
    first_outputs_total: float = math.nan
    """Requests that have had their first token since the engine started, counted when they had it."""
    answers_total: float = math.nan
    """Answers that have ended since the engine started."""
    answer_tokens_total: float = math.nan
    """Of how many tokens these were together."""
    adapters: AdapterReport | None = None
    block_size_tokens: int | None = None
    blocks_total: int | None = None
    process_started_at_s: float | None = None
    """Wall clock, `process_start_time_seconds`; a change means a restart."""
    requests_total: float | None = None
    """Sum of a counter that only a restart can lower."""
    rejections_total: float | None = None
    """Requests that the engine refused because it is full, since it started."""
    attributes: Mapping[str, float] = field(default_factory=dict)
    """What a configuration asks for beside the load: `attribute_key` -> value. What is missing is unknown."""
    asleep: bool = False
    """vLLM's sleep mode: weights are off the GPU in every rank, no request is served."""


class RefusalReason(StrEnum):
    BAD_REQUEST = "bad-request"
    BODY_TOO_LARGE = "body-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    OVERLOADED = "rejected-overloaded"
    """The picker itself has too much to do; the endpoints were not looked at."""
    SATURATED = "rejected-saturated"
    SHUTTING_DOWN = "rejected-shutting-down"
    BODIES_HELD = "rejected-bodies-held"
    REQUEST_TIMEOUT = "request-timeout"


class Refusal(Struct, frozen=True, kw_only=True):
    """Why a request is not routed. A value: refusing is ordinary, exceptions are bugs or I/O."""

    reason: RefusalReason
    status: int
    """HTTP status: 400, 408, 413, 429 or 503."""
    message: str
    """One sentence for the client: what, where, what was expected."""
    param: str | None = None
    """The member of the body that is at fault, if one is."""
    eliminated: Mapping[str, int] = field(default_factory=dict)
    """Name of the step or filter -> how many endpoints it dropped."""
