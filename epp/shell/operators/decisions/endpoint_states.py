"""What speaks against each endpoint, why, and since when: for pages and for what is kept of decisions.

Of an endpoint that is not ready its standing speaks against it, of one that is ready that it is
ejected, is full, fails or is slow. Compared about once a second, so that what lasts for less may be missed.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.fullness import FULL, Full
from epp.core.knowledge.outliers import Outlier
from epp.core.knowledge.pool import Standing
from epp.core.types import Endpoint, Seconds

EJECTED: Final = "ejected"
READY: Final = Standing.READY.value
OUTLYING: Final = (EJECTED, FULL, Cause.FAILING.value, Cause.SLOW.value)
"""States of endpoints that are ready, and have something against them."""
_OF_SCRAPES: Final = (Standing.UNREACHABLE, Standing.STALE, Standing.NEVER_SCRAPED)
"""Standings whose reason the last scrape tells."""
_REASONS: Final[Mapping[Standing, str]] = {
    Standing.UNREACHABLE: "its scrapes get no connection or no answer",
    Standing.STALE: "its last good scrape is too old",
    Standing.ASLEEP: "its engine says that it sleeps",
    Standing.SET_ASIDE: "requests to it failed, it waits for its next good scrape",
    Standing.NEVER_SCRAPED: "no scrape of it was good yet",
}


class EndpointState(Struct, frozen=True):
    """What speaks against an endpoint, or that nothing does."""

    state: str = READY
    """A standing, or of an endpoint that is ready "ejected", "full", "failing" or "slow"."""
    reason: str = ""
    """In words; "" of one that is ready."""
    since_s: float = 0.0
    """By the clock of the day; of one that is ready at least since then."""


States = Mapping[str, EndpointState]
"""By the name of the endpoint."""


class EndpointStates:
    """States of all endpoints as of the last look."""

    def __init__(
        self,
        scheduler: Scheduler,
        problem_of: Callable[[Endpoint], tuple[str, str] | None] = lambda _: None,
        changed: Callable[[States], None] = lambda _: None,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """`problem_of` an endpoint: why its last scrape failed, by kind and in a sentence. `changed` is
        told of all that are not simply ready, each time one of them changes its state. `clock` tells
        the time of the day.
        """
        self._scheduler = scheduler
        self._problem_of = problem_of
        self._changed = changed
        self._clock = clock
        self._states: dict[str, EndpointState] = {}
        """By the id of the endpoint, of the members of the pool."""

    def of(self, endpoint: Endpoint) -> EndpointState:
        """As of the last look; ready, if it was not there then."""
        return self._states.get(endpoint.endpoint_id) or EndpointState(since_s=self._clock())

    def look(self, now: Seconds) -> None:
        """Compare with the last look."""
        scheduler, at_s = self._scheduler, self._clock()
        standings = scheduler.standings(now)
        outliers = dict(scheduler.outliers.detected(now))
        before, self._states = self._states, {}
        notable: dict[str, EndpointState] = {}
        differs = False
        for slot, endpoint in scheduler.pool.endpoints():
            was = before.get(endpoint.endpoint_id)
            state, reason = self._judged(
                endpoint, standings[slot], outliers.get(slot), scheduler.full.by_slot.get(slot), now
            )
            if was is None or was.state != state:
                differs = differs or was is not None or state != READY
                found = EndpointState(state, reason, at_s)
            else:
                found = was if was.reason == reason else EndpointState(state, reason, was.since_s)
            self._states[endpoint.endpoint_id] = found
            if state != READY:
                notable[endpoint.name] = found
        if differs or before.keys() - self._states.keys():
            self._changed(notable)

    def _judged(
        self,
        endpoint: Endpoint,
        standing: Standing,
        outlier: Outlier | None,
        full: Full | None,
        now: Seconds,
    ) -> tuple[str, str]:
        """State and reason."""
        if standing is not Standing.READY:
            reason = _REASONS.get(standing, "")
            problem = self._problem_of(endpoint) if standing in _OF_SCRAPES else None
            if problem is not None:
                kind, sentence = problem
                reason = f"{reason}: {kind}, {sentence}" if sentence else f"{reason}: {kind}"
            return standing.value, reason
        if full is not None and (outlier is None or not outlier.ejected):
            return FULL, _fullness(full, now)
        if outlier is None:
            return READY, ""
        reason = _against(outlier) + (", on trial" if outlier.probed else "")
        return (EJECTED if outlier.ejected else outlier.cause.value), reason


def _fullness(full: Full, now: Seconds) -> str:
    """Return in words why a full endpoint gets few requests or none."""
    if now < full.until_s:
        return "it refused requests for want of room, and gets none for some seconds"
    return "it refused requests for want of room, and gets single ones"


def _against(outlier: Outlier) -> str:
    if outlier.cause is Cause.FAILING:
        if outlier.failures or math.isnan(outlier.failure_share):
            return f"{outlier.failures} errors in a row"
        return f"{outlier.failure_share:.0%} of its last answers were errors"
    if math.isnan(outlier.slowness):
        return "requests took too long there"
    return f"requests take {outlier.slowness:.1f} times what they take at the median of the pool"
