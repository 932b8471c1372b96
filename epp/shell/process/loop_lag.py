"""How late the event loop is: what a timer, and so a request, waits before anybody looks at it.

A timer is due every `BEAT_S`. What it is late by is what waits when the process gets no CPU, is
stopped, or is held by one long piece of work, and what no clock sees that begins to run with the
first line of Python. A beat that is late stands for those that were missed: had they been on time,
each would have waited so much less. So the mean of all is what a request waits that comes at any
instant, and a loop that stands still for 250 of 350 ms does not look like one that is late once.
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
"""Fifty wake-ups a second take a thousandth of a core."""
LATE_FROM_S: Final = 0.002
"""Timers of uvloop and epoll count in milliseconds: less is not late."""
MISSED_MAX: Final = 10_000
"""Beats that one late one stands for: 200 s of standing still."""
WINDOW_S: Final = 60
"""Of `lately`, in whole seconds."""
TURNS_AFTER: Final = 2
"""Turns of the loop, after that of a late beat, until what came meanwhile is read: uvloop runs timers
before it reads, and the second turn begins after that."""
BACKLOG_SHARE: Final = 0.1
"""Of the time that the loop stood still: so long it takes to hand out what a thread kept for it."""


class Lateness(Struct, frozen=True, kw_only=True):
    """Of the last `WINDOW_S`."""

    mean_s: Seconds = 0.0
    """What waits, at an instant like any other."""
    most_s: Seconds = 0.0


class LoopLag:
    """Beats as long as `run` does. `told` gets how late each beat was, in seconds, missed ones too.

    `clock` is monotonic, and that of whoever asks `overdue_s`.
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
        """Since the last late beat."""
        self._counting = False
        """The next turn of the loop is counted."""
        self._beating: asyncio.TimerHandle | None = None
        self._seconds: deque[tuple[Seconds, int, Seconds, Seconds]] = deque(maxlen=WINDOW_S)
        """(when it began, beats, their sum, their greatest), of each second with a beat."""

    async def run(self) -> None:
        """Beat until cancelled."""
        try:
            self._arm(self._clock())
            await asyncio.Event().wait()
        finally:
            self._due_s = math.inf
            if self._beating is not None:
                self._beating.cancel()

    def overdue_s(self, now: Seconds) -> Seconds:
        """For how long what the loop reads at `now` may have waited; 0.0: it looked in time."""
        late_s = now - self._due_s
        if late_s > LATE_FROM_S:
            return late_s
        return now - self._late_since_s if self._turns < TURNS_AFTER else 0.0

    def backlog_s(self, now: Seconds) -> Seconds:
        """For how long, on average, what another thread keeps for the loop until `now` has waited;
        0.0: the loop has not stood still lately.
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
        """The beat that was due runs at `now`."""
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
