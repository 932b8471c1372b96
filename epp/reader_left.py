"""End of `epp` and `sim` without an error message if the reader of their output closes it early, as
`head` does.
"""

import os
import sys
from collections.abc import Callable
from typing import Final

READER_LEFT: Final = 141
"""Exit code if the output was closed early: the one that shells report for a program ended by
SIGPIPE, which Python ignores.
"""


def until_reader_leaves(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, or `READER_LEFT` if standard output was closed early; print no
    error then.
    """
    try:
        try:
            return run()
        finally:
            # A later flush, at the end of the interpreter, would print an error.
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more, so the rest of the output needs a place to go.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return READER_LEFT
