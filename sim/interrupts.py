"""Ctrl-C: a command ends in order, and what is done by then can be read."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Final

INTERRUPTED: Final = 130
"""The exit code, as shells count Ctrl-C."""


@contextlib.contextmanager
def interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C calls `stop` and raises nothing.

    Only the first one does, and none does anything from then on, afterwards neither: what is left
    to do is to write what is done.
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
