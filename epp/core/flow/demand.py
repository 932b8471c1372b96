"""The tokens that flows ask for, by which heavy flows leave some endpoints to light ones.

Fair turns alone do not protect a light flow in an overload. Its request is next, but its prompt then
shares the steps of an engine with the prompts and answers of heavy flows.
"""

import math
from collections.abc import Mapping
from typing import Final

from epp.core.flow.uses import FLOWS_MAX, LIGHT_SHARE
from epp.core.types import Seconds

DEMAND_S: Final = 30.0
"""Length in seconds of the windows over which the tokens of flows are added up. A flow that asked for
nothing in two of them is forgotten.
"""
COMPARED_S: Final = 0.5
"""Seconds between two comparisons of the flows of a band."""

NO_WEIGHTS: Final[Mapping[str, float]] = {}


class FlowDemand:
    """The tokens that the flows of each band asked for in the present and the last window."""

    def __init__(self) -> None:
        self.asked: dict[tuple[int, str], float] = {}
        """Tokens asked for in the present window, by priority and flow."""
        self.ends_s: Seconds = -math.inf
        """Time at which the present window ends."""
        self._last: dict[tuple[int, str], float] = {}
        self._limits: dict[int, tuple[Seconds, float]] = {}
        """Time of the last comparison of the flows of each band, and the tokens below which a flow
        was light then; inf if none was.
        """

    def ask(self, priority: int, flow: str, tokens: float, now: Seconds) -> None:
        """Note that a request of `flow` asks for `tokens`. Flows above `FLOWS_MAX` are ignored.

        A caller may add to `asked` itself if the window has not ended and the flow is in it.
        """
        self._turn(now)
        key = priority, flow
        if key in self.asked or len(self.asked) < FLOWS_MAX:
            self.asked[key] = self.asked.get(key, 0.0) + tokens

    def is_heavy(
        self, priority: int, flow: str, now: Seconds, weights: Mapping[str, float] = NO_WEIGHTS
    ) -> bool:
        """Return whether another flow of the band of `priority` is light, and `flow` is not.

        A flow is light if it asked for less than `LIGHT_SHARE` of the mean demand of the band's flows.
        The demand of a flow is divided by its weight in `weights`, or by 1.
        """
        limit = self._limit(priority, now, weights)
        return self._demand(priority, flow, weights) >= limit

    def is_light(
        self, priority: int, flow: str, now: Seconds, weights: Mapping[str, float] = NO_WEIGHTS
    ) -> bool:
        """Return whether `flow` is light beside others of the band of `priority` (see `is_heavy`)."""
        limit = self._limit(priority, now, weights)
        return self._demand(priority, flow, weights) < limit < math.inf

    def _demand(self, priority: int, flow: str, weights: Mapping[str, float]) -> float:
        key = priority, flow
        tokens = self._last.get(key, 0.0) + self.asked.get(key, 0.0)
        return tokens / weights.get(flow, 1.0)

    def _limit(self, priority: int, now: Seconds, weights: Mapping[str, float]) -> float:
        self._turn(now)
        compared_at_s, limit = self._limits.get(priority, (-math.inf, math.inf))
        if now < compared_at_s + COMPARED_S:
            return limit
        flows = {flow for at, flow in self._last.keys() | self.asked.keys() if at == priority}
        found = [self._demand(priority, flow, weights) for flow in flows]
        limit = LIGHT_SHARE * sum(found) / len(found) if found else math.inf
        if min(found, default=math.inf) >= limit:
            limit = math.inf
        self._limits[priority] = now, limit
        return limit

    def _turn(self, now: Seconds) -> None:
        """Begin a new window if the present one is over."""
        if now < self.ends_s:
            return
        self._last = self.asked if now < self.ends_s + DEMAND_S else {}
        self.asked, self._limits, self.ends_s = {}, {}, now + DEMAND_S
