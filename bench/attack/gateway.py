"""A gateway's side of ext_proc over grpcio, which lets attacks determine each message."""

import asyncio
from collections.abc import Mapping

import grpc
import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from google.protobuf.struct_pb2 import Struct

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHUNK_BYTES = 62_000
HEADERS = {
    ":method": "POST",
    ":path": "/v1/completions",
    "content-type": "application/json",
    "user-agent": "attack",
}


def headers(fields: Mapping[str, str] | None = None, *, subset: str = "") -> bytes:
    """Return the gateway's ext_proc message with request headers: of a full-duplex request whose
    response body bypasses the picker.
    """
    mode = ProcessingMode
    metadata = None
    if subset:
        hint = Struct()
        hint["x-gateway-destination-endpoint-subset"] = subset
        metadata = Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
    return ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(
                headers=[
                    HeaderValue(key=key, raw_value=value.encode())
                    for key, value in (HEADERS | dict(fields or {})).items()
                ]
            )
        ),
        protocol_config=ProtocolConfiguration(
            request_body_mode=mode.FULL_DUPLEX_STREAMED, response_body_mode=mode.NONE
        ),
        metadata_context=metadata,
    ).SerializeToString()


def body(content: bytes, *, end: bool = True) -> bytes:
    """Return the gateway's ext_proc message with one piece of a request body; `end` is True for the
    last piece.
    """
    return ProcessingRequest(
        request_body=HttpBody(body=content, end_of_stream=end)
    ).SerializeToString()


def response_headers() -> bytes:
    """Return the gateway's ext_proc message with response headers of status 200."""
    status = HeaderValue(key=":status", raw_value=b"200")
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=HeaderMap(headers=[status]))
    ).SerializeToString()


def channel(address: str) -> grpc.aio.Channel:
    """Return a gRPC channel to `address` with a connection of its own."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ),
    )


async def ask(
    opened: grpc.aio.Channel,
    content: bytes,
    *,
    timeout_s: float,
    path: str = HEADERS[":path"],
    fields: Mapping[str, str] | None = None,
    takes_s: float = 0.0,
) -> str:
    """Send the ext_proc messages of one whole request, with the body `content` and further headers,
    to the picker. Its response comes `takes_s` seconds after its placement.

    Return "" if it was routed and succeeded, else the reason.
    """
    call = opened.stream_stream(PROCESS)(timeout=timeout_s)
    try:
        await call.write(headers({":path": path} | dict(fields or {})))
        for start in range(0, len(content), CHUNK_BYTES):
            piece = content[start : start + CHUNK_BYTES]
            await call.write(body(piece, end=start + CHUNK_BYTES >= len(content)))
        answered = await call.read()
        if answered is grpc.aio.EOF:
            return f"ended with {(await call.code()).name}"
        answer = ProcessingResponse.FromString(answered)
        if answer.HasField("immediate_response"):
            return f"refused with {answer.immediate_response.status.code}"
        left = len(content)
        while left > 0:
            echoed = ProcessingResponse.FromString(await call.read())
            left -= len(echoed.request_body.response.body_mutation.streamed_response.body)
        await asyncio.sleep(takes_s)
        await call.write(response_headers())
        await call.read()
        await call.done_writing()
        await call.read()
    except grpc.aio.AioRpcError as error:
        return f"failed with {error.code().name}"
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        return f"failed: {error}"
    return ""
