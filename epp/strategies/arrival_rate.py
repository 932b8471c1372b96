"""production-stack's fallback: the endpoint that was sent the fewest requests in the last minute."""

from collections import deque
from typing import Any, ClassVar, Final

import numpy as np

from epp.core.duration import Duration, check_above_zero
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
    Seconds,
)
from epp.strategies.narrowing import first_of, least_of, only
from epp.strategies.strategy import Strategy, config_of, producer, step

ARRIVALS: Final = "arrivals"
"""Column: requests that each endpoint was sent within the window."""
SEEN: Final = "seen"
"""Column: 1 for an endpoint that was ever sent one."""
_STEPS: Final = 60
"""Of a window: arrivals within one step are counted together."""


class ArrivalsSettings(Parameters, frozen=True):
    """`arrivals-producer`: how many requests each endpoint was sent lately."""

    type_name: ClassVar[str] = "arrivals-producer"
    abilities: ClassVar[Abilities] = Abilities()

    window: Duration = Duration(60.0)

    def __post_init__(self) -> None:
        check_above_zero("window", self.window)

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return Arrivals(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply everything to a running index."""
        return isinstance(index, Arrivals) and index.configure(self)


class _Step:
    """Arrivals at one endpoint that are counted together."""

    __slots__ = ("number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0


class Arrivals:
    """Requests by endpoint slot in the last 60 steps; it knows nothing of what endpoints hold.

    Bounded by the number of slots. The window ends with the last `expire`, about a second ago.
    """

    def __init__(self, settings: ArrivalsSettings) -> None:
        self._steps: dict[int, deque[_Step]] = {}
        """By slot, the oldest first; of an endpoint that was never sent anything there is none."""
        self._step_s = float(settings.window) / _STEPS

    def configure(self, settings: ArrivalsSettings) -> bool:
        """Adopt `settings`; arrivals counted in steps of another length are let go."""
        step_s = float(settings.window) / _STEPS
        if step_s != self._step_s:
            self._steps = {slot: deque() for slot in self._steps}
        self._step_s = step_s
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """The two columns."""
        arrivals, seen = np.zeros(slots), np.zeros(slots)
        for slot, steps in self._steps.items():
            if slot < slots:
                seen[slot] = 1.0
                arrivals[slot] = sum([step.requests for step in steps])
        return Affinity(np.zeros(slots, dtype=np.int64), 0, {ARRIVALS: arrivals, SEEN: seen})

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> _Step:
        """`slot` is sent one more."""
        number = int(now // self._step_s)
        steps = self._steps.setdefault(slot, deque(maxlen=_STEPS + 1))
        if not steps or steps[-1].number < number:
            steps.append(_Step(number))
        steps[-1].requests += 1
        return steps[-1]

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` was not sent `request`."""
        recorded.requests -= 1

    def forget(self, slot: int) -> None:
        """The next endpoint in `slot` was never sent anything."""
        self._steps.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Let go what is older than the window."""
        oldest = int(now // self._step_s) - _STEPS
        for steps in self._steps.values():
            while steps and steps[0].number <= oldest:
                steps.popleft()

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""


class ArrivalRate(Parameters, frozen=True):
    """The first in the list that was never sent a request; else argmin of arrivals in 60 s.

    What production-stack does where another policy has no answer: requests without a session, or
    whose prefix is unknown. Source: `routing_logic.py`, `_qps_routing`.

    Differs: arrivals are counted in steps of a second. Kept: ties go to the first in the list; how
    long requests stay does not count.
    """

    type_name: ClassVar[str] = "arrival-rate-scorer"
    producer_type: ClassVar[str] = ArrivalsSettings.type_name

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        n = len(candidates)
        columns = candidates.affinity(self.producer_type).columns
        unseen = columns.get(SEEN, np.zeros(n)) == 0
        if unseen.any():
            return only(first_of(unseen))
        return only(first_of(least_of(columns[ARRIVALS])))


INDEXES: Final = (ArrivalsSettings,)

SCORERS: Final = (ArrivalRate,)

STRATEGIES: Final = (
    Strategy(
        name="production-stack-qps",
        idea="production-stack's fallback: the fewest requests sent there in the last minute.",
        config=config_of(producer(ArrivalsSettings.type_name), step(ArrivalRate.type_name)),
    ),
)
