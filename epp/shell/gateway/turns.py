"""Turns of connections that have more to do than one of them may do at a time.

The loop is everybody's: scrapes, health and pages run on it too. So what a connection has brought is
worked off in turns that are bounded by messages and by time, one connection after the other; after a
round, and after `PASS_S_MAX`, the loop serves the others.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from epp.core.types import Seconds

TURN_STEPS_MAX: Final = 128
"""Messages, and frames that are none."""
TURN_S_MAX: Final = 0.002
"""Some dozens of ordinary messages; what one message takes is bounded elsewhere, and it is not
interrupted."""
PASS_S_MAX: Final = 0.010
"""Of all connections together between two turns of the loop."""


class Turn:
    """What is left of one turn; over until it is `begin`ned."""

    __slots__ = ("_clock", "_left", "_until_s")

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._left = 0
        self._until_s = 0.0

    def begin(self) -> None:
        self._left = TURN_STEPS_MAX
        self._until_s = self._clock() + TURN_S_MAX

    def take(self) -> bool:
        """Whether one more step may be taken."""
        if self._left <= 0 or self._clock() >= self._until_s:
            return False
        self._left -= 1
        return True


class Taking(Protocol):
    """Who takes turns."""

    def turn(self) -> bool:
        """Do something; true: there is more to do. Bounded by a `Turn`."""
        ...


class Turns:
    """Gives those that are `due` their turns, round and round, in the order in which they came."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._due: deque[Taking] = deque()
        self._called = False

    def __repr__(self) -> str:
        return f"<Turns [{len(self._due)} due]>"

    @property
    def idle(self) -> bool:
        """Nobody waits: who has something to do may begin at once."""
        return not self._due

    def due(self, taking: Taking) -> None:
        """`taking`, which is not due yet, has something to do."""
        self._due.append(taking)
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._called = False
        until_s = self._clock() + PASS_S_MAX
        try:
            for _ in range(len(self._due)):
                taking = self._due.popleft()
                if taking.turn():
                    self._due.append(taking)
                if self._clock() >= until_s:
                    break
        finally:
            # Also where a turn failed: the others wait for theirs.
            if self._due:
                self._call()
