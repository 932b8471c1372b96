"""Implement `epp serve`: set up the process and serve until a signal ends it."""

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
from epp.shell.process.garbage import GARBAGE_THRESHOLDS, exempt_existing_objects
from epp.shell.process.memory import tune_allocator
from epp.shell.process.standard_error import StandardError
from epp.shell.starting import StartError

INTERRUPTED_DRAIN_S_MAX: Final = 30.0
"""Maximum time in seconds for which a picker drains its streams after Ctrl-C, even if
`--drain-timeout` is longer.
"""

_log = structlog.get_logger(__name__)


def serve(flags: ServeFlags, out: TextIO, err: TextIO) -> int:
    """Run a picker until SIGTERM or SIGINT, then drain it.

    All messages are logged and nothing is printed. Return 0, or 1 if the picker cannot start.
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
        exempt_existing_objects()
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
    """Run a picker until SIGTERM or SIGINT, then let it drain.

    A second signal, or Ctrl-C without a connected gateway, ends the drain at once; after Ctrl-C
    with one, the drain takes at most `interrupted_max_s`. SIGHUP is logged and ignored.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        # The first signal starts the drain and a second one cuts it short. Ctrl-C without a
        # connected gateway also cuts it short. After SIGTERM a gateway may still send requests for
        # a while.
        if stop.is_set() or (number == signal.SIGINT and not picker.has_gateway):
            hurry.set()
        elif number == signal.SIGINT:
            loop.call_later(interrupted_max_s, hurry.set)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    # The default action of SIGHUP would end the picker without a drain. Operators send SIGHUP to
    # make servers read their files again; the picker does that whenever a file changes.
    loop.add_signal_handler(
        signal.SIGHUP,
        _log.warning,
        "SIGHUP is ignored: files are read again when they change",
    )
    await picker.serve(stop, hurry)
