"""Ctrl-C in a command that calls plugins outside an event loop."""

import signal
from typing import NoReturn

from epp.core.failures import Interrupted


def raise_interrupted() -> None:
    """From now on Ctrl-C raises `Interrupted`, which the guards round plugins let pass.

    Python's own `KeyboardInterrupt` could be a plugin's, and would count as its failure. Left alone
    is what a shell or a caller has set already, as for a command in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise Interrupted
