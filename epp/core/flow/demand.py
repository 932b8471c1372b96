"""The tokens that flows ask for, by which heavy flows leave some endpoints to light ones.

Fair turns alone do not protect a light flow in an overload. Its request is next, but its prompt then
shares the steps of an engine with the prompts and answers of heavy flows.
"""

import math
from typing import Final

from epp.core.flow.uses import FLOWS_MAX, LIGHT_SHARE
from epp.core.types import Seconds

DEMAND_S: Final = 30.0
"""Length in seconds of the windows over which the tokens of flows are added up. A flow that asked for
nothing in two of them is forgotten.
"""
COMPARED_S: Final = 0.5
"""Seconds between two comparisons of the flows of a band."""


class FlowDemand:
    """The tokens that the flows of each band asked for in the present and the last window."""

    def __init__(self) -> None:
        self._began_s: Seconds = -math.inf
        self._bands: dict[int, dict[str, float]] = {}
        self._last: dict[int, dict[str, float]] = {}
        self._limits: dict[int, tuple[Seconds, float]] = {}
        """Time of the last comparison of the flows of each band, and the tokens below which a flow
        was light then; inf if none was.
        """

    def ask(self, priority: int, flow: str, tokens: float, now: Seconds) -> None:
        """Note that a request of `flow` asks for `tokens`. Flows above `FLOWS_MAX` of a band are
        ignored.
        """
        self._turn(now)
        asked = self._bands.setdefault(priority, {})
        if flow in asked or len(asked) < FLOWS_MAX:
            asked[flow] = asked.get(flow, 0.0) + tokens

    def is_heavy(self, priority: int, flow: str, now: Seconds) -> bool:
        """Return whether another flow of the band of `priority` is light, and `flow` is not.

        A flow is light if it asked for less than `LIGHT_SHARE` of the mean demand of the band's flows.
        """
        self._turn(now)
        return self._tokens(priority, flow) >= self._limit(priority, now)

    def has_light(self, priority: int, now: Seconds) -> bool:
        """Return whether any flow of the band of `priority` is light."""
        self._turn(now)
        return self._limit(priority, now) < math.inf

    def _tokens(self, priority: int, flow: str) -> float:
        windows = (self._last, self._bands)
        return sum(window.get(priority, {}).get(flow, 0.0) for window in windows)

    def _limit(self, priority: int, now: Seconds) -> float:
        compared_at_s, limit = self._limits.get(priority, (-math.inf, math.inf))
        if now < compared_at_s + COMPARED_S:
            return limit
        flows = self._last.get(priority, {}).keys() | self._bands.get(priority, {}).keys()
        found = [self._tokens(priority, flow) for flow in flows]
        limit = LIGHT_SHARE * sum(found) / len(found) if found else math.inf
        if min(found, default=math.inf) >= limit:
            limit = math.inf
        self._limits[priority] = now, limit
        return limit

    def _turn(self, now: Seconds) -> None:
        """Begin a new window if the present one is over."""
        if now < self._began_s + DEMAND_S:
            return
        self._last = self._bands if now < self._began_s + 2 * DEMAND_S else {}
        self._bands, self._limits, self._began_s = {}, {}, now
