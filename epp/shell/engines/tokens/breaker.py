"""A circuit breaker that stops requests to a failing backend for a while, without I/O."""

import math
from typing import Final

from epp.core.types import Seconds

FAILURES_MAX: Final = 5
OPEN_S: Final[Seconds] = 10.0


class CircuitBreaker:
    """A circuit breaker that stops requests for `open_s` seconds after `failures_max` consecutive
    failures.

    Then one request is allowed as a trial. If it succeeds, the circuit closes and all requests are
    allowed. Until then, or if it fails, no other request is allowed for `open_s` seconds.
    """

    def __init__(self, failures_max: int = FAILURES_MAX, open_s: Seconds = OPEN_S) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._in_a_row = 0
        self._closed_at_s = -math.inf
        """Time from which a single request is allowed again, after too many consecutive
        failures.
        """

    def allows(self, now: Seconds) -> bool:
        """Return True if a request is allowed at `now`. The call itself changes nothing."""
        return self._in_a_row < self._failures_max or now >= self._closed_at_s

    def asked(self, now: Seconds) -> None:
        """Record that a request starts. If the circuit is open, it is the trial, and no other
        request is allowed for `open_s` seconds unless the trial succeeds before.
        """
        if self._in_a_row >= self._failures_max:
            self._closed_at_s = now + self._open_s

    def succeeded(self) -> None:
        self._in_a_row = 0

    def failed(self, now: Seconds) -> bool:
        """Record that a request failed. Return True if this failure opened the circuit."""
        self._in_a_row += 1
        if self._in_a_row < self._failures_max:
            return False
        self._closed_at_s = now + self._open_s
        return self._in_a_row == self._failures_max

    def is_open(self, now: Seconds) -> bool:
        return not self.allows(now)
