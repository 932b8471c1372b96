"""Serialised ext_proc messages of a gateway, as Envoy sends them on a stream in full duplex."""

from collections.abc import Mapping

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)

CHUNK_BYTES = 32_768
"""Size in bytes of Envoy's read buffer, which limits a chunk of a body."""
CHAT_HEADERS = {
    ":authority": "llm.example.com",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "user-agent": "OpenAI/Python 1.99.0",
    "accept": "application/json",
    "content-type": "application/json",
    "authorization": "Bearer sk-0123456789abcdef0123456789abcdef",
    "x-forwarded-for": "10.1.2.3",
    "x-forwarded-proto": "http",
    "x-request-id": "7c9e6679-7425-40de-944b-e07fc1f90ae7",
}


def headers_message(
    headers: Mapping[str, str] = CHAT_HEADERS, *, response_bodies: bool = False
) -> bytes:
    """Return the gateway's first message of a stream: the request headers. The request body follows
    in chunks.

    With `response_bodies` the gateway also sends the response body, in chunks too.
    """
    response_mode = ProcessingMode.FULL_DUPLEX_STREAMED if response_bodies else ProcessingMode.NONE
    return ProcessingRequest(
        request_headers=_headers(headers),
        protocol_config=ProtocolConfiguration(
            request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
            response_body_mode=response_mode,
        ),
    ).SerializeToString()


def body_messages(body: bytes) -> list[bytes]:
    """Return the gateway's messages with a request body, one for each chunk."""
    pieces = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]
    return [
        ProcessingRequest(
            request_body=HttpBody(body=piece, end_of_stream=number == len(pieces))
        ).SerializeToString()
        for number, piece in enumerate(pieces, 1)
    ]


def response_headers_message(headers: Mapping[str, str]) -> bytes:
    """Return the gateway's message with response headers."""
    return ProcessingRequest(response_headers=_headers(headers)).SerializeToString()


def response_body_message(piece: bytes, *, last: bool = False) -> bytes:
    """Return the gateway's message with one chunk of a response body."""
    return ProcessingRequest(
        response_body=HttpBody(body=piece, end_of_stream=last)
    ).SerializeToString()


def _headers(headers: Mapping[str, str]) -> HttpHeaders:
    values = [HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    return HttpHeaders(headers=HeaderMap(headers=values))
