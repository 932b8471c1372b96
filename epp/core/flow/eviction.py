"""The choice of a running request that ends early, so that a request of higher priority has room.

Only requests of priority below 0 are evicted, and only before their response begins: the client
then gets a plain refusal, and no part of an answer is lost.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from msgspec import Struct

from epp.core.knowledge.inflight import Lease
from epp.core.types import Refusal, Seconds

EVICT_AFTER_S: Final = 1.0
"""Wait in seconds after which a request may have another one evicted. It is half of the longest wait
of the request if that is less, and 0 while the queue has no space for a further request.
"""
PAUSE_S: Final = 1.0
"""Pause in seconds after an eviction that made no room. By then the endpoint's next page shows its
effect.
"""


class Running(Struct, frozen=True, eq=False):
    """A request that may be evicted: it was placed, and its response has not begun."""

    priority: int
    lease: Lease
    evict: Callable[[Refusal], None]
    """Function that ends the request and its lease with a refusal for the client."""


class Evictions:
    """The running requests that may be evicted, and the time before which none is evicted."""

    def __init__(self) -> None:
        self.evicted: Counter[int] = Counter()
        """Number of evicted requests by priority."""
        self._running: dict[int, dict[Running, None]] = {}
        """Running requests that may be evicted, by priority, oldest first. The number of open streams
        bounds them.
        """
        self.paused_until_s: Seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    def add(self, running: Running) -> None:
        """Add a request that was just placed. Raises `ValueError` if its priority is not below 0."""
        if running.priority >= 0:
            raise ValueError(f"priority is {running.priority}, expected one below 0 to evict")
        self._running.setdefault(running.priority, {})[running] = None

    def remove(self, running: Running) -> None:
        """Remove a request whose response begins or which ends; do nothing if it is not there."""
        same = self._running.get(running.priority)
        if same is None:
            return
        same.pop(running, None)
        if not same:
            del self._running[running.priority]

    def any_below(self, priority: int) -> bool:
        """Return whether a request of lower priority than `priority` may be evicted."""
        return any(one < priority for one in self._running)

    def victim(self, priority: int, slots: Collection[int]) -> Running | None:
        """Return the request to evict for one of `priority` that may be served by the endpoints in
        `slots`: of the requests that may be evicted there, the newest one of the lowest priority
        below `priority`, or None if there is none.
        """
        for lowest in sorted(one for one in self._running if one < priority):
            for running in reversed(self._running[lowest]):
                if running.lease.slot in slots:
                    return running
        return None

    def end(self, victim: Running, refusal: Refusal) -> None:
        """Evict the running request `victim` with `refusal` for its client, and count it."""
        self.remove(victim)
        self.evicted[victim.priority] += 1
        victim.evict(refusal)
