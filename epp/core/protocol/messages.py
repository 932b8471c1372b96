"""The messages of an ext_proc stream: events from the gateway, and answers of the picker.

The module does not depend on protobuf: `shell/gateway/codec` translates. Each event is one message
of the gateway.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.types import Refusal, RefusalReason

BODY_CHUNK_BYTES_MAX: Final = 62_000
"""Maximum size in bytes of a body chunk that the picker sends. Gateways reject chunks above 64 KB;
the reference picker uses this limit.
"""

DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
REQUEST_ID_HEADER: Final = "x-request-id"
DROP_REASON_HEADER: Final = "x-llm-d-request-dropped-reason"
UPGRADE_HEADER: Final = "upgrade"
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FLOW_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Names of the header with the id of the flow, such as a tenant, that the request belongs to."""
TTL_HEADER: Final = "x-llm-d-inference-ttl"
"""Name of the header with the longest time for which the request may wait in the queue."""
FIRST_TOKEN_HEADERS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Names of the header with the milliseconds in which the client expects the first token."""
REWRITE_HEADERS: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
PREFILL_HEADER: Final = "x-prefiller-host-port"
"""Request header that names the endpoint that prefills, as "ip:port", for the sidecar of the decode
endpoint.
"""
ENCODE_HEADER: Final = "x-encoder-hosts-ports"
"""Request header that names the endpoints that encode media, as a list of "ip:port"."""
RANK_ADDRESS_HEADER: Final = "x-data-parallel-host-port"
"""Request header with the address "ip:port" of the data-parallel rank that must serve the request,
for the sidecar that listens on the port that all ranks of the pod share.
"""
ENGINE_PRIORITY_HEADER: Final = "x-vllm-priority"
"""Request header with the priority of a request in vLLM's own queue, an integer.

vLLM serves requests with a lower value earlier. The header replaces the field `priority` of the
body.
"""
CONTROL_HEADERS: Final = frozenset(
    {
        *OBJECTIVE_HEADERS,
        *REWRITE_HEADERS,
        *FLOW_HEADERS,
        TTL_HEADER,
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-scores",
        "x-gateway-destination-endpoint-fallback",
        PREFILL_HEADER,
        ENCODE_HEADER,
        RANK_ADDRESS_HEADER,
        ENGINE_PRIORITY_HEADER,
        "x-kv-cache-source-host-port",
    }
)
"""Names of the headers between gateway and picker. The picker lets the gateway remove them from
clients' requests, so that model servers do not receive them.
"""


class BodyMode(IntEnum):
    """Values of `envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode`; `UNKNOWN`
    stands for any other value.
    """

    UNKNOWN = -1
    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class BodyModes(Struct, frozen=True):
    """The modes in which a gateway sends request and response bodies. Only the first message of a
    stream announces them (`protocol_config`).
    """

    request: BodyMode
    response: BodyMode
    unknown: int | None = None
    """Number of an announced mode that the picker does not know, or None if it knows both."""


class RequestHeaders(Struct, frozen=True, gc=False):
    headers: Mapping[str, str]
    """Headers of the HTTP request, by lower-case name."""
    end_of_stream: bool
    modes: BodyModes | None = None
    subset: tuple[str, ...] | None = None
    """Addresses in the subset hint of this message. None if it has no hint, () if the hint is empty
    or malformed.
    """


class RequestBody(Struct, frozen=True, gc=False):
    body: bytes | memoryview
    """A piece of the request body, or the whole body. A memoryview keeps the whole gRPC message in
    memory.
    """
    end_of_stream: bool
    subset: tuple[str, ...] | None = None


class RequestTrailers(Struct, frozen=True, gc=False):
    subset: tuple[str, ...] | None = None


class ResponseHeaders(Struct, frozen=True, gc=False):
    headers: Mapping[str, str]
    end_of_stream: bool
    modes: BodyModes | None = None
    served: str = ""
    """Address "ip:port" of the endpoint that serves the request, or "" if the gateway does not
    report it.
    """


class ResponseBody(Struct, frozen=True, gc=False):
    body: bytes
    end_of_stream: bool


class ResponseTrailers(Struct, frozen=True):
    pass


Event: TypeAlias = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
)


class Destination(Struct, frozen=True, gc=False):
    """The endpoints that may serve a request, and the changes of the request's headers."""

    endpoints: tuple[str, ...]
    """Addresses "ip:port" of the endpoints, the first choice first; more than one only if fallbacks
    are configured.
    """
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    own_header: tuple[str, str] | None = None
    """One more header to set on the request, or None if there is none. It is kept apart because its
    value differs for each request.
    """


class RequestHeadersAnswer(Struct, frozen=True, gc=False):
    destination: Destination | None = None


class RequestBodyAnswer(Struct, frozen=True, gc=False):
    """The answer to a message with a buffered or streamed request body. `body` replaces Envoy's
    copy of the body, unless it is None.
    """

    destination: Destination | None = None
    body: bytes | None = None


class RequestBodyChunk(Struct, frozen=True, gc=False):
    """An answer with a piece of a full-duplex request body, which the picker sends back to the
    gateway.
    """

    body: bytes | memoryview
    end_of_stream: bool


class RequestTrailersAnswer(Struct, frozen=True):
    pass


class ResponseHeadersAnswer(Struct, frozen=True, gc=False):
    set_headers: tuple[tuple[str, str], ...] = ()
    without_body: bool = False
    """True to ask the gateway not to send the response body. This has an effect only if the gateway
    allows an override of its processing mode.
    """


class ResponseBodyAnswer(Struct, frozen=True):
    pass


class ResponseBodyChunk(Struct, frozen=True, gc=False):
    """An answer with a piece of a full-duplex response body, which the picker sends back to the
    gateway.
    """

    body: bytes | memoryview
    end_of_stream: bool


class ResponseTrailersAnswer(Struct, frozen=True):
    pass


class TimeoutAnswer(Struct, frozen=True, gc=False):
    """An answer that asks the gateway to wait up to `timeout_s` seconds for the next one. Envoy obeys
    the first of a message, if its `max_message_timeout` allows so long a time.
    """

    timeout_s: float


class ImmediateAnswer(Struct, frozen=True):
    """An answer with which the picker refuses a request; the gateway sends it to the client instead
    of a response.
    """

    refusal: Refusal
    headers: tuple[tuple[str, str], ...]


RETRY_AFTER_S: Final = 1
"""`retry-after` in seconds of a refusal whose reason may soon pass, if no better time is known."""
RETURNED_CHARACTERS_MAX: Final = 256
"""Maximum length in characters of a request id that is returned to the client. A client may send an
id of any length, and responses have less room for headers than requests.
"""


_PASSING: Final = frozenset(
    {
        RefusalReason.SATURATED,
        RefusalReason.WAIT_EXPIRED,
        RefusalReason.EVICTED,
        RefusalReason.OVERLOADED,
        RefusalReason.BODIES_HELD,
    }
)
"""Reasons of refusals that may soon pass, for which the client gets a `retry-after` header."""


def first_of(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the value of the first of `names` that is in `headers`, or ""."""
    for name in names:
        if name in headers:
            return headers[name]
    return ""


def returnable(request_id: str) -> str:
    """Return `request_id` if it may be a response header (printable ASCII, at most
    `RETURNED_CHARACTERS_MAX`), else "".
    """
    fits = len(request_id) <= RETURNED_CHARACTERS_MAX
    return request_id if fits and request_id.isascii() and request_id.isprintable() else ""


def refusing(refusal: Refusal, request_id: str = "") -> ImmediateAnswer:
    """Return the answer that refuses a request, in the same form for all reasons.

    `request_id` becomes a response header if it is `returnable`; it is "" if the request has none.
    """
    headers = [("content-type", "application/json")]
    if returnable(request_id):
        headers.append((REQUEST_ID_HEADER, request_id))
    if refusal.status in (429, 503):
        headers.append((DROP_REASON_HEADER, refusal.reason.value))
    if refusal.reason in _PASSING:
        headers.append(("retry-after", str(refusal.retry_after_s or RETRY_AFTER_S)))
    return ImmediateAnswer(refusal, tuple(headers))


Answer: TypeAlias = (
    RequestHeadersAnswer
    | RequestBodyAnswer
    | RequestBodyChunk
    | RequestTrailersAnswer
    | ResponseHeadersAnswer
    | ResponseBodyAnswer
    | ResponseBodyChunk
    | ResponseTrailersAnswer
    | TimeoutAnswer
    | ImmediateAnswer
)
