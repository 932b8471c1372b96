"""One gRPC stream, whatever carries it: what serves it, and how it ends.

A transport opens a `Call` for each stream, hands it every message, sends what it returns, and tells
it once how the stream ended. Calls know no transport and never wait, so that two transports serve
the same calls and pass the same tests.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import Final, Protocol, TypeAlias

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.gateway.tls import ServerCertificate
from epp.shell.supervision import Loop


class Code(IntEnum):
    """Of the status codes of gRPC those that we give or are given."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Cut(StrEnum):
    """Why a transport ended a connection that its gateway would have kept."""

    RESETS = "resets"
    """It only opened streams and reset them."""
    PROTOCOL = "protocol"
    """It broke the rules of HTTP/2."""
    WINDOW = "window"
    """Much of what came on it was not acknowledged."""
    EVICTED = "evicted"
    """It was the idlest, and a newer one needed its place."""
    REFUSED = "refused"
    """There was no place for it."""


class Status(Struct, frozen=True):
    """How a stream ends."""

    code: Code
    details: str = ""


OK: Final = Status(Code.OK)
CANCELLED: Final = Status(Code.CANCELLED, "the stream was reset")
DEFECT: Final = Status(Code.INTERNAL, "the picker failed")


class Call(Protocol):
    """What serves one stream. None of it may raise, and none of it waits."""

    ended: Status | None
    """Set: the stream is to be ended with this, once what was returned is sent. Looked at after each
    `receive` and `half_close`; in between a call ends by its wire."""

    def receive(self, message: bytes) -> Iterable[bytes]:
        """Take the next message; the answers to send, which may be made while they are taken."""
        ...

    def half_close(self) -> Iterable[bytes]:
        """The other side will send no more: more answers. Most calls end here; some go on."""
        ...

    def sent(self) -> None:
        """All answers so far are with the other side."""
        ...

    def closed(self, status: Status) -> None:
        """The stream is over. Called once, whatever happened."""
        ...


class Wire(Protocol):
    """What a call can do to its stream besides answering, at any time."""

    waited_s: Seconds
    """For how long what opened the stream was there and nobody looked, when it was opened."""

    def push(self, message: bytes) -> None:
        """Send `message` after what is being sent."""
        ...

    def end(self, status: Status) -> None:
        """Send what was returned so far, then end the stream."""
        ...


Opener: TypeAlias = Callable[[str, Wire], Call]
"""(peer as gRPC spells it, the stream) -> what serves it."""


class EndedCall:
    """The call of a stream that is ended at once."""

    __slots__ = ("ended",)

    def __init__(self, status: Status) -> None:
        self.ended: Status | None = status

    def receive(self, _: bytes) -> Iterable[bytes]:
        return ()

    def half_close(self) -> Iterable[bytes]:
        return ()

    def sent(self) -> None:
        """Nothing was."""

    def closed(self, status: Status) -> None:
        """Nobody asks."""


class Connected(Struct, frozen=True):
    """How it is with the connections of gateways."""

    connections: int
    unacknowledged_bytes: int
    """What has come on them and was not given back to their windows."""


class Transport(Protocol):
    """What carries calls. Serves between `start` and `stop`; what it needs to run is in `loops`."""

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Take `port` at `host`, 0: any free one, and return it. Raises `OSError`."""
        ...

    async def start(self) -> None:
        """Take streams."""
        ...

    def loops(self) -> dict[str, Loop]:
        """What is to run beside it, by the name of its task."""
        ...

    def connected(self) -> Connected | None:
        """None: it is not known."""
        ...

    @property
    def has_gateway(self) -> bool:
        """Whether a gateway is connected, as far as can be known, or one was."""
        ...

    def send_away(self, away: bool) -> None:
        """Whether gateways are asked again and again to connect elsewhere; who comes is served."""
        ...

    async def stop(self, wait_s: Seconds | None) -> None:
        """Take no more streams, and cut those that are open after `wait_s`; None: at once."""
        ...
