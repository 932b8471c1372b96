"""The answers of a picker as bytes, without a picker, for all servers of this folder.

Only the tag and the lengths in front of a body are decoded, so the cost of a server is that of its
transport. Only the shapes of messages that the load generator sends are supported.
"""

from typing import Final

CHUNK_BYTES_MAX: Final = 62_000
"""Maximum bytes of a returned chunk, which a gateway accepts in one message."""

_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY = 0x12, 0x1A, 0x22, 0x2A
"""Tags of the fields of `ProcessingRequest`, one of which begins each message of the load
generator.
"""
_END_OF_STREAM: Final = b"\x10\x01"
"""Bytes of the protobuf field `end_of_stream`, which is the last field of a message with a piece of
a body.
"""


def varint(number: int) -> bytes:
    """Return `number` as protobuf encodes a length."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _field(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + varint(len(value)) + value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


# ProcessingResponse.request_headers.response { header_mutation { set_headers }, clear_route_cache }
_HEADER: Final = _field(0x0A, b"x-gateway-destination-endpoint") + _field(0x1A, b"10.0.0.1:8000")
_MUTATION: Final = _field(0x12, _field(0x0A, _field(0x0A, _HEADER)))
HEADERS_ANSWER: Final = _field(0x0A, _field(0x0A, _MUTATION + b"\x28\x01"))
RESPONSE_HEADERS_ANSWER: Final = _field(0x12, b"")


def body_answer(chunk: bytes, *, last: bool, response: bool) -> bytes:
    """Return the answer that passes `chunk` on unchanged: a piece of a response body if `response`
    is true, else of a request body.
    """
    streamed = (_field(0x0A, chunk) if chunk else b"") + (_END_OF_STREAM if last else b"")
    mutation = _field(0x1A, _field(0x1A, streamed))
    return _field(0x22 if response else 0x1A, _field(0x0A, mutation))


class Conversation:
    """The conversation with the load generator on one stream: it computes the answers to each
    message. The request body is stored until it has ended.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def answers(self, message: bytes) -> list[bytes]:
        """Return the answers to the next `message` of the stream.

        The answer to the request headers is returned with those to the request body, when that has
        ended.
        """
        kind = message[0]
        if kind == _RESPONSE_BODY:
            piece, last = _body(message)
            return [body_answer(piece, last=last, response=True)]
        if kind == _RESPONSE_HEADERS:
            return [RESPONSE_HEADERS_ANSWER]
        if kind != _REQUEST_BODY:
            return []
        piece, last = _body(message)
        self._pieces.append(piece)
        return self._echo() if last else []

    def _echo(self) -> list[bytes]:
        body = b"".join(self._pieces)
        self._pieces.clear()
        starts = range(0, len(body), CHUNK_BYTES_MAX)
        return [
            HEADERS_ANSWER,
            *(
                body_answer(
                    body[start : start + CHUNK_BYTES_MAX],
                    last=start + CHUNK_BYTES_MAX >= len(body),
                    response=False,
                )
                for start in starts
            ),
        ]


def _body(message: bytes) -> tuple[bytes, bool]:
    """Return the piece of a body that `message` contains, and True if it is the last piece."""
    size, at = _read_varint(message, 1)
    end = at + size
    piece = b""
    if at < end and message[at] == 0x0A:
        length, start = _read_varint(message, at + 1)
        at = start + length
        piece = message[start:at]
    return piece, message[at : at + 2] == _END_OF_STREAM
