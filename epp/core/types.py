"""The basic types that the shells and the core exchange."""

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from msgspec import Struct, field

from epp.core.address import host_of, port_of

Seconds: TypeAlias = float
"""A time or a duration in seconds. Times are monotonic, since any origin, unless their text says
otherwise. The core never reads a clock; callers pass the time.
"""

BYTES_PER_TOKEN = 4
"""Number of prompt bytes that count as one token if the prompt is not tokenized, as in the
reference picker.
"""


class ApiKind(StrEnum):
    """The API that a request uses. It is part of the seed of hashes of a prompt's bytes, so prompts
    of two APIs share no such blocks. Blocks of token ids all have the seed of `TOKENS`.
    """

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENS = "tokens"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OPAQUE = "opaque"
    """The API is unknown or the body was not read, so the request is routed without its prompt."""


class Stage(StrEnum):
    """A part of the work on a request, for which an endpoint is chosen."""

    DECODE = "decode"
    """Generation of the answer, and every other stage without an endpoint of its own. The gateway
    sends the request to the endpoint of this stage.
    """
    PREFILL = "prefill"
    """Stage in which an endpoint computes the KV cache of the prompt."""
    ENCODE = "encode"
    """Stage in which an endpoint encodes the images, audio and video of the prompt."""


DECODE: Final = Stage.DECODE
PREFILL: Final = Stage.PREFILL
ENCODE: Final = Stage.ENCODE
"""These constants are the members of `Stage`, for code that every request runs. Up to Python 3.11,
reading a member from an enum class takes ten times as long as reading a constant.
"""


CORE_EXTRACTOR: Final = "core-metrics-extractor"
"""Name of the producer of endpoint attributes that applies if a configuration names none."""
NO_ATTRIBUTES: Final[Mapping[str, float]] = MappingProxyType({})


def attribute_key(attribute: str, producer: str = CORE_EXTRACTOR) -> str:
    """Return the key of an endpoint attribute, "name/producer". The producer "" stands for any
    producer.
    """
    return f"{attribute}/{producer}"


class MetricsTarget(Struct, frozen=True, kw_only=True):
    """The port, scheme and path at which the shell scrapes an endpoint's metrics. The core only
    checks whether an endpoint has one.
    """

    port: int
    scheme: str = "http"
    path: str = "/metrics"


class Endpoint(Struct, frozen=True, kw_only=True):
    """An endpoint, which serves requests: one port of one pod."""

    endpoint_id: str
    """Identity of the endpoint: (pod UID, port), or (name, port) without Kubernetes."""
    name: str
    address: str
    """Address "ip:port" of the endpoint, with IPv6 in brackets: the exact text that the gateway
    receives.
    """
    incarnation: str = ""
    """Value that changes when the endpoint's container restarts. The picker then drops its data
    about the old container.
    """
    labels: Mapping[str, str] = field(default_factory=dict)
    node_address: str = ""
    """IP address of the Kubernetes node of the endpoint, with IPv6 in brackets, or "" if unknown.
    """
    metrics: MetricsTarget | None = None
    ready_after_s: float = 0.0
    """Time in seconds, after the endpoint joined, from which it is ready without a successful
    scrape: 5 s for endpoints from Kubernetes or a file.
    """

    @property
    def host(self) -> str:
        """Return the host of the endpoint's `address`, without brackets."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        """Return the port of the endpoint's `address`."""
        return port_of(self.address)


def pod_of(endpoint: Endpoint) -> tuple[str, str]:
    """Return a key that is equal for all endpoints of one pod: their identity without the port, and
    their host.
    """
    return endpoint.endpoint_id.rpartition(":")[0], endpoint.host


def siblings_of(endpoints: Iterable[Endpoint]) -> frozenset[str]:
    """Return the identities of the endpoints whose pod has another of `endpoints`."""
    pods: dict[tuple[str, str], list[str]] = {}
    for endpoint in endpoints:
        pods.setdefault(pod_of(endpoint), []).append(endpoint.endpoint_id)
    return frozenset(one for pod in pods.values() if len(pod) > 1 for one in pod)


def ranks_of(endpoints: Iterable[Endpoint]) -> dict[str, int]:
    """Return the data-parallel rank of each endpoint, by its identity. The ranks of the endpoints
    of one pod ascend with their ports.
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

    `lora_requests_info` (old) gives `active`, and `slots_max` if no other series does.
    `lora_adapter_loaded` (new) gives `gpu`, `cpu` and `pinned`, and `max_gpu_lora_adapters` (new)
    `slots_max`; with either, `resident_known` is True.
    """

    active: frozenset[str] = frozenset()
    """Names of the adapters with a running or waiting request."""
    slots_max: int = 0
    resident_known: bool = False
    gpu: frozenset[str] = frozenset()
    cpu: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()

    @property
    def serves_adapters(self) -> bool:
        """Return whether the engine can serve LoRA adapters."""
        return self.slots_max > 0 or self.resident_known or bool(self.active)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all adapters that are active or in GPU or CPU memory."""
        return self.active | self.gpu | self.cpu


class KvTransfers(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV-cache transfers that an engine counted since it started, between prefill and decode
    endpoints. NaN means that the page does not report a value.
    """

    received_tokens: float = math.nan
    """Number of prompt tokens whose KV cache the engine received from another engine."""
    received_bytes: float = math.nan
    ended: float = math.nan
    """Number of KV-cache transfers to the engine that ended. A request counts once for each process
    of the engine (tensor-parallel worker) that receives a part of its KV cache.
    """
    ended_s: float = math.nan
    """Sum of the times of the KV-cache transfers in `ended`, in seconds."""
    failed: float = math.nan
    """Number of KV-cache transfers that failed."""
    expired: float = math.nan
    """Number of requests whose KV cache the engine dropped, because no other engine read it in time."""


class EndpointMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one successful scrape of an endpoint's metrics. NaN and None mean that the page
    does not report a value.
    """

    waiting_requests: float = math.nan
    running_requests: float = math.nan
    kv_cache_usage: float = math.nan
    """Share of the KV blocks that running requests reference, from 0 to 1; not the fill level of
    the prefix cache.
    """
    cache_queried_tokens: float = math.nan
    """Number of prompt tokens that the engine looked up in its prefix cache since it started."""
    cache_hit_tokens: float = math.nan
    """Number of prompt tokens that the engine found in its prefix cache since it started, in all
    tiers that it reports as one sum.
    """
    tier_hit_tokens: Mapping[str, float] | None = None
    """Number of prompt tokens that the engine found in its prefix cache since it started, by tier,
    with "device" among the tiers; None if not reported.
    """
    ttft_sum_s: float = math.nan
    """Sum of the times to first token, in seconds, of all requests since the engine started."""
    ttft_count: float = math.nan
    """Number of requests whose times to first token are in `ttft_sum_s`."""
    first_outputs_total: float = math.nan
    """Number of requests that produced their first token since the engine started. Each is counted
    when it produces that token.
    """
    answers_total: float = math.nan
    """Number of answers that ended since the engine started."""
    answer_tokens_total: float = math.nan
    """Total number of tokens in the answers that ended since the engine started."""
    adapters: AdapterReport | None = None
    block_size_tokens: int | None = None
    blocks_total: int | None = None
    process_started_at_s: float | None = None
    """Time at which the engine's process started, in seconds since 1970
    (`process_start_time_seconds`). A change means a restart.
    """
    requests_total: float | None = None
    """Value of a counter that falls only if the engine restarts, by which a restart is detected."""
    rejections_total: float | None = None
    """Number of requests that the engine refused since it started, because it was full; None if not
    reported.
    """
    attributes: Mapping[str, float] = field(default_factory=dict)
    """Values of endpoint attributes that a configuration requests in addition to the load, by
    `attribute_key`. An attribute that the page does not report is missing.
    """
    transfers: KvTransfers | None = None
    """KV-cache transfers of the engine, or None if the page reports none of its values."""
    asleep: bool = False
    """True if the engine is in vLLM's sleep mode: every rank has its weights off the GPU and serves
    no request.
    """


class RefusalReason(StrEnum):
    BAD_REQUEST = "bad-request"
    BODY_TOO_LARGE = "body-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    NO_PREFILL_ENDPOINTS = "rejected-no-prefill-endpoints"
    NO_ENCODE_ENDPOINTS = "rejected-no-encode-endpoints"
    NOT_CACHED = "rejected-not-cached"
    """The request is for a cached prompt only (`Prefer: if-available`), and its prompt is not
    cached.
    """
    OVERLOADED = "rejected-overloaded"
    """The picker itself is overloaded, or the request waited too long for the picker to place it,
    so that it was refused without considering the endpoints.
    """
    SATURATED = "rejected-saturated"
    WAIT_EXPIRED = "rejected-ttl-expired"
    """The request waited in the picker's queue for its maximum time."""
    EVICTED = "evicted"
    """The picker ended the placed request before its response began, so that a waiting request of
    higher priority has room.
    """
    SHUTTING_DOWN = "rejected-shutting-down"
    BODIES_HELD = "rejected-bodies-held"
    REQUEST_TIMEOUT = "request-timeout"


class Refusal(Struct, frozen=True, kw_only=True):
    """The refusal of a request that is not routed, with its reason. It is a value, because a
    refusal is ordinary; exceptions are for bugs and I/O.
    """

    reason: RefusalReason
    status: int
    """HTTP status of the response to the client: 400, 408, 412, 413, 429 or 503."""
    message: str
    """One sentence for the client: what happened, where, and what was expected instead."""
    param: str | None = None
    """Path of the member of the body that is at fault, such as "$.model", or None if no single
    member is.
    """
    eliminated: Mapping[str, int] = field(default_factory=dict)
    """Number of endpoints that each step or filter dropped before the refusal, by its name."""
    stage: Stage | None = None
    """Stage for which no endpoint was left, or whose endpoints are saturated. It is None if the
    configuration has only one stage, or if the refusal does not come from a single stage.
    """
    retry_after_s: int | None = None
    """Seconds after which the client should try again, or None if no time is known."""
