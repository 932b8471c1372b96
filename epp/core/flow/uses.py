"""The use of the queue by the flows of a band: whether light flows wait as long as heavy ones.

The waits of all flows say nothing about fairness by themselves, because a flow that sends ten times
as much as the others must wait longer. A flow that used little should hardly wait at all.
"""

from typing import Final

from msgspec import Struct

from epp.core.types import Seconds

WINDOW_S: Final = 60.0
"""Length in seconds of the windows over which the waits and the tokens of flows are added up."""
FLOWS_MAX: Final = 1_024
"""Maximum number of flows of a band that are counted in a window; later ones are ignored."""
LIGHT_SHARE: Final = 0.5
"""Share of the mean use of a band's flows below which a flow is light."""


class FlowUse(Struct):
    """The requests of one flow that waited and were placed or refused in a window."""

    tokens: float = 0.0
    """Number of tokens that the flow was charged for these requests."""
    requests: int = 0
    waited_s: Seconds = 0.0
    """Sum of the waits of the requests."""


class FlowUses:
    """The use and the waits of the flows of each band in the present and the last window."""

    def __init__(self, now: Seconds) -> None:
        self._began_s = now
        self._bands: dict[int, dict[str, FlowUse]] = {}
        self._last: dict[int, dict[str, FlowUse]] = {}

    def left(
        self, priority: int, flow: str, *, tokens: float, waited_s: Seconds, now: Seconds
    ) -> None:
        """Note that a request of `flow` was placed or refused after it had waited for `waited_s`.
        `tokens` are those that its flow was charged for it, 0 if it was not placed. Flows above
        `FLOWS_MAX` of a band are ignored.
        """
        self._turn(now)
        uses = self._bands.setdefault(priority, {})
        use = uses.get(flow)
        if use is None:
            if len(uses) >= FLOWS_MAX:
                return
            use = uses[flow] = FlowUse()
        use.tokens += tokens
        use.requests += 1
        use.waited_s += waited_s

    def light_wait_ratios(self, now: Seconds) -> dict[int, float]:
        """Return the mean wait of the light flows of each band relative to the mean wait of all of
        its flows, by priority, over the last complete window.

        A flow is light if it used less than `LIGHT_SHARE` of the mean use. A band in which no flow
        is light, or none waited, is missing.
        """
        self._turn(now)
        found = {priority: _light_wait_ratio(uses) for priority, uses in self._last.items()}
        return {priority: ratio for priority, ratio in found.items() if ratio is not None}

    def _turn(self, now: Seconds) -> None:
        """Begin a new window if the present one is over."""
        if now < self._began_s + WINDOW_S:
            return
        self._last = self._bands if now < self._began_s + 2 * WINDOW_S else {}
        self._bands = {}
        self._began_s += WINDOW_S * ((now - self._began_s) // WINDOW_S)


def _light_wait_ratio(uses: dict[str, FlowUse]) -> float | None:
    most = LIGHT_SHARE * sum(use.tokens for use in uses.values()) / len(uses)
    light = [use for use in uses.values() if use.tokens < most]
    of_all_s = _mean_wait_s(list(uses.values()))
    return _mean_wait_s(light) / of_all_s if light and of_all_s else None


def _mean_wait_s(uses: list[FlowUse]) -> Seconds:
    return sum(use.waited_s for use in uses) / sum(use.requests for use in uses)
