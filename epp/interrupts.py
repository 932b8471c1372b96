"""Ctrl-C in a command that calls plugins outside an event loop."""

import signal
from typing import NoReturn

from epp.core.failures import Interrupted


def raise_interrupted() -> None:
    """Make Ctrl-C raise `Interrupted`, which the guards around plugins do not catch.

    A plugin could raise Python's own `KeyboardInterrupt`, and it would count as the plugin's failure.
    The function changes nothing if a shell or a caller has already set a handler, as for a command
    in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise Interrupted
