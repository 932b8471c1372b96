"""The data of flow control that the pickers of one pool exchange: their number, and the charges of
flows.

Every picker has a queue of its own. Three things make several queues behave like one:

- Limits are divided by the number of pickers that take part. A picker whose peers fall silent or
  leave has the whole limits, and no share is ever 0.
- Room is counted with the requests that peers report. Reports come late, so a picker assumes that
  each peer has sent as many requests since its last report as the picker has since its own. Pickers
  in whose queues requests wait divide the room evenly. Otherwise the picker that has most requests
  in flight would learn of room first, and keep it.
- Charges of flows are exchanged as totals, not as differences. A lost report is repaired by the
  next one that contains the flow.

Flows are identified by hashes, because their ids are names of clients and never leave a process.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import xxhash

CHARGES_MAX: Final = 1_024
"""Maximum number of flows whose charges are stored, of this picker and of each peer."""
ORIGINS_MAX: Final = 64
"""Maximum number of peers whose charges are stored, and of peers that are stored as waiting."""
TOTAL_MAX: Final = 1e12
"""Largest total of a flow that a peer can report, so that sums stay exact."""

Origin = bytes
Key = int


def key_of(fairness: str, priority: int, flow: str) -> Key:
    """Return a 64-bit hash of a flow, of its band and of the band's fairness rule. The hash is the
    same at every picker.
    """
    text = f"{fairness}\0{priority}\0{flow}"
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class FlowShares:
    """The number of pickers, and the charges of flows, as far as this picker knows them."""

    def __init__(self) -> None:
        self.pickers = 1
        """Number of pickers that take part: this one, and the peers from which it receives reports.
        """
        self.waiting = 0
        """Number of requests that wait in the queue of this picker."""
        self.reports = 0
        """Number of reports of this picker's load to its peers so far."""
        self.loads_heard = 0
        """Number of reports received from peers so far that may have changed the room that
        endpoints have for this picker.
        """
        self.fresh: dict[Key, float] = {}
        """Charges by peers that the queue has not added to its flows yet, by key."""
        self._own: OrderedDict[Key, float] = OrderedDict()
        """Total that this picker charged to each flow, by key; the flow that was charged last comes
        last.
        """
        self._unsent: set[Key] = set()
        self._waiting_peers: set[Origin] = set()
        self._peers: dict[Origin, dict[Key, float]] = {}
        """Total charged to each flow by each peer, as the peer reported it last."""

    def __repr__(self) -> str:
        return f"<FlowShares [{self.pickers} pickers, {len(self._own)} flows]>"

    @property
    def pickers_waiting(self) -> int:
        """Return the number of pickers that divide the room, at least 1: this one, and the peers in
        whose queues requests wait.
        """
        return 1 + len(self._waiting_peers)

    # This picker.

    def share_of(self, limit: int) -> int:
        """Return this picker's share of `limit`, at least 1 unless `limit` is 0."""
        return min(limit, max(1, limit // self.pickers))

    def exceeds_bytes(self, used: int, more: int, limit: int) -> bool:
        """Return whether `more` bytes beside the `used` ones exceed this picker's share of `limit`.

        A request that waits alone may use the whole limit, so that it does not depend on the number
        of pickers whether it may wait at all.
        """
        return used + more > (self.share_of(limit) if used else limit)

    def charge(self, key: Key, amount: float) -> None:
        """Add `amount`, which may be negative for a correction, to this picker's total of a flow. Do
        nothing while there are no peers.
        """
        if self.pickers == 1:
            return
        own = self._own
        own[key] = own.get(key, 0.0) + amount
        own.move_to_end(key)
        self._unsent.add(key)
        if len(own) > CHARGES_MAX:
            dropped, _ = own.popitem(last=False)
            self._unsent.discard(dropped)

    def outgoing(self, *, whole: bool) -> list[tuple[Key, float]]:
        """Return the totals of this picker to report to peers: those that changed since the last
        call, or all of them if `whole`. No total is below 0.
        """
        keys: Iterable[Key] = self._own if whole else self._unsent
        found = [(key, max(0.0, self._own[key])) for key in keys]
        self._unsent.clear()
        return found

    # Peers.

    def hear(self, origin: Origin, totals: Mapping[Key, float], *, whole: bool) -> None:
        """Store the totals of flows that the peer `origin` reports, and add their increases to
        `fresh`. If `whole`, the peer has no other totals.

        The first report of a peer is the basis of later ones: what a flow was charged before does
        not count. The first report is ignored if it is not `whole`, or above `ORIGINS_MAX` peers.
        """
        known = self._peers.get(origin)
        if known is None:
            if whole and len(self._peers) < ORIGINS_MAX:
                self._peers[origin] = dict(totals)
            return
        for key, total in totals.items():
            self._add(key, total, known.get(key, 0.0))
        if whole:
            known.clear()
        known.update(totals)
        while len(known) > CHARGES_MAX:
            del known[next(iter(known))]

    def forget(self, origin: Origin) -> None:
        """Drop the totals of flows that the peer `origin` reported, because the peer is gone. Its
        charges stay counted for the flows. Requests no longer count as waiting in its queue.
        """
        self._peers.pop(origin, None)
        self._waiting_peers.discard(origin)

    def waits(self, origin: Origin, *, waits: bool) -> bool:
        """Store whether requests wait in the queue of the peer `origin`. Return whether that
        differs from what was stored. A waiting peer above `ORIGINS_MAX` is not stored.
        """
        if waits == (origin in self._waiting_peers):
            return False
        if not waits:
            self._waiting_peers.discard(origin)
            return True
        if len(self._waiting_peers) >= ORIGINS_MAX:
            return False
        self._waiting_peers.add(origin)
        return True

    def take_fresh(self) -> dict[Key, float]:
        """Return the charges that peers reported since the last call, by the key of the flow
        (`key_of`).
        """
        found, self.fresh = self.fresh, {}
        return found

    def _add(self, key: Key, total: float, before: float) -> None:
        # Corrections lower a total a little. A total that fell below half was reset by its sender.
        more = total if total < before / 2.0 else total - before
        if more and (key in self.fresh or len(self.fresh) < CHARGES_MAX):
            self.fresh[key] = self.fresh.get(key, 0.0) + more
