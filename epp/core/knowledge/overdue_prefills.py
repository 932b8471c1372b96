"""Prefill stages that neither ended nor failed within a deadline, by pair of endpoints.

A prefill endpoint can hang after it accepted a request, or the transfer of the KV cache can. The
request then has no response, so no status shows the fault. Counting such requests by pair shows
operators which prefill and decode endpoints to inspect.
"""

from collections import Counter, deque
from itertools import islice
from typing import Final

from epp.core.knowledge.inflight import InflightLedger, Lease
from epp.core.types import PREFILL, Seconds

WATCHED_MAX: Final = 65_536
"""Maximum number of watched requests; the oldest are no longer watched when there are more."""

COUNTED_MAX: Final = 8_192
"""Maximum number of watched requests, the latest ones, that `in_flight` looks at."""


class OverduePrefills:
    """The requests whose prefill and decode run on different endpoints, and the number of overdue
    prefills by pair of slots.
    """

    def __init__(self) -> None:
        self.by_pair: dict[tuple[int, int], int] = {}
        """Number of overdue prefills since both endpoints joined or restarted, by slot of the
        prefill and of the decode endpoint.
        """
        self.total = 0
        """Number of overdue prefills of all pairs, also of endpoints that left."""
        self._watched: deque[tuple[Lease, Lease]] = deque(maxlen=WATCHED_MAX)
        """Lease of the prefill and of the decode endpoint of each request, oldest first."""

    def watch(self, prefill: Lease, decode: Lease) -> None:
        """Watch the request that the endpoints of the leases `prefill` and `decode` serve together."""
        self._watched.append((prefill, decode))

    def tick(self, ledger: InflightLedger, deadline_s: Seconds, now: Seconds) -> None:
        """Count the prefills that began `deadline_s` ago or earlier, if neither they nor the
        requests at their decode endpoints have ended. No longer watch these prefills, nor the
        oldest ones that have ended.
        """
        watched = self._watched
        while watched and not ledger.is_live(watched[0][0]):
            watched.popleft()
        while watched and watched[0][0].opened_at_s + deadline_s <= now:
            prefill, decode = watched.popleft()
            if ledger.is_live(prefill) and ledger.is_live(decode):
                pair = prefill.slot, decode.slot
                self.by_pair[pair] = self.by_pair.get(pair, 0) + 1
                self.total += 1

    def in_flight(self, ledger: InflightLedger) -> Counter[tuple[int, int]]:
        """Return the number of prefills that have neither ended nor become overdue, by slot of the
        prefill and of the decode endpoint, among the `COUNTED_MAX` latest watched requests.
        """
        return Counter(
            (prefill.slot, decode.slot)
            for prefill, decode in islice(reversed(self._watched), COUNTED_MAX)
            if ledger.is_live(prefill) and ledger.is_live(decode)
        )

    def of(self, slot: int) -> dict[tuple[int, int], int]:
        """Return the numbers of overdue prefills, by slot of the prefill and of the decode
        endpoint, of the pairs in which `slot` is one of both.
        """
        return {pair: count for pair, count in self.by_pair.items() if slot in pair}

    def forget(self, slot: int) -> None:
        """Drop the counts of the pairs with `slot`, because its endpoint left or restarted. `total`
        still includes them.
        """
        for pair in self.of(slot):
            del self.by_pair[pair]


def prefill_of(lease: Lease) -> Lease | None:
    """Return the lease of the endpoint that prefills for the request of `lease`, or None if no
    other endpoint does.
    """
    for one in lease.earlier:
        if one.stage is PREFILL:
            return one
    return None
