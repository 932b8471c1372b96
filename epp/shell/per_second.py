"""A limit of events per second, with a count of those above the limit."""

from epp.core.types import Seconds


class PerSecond:
    """A limiter that admits the first `admitted_max` events of each second, by a clock that the
    caller reads.
    """

    def __init__(self, admitted_max: int) -> None:
        self._admitted_max = admitted_max
        self._second = 0
        self._admitted = 0
        self._left_out = 0

    def admits(self, now: Seconds) -> bool:
        """Return True if an event at `now` is within the limit; otherwise count it as left out."""
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
        """Return a field for a log line with the number of events above the limit since the last
        call; no field if there were none.
        """
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}
