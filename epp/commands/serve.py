"""`epp serve`: sets the process up, and serves until a signal ends it."""

import asyncio
import gc
import signal
from typing import Final, TextIO

import structlog

from epp.app.wiring import EndpointPicker
from epp.core.types import Seconds
from epp.flags.serve import ServeFlags
from epp.shell.operators.logs.set_up import configure_logging
from epp.shell.process.event_loop import loop_factory, raise_open_files_limit
from epp.shell.process.garbage import GARBAGE_THRESHOLDS, spare_what_is_there
from epp.shell.process.memory import tune_allocator
from epp.shell.process.standard_error import StandardError
from epp.shell.starting import StartError

INTERRUPTED_DRAIN_S_MAX: Final = 30.0
"""Whoever is at the keyboard waits no longer for streams to end, whatever `--drain-timeout` says."""

_log = structlog.get_logger(__name__)


def serve(flags: ServeFlags, out: TextIO, err: TextIO) -> int:
    """Until SIGTERM or SIGINT, then drain. Exit code: 0 all went well, 1 it cannot start.

    Prints nothing: what there is to say goes to the log.
    """
    configure_logging(flags.log_format.value, flags.log_level)
    standard_error = StandardError()
    standard_error.take_over()
    raise_open_files_limit()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    tune_allocator()
    for warning in flags.warnings:
        _log.warning(warning)
    try:
        picker = EndpointPicker(flags)
        spare_what_is_there()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.get_loop().set_exception_handler(standard_error.task_failed)
            runner.run(until_signal(picker))
    except StartError as error:
        for line in str(error).splitlines():
            _log.error(line)
        return 1
    return 0


async def until_signal(
    picker: EndpointPicker, interrupted_max_s: Seconds = INTERRUPTED_DRAIN_S_MAX
) -> None:
    """Serve until a signal ends it."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        # The first signal drains, a second one does not wait for it. Nor does a Ctrl-C that no
        # gateway would notice; after SIGTERM one may still be sent here by what it was told before.
        if stop.is_set() or (number == signal.SIGINT and not picker.has_gateway):
            hurry.set()
        elif number == signal.SIGINT:
            loop.call_later(interrupted_max_s, hurry.set)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    # Its default would end the picker without a drain. Who sends it wants files to be read again,
    # as other servers do at this signal; ours are read whenever they change.
    loop.add_signal_handler(
        signal.SIGHUP, _log.warning, "SIGHUP is ignored: files are read again when they change"
    )
    await picker.serve(stop, hurry)
