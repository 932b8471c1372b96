"""What can keep the picker from starting, each in one sentence."""

import os
from typing import Final

from epp.flags.values import IpAddress

EVERYWHERE: Final = IpAddress("::")
"""All addresses, of IPv4 too."""


class StartError(Exception):
    """Why the picker cannot start: one sentence a line."""


def cannot_listen(
    flag: str, port: int, error: OSError | RuntimeError, address: IpAddress = EVERYWHERE
) -> StartError:
    """The error that says why `port` cannot be had at `address`."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else error
    where = "" if address == EVERYWHERE else f" at {address}"
    return StartError(f"{flag} {port}{where} cannot be listened on: {why}")
