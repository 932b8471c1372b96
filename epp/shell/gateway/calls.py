"""The interface between a gRPC transport and the picker's handler of one stream.

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
    """Codes of the gRPC statuses that the picker sends or receives."""

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
    """Reasons for which the picker closes or rejects a gateway's connection, or asks the gateway to
    replace it, although the gateway would keep it open.
    """

    RESETS = "resets"
    """The gateway repeatedly opened streams on the connection and reset them before an answer."""
    PROTOCOL = "protocol"
    """The gateway violated the HTTP/2 protocol on the connection."""
    WINDOW = "window"
    """Much of the data received on the connection was not acknowledged, so that little of its
    flow-control window was left.
    """
    EVICTED = "evicted"
    """A newer connection needed a place within the limits. This one was asked to leave: a
    connection without streams if there was one, and among several the one that had been silent for
    longest.
    """
    REFUSED = "refused"
    """The limits of the number of connections left no place for the new connection."""


class Status(Struct, frozen=True):
    """The gRPC status with which a stream ends: a code and details."""

    code: Code
    details: str = ""


OK: Final = Status(Code.OK)
CANCELLED: Final = Status(Code.CANCELLED, "the stream was reset")
DEFECT: Final = Status(Code.INTERNAL, "the picker failed")


class Call(Protocol):
    """The handler of one gRPC stream. Its methods neither raise nor wait."""

    ended: Status | None
    """Status with which the transport ends the stream after sending the returned answers, or None
    to keep the stream open. The transport reads it after each `receive` and `half_close`; at other
    times a call ends its stream with `Wire.end`.
    """

    def receive(self, message: bytes) -> Iterable[bytes]:
        """Process the next message of the stream and return the answers to send, which may be
        created lazily.
        """
        ...

    def half_close(self) -> Iterable[bytes]:
        """Handle the end of the client's messages (half-close), and return further answers to send.
        Most calls end here.
        """
        ...

    def sent(self) -> None:
        """Note that the transport has sent all of this call's answers so far to the client."""
        ...

    def closed(self, status: Status) -> bool:
        """Handle the end of the stream. The transport calls this method exactly once for every
        stream.

        Return True if the picker itself let the stream wait for its answer, so that a reset is no
        sign of abuse.
        """
        ...


class Wire(Protocol):
    """The stream of a call, with which the call can send messages or end the stream at any time,
    not only in reply to a message.
    """

    came_at_s: Seconds
    """Estimated time at which the request to open the stream came, by the clock of the server: it may
    have waited before the picker read it.
    """

    def push(self, message: bytes) -> None:
        """Send `message` on the stream, after the messages that are already being sent."""
        ...

    def end(self, status: Status) -> None:
        """Send the answers that the call has returned, then end the stream with `status`."""
        ...


Opener: TypeAlias = Callable[[str, Wire], Call]
"""Type of a function that opens a call: it gets the peer in gRPC's spelling and the stream's
`Wire`, and returns the `Call` that serves the stream.
"""


class EndedCall:
    """A call that ends its stream at once with a given status."""

    __slots__ = ("ended",)

    def __init__(self, status: Status) -> None:
        self.ended: Status | None = status

    def receive(self, _: bytes) -> Iterable[bytes]:
        return ()

    def half_close(self) -> Iterable[bytes]:
        return ()

    def sent(self) -> None:
        """Do nothing after sending, because a call that ends its stream at once sends no messages."""

    def closed(self, status: Status) -> bool:
        """Return False at the end of the stream, because this call keeps nothing about it."""
        return False


class Connected(Struct, frozen=True):
    """Counts of the open connections of gateways and of their unacknowledged bytes."""

    connections: int
    unacknowledged_bytes: int
    """Number of bytes that were received from gateways and not yet returned to their flow-control
    windows.
    """


class Transport(Protocol):
    """A gRPC server that carries calls between `start` and `stop`. The coroutines of `loops` must
    run meanwhile.
    """

    async def listen(self, host: str, port: int, certificate: ServerCertificate | None) -> int:
        """Listen for gateways on `port` at `host` (0 for any free port) and return the port number.
        Raises `OSError`.
        """
        ...

    async def start(self) -> None:
        """Begin to accept streams on the ports of `listen`."""
        ...

    def loops(self) -> dict[str, Loop]:
        """Return the coroutines that must run as tasks beside the gRPC transport, by the names of
        these tasks.
        """
        ...

    def connected(self) -> Connected | None:
        """Return the counts of gateways' connections, or None if the transport does not know
        them.
        """
        ...

    @property
    def has_gateway(self) -> bool:
        """True if a gateway is connected. If the transport does not know that, True if a gateway
        has ever been connected.
        """
        ...

    def send_away(self, away: bool) -> None:
        """Start (`away` True) or stop (False) asking gateways to connect to another picker.
        Gateways that connect here all the same are served.
        """
        ...

    async def stop(self, wait_s: Seconds | None) -> None:
        """Accept no more streams, and cut the open streams after `wait_s` seconds, or at once if it
        is None.
        """
        ...
