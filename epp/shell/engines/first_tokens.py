"""Track the time to first token that the engines measure, by endpoint.

The sum and count of each engine's histogram are recorded, from which means follow. Quantiles would
need a dozen series per endpoint, which the engine's own metrics page already has. No decision
depends on these values. This module performs no I/O.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import EndpointMetrics, Seconds

WINDOW_S: Final = 60.0
"""Length in seconds of the window over which the recent mean of times to first token is taken."""
STEP_S: Final = 5.0
"""Minimum seconds between two recorded samples of an endpoint's times to first token."""
_STEPS_MAX: Final = int(WINDOW_S / STEP_S) + 1


class FirstTokens(Struct, frozen=True, kw_only=True):
    """The times to first token that one endpoint measured."""

    sum_s: Seconds
    """Sum of all times to first token, from the engine's counter; it includes what the engine
    counted before the first scrape, and what earlier engines at this endpoint counted.
    """
    count: float
    lately_s: Seconds | None
    """Mean time to first token in the last minute, in seconds, or None if there was no first
    token.
    """


class _Engine:
    __slots__ = ("before_count", "before_s", "count", "steps", "sum_s")

    def __init__(self) -> None:
        self.sum_s = self.before_s = 0.0
        self.count = self.before_count = 0.0
        """Number of first tokens that the current engine counted (`count`), and that earlier
        engines at this endpoint counted (`before_count`).
        """
        self.steps: deque[tuple[Seconds, Seconds, float]] = deque(maxlen=_STEPS_MAX)
        """Time, sum and count of each recorded sample of times to first token; sum and count
        include earlier engines.
        """


class FirstTokensSeen:
    """The recorded times to first token of all endpoints, by endpoint id."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}

    def replace(self, endpoint_ids: Collection[str]) -> None:
        """Forget all endpoints that are not in `endpoint_ids`."""
        for gone in self._engines.keys() - set(endpoint_ids):
            del self._engines[gone]

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: Seconds) -> None:
        """Record the times to first token of a successful scrape; do nothing if the page does not
        report them. A decrease of a counter means that the engine restarted.
        """
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
        """Return the times to first token of all endpoints that report them, by endpoint id."""
        return {name: _told(engine, now) for name, engine in self._engines.items()}


def _told(engine: _Engine, now: Seconds) -> FirstTokens:
    sum_s, count = engine.before_s + engine.sum_s, engine.before_count + engine.count
    recent = (step for step in engine.steps if now - step[0] <= WINDOW_S)
    _, since_s, since_count = next(recent, (now, sum_s, count))
    lately_s = (sum_s - since_s) / (count - since_count) if count > since_count else None
    return FirstTokens(sum_s=sum_s, count=count, lately_s=lately_s)
