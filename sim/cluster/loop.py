"""The event loop of simulated time: a heap of (time, sequence number, callback).

Callbacks due at the same time run in the order in which they were scheduled. A run therefore
depends only on its inputs.
"""

import heapq
from collections.abc import Callable
from typing import Any

from epp.core.types import Seconds


class Loop:
    """An event loop of simulated time that runs callbacks in order of time; `now` is the time of
    the running callback, in seconds.
    """

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.events = 0
        """Number of callbacks that have run so far."""
        self._heap: list[tuple[Seconds, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> Seconds | None:
        """Time of the next scheduled callback, or None if none is scheduled."""
        return self._heap[0][0] if self._heap else None

    def at(self, instant: Seconds, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule `callback(*arguments)` for the simulated time `instant`, which must not be in
        the past.
        """
        assert instant >= self.now, f"{instant} s is before {self.now} s"
        heapq.heappush(self._heap, (instant, self._sequence, callback, arguments))
        self._sequence += 1

    def after(self, delay_s: Seconds, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule `callback(*arguments)` to run in `delay_s` simulated seconds, which must not be
        negative.
        """
        assert delay_s >= 0.0, f"{delay_s} s is in the past"
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, callback, arguments))
        self._sequence += 1

    def step(self) -> bool:
        """Run the next scheduled callback. Return False if there is none."""
        if not self._heap:
            return False
        self.now, _, callback, arguments = heapq.heappop(self._heap)
        self.events += 1
        callback(*arguments)
        return True

    def run(self, after_event: Callable[[], None] | None = None) -> None:
        """Run scheduled callbacks until `stop` is called or none is left; call `after_event` after
        each one.
        """
        self._stopped = False
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped:
            self.now, _, callback, arguments = pop(heap)
            self.events += 1
            callback(*arguments)
            if after_event is not None:
                after_event()

    def stop(self) -> None:
        """Make `run` return when the callback that is running has returned."""
        self._stopped = True
