"""How much of the event loop reading pages may take: of one endpoint, and of all together. Pure.

A page is a message of a server that nobody vouches for, and one loop serves everybody. What a page
cost is measured; its endpoint is left alone in proportion, so that in the long run no endpoint takes
more than `SHARE_ONE_MAX` of the loop and all together no more than `SHARE_ALL_MAX`.

A good page may be dear once, because the garbage collector ran or the machine was busy. So there is
credit: an endpoint that owes is asked often enough for its metrics to stay fresh, until it owes more
than `CREDIT_S`.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Final

from epp.core.types import Seconds

SHARE_ONE_MAX: Final = 0.01
"""Of the loop's time, for the pages of one endpoint: 2 ms every 200 ms, and a usual page takes 0.1."""
SHARE_ALL_MAX: Final = 0.5
"""For all pages. A thousand usual ones every half second take 0.2."""
CREDIT_S: Final = 10.0
"""Of pauses that may be taken later."""
COST_S_MAX: Final = 0.1
"""Charged for one page. More than the limits of a page allow is not the page's doing."""


class LoopShare:
    """Shared by all endpoints. `clock` gives the CPU time of the loop's thread."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self.clock = clock
        self._wanted = 0.0

    @property
    def stretch(self) -> float:
        """By how much all pauses are longer than they would be if there were loop to spare."""
        return max(1.0, self._wanted / SHARE_ALL_MAX)

    def open(self) -> "Account":
        """For one more endpoint; to be closed when it is not asked any more."""
        return Account(self)

    def want(self, share: float) -> None:
        """An endpoint would take so much more of the loop than before, or less."""
        self._wanted = max(0.0, self._wanted + share)


class Account:
    """Of one endpoint. `with account:` charges it with the loop time of the block."""

    __slots__ = ("_owed_s", "_shared", "_spent_s", "_started_s", "_wanted")

    def __init__(self, shared: LoopShare) -> None:
        self._shared = shared
        self._started_s = 0.0
        self._spent_s = 0.0
        self._owed_s = 0.0
        self._wanted = 0.0

    def __enter__(self) -> None:
        self._started_s = self._shared.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent_s += self._shared.clock() - self._started_s

    def charge(self, seconds: Seconds) -> None:
        """Add what cannot be measured from within."""
        self._spent_s += seconds

    def settle(self, interval_s: Seconds, patience_s: Seconds) -> Seconds:
        """A page is done: how long its endpoint is to be left alone at least.

        `interval_s`: between two pages that cost little. `patience_s`: the longest pause of one
        that has credit.
        """
        cost_s, self._spent_s = min(self._spent_s, COST_S_MAX), 0.0
        self._want(min(cost_s / interval_s, SHARE_ONE_MAX))
        stretch = self._shared.stretch
        self._owed_s += cost_s / SHARE_ONE_MAX * stretch
        pause_s = max(interval_s * stretch, min(self._owed_s, patience_s), self._owed_s - CREDIT_S)
        self._owed_s = max(0.0, self._owed_s - pause_s)
        return pause_s

    def close(self) -> None:
        """Its endpoint is not asked any more."""
        self._want(0.0)

    def _want(self, share: float) -> None:
        self._shared.want(share - self._wanted)
        self._wanted = share
