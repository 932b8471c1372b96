"""Measurements of the operating system: CPU and memory of processes, and load of the machine.

CPU is the kernel's count of a process with all of its threads, including ended ones, in
nanoseconds. The work of others is that of the machine minus ours. `/proc/stat` has a resolution of
hundredths of a second.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SCHEDULED: Final = 2


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that the process `pid` has used. Raise `OSError` if it has ended."""
    # The number of a clock that counts this process, as clock_getcpuclockid(3) computes it.
    return time.clock_gettime(~pid << 3 | _SCHEDULED)


def session(leader: int) -> list[int]:
    """Return the ids of the processes of the session that `leader` began, including `leader`."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "stat").read_text()
            except OSError:
                continue
            if session_of(told) == leader:
                found.append(int(entry.name))
    return found


def session_of(stat: str) -> int:
    """Return the session id from the text `stat` of `/proc/PID/stat`.

    The command's name is in brackets and may contain any character.
    """
    return int(stat.rpartition(")")[2].split()[3])


def session_cpu_s(leader: int) -> float:
    """Return the CPU seconds that all living processes of the session of `leader` have used."""
    return sum(process_cpu_s(pid) for pid in session(leader))


class Machine(Struct, frozen=True):
    """CPU seconds that all cores of the machine have used since it started: those of its own
    programs, and those that other guests of the host took.
    """

    busy_s: float
    stolen_s: float
    """CPU seconds that other guests of the same host took from this machine."""

    @classmethod
    def now(cls) -> "Machine":
        return cls.read((_PROC / "stat").read_text())

    @classmethod
    def read(cls, text: str) -> "Machine":
        """Return the CPU seconds in the text of `/proc/stat`."""
        fields = [int(field) / _TICKS_PER_S for field in text.splitlines()[0].split()[1:]]
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = fields[:8]
        return cls(user + nice + system + interrupts + soft, stolen)


class Disturbance(Struct, frozen=True):
    """CPU use, in cores, of other programs and of other guests of the host during a measurement."""

    others_cores: float
    stolen_cores: float


class Watch:
    """The CPU time of the machine and of our own processes at the start of a measurement.

    `passed` computes the CPU use of others since then.
    """

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours = tuple(ours)
        self._machine, self._ours_s, self._at_s = self._read()

    def _read(self) -> tuple[Machine, float, float]:
        used_s = sum(process_cpu_s(pid) for pid in self._ours)
        return Machine.now(), used_s, time.monotonic()

    def passed(self) -> Disturbance:
        """Return the CPU use of other programs and guests since this object was created; all of the
        processes `ours` must still live.
        """
        machine, used_s, at_s = self._read()
        passed_s = at_s - self._at_s
        others_s = machine.busy_s - self._machine.busy_s - (used_s - self._ours_s)
        return Disturbance(
            others_cores=max(0.0, others_s / passed_s),
            stolen_cores=(machine.stolen_s - self._machine.stolen_s) / passed_s,
        )


def memory_bytes(pid: int, name: str = "VmRSS") -> int:
    """Return a memory size of the process `pid` in bytes.

    "VmRSS" is the resident set, "VmHWM" its maximum since `forget_peak`.
    """
    return memory_of((_PROC / str(pid) / "status").read_text(), name)


def memory_of(status: str, name: str) -> int:
    """Return the size `name` in bytes from the text of `/proc/PID/status`."""
    (told,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(told.split()[1]) * 1024


def forget_peak(pid: int) -> None:
    """Reset the maximum resident set of the process `pid` to the present one."""
    (_PROC / str(pid) / "clear_refs").write_text("5")
