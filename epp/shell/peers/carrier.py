"""The interface that transports frames between replicas."""

from enum import IntEnum
from typing import Final, Protocol

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.peers.state import PeerRow


class Kind(IntEnum):
    """The kind of a message, which is its first byte on a connection."""

    HELLO = ord("H")
    """A request and its answer, sent about once a second."""
    FRAME = ord("F")
    SNAPSHOT_WANTED = ord("S")
    SNAPSHOT_PART = ord("P")
    SNAPSHOT_END = ord("E")
    SNAPSHOT_REFUSED = ord("N")
    """A refusal, because another snapshot is being sent or there is none yet."""


KINDS: Final = {kind.value: kind for kind in Kind}


class Source(Protocol):
    """The sender of a message. Only the carrier that created it knows more."""

    @property
    def origin(self) -> bytes:
        """Origin for which the sender may speak, or b"" if it is not known yet."""
        ...


class Message(Struct, frozen=True):
    source: Source
    kind: Kind
    frame: bytes


class Carrier(Protocol):
    """A transport of frames. No method blocks, and each takes bounded time."""

    def send(self, frame: bytes) -> None:
        """Send `frame` to every active peer.

        Where a queue is full the frame is dropped and counted.
        """
        ...

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        """Return at most `messages_max` received messages, and True if there may be more.

        Messages of `paused` stay unread.
        """
        ...

    def beat(self, now: Seconds) -> None:
        """Do periodic work once per beat."""
        ...

    def greeted(self, message: Message, now: Seconds) -> None:
        """Process a `HELLO` message."""
        ...

    def rows(self, now: Seconds) -> list[PeerRow]:
        """Return the rows of the peers for operators."""
        ...

    @property
    def known(self) -> int:
        """Number of known peers, including those that do not answer."""
        ...

    @property
    def answering(self) -> int:
        """Number of peers that answer."""
        ...
