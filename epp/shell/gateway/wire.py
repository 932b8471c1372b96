"""A fast reader of the most frequent ext_proc messages, which leaves unusual messages to protobuf.

Protobuf parses a message in a microsecond, but takes ten to return each header. This module
therefore reads the phase of a message, which every library writes first, in the one layout that
gateways use:

  request headers 2, response headers 3, trailers 6 and 7:
    headers 1 { headers 1 { key 1, raw_value 3 or value 2 } * }, end_of_stream 3
  request body 4, response body 5:
    body 1, end_of_stream 2

A message is unusual if a field has another number, order or type, or occurs twice; if a text is not
UTF-8; if a length exceeds its container or has more than four bytes; or if it has too many or too
long headers. The whole message then goes to `codec.decode`, which accepts or rejects it. The part
after the phase (attributes, metadata, modes) goes to protobuf, unless it is cached. It is a valid
message by itself, because protobuf treats two concatenated messages as one with the fields of both.

The reader therefore accepts no message that protobuf would reject, and reads none differently.
"""

from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError
from msgspec import Struct

from epp.core.protocol.messages import (
    BodyModes,
    Event,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from epp.shell.gateway.codec import (
    BESIDE_BODY_BYTES_MAX,
    HEADERS_MAX,
    decode,
    modes_of,
    served_of,
    subset_of,
)
from epp.shell.gateway.ext_proc_messages import ProcessingRequest

HEADERS_KEPT_MAX: Final = 1_024
NAMES_KEPT_MAX: Final = 1_024
OPENINGS_KEPT_MAX: Final = 4
"""Maximum number of cached sequences of first headers, such as those of the requests of one client
library, that the decoder recognises as a whole.
"""
OPENING_BYTES_MAX: Final = 2_048
MODES_KEPT_MAX: Final = 64
MODES_KEPT_BYTES_MAX: Final = 32
"""Maximum length in bytes of the part of an ext_proc message after its phase that is cached. It
usually contains two body modes in four or six bytes.
"""

VIEWED_BYTES_MIN: Final = 4_096
"""Minimum length in bytes from which a chunk of a request body, except the last, is passed on as a
view of its message. A view avoids a copy. A view and the rest of the message occupy about 350
bytes, so shorter chunks are copied.
"""

_Kept = TypeVar("_Kept")

_REPEATED: Final = frozenset(
    {
        *(":authority", ":method", ":path", ":scheme", ":status"),
        *("accept", "accept-encoding", "accept-language", "connection", "content-type"),
        *("server", "transfer-encoding", "user-agent", "via", "x-forwarded-proto"),
        *("x-stainless-arch", "x-stainless-async", "x-stainless-lang", "x-stainless-os"),
        *("x-stainless-package-version", "x-stainless-retry-count", "x-stainless-runtime"),
        *("x-stainless-runtime-version", "x-envoy-expected-rq-timeout-ms"),
    }
)
"""Names of headers whose values many requests share and that are not secret; their parsed form is
cached. Other headers would displace them from the cache, and might be credentials.
"""

_BODIES: Final = frozenset({4 << 3 | 2, 5 << 3 | 2})
_FIRST: Final = 1 << 3 | 2
_VALUES: Final = (3 << 3 | 2, 2 << 3 | 2)
_HEADERS_END: Final = b"\x18\x01"
_BODY_ENDS: Final = b"\x10\x01"

_LONG: Final = 0x80
"""Value from which a byte of an integer in protobuf encoding is followed by another byte."""
_COUNTED: Final = range(HEADERS_MAX)


class Unscanned(StrEnum):
    """The part of an ext_proc message because of which the fast reader leaves the message to
    protobuf.
    """

    FIRST_FIELD = "first-field"
    """The ext_proc message does not begin with headers, a body or trailers."""
    HEADERS = "headers"
    """The headers or trailers of the ext_proc message, or the part after them, are unusual."""
    BODY = "body"


class _Opening(Struct, frozen=True, eq=False):
    """The first headers that messages of one kind, such as the requests of one client library, have
    in common, none of which is secret.
    """

    spelled: bytes
    """Bytes of the opening (the first headers), as they stand in an ext_proc message."""
    headers: dict[str, str]
    counted: range
    """Range of the positions of the headers that may follow these first headers; its length limits
    their number.
    """


_NO_OPENING: Final = _Opening(b"", {}, _COUNTED)


class _UnusualError(Exception):
    """Raised for an unusual ext_proc message, which is left to protobuf."""


class Decoder:
    """A decoder of ext_proc messages that reads each one in the fastest way, and counts the ways.

    One decoder serves any number of streams. It caches frequently repeated headers.
    """

    def __init__(self) -> None:
        self.scanned = 0
        """Number of ext_proc messages that were read by the fast reader."""
        self.fallbacks = dict.fromkeys(Unscanned, 0)
        """Number of ext_proc messages that were left to protobuf, including malformed ones, by
        their unusual part.
        """
        self.first_reason: Unscanned | None = None
        """Unusual part of the first ext_proc message that was left to protobuf, or None if there
        was none.
        """
        self._reported: tuple[bool, Unscanned | None] = False, None
        self._headers_kept: dict[bytes, tuple[str, str]] = {}
        self._openings: deque[_Opening] = deque(maxlen=OPENINGS_KEPT_MAX)
        """Cached openings (sequences of first headers), the newest first."""
        self._names_kept: dict[bytes, str] = {}
        self._modes_kept: dict[bytes, BodyModes] = {}
        self._readers: Mapping[int, Callable[[bytes], Event]] = {
            2 << 3 | 2: self._request_headers,
            3 << 3 | 2: self._response_headers,
            4 << 3 | 2: self._request_body,
            5 << 3 | 2: self._response_body,
            6 << 3 | 2: self._request_trailers,
            7 << 3 | 2: self._response_trailers,
        }

    def decode(self, message: bytes) -> Event:
        """Convert an ext_proc message to a session event, with the same results and errors as
        `codec.decode`.
        """
        try:
            event = self._readers[message[0]](message)
        except (_UnusualError, LookupError, UnicodeDecodeError, DecodeError):
            self._note(message)
            return decode(message)
        self.scanned += 1
        return event

    def _note(self, message: bytes) -> None:
        reason = Unscanned.FIRST_FIELD
        if message and message[0] in self._readers:
            reason = Unscanned.BODY if message[0] in _BODIES else Unscanned.HEADERS
        self.fallbacks[reason] += 1
        self.first_reason = self.first_reason or reason

    def paths(self) -> dict[str, int]:
        """Return the number of ext_proc messages by the way in which they were read: "scan" or
        "protobuf".
        """
        return {"scan": self.scanned, "protobuf": sum(self.fallbacks.values())}

    def report(self) -> str | None:
        """Return a sentence for the log after the first message that was read fast, and after the
        first one that was left to protobuf; else None.
        """
        state = self.scanned > 0, self.first_reason
        if state == self._reported:
            return None
        told, self._reported = self._reported, state
        if state[1] is not told[1]:
            return f"an ext_proc message is left to protobuf because its {state[1]} is unusual"
        return "ext_proc messages are read by the fast reader"

    def _request_headers(self, message: bytes) -> Event:
        headers, ends, at = self._headers(message)
        modes, beside = self._modes(message, at)
        return RequestHeaders(headers, ends, modes, None if beside is None else subset_of(beside))

    def _response_headers(self, message: bytes) -> Event:
        headers, ends, at = self._headers(message)
        modes, beside = self._modes(message, at)
        return ResponseHeaders(headers, ends, modes, "" if beside is None else served_of(beside))

    def _request_body(self, message: bytes) -> Event:
        start, stop, ends, at = _body(message)
        if at != len(message):
            return RequestBody(message[start:stop], ends, subset_of(_beside(message, at)))
        if ends or stop - start < VIEWED_BYTES_MIN:
            return RequestBody(message[start:stop], ends)
        # The session copies the chunk when it joins the chunks of the body.
        return RequestBody(memoryview(message)[start:stop], ends)

    def _response_body(self, message: bytes) -> Event:
        start, stop, ends, at = _body(message)
        if at != len(message):
            _beside(message, at)
        return ResponseBody(message[start:stop], ends)

    def _request_trailers(self, message: bytes) -> Event:
        return RequestTrailers(subset_of(self._behind_trailers(message)))

    def _response_trailers(self, message: bytes) -> Event:
        self._behind_trailers(message)
        return ResponseTrailers()

    def _behind_trailers(self, message: bytes) -> Any:
        """Check the trailers at the beginning of `message`, whose content is not used, and return
        the parsed part after them. Raises `_UnusualError`.
        """
        _, ends, at = self._headers(message)
        if ends:
            raise _UnusualError
        return _beside(message, at)

    def _headers(self, message: bytes) -> tuple[dict[str, str], bool, int]:
        """Return the headers at the beginning of `message`, whether they end the stream, and the
        position after them. Raises `_UnusualError`.
        """
        if len(message) > BESIDE_BODY_BYTES_MAX:
            raise _UnusualError
        at = 2
        length = message[1]
        if length >= _LONG:
            at, length = _long(message, 1)
        end = at + length
        if not length:
            return {}, False, end
        if end > len(message) or message[at] != _FIRST:
            raise _UnusualError
        length = message[at + 1]
        if length < _LONG:
            at += 2
        else:
            at, length = _long(message, at + 1)
        stop = at + length
        headers = self._header_map(message, at, stop)
        if stop == end:
            return headers, False, end
        if message[stop:end] == _HEADERS_END:
            return headers, True, end
        raise _UnusualError

    def _header_map(self, message: bytes, at: int, stop: int) -> dict[str, str]:
        """Parse the headers from `at` to `stop` of `message`. Raises `_UnusualError`. Repeated
        headers come from a cache, because every message passes here.
        """
        kept, names = self._headers_kept, self._names_kept
        begin, opening = at, _NO_OPENING
        for known in self._openings:
            if message.startswith(known.spelled, at):
                opening = known
                break
        headers = opening.headers.copy()
        known_to = at = at + len(opening.spelled)
        for count in opening.counted:
            if at >= stop:
                break
            field_at = at
            if message[at] != _FIRST:
                raise _UnusualError
            length = message[at + 1]
            start = at + 2
            if length >= _LONG:
                start, length = _long(message, at + 1)
            at = start + length
            header = message[start:at]
            pair = kept.get(header)
            if pair is not None:
                headers[pair[0]] = pair[1]
                continue
            if known_to:
                # The first header that is not cached ends the opening, if it is longer than the
                # known one.
                if field_at > known_to:
                    self._learn_opening(message[begin:field_at], headers, _COUNTED[count:])
                known_to = 0
            length = header[1]
            name_stop = length + 2
            if length >= _LONG or header[0] != _FIRST:
                raise _UnusualError
            value_start = name_stop
            # An empty value is omitted from the message.
            if name_stop != len(header):
                if header[name_stop] not in _VALUES:
                    raise _UnusualError
                value_start += 2
                length = header[name_stop + 1]
                if length >= _LONG:
                    value_start, length = _long(header, name_stop + 1)
                if value_start + length != len(header):
                    raise _UnusualError
            key = header[2:name_stop]
            name = names.get(key) or self._name(key)
            headers[name] = value = header[value_start:].decode()
            if name in _REPEATED and len(header) < _LONG:
                _keep(kept, header, (name, value), HEADERS_KEPT_MAX)
        if at != stop:
            raise _UnusualError
        return headers

    def _learn_opening(self, spelled: bytes, headers: dict[str, str], counted: range) -> None:
        """Cache the headers at the beginning of a message, all of which were in the cache, as an
        opening to be recognised as a whole.
        """
        if len(spelled) <= OPENING_BYTES_MAX:
            self._openings.appendleft(_Opening(spelled, headers.copy(), counted))

    def _name(self, key: bytes) -> str:
        name = key.decode("ascii").lower()
        _keep(self._names_kept, key, name, NAMES_KEPT_MAX)
        return name

    def _modes(self, message: bytes, at: int) -> tuple[BodyModes | None, Any]:
        """Return the body modes in `message` after `at`, and the parsed rest of the message from
        there.

        The rest is None if the modes came from the cache, because a cached rest contains no
        metadata. Both are None if `at` is the end of the message.
        """
        if at == len(message):
            return None, None
        rest = message[at:]
        modes = self._modes_kept.get(rest)
        if modes is not None:
            return modes, None
        beside = _beside(message, at)
        modes = modes_of(beside)
        if (
            modes is not None
            and not beside.HasField("metadata_context")
            and len(rest) <= MODES_KEPT_BYTES_MAX
        ):
            _keep(self._modes_kept, rest, modes, MODES_KEPT_MAX)
        return modes, beside


def _body(message: bytes) -> tuple[int, int, bool, int]:
    """Find the request or response body at the beginning of `message`.

    Return the start and end of the body, whether it ends its stream, and the position after the
    body's field. Raises `_UnusualError`.
    """
    # Lengths of one and two bytes are read without a call, because every chunk of a response passes
    # here.
    at, length = 2, message[1]
    if length >= _LONG:
        second = message[2]
        at, length = (3, length & 0x7F | second << 7) if second < _LONG else _long(message, 1)
    start = stop = at
    end = at + length
    if length and message[at] == _FIRST:
        start, length = at + 2, message[at + 1]
        if length >= _LONG:
            second = message[start]
            if second < _LONG:
                start, length = start + 1, length & 0x7F | second << 7
            else:
                start, length = _long(message, at + 1)
        stop = start + length
    if end > len(message):
        raise _UnusualError
    if stop == end:
        return start, stop, False, end
    if message[stop:end] == _BODY_ENDS:
        return start, stop, True, end
    raise _UnusualError


def _beside(message: bytes, at: int) -> Any:
    """Parse and return the part of `message` after its phase, which ends at `at`. Raises
    `_UnusualError` if this part is too long or contains another phase.
    """
    if len(message) - at > BESIDE_BODY_BYTES_MAX:
        raise _UnusualError
    beside = ProcessingRequest.FromString(message[at:])
    # Another phase would replace the first one, or be merged with it.
    if beside.WhichOneof("request") is not None:
        raise _UnusualError
    return beside


def _long(message: bytes, at: int) -> tuple[int, int]:
    """Return the position after the protobuf integer that begins at `at` in `message`, and its
    value.

    The integer has two to four bytes; a longer one raises `_UnusualError`. The code has no loop,
    because each body has two such integers. Four bytes allow lengths up to 256 MB, more than a
    server accepts.
    """
    first, second = message[at], message[at + 1]
    length = first & 0x7F | (second & 0x7F) << 7
    if second < _LONG:
        return at + 2, length
    third = message[at + 2]
    length |= (third & 0x7F) << 14
    if third < _LONG:
        return at + 3, length
    fourth = message[at + 3]
    if fourth < _LONG:
        return at + 4, length | fourth << 21
    raise _UnusualError


def _keep(kept: dict[bytes, _Kept], key: bytes, value: _Kept, most: int) -> None:
    """Cache `value` under `key`. A cache with `most` entries is cleared first, because frequent
    values return soon.
    """
    if len(kept) >= most:
        kept.clear()
    kept[key] = value
