"""How many requests each endpoint got lately: load for routers that see only what they send."""

from collections import deque
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Affinity,
    AffinityIndex,
    InferenceRequest,
    Parameters,
    Seconds,
)

ARRIVALS: Final = "arrivals"
"""Column: requests sent there in the window."""


class RecentArrivalsSettings(Parameters, frozen=True):
    """Counts by the second; production-stack's window is a minute."""

    type_name: ClassVar[str] = "recent-arrivals-producer"

    window_s: Annotated[int, Meta(ge=1, le=3600)] = 60

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return RecentArrivals(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply the window to a running index."""
        return isinstance(index, RecentArrivals) and index.configure(self)


class RecentArrivals:
    """The unit is one endpoint that was ever used: 1 of 1, or 0. `ARRIVALS` is a column.

    Bounded by one count a second and endpoint. What grew too old goes about once a second.
    """

    def __init__(self, settings: RecentArrivalsSettings) -> None:
        self._counts: dict[int, deque[list[int]]] = {}
        """Slot -> (second, requests in it), the oldest first."""
        self._totals: dict[int, int] = {}
        """Slot -> their sum. A slot is here once it was used."""
        self.configure(settings)

    def configure(self, settings: RecentArrivalsSettings) -> bool:
        """Adopt `settings`; what is too old for them goes with the next `expire`."""
        self._window_s = settings.window_s
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """The same for every request."""
        used = np.zeros(slots, dtype=np.int64)
        arrivals = np.zeros(slots)
        for slot, total in self._totals.items():
            if slot < slots:
                used[slot] = 1
                arrivals[slot] = total
        return Affinity(used, 1, {ARRIVALS: arrivals})

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """One more, now."""
        counts = self._counts.setdefault(slot, deque())
        second = int(now)
        if counts and counts[-1][0] >= second:
            counts[-1][1] += 1
        else:
            counts.append([second, 1])
        self._totals[slot] = self._totals.get(slot, 0) + 1
        request.recorded[self, slot] = counts[-1]

    def retract(self, request: InferenceRequest, slot: int, kept: int, now: Seconds) -> None:
        """One less of the second in which it was sent there, if that still counts."""
        count = request.recorded.pop((self, slot), None)
        if count is not None and count[1]:
            count[1] -= 1
            self._totals[slot] -= 1

    def forget(self, slot: int) -> None:
        """As if it had never been used."""
        for count in self._counts.pop(slot, ()):
            count[1] = 0
        self._totals.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Let go of what is older than the window."""
        oldest = int(now) - self._window_s
        for slot, counts in self._counts.items():
            while counts and counts[0][0] <= oldest:
                self._totals[slot] -= counts[0][1]
                counts.popleft()[1] = 0

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""
