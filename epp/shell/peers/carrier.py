"""What carries frames between replicas, as those see it who fill and empty it."""

from enum import IntEnum
from typing import Final, Protocol

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.peers.state import PeerRow


class Kind(IntEnum):
    """What a message is; on a connection its first byte."""

    HELLO = ord("H")
    """Asked and answered the same way, about once a second."""
    FRAME = ord("F")
    SNAPSHOT_WANTED = ord("S")
    SNAPSHOT_PART = ord("P")
    SNAPSHOT_END = ord("E")
    SNAPSHOT_REFUSED = ord("N")
    """Not now: another is being served, or there is nothing yet."""


KINDS: Final = {kind.value: kind for kind in Kind}


class Source(Protocol):
    """Whom a message came from; only the carrier that gave it knows more."""

    @property
    def origin(self) -> bytes:
        """For whom it may speak, and for nobody else; b"": for nobody yet."""
        ...


class Message(Struct, frozen=True):
    source: Source
    kind: Kind
    frame: bytes


class Carrier(Protocol):
    """Not a call of it waits, and each takes bounded time."""

    def send(self, frame: bytes) -> None:
        """To every peer that answers; where its queue is full the frame is dropped and counted."""
        ...

    def receive(
        self, messages_max: int, paused: Source | None = None
    ) -> tuple[list[Message], bool]:
        """What has come, at most `messages_max`, none of `paused`; and whether there may be more."""
        ...

    def beat(self, now: Seconds) -> None:
        """Housekeeping, once a beat."""
        ...

    def greeted(self, message: Message, now: Seconds) -> None:
        """A `HELLO` came."""
        ...

    def rows(self, now: Seconds) -> list[PeerRow]:
        """The peers, for operators."""
        ...

    @property
    def known(self) -> int:
        """Peers, whether they answer or not."""
        ...

    @property
    def answering(self) -> int:
        """Peers that answer."""
        ...
