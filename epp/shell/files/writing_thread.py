"""A thread that writes files, owned by a task of the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

import structlog

from epp.core.types import Seconds

_log = structlog.get_logger(__name__)


async def beside_the_loop(
    name: str, work: Callable[[], None], stopping: threading.Event, close_s_max: Seconds
) -> None:
    """Clear `stopping` and run `work` in a thread until cancelled; then set it and wait for the return.

    `work` lets nothing out, and returns soon once `stopping` is set. A disk that hangs is waited for
    no longer than `close_s_max`. If `work` returns before, this goes on until it is cancelled.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            # Too late, if the disk took longer than we waited.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

    stopping.clear()
    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        await ended.wait()
        await asyncio.Event().wait()
    finally:
        stopping.set()
        try:
            await asyncio.wait_for(ended.wait(), close_s_max)
        except TimeoutError:
            _log.error(f"the end of the {name} is not written: the disk takes too long")
