"""One line for each endpoint that stops getting work first, and one when it is back."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.pool import Standing
from epp.core.types import Endpoint, Seconds

LINES_MAX: Final = 20
"""In one look: a partition takes away a thousand endpoints at once, and gives them back."""
LOOKS_PER_STALENESS: Final = 8
LOOK_S_MIN: Final = 0.05
LOOK_S_MAX: Final = 1.0

_log = structlog.get_logger(__name__)


class StandingsLog:
    """Compares standings to those of the last look. An endpoint is ready until known otherwise."""

    def __init__(
        self,
        scheduler: Scheduler,
        problem_of: Callable[[Endpoint], tuple[str, str] | None],
        *,
        staleness_s: Seconds,
    ) -> None:
        """`problem_of` an endpoint: why its last scrape failed, by kind and in a sentence.

        `run` looks some times while metrics become `staleness_s` old.
        """
        self._scheduler = scheduler
        self._problem_of = problem_of
        self._look_every_s = min(max(staleness_s / LOOKS_PER_STALENESS, LOOK_S_MIN), LOOK_S_MAX)
        self._not_ready: dict[str, tuple[Standing, Seconds]] = {}
        """Endpoint id -> standing, and since when it is not ready."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look(time.monotonic())

    def look(self, now: Seconds) -> None:
        """Log what has changed since the last look."""
        standings = self._scheduler.standings(now)
        before, self._not_ready = self._not_ready, {}
        changed = 0
        for slot, endpoint in self._scheduler.pool.endpoints():
            was, since_s = before.get(endpoint.endpoint_id, (Standing.READY, now))
            standing = standings[slot]
            if standing is Standing.NEVER_SCRAPED:
                # It joined or restarted, and will be known in an instant.
                standing = was
            if standing is not Standing.READY:
                self._not_ready[endpoint.endpoint_id] = standing, since_s
            if standing is not was:
                changed += 1
                if changed <= LINES_MAX:
                    self._tell(endpoint, was, standing, now - since_s)
        if changed > LINES_MAX:
            _log.info("more endpoints changed their standing", endpoints=changed - LINES_MAX)

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
