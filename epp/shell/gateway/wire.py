"""Reads the messages that dominate from their bytes, and leaves what is unusual to protobuf.

To parse a message takes protobuf a microsecond; to ask it for each header takes ten. So the phase of
a message, which every library writes first, is read here, in the one layout that gateways use:

    request headers 2, response headers 3, trailers 6 and 7:
        headers 1 { headers 1 { key 1, raw_value 3 or value 2 } * }, end_of_stream 3
    request body 4, response body 5:
        body 1, end_of_stream 2

Another number, order or type of a field, a field that comes twice, a text that is not UTF-8, a length
that leads out of what it is in or is spelt in more bytes than these: the whole message goes to
`codec.decode`, which accepts or refuses it. What follows the phase (attributes, metadata, modes) goes
to protobuf in any case: it is a message of its own, because two messages one behind the other are
to protobuf one that has the fields of both.

So no message is read that protobuf would refuse, and none is read otherwise than it would.
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
"""The decoder recognises the first headers of so many kinds of clients together."""
OPENING_BYTES_MAX: Final = 2_048
MODES_KEPT_MAX: Final = 64
MODES_KEPT_BYTES_MAX: Final = 32
"""What follows a phase is as a rule two body modes, in four or six bytes."""

VIEWED_BYTES_MIN: Final = 4_096
"""From this length on a piece of a request body is a view of its message, if nothing follows it there.
That saves a copy. A view and the rest of the message take about 350 bytes of memory, so shorter pieces
are copied."""

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
"""Headers whose values many requests share and nobody keeps secret: these are kept as they were read.
Any other would push them out, and might be a credential."""

_BODIES: Final = frozenset({4 << 3 | 2, 5 << 3 | 2})
_FIRST: Final = 1 << 3 | 2
_VALUES: Final = (3 << 3 | 2, 2 << 3 | 2)
_HEADERS_END: Final = b"\x18\x01"
_BODY_ENDS: Final = b"\x10\x01"

_LONG: Final = 0x80
"""A byte from here on is not the last one of its integer."""
_COUNTED: Final = range(HEADERS_MAX)


class Unscanned(StrEnum):
    """In which part of a message something unusual is."""

    FIRST_FIELD = "first-field"
    """It does not begin with a phase."""
    HEADERS = "headers"
    """Trailers included."""
    BODY = "body"


class _Opening(Struct, frozen=True, eq=False):
    """The first headers of messages of one kind of client, none of which is a secret."""

    spelled: bytes
    """The headers as the message spells them."""
    headers: dict[str, str]
    counted: range
    """Counts the headers that may follow them."""


_NO_OPENING: Final = _Opening(b"", {}, _COUNTED)


class _UnusualError(Exception):
    """To be left to protobuf."""


class Decoder:
    """Reads each message in the way that suits it, and counts which one that was.

    One serves any number of streams. It keeps what it read of headers that come again and again.
    """

    def __init__(self) -> None:
        self.scanned = 0
        """Messages that were read here."""
        self.fallbacks = dict.fromkeys(Unscanned, 0)
        """Messages that were left to protobuf, the malformed ones included."""
        self.first_reason: Unscanned | None = None
        """Why the first of them was."""
        self._reported: tuple[bool, Unscanned | None] = False, None
        self._headers_kept: dict[bytes, tuple[str, str]] = {}
        self._openings: deque[_Opening] = deque(maxlen=OPENINGS_KEPT_MAX)
        """The latest first."""
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
        """As `codec.decode`, errors included."""
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
        """How many messages were read in which way."""
        return {"scan": self.scanned, "protobuf": sum(self.fallbacks.values())}

    def report(self) -> str | None:
        """A sentence when the first message was scanned, and when the first one was not; or None."""
        state = self.scanned > 0, self.first_reason
        if state == self._reported:
            return None
        told, self._reported = self._reported, state
        if state[1] is not told[1]:
            return f"a message is left to protobuf: its {state[1]} is unusual"
        return "messages are scanned"

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
        # The session copies the piece when it joins the pieces of the body.
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
        """They themselves are of no interest, but must be some."""
        _, ends, at = self._headers(message)
        if ends:
            raise _UnusualError
        return _beside(message, at)

    def _headers(self, message: bytes) -> tuple[dict[str, str], bool, int]:
        """The headers of a message that begins with them, whether they end it, where they do."""
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
        """The headers from `at` to `stop`. Each passes here, so those that came before at once."""
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
                # The first header that is not kept ends the opening, if it is longer than the one known.
                if field_at > known_to:
                    self._learn_opening(message[begin:field_at], headers, _COUNTED[count:])
                known_to = 0
            length = header[1]
            name_stop = length + 2
            if length >= _LONG or header[0] != _FIRST:
                raise _UnusualError
            value_start = name_stop
            # An empty value is not written.
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
        """Keep the headers with which a message began and which were all known."""
        if len(spelled) <= OPENING_BYTES_MAX:
            self._openings.appendleft(_Opening(spelled, headers.copy(), counted))

    def _name(self, key: bytes) -> str:
        name = key.decode("ascii").lower()
        _keep(self._names_kept, key, name, NAMES_KEPT_MAX)
        return name

    def _modes(self, message: bytes, at: int) -> tuple[BodyModes | None, Any]:
        """What follows at `at`: the modes, and where the rest is to be read if there is more."""
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
    """Find the body with which a message begins.

    Returns where the body begins and ends, whether it ends its stream, and where the phase ends.
    """
    # Lengths of one and of two bytes are read without a call: every chunk of a response passes here.
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
    """What follows the phase, which ends at `at`."""
    if len(message) - at > BESIDE_BODY_BYTES_MAX:
        raise _UnusualError
    beside = ProcessingRequest.FromString(message[at:])
    # Another phase would replace the first one, or be merged with it.
    if beside.WhichOneof("request") is not None:
        raise _UnusualError
    return beside


def _long(message: bytes, at: int) -> tuple[int, int]:
    """Where the integer at `at` ends, which has two to four bytes, and what it is.

    Without a loop: a body has two of them. Four bytes are 256 MB, more than a server takes.
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
    """When there is no more room all are forgotten: what comes again is soon there again."""
    if len(kept) >= most:
        kept.clear()
    kept[key] = value
