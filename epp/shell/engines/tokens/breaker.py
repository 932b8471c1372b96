"""Does not ask for a while who failed again and again. Pure."""

import math
from typing import Final

from epp.core.types import Seconds

FAILURES_MAX: Final = 5
OPEN_S: Final[Seconds] = 10.0


class CircuitBreaker:
    """Closed until `failures_max` questions in a row failed, then open for `open_s`.

    Then one question is let through; while it is under way nobody else is, and how it ends decides.
    """

    def __init__(self, failures_max: int = FAILURES_MAX, open_s: Seconds = OPEN_S) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._in_a_row = 0
        self._closed_at_s = -math.inf
        """When it lets one through; matters once there are too many failures in a row."""

    def allows(self, now: Seconds) -> bool:
        """Whether a question may be asked. Changes nothing."""
        return self._in_a_row < self._failures_max or now >= self._closed_at_s

    def asked(self, now: Seconds) -> None:
        """A question is asked; while open it is the one that tries."""
        if self._in_a_row >= self._failures_max:
            self._closed_at_s = now + self._open_s

    def succeeded(self) -> None:
        self._in_a_row = 0

    def failed(self, now: Seconds) -> bool:
        """Whether it is open since now."""
        self._in_a_row += 1
        if self._in_a_row < self._failures_max:
            return False
        self._closed_at_s = now + self._open_s
        return self._in_a_row == self._failures_max

    def is_open(self, now: Seconds) -> bool:
        return not self.allows(now)
