"""Run tasks until the picker ends, and restart a task that ends before.

An `asyncio.TaskGroup` owns tasks: it waits for them and ends them together. It does not supervise
them. An exception of one task ends all tasks of the group. The group silently forgets a task that
returns or that ends with a `CancelledError` of any origin. Every task that must not end therefore
runs inside `Supervisor.keep`, which ends only when it is cancelled.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeAlias

import structlog

from epp.core.types import Seconds

BACKOFF_S: Final[Seconds] = 0.1
"""Pause in seconds before the first restart of a background task that ended; each further pause is
twice as long, up to `BACKOFF_S_MAX`.
"""
BACKOFF_S_MAX: Final[Seconds] = 30.0
STEADY_S: Final[Seconds] = 60.0
"""Time in seconds after which a running task counts as healthy, so that the pause before its next
restart is reset.
"""
ENDS_MAX: Final = 3
"""Number of unexpected ends of a background task, without a healthy run between them, from which it
counts as broken.
"""

Loop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Type of a function that starts a background task; its coroutine runs until cancelled."""

_log = structlog.get_logger(__name__)


class Supervisor:
    """The supervisor of all background tasks (loops) of the process, each with a name.

    `count(name, ends)` counts unexpected ends: 1 for each, and 0 when `keep` is called, so that the
    count exists before the first end. `on_change` is called when `broken` changes.
    """

    def __init__(
        self,
        count: Callable[[str, int], None] = lambda _, __: None,
        on_change: Callable[[], None] = lambda: None,
        *,
        backoff_s: Seconds = BACKOFF_S,
        steady_s: Seconds = STEADY_S,
    ) -> None:
        self._count = count
        self._on_change = on_change
        self._backoff_s = backoff_s
        self._steady_s = steady_s
        self.broken: set[str] = set()
        """Names of essential background tasks that have ended at least `ENDS_MAX` times without a
        healthy run between.
        """

    async def keep(self, name: str, loop: Loop, *, of: str = "", essential: bool = False) -> None:
        """Run the background task `loop` until cancelled, and restart it with back-off whenever it
        ends by itself.

        Few different values of `name` may occur, because it becomes a label; `of` distinguishes
        loops with the same name. An `essential` loop that ends repeatedly makes the picker not
        ready.

        Every `BaseException` of the loop is contained, except a cancellation that was requested
        (`Task.cancelling`).
        """
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        clock = asyncio.get_running_loop()
        ends, pause_s = 0, 0.0
        self._count(name, 0)

        def steady() -> None:
            nonlocal ends
            ends = 0
            self._mark(name, broken=False)

        while True:
            steady_at_s = clock.time() + pause_s + self._steady_s
            # Other loops change nothing then, and there may be a thousand of them.
            timer = clock.call_at(steady_at_s, steady) if essential else None
            error: BaseException | None = None
            try:
                await asyncio.sleep(pause_s)
                await loop()
            except BaseException as raised:
                if task.cancelling():
                    raise
                error = raised
            finally:
                if timer is not None:
                    timer.cancel()
            if clock.time() >= steady_at_s:
                ends = 0
            ends += 1
            # 2**16 back-offs are more than the longest.
            pause_s = min(self._backoff_s * 2.0 ** min(ends - 1, 16), BACKOFF_S_MAX)
            self._count(name, 1)
            if essential and ends >= ENDS_MAX:
                self._mark(name, broken=True)
            _log.error(
                "background task ended unexpectedly, it is restarted",
                task=name,
                of=of,
                how="returned" if error is None else f"raised {type(error).__name__}",
                again_in_s=pause_s,
                exc_info=error,
            )

    def _mark(self, name: str, *, broken: bool) -> None:
        if broken != (name in self.broken):
            (self.broken.add if broken else self.broken.discard)(name)
            self._on_change()


async def forever() -> NoReturn:
    """Wait until cancelled. A background task that has nothing more to do ends with this, because
    it must not return.
    """
    while True:
        await asyncio.Event().wait()
