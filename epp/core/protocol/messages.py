"""The vocabulary of an ext_proc stream: what a gateway sends, what the picker answers.

Free of protobuf: `shell/gateway/codec` translates. Each event is one message of the gateway.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.types import Refusal, RefusalReason

BODY_CHUNK_BYTES_MAX: Final = 62_000
"""Gateways refuse body chunks above 64 KB; the reference picker cuts here."""

DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
REQUEST_ID_HEADER: Final = "x-request-id"
DROP_REASON_HEADER: Final = "x-llm-d-request-dropped-reason"
UPGRADE_HEADER: Final = "upgrade"
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
REWRITE_HEADERS: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
CONTROL_HEADERS: Final = frozenset(
    {
        *OBJECTIVE_HEADERS,
        *REWRITE_HEADERS,
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-scores",
        "x-gateway-destination-endpoint-fallback",
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
    }
)
"""Spoken between gateway and picker: the model server must not get them from a client."""


class BodyMode(IntEnum):
    """`envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode`."""

    UNKNOWN = -1
    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class BodyModes(Struct, frozen=True):
    """What `protocol_config` announces; only the first message of a stream carries it."""

    request: BodyMode
    response: BodyMode
    unknown: int | None = None
    """The number of a mode that is not known, if there is one."""


class RequestHeaders(Struct, frozen=True, gc=False):
    headers: Mapping[str, str]
    """Lower-case names."""
    end_of_stream: bool
    modes: BodyModes | None = None
    subset: tuple[str, ...] | None = None
    """The subset hint of this message; None: it carries none; (): empty or malformed."""


class RequestBody(Struct, frozen=True, gc=False):
    body: bytes | memoryview
    """A piece of the body, or all of it. A view keeps the message in memory that it is a part of."""
    end_of_stream: bool
    subset: tuple[str, ...] | None = None


class RequestTrailers(Struct, frozen=True, gc=False):
    subset: tuple[str, ...] | None = None


class ResponseHeaders(Struct, frozen=True, gc=False):
    headers: Mapping[str, str]
    end_of_stream: bool
    modes: BodyModes | None = None
    served: str = ""
    """The endpoint that serves, if the gateway tells: "ip:port"."""


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
    """Where the request goes and what changes in its headers."""

    endpoints: tuple[str, ...]
    """ "ip:port", the first choice first; more than one only where fallbacks are configured."""
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    own_header: tuple[str, str] | None = None
    """One more to set, whose value no other request gets."""


class RequestHeadersAnswer(Struct, frozen=True, gc=False):
    destination: Destination | None = None


class RequestBodyAnswer(Struct, frozen=True, gc=False):
    """Answers a message of a buffered or streamed body; `body` replaces what Envoy holds."""

    destination: Destination | None = None
    body: bytes | None = None


class RequestBodyChunk(Struct, frozen=True, gc=False):
    """A piece of a full-duplex request body."""

    body: bytes | memoryview
    end_of_stream: bool


class RequestTrailersAnswer(Struct, frozen=True):
    pass


class ResponseHeadersAnswer(Struct, frozen=True, gc=False):
    set_headers: tuple[tuple[str, str], ...] = ()
    without_body: bool = False
    """The gateway need not show the body; it does all the same unless it allows an override."""


class ResponseBodyAnswer(Struct, frozen=True):
    pass


class ResponseBodyChunk(Struct, frozen=True, gc=False):
    """A piece of a full-duplex response body."""

    body: bytes | memoryview
    end_of_stream: bool


class ResponseTrailersAnswer(Struct, frozen=True):
    pass


class ImmediateAnswer(Struct, frozen=True):
    """Answer the client ourselves."""

    refusal: Refusal
    headers: tuple[tuple[str, str], ...]


RETRY_AFTER_S: Final = "1"
RETURNED_CHARACTERS_MAX: Final = 256
"""Of a request id: a client may send any, and a response has room for less than a request."""


_PASSING: Final = frozenset(
    {RefusalReason.SATURATED, RefusalReason.OVERLOADED, RefusalReason.BODIES_HELD}
)
"""Reasons that may be gone in a moment: the client is told when to come back."""


def returnable(request_id: str) -> str:
    """`request_id`, if clients may get it back as a header: not too long, and printable ASCII; else ""."""
    fits = len(request_id) <= RETURNED_CHARACTERS_MAX
    return request_id if fits and request_id.isascii() and request_id.isprintable() else ""


def refusing(refusal: Refusal, request_id: str = "") -> ImmediateAnswer:
    """The answer that refuses a request: whoever refuses, it looks the same.

    `request_id`: its name, which the client is told if it is `returnable`; "": it has none.
    """
    headers = [("content-type", "application/json")]
    if returnable(request_id):
        headers.append((REQUEST_ID_HEADER, request_id))
    if refusal.status in (429, 503):
        headers.append((DROP_REASON_HEADER, refusal.reason.value))
    if refusal.reason in _PASSING:
        headers.append(("retry-after", RETRY_AFTER_S))
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
    | ImmediateAnswer
)
