"""What this wing moves frames for: the core's session with all peers, as it is seen from here."""

from collections.abc import Iterator
from typing import Protocol

from epp.core.peers.exchange import Taken
from epp.core.types import Seconds


class Exchange(Protocol):
    """Frames in, frames out. Without I/O; what it is given and gives is opaque to the shell."""

    @property
    def origin(self) -> bytes:
        """`ORIGIN_BYTES` that are drawn anew by every process."""
        ...

    def outgoing(self, now: Seconds) -> list[bytes]:
        """What every peer is to be sent now; called once a beat, nearly always empty when idle."""
        ...

    def goodbye(self, now: Seconds) -> bytes:
        """What every peer is to be sent last."""
        ...

    def receive(self, frame: bytes, now: Seconds) -> Taken:
        """Take in what a peer sent, in bounded time."""
        ...

    def receive_snapshot_frame(self, frame: bytes, now: Seconds, age_s: Seconds) -> Taken:
        """Take in a frame of a `snapshot` that was made `age_s` ago, in bounded time."""
        ...

    def pending(self) -> bool:
        """Whether something was taken in that `apply` has not applied yet."""
        ...

    def apply(self, now: Seconds) -> None:
        """Apply some of it, in bounded time; called once a turn of the loop while it is pending."""
        ...

    def snapshot(self, now: Seconds) -> Iterator[bytes]:
        """Frames of all that is known, oldest first; each is made in about a millisecond."""
        ...

    def tick(self, now: Seconds) -> None:
        """Called about once a second: forget who has fallen silent."""
        ...
