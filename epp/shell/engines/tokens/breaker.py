"""A circuit breaker that stops requests to a failing backend for a while, without I/O."""

import math
from typing import Final

from epp.core.types import Seconds

FAILURES_MAX: Final = 5
OPEN_S: Final[Seconds] = 10.0


class CircuitBreaker:
    """A circuit breaker that opens for `open_s` after `failures_max` failures in a row.

    Then one request is allowed. Until it ends no other one is, and its result decides.
    """

    def __init__(self, failures_max: int = FAILURES_MAX, open_s: Seconds = OPEN_S) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._in_a_row = 0
        self._closed_at_s = -math.inf
        """Time at which one request is allowed, after too many failures in a row."""

    def allows(self, now: Seconds) -> bool:
        """Return True if a request is allowed. This changes nothing."""
        return self._in_a_row < self._failures_max or now >= self._closed_at_s

    def asked(self, now: Seconds) -> None:
        """Record that a request starts; while open it is the only one."""
        if self._in_a_row >= self._failures_max:
            self._closed_at_s = now + self._open_s

    def succeeded(self) -> None:
        self._in_a_row = 0

    def failed(self, now: Seconds) -> bool:
        """Record a failure. Return True if it opened the circuit."""
        self._in_a_row += 1
        if self._in_a_row < self._failures_max:
            return False
        self._closed_at_s = now + self._open_s
        return self._in_a_row == self._failures_max

    def is_open(self, now: Seconds) -> bool:
        return not self.allows(now)
