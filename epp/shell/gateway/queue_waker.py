"""Calls of the queue by the event loop: soon after an event, and when a wait ends. It never polls."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.types import Seconds

RETRY_S: Final = 1.0
"""Seconds after which the queue is called again if a call failed."""
TASK: Final = "queue"
"""Name under which failed calls are counted among the ends of background tasks."""

_log = structlog.get_logger(__name__)


class QueueWaker:
    """The `Waker` of a queue in the running event loop.

    A call that fails is logged, counted by `count(TASK, 1)` and repeated after `RETRY_S`.
    """

    def __init__(
        self,
        pump: Callable[[Seconds], None],
        clock: Callable[[], Seconds] = time.monotonic,
        count: Callable[[str, int], None] = lambda _, __: None,
    ) -> None:
        self._pump = pump
        self._clock = clock
        self._count = count
        count(TASK, 0)
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._at_s: Seconds | None = None

    def soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._run)

    def at(self, time_s: Seconds | None) -> None:
        if time_s == self._at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at_s = time_s
        if time_s is not None:
            delay_s = max(0.0, time_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = self._at_s = None
        self._run()

    def _run(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        try:
            self._pump(self._clock())
        except Exception:  # noqa: BLE001  the boundary of a callback of the loop
            self._count(TASK, 1)
            _log.exception("the queue failed, it is called again", again_in_s=RETRY_S)
            self.at(self._clock() + RETRY_S)


def open_queue(
    scheduler: Scheduler,
    clock: Callable[[], Seconds] = time.monotonic,
    count: Callable[[str, int], None] = lambda _, __: None,
    *,
    bytes_max: int = 0,
) -> FlowQueue:
    """Return the queue of `scheduler`, which the running event loop calls. `count` receives its
    failures, like the ends of background tasks. `bytes_max` is the memory for bodies of waiting
    requests; 0 for no limit.
    """
    waker = QueueWaker(lambda now: queue.pump(now), clock, count)
    queue = FlowQueue(scheduler, waker, clock(), bytes_max=bytes_max)
    return queue
