"""ZMTP 3.0 connections without I/O, for both ends of a connection.

Pickers subscribe and send requests to a router; the simulator's pods publish and answer.

The implementation follows RFC 23 with the mechanism NULL: a greeting of 64 bytes, a command READY
in each direction, then messages of frames. It greets as version 3.0, so that subscriptions are
messages and peers send no PING; a PING is answered all the same. Everything has a limit, and
unknown input ends the connection.
"""

from enum import StrEnum
from typing import Final, TypeAlias

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024 + 1024
MESSAGE_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
PARTS_MAX: Final = 16
COMMAND_BYTES_MAX: Final = 64 * 1024

_GREETING_BYTES: Final = 64
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + b"\0" + bytes(31)
_MORE: Final = 0x01
_LONG: Final = 0x02
_COMMAND: Final = 0x04
_SHORT_MAX: Final = 255

Message: TypeAlias = tuple[bytes, ...]


class SocketType(StrEnum):
    SUB = "SUB"
    DEALER = "DEALER"
    PUB = "PUB"
    ROUTER = "ROUTER"


_PEERS: Final = {
    SocketType.SUB: (b"PUB", b"XPUB"),
    SocketType.DEALER: (b"ROUTER",),
    SocketType.PUB: (b"SUB", b"XSUB"),
    SocketType.ROUTER: (b"DEALER", b"REQ"),
}


class ZmtpError(Exception):
    """A violation of ZMTP by the other end of the connection, which may speak another protocol. The
    message is a phrase about that end, without any text from it.
    """


class ZmtpConnection:
    """One end of a ZMTP connection. Pass received data to `feed`, and send what `to_send` returns."""

    def __init__(self, socket_type: SocketType, *, topic: bytes = b"") -> None:
        """Create one end of a connection with the socket type `socket_type`. `topic` is the prefix
        of the topics to which a subscriber subscribes.
        """
        self._type = socket_type
        self._topic = topic
        self._rest = bytearray()
        """Received bytes that do not form a whole ZMTP frame yet."""
        self._outgoing = bytearray(_GREETING)
        self._greeted = False
        self.ready = False
        """True once the other end of the connection has sent READY. A subscriber has then sent its
        subscription.
        """
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    def to_send(self) -> bytes:
        """Return the bytes to send to the other end of the connection now. Each byte is returned
        once.
        """
        if not self._outgoing:
            return b""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def send(self, message: Message) -> None:
        """Encode `message` and append it to the bytes that `to_send` returns."""
        last = len(message) - 1
        for number, part in enumerate(message):
            self._frame(part, _MORE if number < last else 0)

    def feed(self, data: bytes) -> list[Message]:
        """Process received bytes and return the messages that they complete. Answers of the
        protocol are added to the bytes that `to_send` returns. Raises `ZmtpError` if the other end
        of the connection violates the protocol.
        """
        rest = self._rest
        # Most data consists of whole messages, which are read in place.
        wire: bytes | bytearray = data
        if rest:
            rest += data
            wire = rest
        found: list[Message] = []
        at = 0
        if not self._greeted:
            at = self._read_greeting(wire)
        if self._greeted:
            at = self._read_messages(wire, at, found)
        # Processed data is removed in one cut, not frame by frame.
        if wire is rest:
            del rest[:at]
        elif at < len(data):
            rest += data[at:]
        return found

    def _read_messages(self, wire: bytes | bytearray, at: int, found: list[Message]) -> int:
        """Add the messages that are complete in `wire` from position `at` on to `found`. Return the
        position after the last whole ZMTP frame. Raises `ZmtpError` for a frame or message that
        breaks the protocol or a limit.
        """
        end = len(wire)
        parts, parts_bytes = self._parts, self._parts_bytes
        # A frame consists of flags, size and body.
        while at + 2 <= end:
            flags = wire[at]
            start, size = at + 2, wire[at + 1]
            if flags > _MORE:
                if flags & ~(_MORE | _LONG | _COMMAND):
                    raise ZmtpError("sent a frame with unknown flags")
                if flags & _LONG:
                    start = at + 9
                    if end < start:
                        break
                    size = int.from_bytes(wire[at + 1 : start], "big")
                most = COMMAND_BYTES_MAX if flags & _COMMAND else FRAME_BYTES_MAX
                if size > most:
                    raise ZmtpError(f"sent a frame of {size} bytes; expected at most {most}")
            if end < start + size:
                break
            at = start + size
            body = bytes(wire[start:at])
            if flags & _COMMAND:
                self._read_command(body)
                continue
            if not self.ready:
                raise ZmtpError("sent a message before it was ready")
            parts.append(body)
            parts_bytes += size
            if len(parts) > PARTS_MAX or parts_bytes > MESSAGE_BYTES_MAX:
                raise ZmtpError(
                    f"sent a message of more than {PARTS_MAX} parts or {MESSAGE_BYTES_MAX} bytes"
                )
            if not flags & _MORE:
                found.append(tuple(parts))
                parts.clear()
                parts_bytes = 0
        self._parts_bytes = parts_bytes
        return at

    def _read_greeting(self, wire: bytes | bytearray) -> int:
        """Read the greeting of the other end, and answer a complete one with READY. Return its size
        in bytes, or 0 if it is incomplete. Raises `ZmtpError` for another protocol.
        """
        if wire[:1] != b"\xff"[: len(wire)] or (len(wire) > 9 and not wire[9] & 1):
            raise ZmtpError("sent a greeting that is not ZMTP 3")
        if len(wire) < _GREETING_BYTES:
            return 0
        if wire[10] < 3:
            raise ZmtpError(f"speaks ZMTP {wire[10]}; expected 3 or later")
        if bytes(wire[12:32]) != _MECHANISM:
            raise ZmtpError("demands a security mechanism; expected NULL")
        self._greeted = True
        name = b"Socket-Type"
        value = self._type.value.encode()
        body = b"\x05READY" + bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        if self._type is SocketType.DEALER:
            body += b"\x08Identity" + bytes(4)
        self._frame(body, _COMMAND)
        return _GREETING_BYTES

    def _read_command(self, body: bytes) -> None:
        length = body[0] if body else 0
        name, rest = body[1 : 1 + length], body[1 + length :]
        if name == b"READY":
            if self.ready:
                raise ZmtpError("sent READY twice")
            self._check_peer(rest)
            self.ready = True
            if self._type is SocketType.SUB:
                self._frame(b"\x01" + self._topic, 0)
        elif name == b"ERROR":
            raise ZmtpError("refused the connection")
        elif name == b"PING":
            # The command has a time to live, and a context to repeat.
            self._frame(b"\x04PONG" + rest[2:18], _COMMAND)

    def _check_peer(self, properties: bytes) -> None:
        at = 0
        while at < len(properties):
            end = at + 1 + properties[at]
            name = properties[at + 1 : end].lower()
            size = int.from_bytes(properties[end : end + 4], "big")
            value = properties[end + 4 : end + 4 + size]
            if len(value) != size or len(properties) < end + 4:
                raise ZmtpError("sent unreadable properties")
            if name == b"socket-type" and value not in _PEERS[self._type]:
                expected = " or ".join(kind.decode() for kind in _PEERS[self._type])
                raise ZmtpError(f"is a socket of another type; expected {expected}")
            at = end + 4 + size

    def _frame(self, body: bytes, flags: int) -> None:
        if len(body) > _SHORT_MAX:
            self._outgoing += bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
        else:
            self._outgoing += bytes([flags, len(body)]) + body


# Content of messages with KV-cache events.

SEQUENCE_BYTES: Final = 8
END: Final = b"\xff" * SEQUENCE_BYTES
"""Bytes that stand in place of a frame number in the message that ends a replay."""


def read_subscription(message: Message) -> tuple[bool, bytes] | None:
    """Return (subscribes, topics) of a message of a subscriber: whether it subscribes or
    unsubscribes, and the prefix of the topics. Return None if `message` is none of these.
    """
    if len(message) != 1 or message[0][:1] not in (b"\0", b"\1"):
        return None
    return message[0][:1] == b"\1", message[0][1:]


def live_message(topic: bytes, sequence: int, payload: bytes) -> Message:
    """Return the ZMTP message with which a publisher sends the live frame `sequence`, whose events
    are in `payload`. `read_live` reads it.
    """
    return (topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)


def read_live(message: Message) -> tuple[int, bytes] | None:
    """Return (number of the frame, payload) of a publisher's message with a live frame. Return None
    if `message` does not have the parts topic, number and payload.
    """
    if len(message) != 3 or len(message[1]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(message[1], "big"), message[2]


def ask_replay(first: int) -> Message:
    """Return the ZMTP message that requests a replay of all frames from number `first` on."""
    return (b"", first.to_bytes(SEQUENCE_BYTES, "big"))


def read_asked(message: Message) -> int | None:
    """Return the number of the first frame that a message of `ask_replay` requests. Return None for
    another message.
    """
    if len(message) != 2 or message[0] or len(message[1]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(message[1], "big")


def replayed_message(topic: bytes, sequence: int, payload: bytes) -> Message:
    """Return the ZMTP message with which a router replays the frame `sequence`, whose events are in
    `payload`. `read_replayed` reads it.
    """
    return (b"", *live_message(topic, sequence, payload))


REPLAY_ENDED: Final[Message] = (b"", b"", END, b"")


def read_replayed(message: Message) -> tuple[int, bytes] | bool | None:
    """Return (number of the frame, payload) of a router's message with a replayed frame, True for
    the end marker of a replay, or None for another message.

    The parts are an empty part, the topic since vLLM 0.26, the number, and the payload.
    """
    number = len(message) - 2
    if number not in (1, 2) or message[0] or len(message[number]) != SEQUENCE_BYTES:
        return None
    if message[number] == END:
        return True
    return int.from_bytes(message[number], "big"), message[number + 1]
