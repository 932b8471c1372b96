"""Handling of Ctrl-C in a command that calls plugins outside an event loop."""

import signal
from typing import NoReturn

from epp.core.failures import Interrupted


def raise_interrupted() -> None:
    """Make Ctrl-C raise `Interrupted`, which the guards around plugins do not catch.

    Python's own `KeyboardInterrupt` could also come from a plugin, so the guards count it as that
    plugin's failure. The function changes nothing if SIGINT is already handled or ignored, as for a
    shell command in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise Interrupted
