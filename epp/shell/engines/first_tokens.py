"""How long the engines themselves say that first tokens took, by endpoint. Pure.

Of each engine's histogram the sum and the count are kept, from which means follow. Quantiles would
take a dozen series of every endpoint on our page, which the engine's own page has already. Nothing is
decided by any of it.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import EndpointMetrics, Seconds

WINDOW_S: Final = 60.0
"""Of the mean that is recent."""
STEP_S: Final = 5.0
"""Between two instants of the window that are remembered."""
_STEPS_MAX: Final = int(WINDOW_S / STEP_S) + 1


class FirstTokens(Struct, frozen=True, kw_only=True):
    """Of one endpoint."""

    sum_s: Seconds
    """Since it was first scraped, and of its engine what was before that."""
    count: float
    lately_s: Seconds | None
    """Mean of the last minute; None: there was no first token in it."""


class _Engine:
    __slots__ = ("before_count", "before_s", "count", "steps", "sum_s")

    def __init__(self) -> None:
        self.sum_s = self.before_s = 0.0
        self.count = self.before_count = 0.0
        """Of the engine that runs, and of those at this endpoint before it."""
        self.steps: deque[tuple[Seconds, Seconds, float]] = deque(maxlen=_STEPS_MAX)
        """(instant, sum, count) of all engines there were."""


class FirstTokensSeen:
    """What was scraped of each endpoint, by its id."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}

    def replace(self, endpoint_ids: Collection[str]) -> None:
        """The pool is now these."""
        for gone in self._engines.keys() - set(endpoint_ids):
            del self._engines[gone]

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: Seconds) -> None:
        """One good scrape. Counters that fall are those of an engine that has restarted."""
        sum_s, count = metrics.ttft_sum_s, metrics.ttft_count
        if math.isnan(sum_s) or math.isnan(count):
            return
        engine = self._engines.get(endpoint_id)
        if engine is None:
            engine = self._engines[endpoint_id] = _Engine()
        elif count < engine.count or sum_s < engine.sum_s:
            engine.before_s += engine.sum_s
            engine.before_count += engine.count
        engine.sum_s, engine.count = sum_s, count
        steps = engine.steps
        if not steps or now - steps[-1][0] >= STEP_S:
            steps.append((now, engine.before_s + sum_s, engine.before_count + count))

    def lately(self, now: Seconds) -> Mapping[str, FirstTokens]:
        """Of the endpoints that told, by id."""
        return {name: _told(engine, now) for name, engine in self._engines.items()}


def _told(engine: _Engine, now: Seconds) -> FirstTokens:
    sum_s, count = engine.before_s + engine.sum_s, engine.before_count + engine.count
    recent = (step for step in engine.steps if now - step[0] <= WINDOW_S)
    _, since_s, since_count = next(recent, (now, sum_s, count))
    lately_s = (sum_s - since_s) / (count - since_count) if count > since_count else None
    return FirstTokens(sum_s=sum_s, count=count, lately_s=lately_s)
