"""The rule by which a request waits in the picker only if requests gain by that.
A request waits in the picker so that requests of other flows and priorities can pass it. It gains
nothing if none of them came within the last minute, and nothing in a short burst that the engines
compute anyway.
"""

import math
from collections.abc import Callable
from typing import Final

from epp.core.flow.demand import FlowDemand
from epp.core.flow.settings import Fairness, FlowSettings, Ordering
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

RIVALS_S: Final = 60.0
"""Seconds for which two flows or priorities compete after one sent a request next after the other:
the default of `defaultRequestTTL`, because a request of either may still wait for that long.
"""
STANDING_S: Final = 1.0
"""Seconds for which endpoints must be full again and again before requests wait. A burst that ends
sooner is served sooner if all of it is at the engines. In a large pool that is overloaded, some
endpoint has room every now and then, so room that is gone within this time does not end the burst.
"""

_ONE_QUEUE: Final = frozenset({Fairness.NONE, Fairness.SESSIONS})
"""Rules of fairness under which flows do not take turns by what they used."""


class Rivalry:
    """The state from which flow control knows whether requests of several flows or priorities
    compete for the endpoints, so that a wait in the queue has a use.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.settings = settings
        self.holding = False
        """True if requests wait in the queue. The queue sets it."""
        self.flow_of: Callable[[InferenceRequest], str] = lambda _: ""
        """Function that returns the id of a request's flow. The queue sets it."""
        self._demand = FlowDemand()
        self._last: tuple[str, int] | None = None
        """Flow and priority of the last request, or None before the first one."""
        self._highest = 0
        """Highest priority of recent requests, which counts until `_highest_until_s`."""
        self._highest_until_s: Seconds = -math.inf
        self._lowest = 0
        """Lowest priority of recent requests, which counts until `_lowest_until_s`."""
        self._lowest_until_s: Seconds = -math.inf
        self._until_s: Seconds = -math.inf
        """Time until which flows or priorities compete."""
        self._full_since_s: Seconds = math.inf
        """Time since which requests that compete have found no room again and again: less than
        `STANDING_S` apart, or with no request in between that found room. Inf before the first of
        them.
        """
        self._full_at_s: Seconds = -math.inf
        """Time at which a request that competes last found no room."""
        self._had_room = True
        """True if a request found room since `_full_at_s`."""

    def met(self, flow: str, priority: int, now: Seconds, tokens: int = 0) -> bool:
        """Note that a request of `flow` with `priority` arrived, whose prompt has `tokens`. Return
        whether a competition begins with it.
        """
        if now < self._until_s:
            demand = self._demand
            asked = priority if self.settings.by_priority else 0, flow
            # Nearly every request passes here if flows compete, so that calls are avoided.
            if now < demand.ends_s and asked in demand.asked:
                demand.asked[asked] += tokens
            else:
                demand.ask(*asked, tokens, now)
        last, self._last = self._last, (flow, priority)
        if priority >= self._highest or now >= self._highest_until_s:
            self._highest, self._highest_until_s = priority, now + RIVALS_S
        if priority <= self._lowest or now >= self._lowest_until_s:
            self._lowest, self._lowest_until_s = priority, now + RIVALS_S
        if last is None or last == self._last or not self._passes(flow, priority, *last):
            return False
        begins = now >= self._until_s
        self._until_s = now + RIVALS_S
        return begins

    def is_alone(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether no other request would pass `request` in the queue."""
        band = self.settings.band(self._band_of(request.priority))
        return now >= self._until_s and band.ordering is Ordering.ARRIVAL

    def is_outranked(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether the highest priority of recent requests is above that of `request`, and
        flows or priorities compete.
        """
        outranked = self.settings.by_priority and request.priority < self._highest
        return outranked and now < min(self._highest_until_s, self._until_s)

    def is_first(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` has the highest priority of recent requests while lower ones
        compete, or is of a light flow while heavy ones compete.
        """
        outranks = self.settings.by_priority and request.priority > self._lowest
        if outranks and now < min(self._lowest_until_s, self._until_s):
            return request.priority >= self._highest and not self.keeps_off(request, now)
        return self.is_light(request, now)

    def is_light(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether heavier flows of its band leave some endpoints to `request`."""
        priority = self._band_of(request.priority)
        weights, flow = self.settings.band(priority).weights, self.flow_of(request)
        return self._is_fair(priority, now) and self._demand.is_light(priority, flow, now, weights)

    def keeps_off(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` leaves some endpoints to lighter flows of its band."""
        priority = self._band_of(request.priority)
        weights, flow = self.settings.band(priority).weights, self.flow_of(request)
        return self._is_fair(priority, now) and self._demand.is_heavy(priority, flow, now, weights)

    def found_room(self) -> None:
        """Note that a request found room."""
        self._had_room = True

    def is_overloaded(self, now: Seconds) -> bool:
        """Return whether requests wait in the queue, or the endpoints have been full again and again
        for `STANDING_S` until now.
        """
        recently = now - self._full_at_s < STANDING_S
        return self.holding or (recently and now - self._full_since_s >= STANDING_S)

    def must_wait(self, now: Seconds) -> bool:
        """Note that a request that competes found no room. Return whether it must wait."""
        if self._had_room and now - self._full_at_s >= STANDING_S:
            self._full_since_s = now
        self._had_room, self._full_at_s = False, now
        return self.holding or now - self._full_since_s >= STANDING_S

    def _is_fair(self, priority: int, now: Seconds) -> bool:
        """Return whether flows compete, and those of the band of `priority` take turns."""
        return now < self._until_s and self.settings.band(priority).fairness not in _ONE_QUEUE

    def _band_of(self, priority: int) -> int:
        return priority if self.settings.by_priority else 0

    def _passes(self, flow: str, priority: int, last_flow: str, last_priority: int) -> bool:
        """Return whether the queue would change the order of requests of two flows or priorities."""
        if self.settings.by_priority and priority != last_priority:
            return True
        band = self.settings.band(self._band_of(priority))
        return flow != last_flow and band.fairness is not Fairness.NONE
