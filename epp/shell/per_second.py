"""So many of a kind in one second, and a count of the rest."""

from epp.core.types import Seconds


class PerSecond:
    """Says who is among the first `admitted_max` of a second, by a clock that the caller reads."""

    def __init__(self, admitted_max: int) -> None:
        self._admitted_max = admitted_max
        self._second = 0
        self._admitted = 0
        self._left_out = 0

    def admits(self, now: Seconds) -> bool:
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
        """For the next line: how many were not admitted since this was asked last."""
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}
