"""Pickers report on their queues to each other: charges of flows, and whether requests wait."""

from msgspec import structs

from epp.core.flow.shares import FlowShares
from epp.core.peers.frames import Frame, charges_bytes, charges_of


class QueueReports:
    """The reports on queues in the frames between pickers, for the `FlowShares` of one picker."""

    def __init__(self, shares: FlowShares) -> None:
        self._shares = shares
        self._charges = b""
        self._waited = False
        """True if requests waited in the queue when the last frame was sent."""

    def collect(self, *, whole: bool) -> bool:
        """Collect the charges that the next frame reports: all if `whole`, else those that changed.
        Return whether there are any, or whether requests began or ceased to wait since the last
        frame. Count the report in the shares.
        """
        shares = self._shares
        # Peers learn the load of this picker from the same frames.
        shares.reports += 1
        self._charges = charges_bytes(shares.outgoing(whole=whole))
        return bool(self._charges) or self._waited != (shares.waiting > 0)

    def added_to(self, frame: Frame) -> Frame:
        """Return a copy of `frame` with the charges that `collect` collected, and whether requests
        wait in this picker's queue.
        """
        self._waited = self._shares.waiting > 0
        return structs.replace(frame, charges=self._charges, waits=self._waited)

    def take(self, frame: Frame) -> bool:
        """Record the charges and the waiting requests that the `frame` of a peer reports. Return
        whether requests in this picker's queue may have room now, because the peer's load may have
        changed, or requests began or ceased to wait in the peer's queue.
        """
        shares = self._shares
        if frame.charges or frame.whole:
            shares.hear(frame.origin, charges_of(frame.charges), whole=frame.whole)
        changed = shares.waits(frame.origin, waits=frame.waits)
        if not (changed or frame.load or frame.whole):
            return False
        shares.loads_heard += 1
        return True

    def forget(self, origin: bytes) -> None:
        """Drop what the peer `origin` reported, because it is gone."""
        self._shares.forget(origin)

    def count(self, peers: int) -> None:
        """Record the number of peers from which this picker receives reports."""
        self._shares.pickers = 1 + peers
