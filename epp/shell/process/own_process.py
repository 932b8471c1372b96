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
    """CPU time and memory of the picker's process for a metrics page."""

    cpu_s: Seconds
    """CPU time in seconds of all threads, in user and kernel mode, since the process started."""
    resident_bytes: int
    """Resident memory of the process in bytes, or 0 if the kernel does not report it."""


class ProcessLately(Struct, frozen=True, kw_only=True):
    """CPU usage and event-loop lag of the last minute, and current memory, of the picker's process,
    for `epp top` and /live.
    """

    lag_mean_s: Seconds
    """Mean time in seconds that an event arriving at a random time waits for the event loop."""
    lag_most_s: Seconds
    cpu_cores: float | None
    """Mean CPU usage in cores in the last minute, or None if it has been measured for less than a
    second.
    """
    resident_bytes: int


class OwnProcess:
    """A meter of the CPU, memory and event-loop lag of the picker's process. Call `look` about once
    a second.
    """

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
        """Samples of CPU usage: time, and total CPU time until then, in seconds."""

    def look(self) -> None:
        """Record the total CPU time that the process has used until now."""
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
