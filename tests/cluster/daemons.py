"""Processes that outlive the command that started them, known by their pid and their beginning."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster.place import NETWORK, ClusterError

POLL_S: Final = 0.1
INSIDE: Final = ("nsenter", f"--net=/run/netns/{NETWORK}")
"""Prefix of a command that is to run in the network of the cluster.

It is not `ip netns exec`: that mounts another /sys, in which there are no cgroups.
"""


class Daemon:
    """One such process, whose pid is kept in `folder`, so that another command can end it."""

    def __init__(self, name: str, folder: Path, logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._kept = folder / f"{name}.pid"

    def start(self, command: Sequence[str | Path]) -> None:
        """Start `command` in the network of the cluster and in a session of its own."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [*INSIDE, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._kept.write_text(f"{process.pid} {_began(process.pid)}")

    @property
    def number(self) -> int:
        """Pid of the process; 0 if it does not run."""
        if not self._kept.exists():
            return 0
        number, began = self._kept.read_text().split()
        # A number may have another owner by now, after a reboot for instance.
        return int(number) if _began(int(number)) == began else 0

    def signal(self, number: signal.Signals) -> None:
        if self.number:
            os.kill(self.number, number)

    def end(self, grace_s: float) -> None:
        """End the process by SIGTERM, and by SIGKILL if it still runs after `grace_s`."""
        self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while self.number and time.monotonic() < deadline_s:
            _bury()
            time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        self._kept.unlink(missing_ok=True)

    def said(self) -> str:
        """Return the last 2,000 characters of the log; "" if there is none."""
        return self.log.read_text(errors="replace")[-2_000:] if self.log.exists() else ""

    def must_run(self) -> None:
        """Raise `ClusterError` with the end of the log if the process does not run."""
        _bury()
        if not self.number:
            raise ClusterError(f"{self.name} ended by itself: {self.said()}")


def _began(number: int) -> str:
    """Return when the process began, in ticks since the machine did; "" if there is none."""
    try:
        told = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *fields = told.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


def _bury() -> None:
    """Reap children of this process that have ended: they are no processes any more."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
