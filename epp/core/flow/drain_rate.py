"""The rate at which the queue drains, and the `retry-after` of a request that it refuses."""

import math
from collections import deque
from typing import Final

from epp.core.types import Seconds

PLACED_KEPT: Final = 64
"""Maximum number of placements, the latest ones, from which the rate at which the queue drains is
measured.
"""
RETRY_AFTER_S_MIN: Final = 1
RETRY_AFTER_S_MAX: Final = 60
"""Bounds of `retry-after` in seconds. A longer one would outlast most bursts."""


class DrainRate:
    """The rate at which waiting requests are placed, measured since the queue was last empty and
    over at most the last `PLACED_KEPT` placements.
    """

    def __init__(self) -> None:
        self._times_s: deque[Seconds] = deque(maxlen=PLACED_KEPT + 1)
        """Start of the measurement, and the times of the placements after it."""

    def begin(self, now: Seconds) -> None:
        """Note that a request waits and that none waited before."""
        self._times_s.clear()
        self._times_s.append(now)

    def placed(self, now: Seconds) -> None:
        """Note that a request that waited was placed."""
        self._times_s.append(now)

    def retry_after_s(self, requests: int, now: Seconds) -> int:
        """Return the seconds after which `requests` waiting requests are expected to be placed: a
        whole number, clamped to `RETRY_AFTER_S_MIN` and `RETRY_AFTER_S_MAX`.
        Each takes the mean time between two placements. If there was none yet, each takes at least
        the time since the first request began to wait.
        """
        if not self._times_s:
            return RETRY_AFTER_S_MIN
        placements = max(1, len(self._times_s) - 1)
        drain_s = requests * max(0.0, now - self._times_s[0]) / placements
        return min(max(math.ceil(drain_s), RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
