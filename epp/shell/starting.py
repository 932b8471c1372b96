"""What can keep the picker from starting, each in one sentence."""

import os


class StartError(Exception):
    """Why the picker cannot start: one sentence a line."""


def cannot_listen(flag: str, port: int, error: OSError | RuntimeError) -> StartError:
    """The error that says why `port` cannot be had."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else error
    return StartError(f"{flag} {port} cannot be listened on: {why}")
