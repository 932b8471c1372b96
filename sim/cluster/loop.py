"""Simulated time: a heap of (instant, sequence, callback).

What falls due at one instant runs in the order in which it was scheduled, so that a run depends on
nothing but its inputs.
"""

import heapq
from collections.abc import Callable
from typing import Any

from epp.core.types import Seconds


class Loop:
    """Runs callbacks in order of time; `now` is the instant of the one that runs."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.events = 0
        """Callbacks that have run."""
        self._heap: list[tuple[Seconds, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> Seconds | None:
        """When the next callback is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, instant: Seconds, callback: Callable[..., None], *arguments: Any) -> None:
        """Call `callback(*arguments)` at `instant`, which must not lie in the past."""
        assert instant >= self.now, f"{instant} s lies before {self.now} s"
        heapq.heappush(self._heap, (instant, self._sequence, callback, arguments))
        self._sequence += 1

    def after(self, delay_s: Seconds, callback: Callable[..., None], *arguments: Any) -> None:
        """Call `callback(*arguments)` `delay_s`, which is not negative, from now."""
        assert delay_s >= 0.0, f"{delay_s} s is in the past"
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, callback, arguments))
        self._sequence += 1

    def step(self) -> bool:
        """Run the next callback; False if there is none."""
        if not self._heap:
            return False
        self.now, _, callback, arguments = heapq.heappop(self._heap)
        self.events += 1
        callback(*arguments)
        return True

    def run(self, after_event: Callable[[], None] | None = None) -> None:
        """Run callbacks until `stop` is called or none is left; `after_event` after each."""
        self._stopped = False
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped:
            self.now, _, callback, arguments = pop(heap)
            self.events += 1
            callback(*arguments)
            if after_event is not None:
                after_event()

    def stop(self) -> None:
        """Let `run` return after the callback that runs."""
        self._stopped = True
