"""Measure CPU, memory and event-loop lag of the picker's own process."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.process.loop_lag import WINDOW_S, LoopLag
from epp.shell.process.memory import resident_bytes

_LOOKED_S_MIN: Final = 1.0


class ProcessSnapshot(Struct, frozen=True, kw_only=True):
    """CPU and memory of the process for a metrics page."""

    cpu_s: Seconds
    """CPU time of all threads in user and kernel mode since the process started."""
    resident_bytes: int
    """Resident bytes, or 0 if the kernel does not report them."""


class ProcessLately(Struct, frozen=True, kw_only=True):
    """CPU and lag of the last minute and current memory, for `epp top` and /live."""

    lag_mean_s: Seconds
    """Mean time in seconds that an event arriving at a random time waits for the loop."""
    lag_most_s: Seconds
    cpu_cores: float | None
    """Mean CPU usage, or None if it has been measured for less than a second."""
    resident_bytes: int


class OwnProcess:
    """A meter of the process. Call `look` about once a second."""

    def __init__(
        self,
        lag: LoopLag,
        *,
        cpu: Callable[[], Seconds] = time.process_time,
        resident: Callable[[], int] = resident_bytes,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self.lag = lag
        self._cpu = cpu
        self._resident = resident
        self._clock = clock
        self._looks: deque[tuple[Seconds, Seconds]] = deque([(clock(), cpu())], maxlen=WINDOW_S + 1)
        """Time and total CPU time of each sample."""

    def look(self) -> None:
        """Record the CPU time used until now."""
        self._looks.append((self._clock(), self._cpu()))

    def snapshot(self) -> ProcessSnapshot:
        return ProcessSnapshot(cpu_s=self._cpu(), resident_bytes=self._resident())

    def lately(self) -> ProcessLately:
        (since_s, cpu_before_s), (until_s, cpu_s) = self._looks[0], (self._clock(), self._cpu())
        elapsed_s = until_s - since_s
        lag = self.lag.lately()
        return ProcessLately(
            lag_mean_s=lag.mean_s,
            lag_most_s=lag.most_s,
            cpu_cores=(cpu_s - cpu_before_s) / elapsed_s if elapsed_s >= _LOOKED_S_MIN else None,
            resident_bytes=self._resident(),
        )
