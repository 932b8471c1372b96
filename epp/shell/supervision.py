"""Tasks that are to run until the picker ends, and what becomes of one that ends before.

An `asyncio.TaskGroup` owns tasks: it waits for them and ends them together. It does not look after
them. An exception of one ends all; one that returns is forgotten without a word, and so is one that
ends with a `CancelledError`, whoever raised that. So whatever is to run for ever runs inside
`Supervisor.keep`, which itself ends only when it is cancelled; the group sees nothing else.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeAlias

import structlog

from epp.core.types import Seconds

BACKOFF_S: Final[Seconds] = 0.1
"""Before the first start anew; each further one waits twice as long."""
BACKOFF_S_MAX: Final[Seconds] = 30.0
STEADY_S: Final[Seconds] = 60.0
"""A task that ran for so long is well: its back-off begins anew."""
ENDS_MAX: Final = 3
"""As often a task may end before it is steady until it counts as one that cannot be started anew."""

Loop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Runs until cancelled; called again to start it anew."""

_log = structlog.get_logger(__name__)


class Supervisor:
    """Keeps loops running, each under a name. One for the process.

    `count(name, ends)` counts ends that nobody asked for: 1 at each of them, and 0 when a loop is
    started, so that it is shown before its first. `on_change` is called when `broken` changes.
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
        """Essential loops that end again and again."""

    async def keep(self, name: str, loop: Loop, *, of: str = "", essential: bool = False) -> None:
        """Run `loop` until cancelled, and start it anew with back-off whenever it ends by itself.

        `name` is one of few, `of` tells apart those that share it. An `essential` one that cannot be
        started anew makes the picker not ready.

        A `BaseException` is contained too. That of a cancellation is one only if somebody asked for
        it: `Task.cancelling` tells.
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
            # Whoever is not essential has nothing to tell then, and there may be a thousand.
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
                "a task ended that nobody asked to end, it is started anew",
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
    """Until cancelled: the rest of a loop that has done all there is to do."""
    while True:
        await asyncio.Event().wait()
