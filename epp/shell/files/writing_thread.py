"""Run a function that writes files in a thread, which a task of the event loop owns."""

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
    """Run `work` in a thread until this coroutine is cancelled; then set the event `stopping` and
    wait for `work` to return.

    `work` must not raise and must return soon after `stopping` is set. The wait takes at most
    `close_s_max`, in case the disk hangs. If `work` returns earlier, the coroutine waits for its
    cancellation.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            # The loop is already closed if the disk took longer than the wait.
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
            _log.error(
                f"the last records of {name} were not written because the disk takes too long"
            )
