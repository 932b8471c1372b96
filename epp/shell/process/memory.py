"""How much memory this process may use and does use, and giving back what it needs no more.

The allocator keeps what is freed, for what comes next: after 66 clients had left half a gigabyte of
bodies, all of it stayed with the process. `malloc_trim` of glibc gives it back, in 90 ms for half
a gigabyte; another allocator has no such function, and nothing is done.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from epp.core.types import Seconds
from epp.shell.process.pressure import MemoryPressure

_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and 1 of control groups; a container sees its own."""
_RESIDENT: Final = Path("/proc/self/statm")

TRIM_FROM_BYTES: Final = 4 * 2**20
"""What must have come on top since the last time before it is worth a look: to give back 4 MB of a
process of 100 MB took 0.8 ms, and to find nothing 0.2 ms."""
LARGE_BYTES: Final = 2**20
"""Larger than nearly every prompt. Below it what is freed is kept for the next one, which is cheap;
above it one hostile metrics page would leave 8 MB with the process."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Of mallopt(3)."""
POLL_S: Final = 2.0
TRIM_AGAIN_S: Final = 10.0
"""Under pressure there may be little to give back each time, and looking for it takes time."""


def memory_limit_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """The least of what the container may use and what the machine has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            told = (control_group / name).read_text(encoding="ascii").strip()
        except OSError:
            # The other version, or no control groups.
            continue
        if told.isdecimal():
            limits.append(int(told))
    return min(limits)


def resident_bytes() -> int:
    """What this process holds of the machine's memory; 0 where the kernel does not tell."""
    try:
        pages = int(_RESIDENT.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def malloc_trim() -> Callable[[], None] | None:
    """Gives memory that is free back to the machine; None: the allocator has no such function."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return lambda: function(0)


def tune_allocator() -> None:
    """Have the allocator return each block from `LARGE_BYTES` on as soon as it is freed, and let all
    threads share one heap.

    glibc would learn to keep such blocks from the first one that it sees, and give each of the
    threads of grpcio a heap of its own, with holes of its own: 8 MB were free that nobody could
    use. No other allocator has the function, and none is known to need it.
    """
    try:
        function = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    function(_M_ARENA_MAX, 1)
    function(_M_MMAP_THRESHOLD, LARGE_BYTES)
    # As glibc sets the one by the other.
    function(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


class MemoryReturn:
    """Gives memory back after a peak, in a thread: it takes time in proportion to the peak.

    `held_bytes()` is what is in use now of all that comes and goes in bulk, so that memory in use
    is not taken for memory that is free. `pressed` is told when `pressure` has changed its mind;
    as long as there is some, memory is given back whether or not there was a peak.
    """

    def __init__(
        self,
        held_bytes: Callable[[], int],
        *,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] | None,
        pressure: MemoryPressure | None = None,
        pressed: Callable[[MemoryPressure], None] = lambda _: None,
        poll_s: Seconds = POLL_S,
    ) -> None:
        self._held_bytes = held_bytes
        self._resident = resident
        self._trim = trim
        self._pressure = pressure
        self._pressed = pressed
        self._poll_s = poll_s
        self._looks_until_trim = 0
        self._settled_bytes = resident()
        """What was left the last time, beside what was in use."""

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()
            self.weigh()

    async def look(self) -> bool:
        """Give back what is free if enough may be; whether that was done."""
        if self._trim is None:
            return False
        if self._is_time_under_pressure():
            await asyncio.to_thread(self._trim)
        beside_bytes = self._resident() - self._held_bytes()
        if beside_bytes < self._settled_bytes + TRIM_FROM_BYTES:
            # What has shrunk by itself is the measure of the next peak.
            self._settled_bytes = min(self._settled_bytes, beside_bytes)
            return False
        await asyncio.to_thread(self._trim)
        self._settled_bytes = self._resident() - self._held_bytes()
        return True

    def weigh(self) -> None:
        """Tell `pressed` if what the process holds calls for more or for less than before."""
        if self._pressure is not None and self._pressure.look(self._resident()):
            self._pressed(self._pressure)

    def _is_time_under_pressure(self) -> bool:
        if self._pressure is None or not self._pressure.level:
            self._looks_until_trim = 0
            return False
        self._looks_until_trim -= 1
        if self._looks_until_trim >= 0:
            return False
        self._looks_until_trim = int(TRIM_AGAIN_S / POLL_S)
        return True
