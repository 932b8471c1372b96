"""The messages of a gateway on a stream of the performance report, as bytes that are ready to be
sent.

Every prompt is different: each body contains a number of `NONCE_DIGITS` digits where the question
begins, or where the whole prompt begins if nothing is shared. Chats share the part before it
(`bench.decision.Chats`). A stream costs the generator a copy and some inserted numbers, one in each
frame.
"""

import struct
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Final

from msgspec import Struct

from bench.decision import Chats
from bench.gateway_messages import (
    body_messages,
    headers_message,
    response_body_message,
    response_headers_message,
)
from bench.raw_http2 import DATA, END_HEADERS, EXT_PROC, HEADERS, frame, grpc_message

NONCE_DIGITS: Final = 16
FRAME_BYTES_MAX: Final = 16_384
"""Maximum bytes of a DATA frame that Envoy sends, and that every HTTP/2 server accepts."""
_MARK: Final = b"#" * NONCE_DIGITS
_TEMPLATES_BYTES_MAX: Final = 16 * 2**20
_TEMPLATES_MAX: Final = 256
_RESPONSE_HEADERS: Final = {
    ":status": "200",
    "content-type": "text/event-stream",
    "server": "uvicorn",
}


class Shape(Struct, frozen=True, kw_only=True):
    """The composition of a request and its response."""

    body_bytes: int
    shares: bool = True
    """True if a prompt may share its first three quarters with an earlier prompt; False if all
    prompts differ from the beginning.
    """
    response_headers: bool = False
    response_chunks: int = 0
    """Number of chunks of a streamed response that pass through the picker, after
    response headers.
    """


class Opening(Struct, frozen=True, kw_only=True):
    """The messages of a stream up to the end of the request body, as a template for any stream
    number and any prompt.
    """

    payload: bytes
    """gRPC messages with the request's headers and body, without HTTP/2 frames."""
    framed: bytes
    """HTTP/2 frames: the HEADERS frame, then the gRPC messages in DATA frames."""
    streams_at: tuple[int, ...]
    """Positions in `framed` at which the number of the stream is inserted."""
    nonce_at: tuple[tuple[int, int], ...]
    """Positions in `framed` at which the parts of the prompt's distinguishing number are inserted,
    each as (position, number of digits).
    """
    payload_nonce_at: int
    body_bytes: int


class Script(Struct, frozen=True, kw_only=True):
    """The messages of a workload's streams.

    Each element of `later` is sent when the previous one was answered.
    """

    openings: tuple[Opening, ...]
    later: tuple[bytes, ...]


def script(shape: Shape) -> Script:
    """Return the messages of streams of `shape`; they are the same in every process."""
    header = headers_message(response_bodies=shape.response_chunks > 0)
    each = max(1, min(_TEMPLATES_MAX, _TEMPLATES_BYTES_MAX // shape.body_bytes))
    chats = Chats(shape.body_bytes, max(5, min(shape.body_bytes // 1_600, 288)))
    random = Random("report:nonces")
    openings = tuple(_opening(header, _marked(chats.body(), shape, random)) for _ in range(each))
    later = []
    if shape.response_headers or shape.response_chunks:
        later.append(response_headers_message(_RESPONSE_HEADERS))
    later.extend(
        _response_chunk(number, last=number == shape.response_chunks - 1)
        for number in range(shape.response_chunks)
    )
    return Script(openings=openings, later=tuple(grpc_message(each) for each in later))


def nonces() -> Iterator[bytes]:
    """Yield numbers of `NONCE_DIGITS` digits, all different within a process."""
    return (b"%0*d" % (NONCE_DIGITS, number) for number in count(1))


def _marked(body: bytes, shape: Shape, random: Random) -> bytes:
    """Return the request body with `_MARK` inserted where the first text of the prompt that no
    other prompt has begins.
    """
    before = b'"content": "'
    at = body.index(before) if not shape.shares else body.rindex(before)
    at += len(before)
    return body[:at] + _MARK + body[at:]


def _opening(header: bytes, body: bytes) -> Opening:
    payload = b"".join(map(grpc_message, [header, *body_messages(body)]))
    framed = bytearray(frame(HEADERS, END_HEADERS, 0, EXT_PROC))
    streams_at = [5]
    marked_at = payload.index(_MARK)
    nonce_at = []
    for start in range(0, len(payload), FRAME_BYTES_MAX):
        piece = payload[start : start + FRAME_BYTES_MAX]
        streams_at.append(len(framed) + 5)
        framed += frame(DATA, 0, 0, piece)
        first = max(start, marked_at)
        digits = min(start + len(piece), marked_at + NONCE_DIGITS) - first
        if digits > 0:
            nonce_at.append((len(framed) - len(piece) + first - start, digits))
    return Opening(
        payload=payload,
        framed=bytes(framed),
        streams_at=tuple(streams_at),
        nonce_at=tuple(nonce_at),
        payload_nonce_at=marked_at,
        body_bytes=len(body),
    )


_NUMBER: Final = struct.Struct(">I")


def framed(opening: Opening, stream: int, nonce: bytes) -> bytearray:
    """Return the HTTP/2 frames of `opening`, with the stream number `stream` and the digits `nonce`
    inserted.
    """
    made = bytearray(opening.framed)
    for at in opening.streams_at:
        _NUMBER.pack_into(made, at, stream)
    taken = 0
    for at, digits in opening.nonce_at:
        made[at : at + digits] = nonce[taken : taken + digits]
        taken += digits
    return made


def payload(opening: Opening, nonce: bytes) -> bytes:
    """Return the gRPC messages of `opening` with the digits `nonce` inserted, without HTTP/2
    frames.
    """
    at = opening.payload_nonce_at
    return opening.payload[:at] + nonce + opening.payload[at + NONCE_DIGITS :]


def _response_chunk(number: int, *, last: bool) -> bytes:
    event = (
        b'data: {"id":"chatcmpl-7c9e6679742540de944be07fc1f90ae7","object":"chat.completion.chunk",'
        b'"created":1764000000,"model":"llama","choices":[{"index":0,"delta":{"content":" w%05d"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n' % number
    )
    if last:
        event += b"data: [DONE]\n\n"
    return response_body_message(event, last=last)
