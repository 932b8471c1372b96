"""Conversion of Envoy's ext_proc messages to session events, and of a session's answers to ext_proc
messages. The module `wire` reads the usual messages faster.
"""

import json
from functools import lru_cache
from typing import Any, Final, assert_never

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from epp.core.protocol import messages
from epp.core.types import Refusal
from epp.shell.gateway.ext_proc_messages import (
    OVERWRITE_IF_EXISTS_OR_ADD,
    SEND,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    Duration,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
ENDPOINT_NAMESPACE: Final = "envoy.lb"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"

BESIDE_BODY_BYTES_MAX: Final = 2 * 1024 * 1024
"""Maximum size in bytes of the headers, metadata and attributes in one ext_proc message. Envoy
limits headers to 96 KiB by default, and a subset hint with 10,000 endpoints has 600 KB. Reading
takes time in proportion to the size.
"""
HEADERS_MAX: Final = 2_000
"""Maximum number of headers in one ext_proc message; Envoy passes at most 100 by default."""
SUBSET_ENTRIES_MAX: Final = 10_000
"""Maximum number of entries of a subset hint. A longer hint is read as one that allows no endpoint:
no pool is as large, and each entry would be looked up.
"""
SUBSET_CHARACTERS_MAX: Final = 64 * SUBSET_ENTRIES_MAX
"""Maximum number of characters of a subset hint that is a single string; the longest ip:port has
47.
"""
ROUTES_MAX: Final = 4_096
"""Maximum number of cached answers to request headers. An answer depends mainly on the endpoint,
and most pools have fewer endpoints. Answers with an additional header have their own cache of this
size.
"""
OWN_BYTES_MIN: Final = 16
"""Minimum length in bytes of the value of an additional header for which a cached header answer is
used. The value's place in that answer is found by a run of zeros, and a run of this length occurs
nowhere else.
"""
CHUNK_LENGTHS_MAX: Final = 4_096
"""Maximum number of cached pairs of the protobuf bytes before and after a body chunk, which depend
on the chunk's length. The cache of those around a response header's value has the same size.
"""

_BODY_TAGS: Final = frozenset({4 << 3 | 2, 5 << 3 | 2})
"""Protobuf tags of the fields `request_body` and `response_body` in an ext_proc message."""
_MODES: Final = {
    mode.value: mode for mode in messages.BodyMode if mode is not messages.BodyMode.UNKNOWN
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class MalformedMessageError(Exception):
    """Raised if a received message is not a valid ProcessingRequest, contains no known phase, or
    exceeds the limits of headers or of bytes beside its body.
    """


def decode(message: bytes) -> messages.Event:
    """Convert one serialised ProcessingRequest to a session event. Raises `MalformedMessageError`,
    whose text is one sentence.
    """
    if len(message) > BESIDE_BODY_BYTES_MAX and _beside_body(message) > BESIDE_BODY_BYTES_MAX:
        raise MalformedMessageError(
            f"the message has more than {BESIDE_BODY_BYTES_MAX} bytes beside its body"
        )
    try:
        request = ProcessingRequest.FromString(message)
    except DecodeError as error:
        raise MalformedMessageError("the message is not an ext_proc ProcessingRequest") from error
    kind = request.WhichOneof("request")
    match kind:
        case "request_headers":
            return messages.RequestHeaders(
                headers=_headers(request.request_headers.headers),
                end_of_stream=request.request_headers.end_of_stream,
                modes=modes_of(request),
                subset=subset_of(request),
            )
        case "request_body":
            body = request.request_body
            return messages.RequestBody(body.body, body.end_of_stream, subset_of(request))
        case "request_trailers":
            return messages.RequestTrailers(subset_of(request))
        case "response_headers":
            return messages.ResponseHeaders(
                headers=_headers(request.response_headers.headers),
                end_of_stream=request.response_headers.end_of_stream,
                modes=modes_of(request),
                served=served_of(request),
            )
        case "response_body":
            return messages.ResponseBody(
                request.response_body.body, request.response_body.end_of_stream
            )
        case "response_trailers":
            return messages.ResponseTrailers()
        case _:
            raise MalformedMessageError(
                "the ProcessingRequest contains no known phase: headers, body or trailers"
            )


def encode(answer: messages.Answer) -> bytes:
    """Convert a session's answer to one serialised ProcessingResponse."""
    # Chunks of bodies come first, because they are most frequent and the cases are tried in order.
    # A pattern that binds attributes takes three times as long as reading them.
    match answer:
        case messages.ResponseBodyChunk():
            body = answer.body
            head, tail = _round_chunk(_RESPONSE_CHUNK, len(body), answer.end_of_stream)
            return b"".join((head, body, tail))
        case messages.RequestBodyChunk():
            body = answer.body
            head, tail = _round_chunk(_REQUEST_CHUNK, len(body), answer.end_of_stream)
            return b"".join((head, body, tail))
        case messages.RequestHeadersAnswer():
            destination = answer.destination
            if destination is None:
                return _REQUEST_HEADERS
            if destination.own_header is None:
                return _kept_headers(destination)
            return _headers_with_own(destination, *destination.own_header)
        case messages.RequestBodyAnswer(routed, changed):
            if routed is None:
                return _REQUEST_BODY
            response = ProcessingResponse()
            _route(response, response.request_body.response, routed)
            if changed is not None:
                response.request_body.response.body_mutation.body = changed
            return response.SerializeToString()  # type: ignore[no-any-return]
        case messages.RequestTrailersAnswer():
            return _REQUEST_TRAILERS
        case messages.ResponseHeadersAnswer(set_headers, without_body):
            if not set_headers:
                return _RESPONSE_HEADERS_ALONE if without_body else _RESPONSE_HEADERS
            name, value = set_headers[0]
            if len(set_headers) == 1 and value:
                told = value.encode("utf-8", "surrogateescape")
                head, tail = _round_response_header(name, len(told), without_body)
                return b"".join((head, told, tail))
            return _with_response_headers(set_headers, without_body)
        case messages.ResponseBodyAnswer():
            return _RESPONSE_BODY
        case messages.ResponseTrailersAnswer():
            return _RESPONSE_TRAILERS
        case messages.TimeoutAnswer() | messages.ImmediateAnswer():
            return _rare(answer)
        case _:
            assert_never(answer)


def _rare(answer: messages.TimeoutAnswer | messages.ImmediateAnswer) -> bytes:
    if isinstance(answer, messages.TimeoutAnswer):
        seconds, rest = divmod(answer.timeout_s, 1.0)
        timeout = Duration(seconds=int(seconds), nanos=int(rest * 1e9))
        return _bytes(override_message_timeout=timeout)
    refusal = answer.refusal
    return _bytes(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=refusal.status),
            headers=HeaderMutation(set_headers=_set(answer.headers)),
            body=error_body(refusal),
            details=refusal.reason.value,
        )
    )


def error_body(refusal: Refusal) -> bytes:
    """Return the response body of a refused request: the JSON error object of the OpenAI API."""
    error = {
        "message": refusal.message,
        "type": _ERROR_TYPES.get(refusal.status, "service_unavailable"),
        # The API spells the path without its root.
        "param": refusal.param and refusal.param.removeprefix("$."),
        "code": refusal.reason.value,
    }
    return json.dumps({"error": error}).encode()


def _beside_body(message: bytes) -> int:
    """Return the number of bytes of `message` that do not belong to the request or response body at
    its beginning; all bytes if it has no such body.

    Every protobuf library writes fields in the order of their numbers, although the format does not
    require it. A body has the lowest number of the fields in its message.
    """
    if message[0] not in _BODY_TAGS:
        return len(message)
    length = shift = 0
    for position in range(1, 6):
        byte = message[position]
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return len(message) - length - position - 1
        shift += 7
    return len(message)


def _headers(message: Any) -> dict[str, str]:
    """Return the headers of an ext_proc message by lower-case name. A header's value is in
    `raw_value` or, from some gateways, in `value`. Raises `MalformedMessageError` for more than
    `HEADERS_MAX` headers.
    """
    if len(message.headers) > HEADERS_MAX:
        raise MalformedMessageError(f"the message has more than {HEADERS_MAX} headers")
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") or header.value
        for header in message.headers
    }


def modes_of(request: Any) -> messages.BodyModes | None:
    if not request.HasField("protocol_config"):
        return None
    numbers = request.protocol_config.request_body_mode, request.protocol_config.response_body_mode
    request_mode, response_mode = (
        _MODES.get(number, messages.BodyMode.UNKNOWN) for number in numbers
    )
    unknown = next((number for number in numbers if number not in _MODES), None)
    return messages.BodyModes(request_mode, response_mode, unknown)


def subset_of(request: Any) -> tuple[str, ...] | None:
    """Return the endpoints "ip:port" that the subset hint in the metadata allows, or None without
    such a hint.

    The hint is a list of strings or one comma-separated string; a malformed or too long hint allows
    no endpoint.
    """
    if not request.HasField("metadata_context"):
        return None
    metadata = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    return _addresses(fields[SUBSET_KEY])


def _addresses(value: Value) -> tuple[str, ...]:
    match value.WhichOneof("kind"):
        case "string_value":
            text = value.string_value
            if len(text) > SUBSET_CHARACTERS_MAX:
                return ()
            parts = text.split(",", SUBSET_ENTRIES_MAX)
        case "list_value":
            values = value.list_value.values
            if len(values) > SUBSET_ENTRIES_MAX:
                return ()
            if any(item.WhichOneof("kind") != "string_value" for item in values):
                return ()
            parts = [item.string_value for item in values]
        case _:
            return ()
    if len(parts) > SUBSET_ENTRIES_MAX:
        return ()
    return tuple(part.strip() for part in parts if part.strip())


def served_of(request: Any) -> str:
    if not request.HasField("metadata_context"):
        return ""
    metadata = request.metadata_context.filter_metadata
    if ENDPOINT_NAMESPACE not in metadata:
        return ""
    fields = metadata[ENDPOINT_NAMESPACE].fields
    served = _addresses(fields[SERVED_KEY]) if SERVED_KEY in fields else ()
    # Several addresses are those that were tried, and the last one served.
    return served[-1] if served else ""


def _set(headers: tuple[tuple[str, str], ...]) -> list[Any]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
            append_action=OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers
    ]


def _route(response: Any, common: Any, destination: messages.Destination) -> None:
    """Write the routing destination into the protobuf message `response`, of which `common` is a
    part.

    The destination is written as a header and as dynamic metadata, because some gateways read only
    the latter. The response is filled in place, because protobuf copies a message that is assigned
    to another.
    """
    target = ",".join(destination.endpoints)
    common.clear_route_cache = True
    mutation = common.header_mutation
    own = () if destination.own_header is None else (destination.own_header,)
    set_headers = (messages.DESTINATION_HEADER, target), *destination.set_headers, *own
    mutation.set_headers.extend(_set(set_headers))
    mutation.remove_headers.extend(destination.remove_headers)
    metadata = response.dynamic_metadata.fields[ENDPOINT_NAMESPACE].struct_value
    metadata.fields[messages.DESTINATION_HEADER].string_value = target


@lru_cache(maxsize=ROUTES_MAX)
def _kept_headers(destination: messages.Destination) -> bytes:
    """Return the serialised header answer for a destination from a cache; nearly all requests to
    one endpoint get the same answer.
    """
    return _routed_headers(destination)


def _headers_with_own(destination: messages.Destination, name: str, value: str) -> bytes:
    raw_value = value.encode("utf-8", "surrogateescape")
    if len(raw_value) < OWN_BYTES_MIN:
        return _routed_headers(destination)
    same = messages.Destination(
        destination.endpoints, destination.set_headers, destination.remove_headers
    )
    head, tail = _round_own(same, name, len(raw_value))
    return b"".join((head, raw_value, tail))


@lru_cache(maxsize=ROUTES_MAX)
def _round_own(destination: messages.Destination, name: str, length: int) -> tuple[bytes, bytes]:
    """Return the bytes of a header answer before and after the value of one additional header. Only
    this value differs between requests to one endpoint.
    """
    blank = "\0" * length
    set_headers = (*destination.set_headers, (name, blank))
    whole = _routed_headers(
        messages.Destination(destination.endpoints, set_headers, destination.remove_headers)
    )
    head, _, tail = whole.partition(blank.encode())
    return head, tail


def _routed_headers(destination: messages.Destination) -> bytes:
    response = ProcessingResponse()
    _route(response, response.request_headers.response, destination)
    return response.SerializeToString()  # type: ignore[no-any-return]


def _with_response_headers(set_headers: tuple[tuple[str, str], ...], without_body: bool) -> bytes:
    common = CommonResponse(header_mutation=HeaderMutation(set_headers=_set(set_headers)))
    return _bytes(
        response_headers=HeadersResponse(response=common),
        mode_override=_WITHOUT_BODY if without_body else None,
    )


@lru_cache(maxsize=CHUNK_LENGTHS_MAX)
def _round_response_header(name: str, length: int, without_body: bool) -> tuple[bytes, bytes]:
    """Return the bytes of a header answer before and after the value of its single response header,
    which has `length` bytes.

    They are cached, because each response gets its request id in this header, and ids have few
    different lengths.
    """
    value = "\0" * length
    # The run of zeros is unique, because no neighbouring byte is zero.
    head, _, tail = _with_response_headers(((name, value),), without_body).partition(value.encode())
    return head, tail


@lru_cache(maxsize=CHUNK_LENGTHS_MAX)
def _round_chunk(phase: bytes, length: int, end_of_stream: bool) -> tuple[bytes, bytes]:
    """Return the bytes of a body answer before and after a chunk of `length` bytes; `phase` is the
    key of the protobuf field that contains the answer.

    They are built by hand, because protobuf would copy a body three times. They are cached, because
    the chunks of answers have few different lengths.
    """
    head = b""
    tail = _CHUNK_ENDS if end_of_stream else b""
    if length:
        head = _CHUNK_BODY + _varint(length)
    for key in (*_ROUND_CHUNK, phase):
        head = key + _varint(len(head) + length + len(tail)) + head
    return head, tail


def _varint(number: int) -> bytes:
    """Encode a number below 2^21 as a protobuf integer: seven bits a byte, lowest first.

    The code has no loop, because it runs five times for each length of a body chunk that is not
    cached.
    """
    if number < 1 << 7:
        return bytes((number,))
    if number < 1 << 14:
        return bytes((number & 0x7F | 0x80, number >> 7))
    assert number < 1 << 21, f"no piece of a body has {number} bytes"
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))


def _key(message: Any, field: str, wire_type: int) -> bytes:
    """Return the protobuf key that precedes the value of `field` in a serialised message."""
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | wire_type)


def _bytes(**phase: Any) -> bytes:
    return ProcessingResponse(**phase).SerializeToString()  # type: ignore[no-any-return]


_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_CHUNK_BODY: Final = _key(StreamedBodyResponse, "body", _LENGTH_DELIMITED)
_CHUNK_ENDS: Final = _key(StreamedBodyResponse, "end_of_stream", _VARINT) + b"\x01"
_ROUND_CHUNK: Final = (
    _key(BodyMutation, "streamed_response", _LENGTH_DELIMITED),
    _key(CommonResponse, "body_mutation", _LENGTH_DELIMITED),
    _key(BodyResponse, "response", _LENGTH_DELIMITED),
)
_REQUEST_CHUNK: Final = _key(ProcessingResponse, "request_body", _LENGTH_DELIMITED)
_RESPONSE_CHUNK: Final = _key(ProcessingResponse, "response_body", _LENGTH_DELIMITED)

_REQUEST_HEADERS: Final = _bytes(request_headers=HeadersResponse())
_REQUEST_BODY: Final = _bytes(request_body=BodyResponse())
_REQUEST_TRAILERS: Final = _bytes(request_trailers=TrailersResponse())
_RESPONSE_HEADERS: Final = _bytes(response_headers=HeadersResponse())
_WITHOUT_BODY: Final = ProcessingMode(
    response_body_mode=messages.BodyMode.NONE.value, response_trailer_mode=SEND
)
"""Override of Envoy's processing mode that requests the response trailers but not the body. The
stream then stays open until the response ends, instead of ending at the response headers.
"""
_RESPONSE_HEADERS_ALONE: Final = _bytes(
    response_headers=HeadersResponse(), mode_override=_WITHOUT_BODY
)
_RESPONSE_BODY: Final = _bytes(response_body=BodyResponse())
_RESPONSE_TRAILERS: Final = _bytes(response_trailers=TrailersResponse())
