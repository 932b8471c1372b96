"""Log when an endpoint stops being ready, and when it is ready again."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.pool import Standing
from epp.core.types import Endpoint, Seconds

LINES_MAX: Final = 20
"""Maximum number of log lines per comparison about endpoints that are not ready; a network
partition affects a thousand at once.
"""
LOOKS_PER_STALENESS: Final = 8
LOOK_S_MIN: Final = 0.05
LOOK_S_MAX: Final = 1.0

_log = structlog.get_logger(__name__)


class StandingsLog:
    """A log of endpoints that stop being ready or are ready again. An endpoint counts as ready
    until known otherwise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        problem_of: Callable[[Endpoint], tuple[str, str] | None],
        *,
        staleness_s: Seconds,
    ) -> None:
        """Create the log. `problem_of` returns kind and sentence of an endpoint's failed scrape.

        `run` compares the standings (ready, or the reason why not) several times in the
        `staleness_s` seconds after which metrics are stale.
        """
        self._scheduler = scheduler
        self._problem_of = problem_of
        self._look_every_s = min(max(staleness_s / LOOKS_PER_STALENESS, LOOK_S_MIN), LOOK_S_MAX)
        self._not_ready: dict[str, tuple[Standing, Seconds]] = {}
        """Standing (reason for not being ready) of each endpoint that is not ready, with the time
        since which the endpoint is not ready, by endpoint id.
        """

    async def run(self) -> None:
        """Compare the standings of all endpoints (ready, or the reason why not) periodically until
        cancelled.
        """
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look(time.monotonic())

    def look(self, now: Seconds) -> None:
        """Log the endpoints whose standing (ready, or the reason why not) changed since the last
        comparison. Beyond `LINES_MAX` lines, log only the number of further endpoints. An endpoint
        that was never scraped keeps its earlier standing.
        """
        standings = self._scheduler.standings(now)
        before, self._not_ready = self._not_ready, {}
        changed = 0
        for slot, endpoint in self._scheduler.pool.endpoints():
            was, since_s = before.get(endpoint.endpoint_id, (Standing.READY, now))
            standing = standings[slot]
            if standing is Standing.NEVER_SCRAPED:
                # The endpoint joined or restarted, and its standing will be known very soon.
                standing = was
            if standing is not Standing.READY:
                self._not_ready[endpoint.endpoint_id] = standing, since_s
            if standing is not was:
                changed += 1
                if changed <= LINES_MAX:
                    self._tell(endpoint, was, standing, now - since_s)
        if changed > LINES_MAX:
            _log.info(
                "readiness changed for more endpoints than are logged",
                endpoints=changed - LINES_MAX,
            )

    def _tell(self, endpoint: Endpoint, was: Standing, standing: Standing, for_s: Seconds) -> None:
        if standing is Standing.READY:
            _log.info(
                "endpoint is ready again", endpoint=endpoint.name, was=was, for_s=round(for_s, 1)
            )
            return
        kind, problem = self._problem_of(endpoint) or ("", "")
        _log.info(
            f"endpoint is {standing}", endpoint=endpoint.name, was=was, kind=kind, problem=problem
        )
