"""Measure how late the event loop is, which is how long a timer or a request waits in it.

A timer (the beat) is due every `BEAT_S` seconds. It is late if the process gets no CPU, is stopped,
or is blocked by one long piece of work. A clock inside Python code cannot see these delays. A late
beat also stands for the beats that were missed, each of which would have waited less by one period.
The mean of all beats is therefore the mean wait of a request that arrives at a random time. A loop
that blocks for 250 of 350 ms thus differs from one that is late once.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds

BEAT_S: Final = 0.02
"""Interval in seconds of the timer that measures event-loop lag; fifty wake-ups a second use a
thousandth of a core.
"""
LATE_FROM_S: Final = 0.002
"""Delay in seconds from which a beat of the lag timer counts as late; timers of uvloop and epoll
have a resolution of 1 ms.
"""
MISSED_MAX: Final = 10_000
"""Maximum number of missed beats of the lag timer that one late beat stands for: 200 s."""
WINDOW_S: Final = 60
"""Length in seconds of the window over which `lately` reports event-loop lag."""
TURNS_AFTER: Final = 2
"""Number of turns of the event loop after a late beat until everything that arrived meanwhile is
read.

uvloop runs timers before it reads, and the second turn begins after that.
"""
BACKLOG_SHARE: Final = 0.1
"""Time that the event loop needs to deliver what another thread queued while the loop was blocked,
as a share of the blocked time.
"""


class Lateness(Struct, frozen=True, kw_only=True):
    """Event-loop lag within the last `WINDOW_S` seconds: mean and maximum."""

    mean_s: Seconds = 0.0
    """Mean time in seconds that an event arriving at a random time waits for the event loop."""
    most_s: Seconds = 0.0


class LoopLag:
    """A monitor of event-loop lag, whose timer beats while `run` is running.

    `told` is called after each beat with its lag in seconds and with the lags of the beats that
    were missed. `clock` is monotonic and must be the clock of the callers of `overdue_s`.
    """

    def __init__(
        self,
        told: Callable[[Sequence[Seconds]], None],
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._told = told
        self._clock = clock
        self._due_s: Seconds = math.inf
        self._late_since_s: Seconds = 0.0
        self._late_until_s: Seconds = -1.0
        self._turns = TURNS_AFTER
        """Number of turns of the event loop since the last late beat, counted up to `TURNS_AFTER`.
        """
        self._counting = False
        """True if the next turn of the event loop will be counted."""
        self._beating: asyncio.TimerHandle | None = None
        self._seconds: deque[tuple[Seconds, int, Seconds, Seconds]] = deque(maxlen=WINDOW_S)
        """Start time, number of beats, total lag and maximum lag of each second with a beat."""

    async def run(self) -> None:
        """Measure event-loop lag until cancelled."""
        try:
            self._arm(self._clock())
            await asyncio.Event().wait()
        finally:
            self._due_s = math.inf
            if self._beating is not None:
                self._beating.cancel()

    def overdue_s(self, now: Seconds) -> Seconds:
        """Return how many seconds data that the event loop reads at `now` may have waited; 0.0 if
        the loop is on time.
        """
        late_s = now - self._due_s
        if late_s > LATE_FROM_S:
            return late_s
        return now - self._late_since_s if self._turns < TURNS_AFTER else 0.0

    def backlog_s(self, now: Seconds) -> Seconds:
        """Return how many seconds data queued for the event loop by another thread has waited on
        average at `now`.

        The result is 0.0 if the loop was not blocked recently.
        """
        stood_s = self._late_until_s - self._late_since_s
        if now - self._late_until_s <= BACKLOG_SHARE * stood_s:
            return now - (self._late_since_s + self._late_until_s) / 2
        late_s = now - self._due_s
        return late_s / 2 if late_s > LATE_FROM_S else 0.0

    def lately(self) -> Lateness:
        since_s = self._clock() - WINDOW_S
        seconds = [second for second in self._seconds if second[0] >= since_s]
        beats = sum(count for _, count, _, _ in seconds)
        if not beats:
            return Lateness()
        return Lateness(
            mean_s=sum(total_s for _, _, total_s, _ in seconds) / beats,
            most_s=max(most_s for _, _, _, most_s in seconds),
        )

    def beat(self, now: Seconds) -> None:
        """Record a beat of the lag timer at `now`, with the beats that were missed before it, and
        pass their lags to `told`.
        """
        late_s = max(0.0, now - self._due_s)
        if late_s > LATE_FROM_S:
            self._late_since_s = self._due_s
            self._late_until_s = now
            self._turns = 0
        missed = min(int(late_s / BEAT_S), MISSED_MAX)
        late = [late_s - BEAT_S * beats for beats in range(missed + 1)]
        self._note(now, late)
        self._told(late)

    def _note(self, now: Seconds, late: Sequence[Seconds]) -> None:
        if not self._seconds or now - self._seconds[-1][0] >= 1.0:
            self._seconds.append((now, 0, 0.0, 0.0))
        began_s, beats, total_s, most_s = self._seconds[-1]
        self._seconds[-1] = began_s, beats + len(late), total_s + sum(late), max(most_s, late[0])

    def _arm(self, now: Seconds) -> None:
        self._due_s = now + BEAT_S
        self._beating = asyncio.get_running_loop().call_later(BEAT_S, self._ring)

    def _ring(self) -> None:
        try:
            self.beat(self._clock())
        finally:
            self._arm(self._clock())
        if not self._turns and not self._counting:
            self._count_next()

    def _count_next(self) -> None:
        self._counting = self._turns < TURNS_AFTER
        if self._counting:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turns += 1
        self._count_next()
