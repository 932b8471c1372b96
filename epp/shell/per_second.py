"""A limit of events a second, with a count of those above it."""

from epp.core.types import Seconds


class PerSecond:
    """Admits the first `admitted_max` events of each second, by a clock that the caller reads."""

    def __init__(self, admitted_max: int) -> None:
        self._admitted_max = admitted_max
        self._second = 0
        self._admitted = 0
        self._left_out = 0

    def admits(self, now: Seconds) -> bool:
        """Return True if an event at `now` is within the limit; count it otherwise."""
        second = int(now)
        if second != self._second:
            self._second = second
            self._admitted = 0
        if self._admitted >= self._admitted_max:
            self._left_out += 1
            return False
        self._admitted += 1
        return True

    def left_out(self) -> dict[str, int]:
        """Return a field for a log line: the number of events not admitted since the last call, if any."""
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}
