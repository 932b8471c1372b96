"""Envoy's protobuf messages to session events, and answers to messages. Nothing else knows them."""

import json
from typing import Any, Final, assert_never

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value

from epp.core.messages import (
    DESTINATION_HEADER,
    Answer,
    BodyMode,
    BodyModes,
    Destination,
    Event,
    ImmediateAnswer,
    RequestBody,
    RequestBodyAnswer,
    RequestBodyChunk,
    RequestHeaders,
    RequestHeadersAnswer,
    RequestTrailers,
    RequestTrailersAnswer,
    ResponseBody,
    ResponseBodyAnswer,
    ResponseBodyChunk,
    ResponseHeaders,
    ResponseHeadersAnswer,
    ResponseTrailers,
    ResponseTrailersAnswer,
)
from epp.core.types import Refusal

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
ENDPOINT_NAMESPACE: Final = "envoy.lb"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"

_MODES: Final = {mode.value: mode for mode in BodyMode if mode is not BodyMode.UNKNOWN}
_OVERWRITE: Final = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class MalformedMessageError(Exception):
    """Bytes that are no ProcessingRequest, or one that carries nothing."""


def decode(message: bytes) -> Event:
    """Read one ProcessingRequest.

    Raises `MalformedMessageError` in one sentence.
    """
    try:
        request = ProcessingRequest.FromString(message)
    except DecodeError as error:
        raise MalformedMessageError("the message is not an ext_proc ProcessingRequest") from error
    kind = request.WhichOneof("request")
    match kind:
        case "request_headers":
            return RequestHeaders(
                headers=_headers(request.request_headers.headers),
                end_of_stream=request.request_headers.end_of_stream,
                modes=_modes(request),
                subset=_subset(request),
            )
        case "request_body":
            body = request.request_body
            return RequestBody(body.body, body.end_of_stream, _subset(request))
        case "request_trailers":
            return RequestTrailers(_subset(request))
        case "response_headers":
            return ResponseHeaders(
                headers=_headers(request.response_headers.headers),
                end_of_stream=request.response_headers.end_of_stream,
                modes=_modes(request),
                served=_served(request),
            )
        case "response_body":
            return ResponseBody(request.response_body.body, request.response_body.end_of_stream)
        case "response_trailers":
            return ResponseTrailers()
        case _:
            raise MalformedMessageError("the ProcessingRequest carries no phase that is known")


def encode(answer: Answer) -> bytes:
    """Write the answer as one serialised ProcessingResponse."""
    match answer:
        case RequestHeadersAnswer(destination):
            if destination is None:
                return _REQUEST_HEADERS
            return _routed(
                destination, "request_headers", HeadersResponse(response=_common(destination))
            )
        case RequestBodyAnswer(destination, body):
            if destination is None:
                return _REQUEST_BODY
            common = _common(destination)
            if body is not None:
                common.status = CommonResponse.ResponseStatus.CONTINUE
                common.body_mutation.body = body
            return _routed(destination, "request_body", BodyResponse(response=common))
        case RequestBodyChunk(body, end_of_stream):
            return _bytes(request_body=_chunk(body, end_of_stream=end_of_stream))
        case RequestTrailersAnswer():
            return _REQUEST_TRAILERS
        case ResponseHeadersAnswer(set_headers):
            if not set_headers:
                return _RESPONSE_HEADERS
            common = CommonResponse(header_mutation=HeaderMutation(set_headers=_set(set_headers)))
            return _bytes(response_headers=HeadersResponse(response=common))
        case ResponseBodyAnswer():
            return _RESPONSE_BODY
        case ResponseBodyChunk(body, end_of_stream):
            return _bytes(response_body=_chunk(body, end_of_stream=end_of_stream))
        case ResponseTrailersAnswer():
            return _RESPONSE_TRAILERS
        case ImmediateAnswer(refusal, headers):
            return _bytes(
                immediate_response=ImmediateResponse(
                    status=HttpStatus(code=refusal.status),
                    headers=HeaderMutation(set_headers=_set(headers)),
                    body=error_body(refusal),
                    details=refusal.reason.value,
                )
            )
        case _:
            assert_never(answer)


def error_body(refusal: Refusal) -> bytes:
    """The refusal as the JSON error object of the OpenAI API."""
    error = {
        "message": refusal.message,
        "type": _ERROR_TYPES.get(refusal.status, "service_unavailable"),
        # As the API spells it: without the root of the path.
        "param": refusal.param and refusal.param.removeprefix("$."),
        "code": refusal.reason.value,
    }
    return json.dumps({"error": error}).encode()


def _headers(message: HeaderMap) -> dict[str, str]:
    """Lower-case names; the value is in `raw_value` or, from some gateways, in `value`."""
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") or header.value
        for header in message.headers
    }


def _modes(request: ProcessingRequest) -> BodyModes | None:
    if not request.HasField("protocol_config"):
        return None
    numbers = request.protocol_config.request_body_mode, request.protocol_config.response_body_mode
    request_mode, response_mode = (_MODES.get(number, BodyMode.UNKNOWN) for number in numbers)
    unknown = next((number for number in numbers if number not in _MODES), None)
    return BodyModes(request_mode, response_mode, unknown)


def _subset(request: ProcessingRequest) -> tuple[str, ...] | None:
    """The subset hint: a list of strings or one comma-separated string; malformed allows nobody."""
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
            parts = value.string_value.split(",")
        case "list_value":
            values = value.list_value.values
            if any(item.WhichOneof("kind") != "string_value" for item in values):
                return ()
            parts = [item.string_value for item in values]
        case _:
            return ()
    return tuple(part.strip() for part in parts if part.strip())


def _served(request: ProcessingRequest) -> str:
    if not request.HasField("metadata_context"):
        return ""
    metadata = request.metadata_context.filter_metadata
    if ENDPOINT_NAMESPACE not in metadata:
        return ""
    fields = metadata[ENDPOINT_NAMESPACE].fields
    served = _addresses(fields[SERVED_KEY]) if SERVED_KEY in fields else ()
    # Several: the list of what was tried, the last of which served.
    return served[-1] if served else ""


def _set(headers: tuple[tuple[str, str], ...]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
            append_action=_OVERWRITE,
        )
        for name, value in headers
    ]


def _common(destination: Destination) -> CommonResponse:
    target = ",".join(destination.endpoints)
    return CommonResponse(
        clear_route_cache=True,
        header_mutation=HeaderMutation(
            set_headers=_set(((DESTINATION_HEADER, target), *destination.set_headers)),
            remove_headers=destination.remove_headers,
        ),
    )


def _routed(destination: Destination, phase: str, answer: HeadersResponse | BodyResponse) -> bytes:
    """The destination again as dynamic metadata: some gateways read only that."""
    response = ProcessingResponse(**{phase: answer})
    metadata = Struct()
    metadata.fields[DESTINATION_HEADER].string_value = ",".join(destination.endpoints)
    response.dynamic_metadata.fields[ENDPOINT_NAMESPACE].struct_value.CopyFrom(metadata)
    return response.SerializeToString()  # type: ignore[no-any-return]


def _chunk(body: bytes, *, end_of_stream: bool) -> BodyResponse:
    return BodyResponse(
        response=CommonResponse(
            body_mutation=BodyMutation(
                streamed_response=StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
            )
        )
    )


def _bytes(**phase: Any) -> bytes:
    return ProcessingResponse(**phase).SerializeToString()  # type: ignore[no-any-return]


_REQUEST_HEADERS: Final = _bytes(request_headers=HeadersResponse())
_REQUEST_BODY: Final = _bytes(request_body=BodyResponse())
_REQUEST_TRAILERS: Final = _bytes(request_trailers=TrailersResponse())
_RESPONSE_HEADERS: Final = _bytes(response_headers=HeadersResponse())
_RESPONSE_BODY: Final = _bytes(response_body=BodyResponse())
_RESPONSE_TRAILERS: Final = _bytes(response_trailers=TrailersResponse())
