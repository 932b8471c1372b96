"""Turns for connections that have more work than they may do at a time without a pause.

The event loop also serves scrapes, health checks and pages. The work of a connection is therefore
done in turns, which are bounded by messages and by time, round robin between connections. After a
round, and after `PASS_S_MAX`, the loop serves other tasks.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from epp.core.types import Seconds

TURN_STEPS_MAX: Final = 128
"""Maximum number of messages and other HTTP/2 frames that are processed in one turn of a gateway's
connection.
"""
TURN_S_MAX: Final = 0.002
"""Time in seconds after which the turn of a gateway's connection begins no further message: some
dozens of ordinary messages. A single message is bounded elsewhere and not interrupted.
"""
PASS_S_MAX: Final = 0.010
"""Time in seconds of all connections' turns together after which no further turn begins before the
next iteration of the event loop.
"""


class Turn:
    """The remaining steps and time of a connection's turn. Nothing remains until `begin` is
    called.
    """

    __slots__ = ("_clock", "_left", "_until_s")

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._left = 0
        self._until_s = 0.0

    def begin(self) -> None:
        self._left = TURN_STEPS_MAX
        self._until_s = self._clock() + TURN_S_MAX

    def take(self) -> bool:
        """Use one more step of the turn. Return False, and use none, if no step or time is left."""
        if self._left <= 0 or self._clock() >= self._until_s:
            return False
        self._left -= 1
        return True


class TurnTaker(Protocol):
    """An object, such as a connection, that does its work in turns."""

    def turn(self) -> bool:
        """Do some of this object's work, bounded by a `Turn`, and return whether more remains."""
        ...


class Turns:
    """A scheduler of turns, round robin between the objects with work, in the order in which they
    got work.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._due: deque[TurnTaker] = deque()
        self._called = False

    def __repr__(self) -> str:
        return f"<Turns [{len(self._due)} due]>"

    @property
    def idle(self) -> bool:
        """True if no object waits for a turn, so that a new one may begin at once."""
        return not self._due

    def due(self, taking: TurnTaker) -> None:
        """Schedule turns for the object `taking`, which is not scheduled yet."""
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
            # The others get their turns even if one failed.
            if self._due:
                self._call()
