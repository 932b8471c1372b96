"""What `epp` and `sim` do when whoever reads their output leaves before its end, as `head` does."""

import os
import sys
from collections.abc import Callable
from typing import Final

READER_LEFT: Final = 141
"""The exit code, as shells count what SIGPIPE ends: Python ignores the signal, for its sockets."""


def until_reader_leaves(run: Callable[[], int]) -> int:
    """The exit code of `run`, all of whose output was taken; `READER_LEFT`, silently, if it was not."""
    try:
        try:
            return run()
        finally:
            # Here, because the end of the interpreter would complain.
            sys.stdout.flush()
    except BrokenPipeError:
        # It flushes once more, and what is left has nowhere to go.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return READER_LEFT
