"""The interface between a gRPC transport and the service of one stream.

A transport opens a `Call` for each stream, passes it every message, sends the answers, and reports
once how the stream ended. Calls do not depend on a transport and never wait. Two transports can
therefore serve the same calls and pass the same tests.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import Final, Protocol, TypeAlias

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.gateway.tls import ServerCertificate
from epp.shell.supervision import Loop


class Code(IntEnum):
    """The gRPC status codes that the picker sends or receives."""

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
    """Reasons why a transport closed a connection that its gateway would have kept."""

    RESETS = "resets"
    """The connection only opened streams and reset them."""
    PROTOCOL = "protocol"
    """The connection violated the HTTP/2 protocol."""
    WINDOW = "window"
    """Much of the connection's received data was not acknowledged."""
    EVICTED = "evicted"
    """The connection was the idlest, and a newer one needed its place."""
    REFUSED = "refused"
    """There was no place for the connection."""


class Status(Struct, frozen=True):
    """The status that ends a stream."""

    code: Code
    details: str = ""


OK: Final = Status(Code.OK)
CANCELLED: Final = Status(Code.CANCELLED, "the stream was reset")
DEFECT: Final = Status(Code.INTERNAL, "the picker failed")


class Call(Protocol):
    """The service of one stream. Its methods neither raise nor wait."""

    ended: Status | None
    """Status with which the transport ends the stream after sending the returned answers, or None.
    The transport reads it after each `receive` and `half_close`; at other times a call ends by its
    wire.
    """

    def receive(self, message: bytes) -> Iterable[bytes]:
        """Process the next message and return the answers to send, which may be created lazily."""
        ...

    def half_close(self) -> Iterable[bytes]:
        """Handle the end of the other side's messages and return further answers. Most calls end
        here.
        """
        ...

    def sent(self) -> None:
        """Note that all answers so far have been sent to the other side."""
        ...

    def closed(self, status: Status) -> None:
        """Handle the end of the stream. It is called exactly once, in every case."""
        ...


class Wire(Protocol):
    """The stream of a call, for actions other than answering; they are allowed at any time."""

    waited_s: Seconds
    """Time that the opening of the stream waited before the picker read it."""

    def push(self, message: bytes) -> None:
        """Send `message` after the messages that are being sent."""
        ...

    def end(self, status: Status) -> None:
        """Send the returned answers, then end the stream."""
        ...


Opener: TypeAlias = Callable[[str, Wire], Call]
"""Function (peer in gRPC's spelling, stream) -> the call that serves it."""


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
        """Do nothing, because nothing was sent."""

    def closed(self, status: Status) -> None:
        """Do nothing, because the call has no state."""


class Connected(Struct, frozen=True):
    """The state of the connections of gateways."""

    connections: int
    unacknowledged_bytes: int
    """Bytes that were received and not returned to the flow-control windows."""


class Transport(Protocol):
    """A carrier of calls, between `start` and `stop`. The tasks in `loops` must run beside it."""

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Listen on `port` at `host` (0 for any free port) and return the port. Raises `OSError`."""
        ...

    async def start(self) -> None:
        """Accept streams."""
        ...

    def loops(self) -> dict[str, Loop]:
        """Return the coroutines to run beside the transport, by the names of their tasks."""
        ...

    def connected(self) -> Connected | None:
        """Return the state of the connections, or None if it is unknown."""
        ...

    @property
    def has_gateway(self) -> bool:
        """True if a gateway is connected or, if that is unknown, has been connected."""
        ...

    def send_away(self, away: bool) -> None:
        """Start or stop asking gateways to connect elsewhere; those that connect are still served."""
        ...

    async def stop(self, wait_s: Seconds | None) -> None:
        """Accept no more streams, and cut the open ones after `wait_s`; None to cut them at once."""
        ...
