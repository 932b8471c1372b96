"""Handling of Ctrl-C: a command ends in order, and writes the results that it has."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended: 128 + SIGINT, as in shells."""


@contextlib.contextmanager
def interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on Ctrl-C inside the context, instead of raising KeyboardInterrupt.

    Only the first Ctrl-C calls `stop`. Later ones are ignored, also after the context, because the
    command then only writes its results.
    """

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)
