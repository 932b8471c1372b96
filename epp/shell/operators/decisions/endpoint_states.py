"""Track the state of each endpoint, its reason and since when it lasts, for pages and decision
records.

The standing of an endpoint describes why it is not ready. A ready endpoint may be ejected, full,
failing or slow. States are compared about once a second, so that shorter states may be missed.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.ejection import Cause
from epp.core.knowledge.fullness import FULL, Full
from epp.core.knowledge.outliers import Outlier
from epp.core.knowledge.pool import Standing
from epp.core.types import Endpoint, Seconds
from epp.journal.records import READY, EndpointState, States

EJECTED: Final = "ejected"
OUTLYING: Final = (EJECTED, FULL, Cause.FAILING.value, Cause.SLOW.value)
"""States of endpoints that are ready but have a problem."""
_OF_SCRAPES: Final = (Standing.UNREACHABLE, Standing.STALE, Standing.NEVER_SCRAPED)
"""Standings of endpoints (reasons for not being ready) for which the last failed scrape gives the
details.
"""
_REASONS: Final[Mapping[Standing, str]] = {
    Standing.UNREACHABLE: "scrapes fail to connect or get no answer",
    Standing.STALE: "the last successful scrape is too old",
    Standing.ASLEEP: "the engine reports that it sleeps",
    Standing.SET_ASIDE: "requests failed; it is excluded until its next successful scrape",
    Standing.NEVER_SCRAPED: "it has not been scraped successfully yet",
}


class EndpointStates:
    """The states of all endpoints at the last comparison, which takes place about once a second and
    for each page of endpoints.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        problem_of: Callable[[Endpoint], tuple[str, str] | None] = lambda _: None,
        changed: Callable[[States], None] = lambda _: None,
        clock: Callable[[], Seconds] = time.time,
    ) -> None:
        """Create the tracker.

        `problem_of` returns kind and sentence of an endpoint's failed scrape. `changed` is called
        with all endpoints that are not ready or have a problem, whenever a state changes, or an
        endpoint joins with a problem or leaves. `clock` returns Unix time.
        """
        self._scheduler = scheduler
        self._problem_of = problem_of
        self._changed = changed
        self._clock = clock
        self._states: dict[str, EndpointState] = {}
        """States of the pool's endpoints at the last comparison, by endpoint id."""

    def of(self, endpoint: Endpoint) -> EndpointState:
        """Return the state of an endpoint at the last comparison, or ready if the endpoint is
        new.
        """
        return self._states.get(endpoint.endpoint_id) or EndpointState(since_s=self._clock())

    def look(self, now: Seconds) -> None:
        """Determine the states of all endpoints at `now`, and report them if any of them
        changed.
        """
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
        """Return the current state of an endpoint and the reason for it."""
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
    """Return in words why an endpoint that counts as full gets few or no requests."""
    if now < full.until_s:
        return "it refused requests because it is full, and gets none for some seconds"
    return "it refused requests because it is full, and gets single ones as a test"


def _against(outlier: Outlier) -> str:
    if outlier.cause is Cause.FAILING:
        if outlier.failures or math.isnan(outlier.failure_share):
            return f"{outlier.failures} errors in a row"
        return f"{outlier.failure_share:.0%} of its last responses were errors"
    if math.isnan(outlier.slowness):
        return "requests took too long"
    return f"requests take {outlier.slowness:.1f} times the median of the pool"
