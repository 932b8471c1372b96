"""`sim` as a terminal runs it: bars on standard error, Ctrl-C to the process."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_a_terminal(*arguments, interrupt_at=None):
    """Exit code, standard output, and what the terminal got, until it ends.

    Ctrl-C is sent as soon as the terminal has got `interrupt_at`.
    """
    ours, theirs = pty.openpty()
    environment = {
        "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "sim", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=theirs, text=True, env=dict(os.environ) | environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65_536)
        except OSError:
            # How Linux tells that the other side of a terminal is gone.
            break
        if interrupt_at is not None and interrupt_at in shown.decode(errors="replace"):
            interrupt_at = None
            process.send_signal(signal.SIGINT)
    os.close(ours)
    printed, _ = process.communicate()
    return process.returncode, printed, shown.decode(errors="replace")
