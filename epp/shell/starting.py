"""Errors that prevent the picker from starting, each in one sentence."""

import os
from typing import Final

from epp.flags.values import IpAddress

EVERYWHERE: Final = IpAddress("::")
"""Address that stands for all IPv4 and IPv6 addresses of this machine."""


class StartError(Exception):
    """An error that prevents the picker from starting; its text has one sentence for each line."""


def cannot_listen(
    flag: str, port: int, error: OSError | RuntimeError, address: IpAddress = EVERYWHERE
) -> StartError:
    """Return the error that says why the picker cannot listen on `port` at `address`."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else error
    where = "" if address == EVERYWHERE else f" at {address}"
    return StartError(f"{flag} {port}{where} cannot be listened on: {why}")
