"""Token usage that the engine reports inside a response, read without decoding the answer."""

from typing import Final

import msgspec
from msgspec import Struct

RESPONSE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum size in bytes of an answer without streaming that is stored to read its usage; usage of a
larger one stays unknown.
"""
EVENT_BYTES_MAX: Final = 256 * 1024
"""Maximum length in bytes of the beginning of a line of a streamed answer that is stored until its
rest comes. Longer lines are skipped, because usage is in a short one.
"""


class Usage(Struct, frozen=True):
    """The token counts of one request as the engine reported them; None for a count that was not
    reported.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Nested(Struct):
    usage: _Usage | None = None


class _Document(Struct):
    usage: _Usage | None = None
    response: _Nested | None = None
    message: _Nested | None = None


_decode: Final = msgspec.json.Decoder(_Document).decode


class UsageReader:
    """A reader of the token usage in one response. `usage` has the latest value of each count, and
    is None if none was found.

    OpenAI sends it at the end of the answer or in the last event of a stream, the Responses API
    inside `response`, and Anthropic in `message_start` and `message_delta`.
    """

    def __init__(self, *, event_stream: bool) -> None:
        self.usage: Usage | None = None
        self._event_stream = event_stream
        self._kept = bytearray()
        self._too_long = False

    def feed(self, chunk: bytes, *, end: bool) -> None:
        """Process the next piece of the response body; no content raises an error."""
        if self._event_stream:
            self._feed_events(chunk)
            if end:
                self._feed_events(b"\n")
            return
        if not self._too_long:
            self._kept += chunk
            self._too_long = len(self._kept) > RESPONSE_BYTES_MAX
            if self._too_long:
                self._kept.clear()
        if end and not self._too_long:
            self._read(bytes(self._kept))
            self._kept.clear()

    def _feed_events(self, chunk: bytes) -> None:
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._keep(rest)
            return
        lines = (bytes(self._kept) + head).split(b"\n")
        self._kept.clear()
        if self._too_long:
            # The first line is unreadable, because its beginning was dropped.
            self._too_long = False
            del lines[0]
        for line in lines:
            if line.startswith(b"data:") and b'"usage"' in line:
                self._read(line[5:].strip())
        self._keep(rest)

    def _keep(self, piece: bytes) -> None:
        if self._too_long or len(self._kept) + len(piece) > EVENT_BYTES_MAX:
            self._too_long = True
            self._kept.clear()
            return
        self._kept += piece

    def _read(self, document: bytes) -> None:
        try:
            found = _decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The answer goes to the client unchanged, and only its usage stays unknown.
            return
        nested = found.response or found.message
        usage = found.usage or (nested.usage if nested else None)
        if usage is None:
            return
        before = self.usage or Usage()
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        self.usage = Usage(
            prompt_tokens=_last(before.prompt_tokens, usage.prompt_tokens, usage.input_tokens),
            completion_tokens=_last(
                before.completion_tokens, usage.completion_tokens, usage.output_tokens
            ),
            cached_tokens=_last(
                before.cached_tokens, details.cached_tokens, usage.cache_read_input_tokens
            ),
        )


def _last(*values: int | None) -> int | None:
    return next((value for value in reversed(values) if value is not None), None)
