"""Limit the event loop's time for receiving and parsing endpoints' pages: per endpoint and in
total.

A page comes from a server that is not trusted, and one loop serves all requests. The time for each
page is measured, and the endpoint's next fetch is delayed in proportion. In the long run no
endpoint uses more than `SHARE_ONE_MAX` of the loop, and all together no more than `SHARE_ALL_MAX`.

A harmless page may take long once, because of a garbage collection or a busy machine. Therefore
there is credit: an endpoint in debt is still fetched often enough for fresh metrics, up to
`CREDIT_S` of debt. This module performs no I/O.
"""

from collections.abc import Callable
from typing import Final

from epp.core.types import Seconds

SHARE_ONE_MAX: Final = 0.01
"""Maximum share of the event loop's time for the pages of one endpoint: 2 ms every 200 ms. A usual
page takes 0.1 ms.
"""
SHARE_ALL_MAX: Final = 0.5
"""Maximum share of the event loop's time for the pages of all endpoints. A thousand usual pages
every half second take a share of 0.2.
"""
CREDIT_S: Final = 10.0
"""Debt of an endpoint, in seconds of pauses that were left out, up to which it is still fetched
often enough for fresh metrics. The debt above it delays its next fetch.
"""
COST_S_MAX: Final = 0.1
"""Maximum time in seconds that is charged for one page. No page within the limits takes longer;
more time has another cause, such as a busy machine.
"""


class LoopShare:
    """The use of the event loop's time for the pages of all endpoints. `clock` returns the CPU time
    of the loop's thread.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self.clock = clock
        self._wanted = 0.0

    @property
    def stretch(self) -> float:
        """Factor by which the pauses between fetches of each endpoint's page are extended because
        the event loop lacks time; at least 1.
        """
        return max(1.0, self._wanted / SHARE_ALL_MAX)

    def open(self) -> "Account":
        """Return an account of the loop time of one more endpoint. The caller closes it when the
        endpoint's pages are no longer fetched.
        """
        return Account(self)

    def want(self, share: float) -> None:
        """Add `share`, which may be negative, to the share of the event loop's time that all
        endpoints need.
        """
        self._wanted = max(0.0, self._wanted + share)


class Account:
    """The account of the loop time that one endpoint's pages take. `with account:` charges the time
    of the block.
    """

    __slots__ = ("_owed_s", "_shared", "_spent_s", "_started_s", "_wanted")

    def __init__(self, shared: LoopShare) -> None:
        self._shared = shared
        self._started_s = 0.0
        self._spent_s = 0.0
        self._owed_s = 0.0
        self._wanted = 0.0

    def __enter__(self) -> None:
        self._started_s = self._shared.clock()

    def __exit__(self, *_: object) -> None:
        self._spent_s += self._shared.clock() - self._started_s

    def charge(self, seconds: Seconds) -> None:
        """Charge more loop time for a page, which the block of `with account:` cannot measure."""
        self._spent_s += seconds

    def settle(self, interval_s: Seconds, patience_s: Seconds) -> Seconds:
        """Charge the endpoint with the loop time of the page that was processed, at most
        `COST_S_MAX`, and return the minimum pause in seconds before its next fetch.

        `interval_s` is the pause between cheap pages. `patience_s` is the longest pause while there
        is credit.
        """
        cost_s, self._spent_s = min(self._spent_s, COST_S_MAX), 0.0
        self._want(min(cost_s / interval_s, SHARE_ONE_MAX))
        stretch = self._shared.stretch
        self._owed_s += cost_s / SHARE_ONE_MAX * stretch
        pause_s = max(interval_s * stretch, min(self._owed_s, patience_s), self._owed_s - CREDIT_S)
        self._owed_s = max(0.0, self._owed_s - pause_s)
        return pause_s

    def close(self) -> None:
        """Give back the share of the loop's time of an endpoint that is no longer fetched."""
        self._want(0.0)

    def _want(self, share: float) -> None:
        self._shared.want(share - self._wanted)
        self._wanted = share
