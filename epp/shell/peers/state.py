"""Statistics about the peers of this replica, for operators."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.peers.exchange import Taken
from epp.core.types import Seconds


class Traffic:
    """Traffic totals over all peers, including those that have left, so that the totals never
    decrease.
    """

    __slots__ = ("bytes_received", "bytes_sent", "failures", "frames")

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str], int] = {
            ("sent", "sent"): 0,
            ("sent", "dropped"): 0,
            ("received", "received"): 0,
            ("received", "dropped"): 0,
            **{("received", taken.value): 0 for taken in Taken if taken is not Taken.TAKEN},
        }
        """Number of frames exchanged with peers, by direction ("sent", "received") and outcome.
        Sent frames are "dropped" if a queue is full, the connection is gone or the frame is too
        long; received ones if the queue of the broker's frames is full. Frames with an outcome of
        `Taken` are counted as "received" in addition, but not messages that contain no frame.
        """
        self.bytes_sent = 0
        self.bytes_received = 0
        self.failures: dict[str, int] = {}
        """Number of failures by kind, mostly of connections to peers or to the broker that failed
        or were closed.
        """

    def dropped(self) -> None:
        self.frames["sent", "dropped"] += 1

    def received(self, frame_bytes: int) -> None:
        self.frames["received", "received"] += 1
        self.bytes_received += frame_bytes

    def unreadable(self) -> None:
        self.frames["received", "unreadable"] += 1

    def took(self, taken: Taken) -> None:
        """Count the outcome of a frame that was received from a peer. An accepted frame is not
        counted again.
        """
        if taken is not Taken.TAKEN:
            self.frames["received", taken.value] += 1

    def failed(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1


class PeerRow(Struct, frozen=True, kw_only=True):
    """The row of one peer on the page /debug/peers."""

    address: str
    origin: str
    """First eight hexadecimal digits of the peer's origin; "" before its first answer."""
    connected_s: Seconds | None
    """Seconds for which the peer has been answering, or None if it does not answer."""
    heard_s: Seconds | None
    """Seconds since the peer last answered a hello, or since its last message through the broker;
    None if there was none.
    """
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: int = 0
    """Number of frames to this peer that were dropped, because its queue was full or its connection
    was gone.
    """
    lost: int = 0
    """Number of frames from this peer that did not arrive, or arrived too late."""
    claims_cut: int = 0
    """Number of the peer's load reports that were reduced, because they exceeded what is
    possible.
    """


class PeersSnapshot(Struct, frozen=True, kw_only=True):
    """Statistics about the peers of this replica, as shown on its metrics page."""

    known: int
    """Number of other replicas whose addresses are known, or that send messages through the broker.
    """
    frames: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of frames by direction and outcome, as in `Traffic.frames`."""
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    snapshots: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of snapshots by use and outcome. The use is "taken" (attempts to receive one from a
    replica or through the broker), "given" (to a replica), "file" or "broker".
    """
