"""How it is with the peers: what operators are shown of it."""

from collections.abc import Mapping

from msgspec import Struct, field

from epp.core.peers.exchange import Taken
from epp.core.types import Seconds


class Traffic:
    """Totals of all peers, those that left included, so that they never fall."""

    __slots__ = ("bytes_received", "bytes_sent", "failures", "frames")

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str], int] = {
            ("sent", "sent"): 0,
            ("sent", "dropped"): 0,
            ("received", "received"): 0,
            ("received", "dropped"): 0,
            **{("received", taken.value): 0 for taken in Taken if taken is not Taken.TAKEN},
        }
        """(direction, outcome) -> frames; "dropped": the peer's queue was full; those of `Taken`
        were "received" too."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.failures: dict[str, int] = {}
        """Kind -> connections that failed, or were cut."""

    def dropped(self) -> None:
        self.frames["sent", "dropped"] += 1

    def received(self, frame_bytes: int) -> None:
        self.frames["received", "received"] += 1
        self.bytes_received += frame_bytes

    def unreadable(self) -> None:
        self.frames["received", "unreadable"] += 1

    def took(self, taken: Taken) -> None:
        """What became of a frame that was received."""
        if taken is not Taken.TAKEN:
            self.frames["received", taken.value] += 1

    def failed(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1


class PeerRow(Struct, frozen=True, kw_only=True):
    """One peer, for the page /debug/peers."""

    address: str
    origin: str
    """The beginning of it, in hexadecimal digits; "" before the first answer."""
    connected_s: Seconds | None
    """For how long; None: it does not answer."""
    heard_s: Seconds | None
    """Since it was last heard of; None: never."""
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: int = 0
    """Frames, because its queue was full."""
    lost: int = 0
    """Frames of it that did not come, or came late."""
    claims_cut: int = 0
    """Of its load: more than can be true by what is known here."""


class PeersSnapshot(Struct, frozen=True, kw_only=True):
    """For a page of metrics."""

    known: int
    """Whose addresses are known, ourselves left out."""
    frames: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """As `Traffic.frames`."""
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    snapshots: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(Source or aim: "peer", "file", "broker", outcome) -> snapshots."""
