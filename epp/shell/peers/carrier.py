"""The interface of a carrier, which transports frames between replicas."""

from enum import IntEnum
from typing import Final, Protocol

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.peers.state import PeerRow


class Kind(IntEnum):
    """The kind of a message between replicas, which is the message's first byte on a connection."""

    HELLO = ord("H")
    """A greeting with the sender's origin, and the answer to it. It is sent about once a second."""
    FRAME = ord("F")
    SNAPSHOT_WANTED = ord("S")
    SNAPSHOT_PART = ord("P")
    SNAPSHOT_END = ord("E")
    SNAPSHOT_REFUSED = ord("N")
    """The refusal of a request for a snapshot, because the replica sends one to another replica or
    has none yet.
    """


KINDS: Final = {kind.value: kind for kind in Kind}


class Source(Protocol):
    """The sender of a message. Only the carrier that created this object knows more about it."""

    @property
    def origin(self) -> bytes:
        """Origin (8-byte id) of the replica for which the sender may speak, or b"" if it is not
        known yet.
        """
        ...


class Message(Struct, frozen=True):
    """A message that was received from another replica: its sender, its kind and its content."""

    source: Source
    kind: Kind
    frame: bytes


class Carrier(Protocol):
    """A transport of frames between replicas. No method blocks, and each takes bounded time."""

    def send(self, frame: bytes) -> None:
        """Send `frame` to every active peer. For a peer whose queue is full, the frame is dropped
        and counted.
        """
        ...

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        """Return at most `messages_max` received messages, and True if there may be more.

        Messages from the source `paused` stay unread.
        """
        ...

    def beat(self, now: Seconds) -> None:
        """Do the carrier's periodic work, once per beat."""
        ...

    def greeted(self, message: Message, now: Seconds) -> None:
        """Process a received `HELLO` message."""
        ...

    def rows(self, now: Seconds) -> list[PeerRow]:
        """Return one row per peer for operators, with its address, traffic and state."""
        ...

    @property
    def known(self) -> int:
        """Number of known peers, including peers that do not answer."""
        ...

    @property
    def answering(self) -> int:
        """Number of peers that currently answer."""
        ...
