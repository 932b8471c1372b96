"""What the picker's own process takes of its machine, and how late its loop is."""

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
    """For a page of metrics."""

    cpu_s: Seconds
    """Of all threads, in user and kernel mode, since the process began."""
    resident_bytes: int
    """0: the kernel does not tell."""


class ProcessLately(Struct, frozen=True, kw_only=True):
    """Of the last minute, for `epp top` and /live; memory is that of this instant."""

    lag_mean_s: Seconds
    """What waits at an instant like any other before the loop looks at it."""
    lag_most_s: Seconds
    cpu_cores: float | None
    """None: it has been looked at for less than a second."""
    resident_bytes: int


class OwnProcess:
    """To be told the time about once a second by `look`."""

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
        """(instant, CPU time until then)."""

    def look(self) -> None:
        """Note how much CPU time was taken until now."""
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
