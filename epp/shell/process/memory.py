"""Determine the memory limit and usage of this process, and return free memory to the system.

The C library's allocator keeps freed memory for later use. After 66 clients had left half a
gigabyte of bodies, all of it stayed with the process. `malloc_trim` of glibc returns half a
gigabyte in 90 ms. Other allocators lack this function, and nothing is done for them.
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
"""Files with the memory limit in control groups version 2 and 1; a container sees its own limit
there.
"""
_RESIDENT: Final = Path("/proc/self/statm")

TRIM_FROM_BYTES: Final = 4 * 2**20
"""Growth of resident memory in bytes, since free memory was last returned, from which returning it
again is worthwhile. Returning 4 MB of a process of 100 MB took 0.8 ms; finding nothing to return
took 0.2 ms.
"""
LARGE_BYTES: Final = 2**20
"""Size in bytes of an allocation from which its memory is returned to the system as soon as it is
freed.

Nearly every prompt is smaller, and keeping its memory for the next one saves time. Without this
limit one hostile metrics page would leave 8 MB with the process.
"""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Number of a parameter of mallopt(3), as defined in malloc.h."""
POLL_S: Final = 2.0
TRIM_AGAIN_S: Final = 10.0
"""Minimum time in seconds between two returns of free memory because of memory pressure. Each
return takes time and may find little.
"""


def memory_limit_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """Return the smaller of the container's memory limit and the machine's memory, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            told = (control_group / name).read_text(encoding="ascii").strip()
        except OSError:
            # This version of control groups is absent.
            continue
        if told.isdecimal():
            limits.append(int(told))
    return min(limits)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if the kernel does not report it."""
    try:
        pages = int(_RESIDENT.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def malloc_trim() -> Callable[[], None] | None:
    """Return a function that returns this process's free memory to the system, or None if the
    allocator has no such function.
    """
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return lambda: function(0)


def tune_allocator() -> None:
    """Make glibc's allocator return freed blocks of `LARGE_BYTES` or more and use one heap for all
    threads.

    By default glibc keeps such blocks after it has freed the first one. It also gives each thread
    of grpcio its own heap, whose free memory others cannot use: 8 MB were lost that way. Other
    allocators lack this function, and none is known to need it.
    """
    try:
        function = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    function(_M_ARENA_MAX, 1)
    function(_M_MMAP_THRESHOLD, LARGE_BYTES)
    # glibc sets the trim threshold to twice the mmap threshold, too.
    function(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


class MemoryReturn:
    """A task that returns free memory to the system after a peak of memory usage.

    Memory is returned in a thread, because that takes time in proportion to the peak.
    `held_bytes()` returns the bytes currently used by bodies and similar data, which are not free
    memory. `pressed` is called when the measures that `pressure` demands change. Under pressure
    memory is returned even without a peak.
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
        """Least resident bytes, without those in use by bodies, since memory was last returned
        after a peak, or since the start.
        """

    async def run(self) -> None:
        """Check the memory of this process periodically until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()
            self.weigh()

    async def look(self) -> bool:
        """Return free memory to the system if enough of it may be free, or regularly under memory
        pressure; do nothing without a function `trim`. Return True if a peak was the reason.
        """
        if self._trim is None:
            return False
        if self._is_time_under_pressure():
            await asyncio.to_thread(self._trim)
        beside_bytes = self._resident() - self._held_bytes()
        if beside_bytes < self._settled_bytes + TRIM_FROM_BYTES:
            # Memory that shrank by itself becomes the baseline of the next peak.
            self._settled_bytes = min(self._settled_bytes, beside_bytes)
            return False
        await asyncio.to_thread(self._trim)
        self._settled_bytes = self._resident() - self._held_bytes()
        return True

    def weigh(self) -> None:
        """Call `pressed` if the current resident memory changes the measures against memory
        pressure.
        """
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
