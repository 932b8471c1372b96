"""Arrival times for traces that state the times of only some requests.

A turn of a session that has a delay waits for the previous answer and then for the delay. A turn
without a time waits for the previous answer too. A trace without any times is sent at a constant
rate.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.traces.arrival import FieldError
from sim.traces.reading import ReadOptions

SESSIONS_MAX: Final = 1_000_000
"""Maximum number of sessions whose latest turn is stored."""


class Moment(Struct, frozen=True):
    """The arrival time of a request; its fields are those of `Arrival` with these names."""

    time_s: Seconds
    after: int | None = None
    think_s: Seconds = 0.0
    turn: int = 0


class Turns:
    """The arrival times of the requests of one trace, in the order of its lines."""

    def __init__(self, options: ReadOptions, *, timed: bool) -> None:
        """Create the object. `timed` is True if the trace has times; a first turn without one is
        then malformed.
        """
        self._options = options
        self._timed = timed
        self._begun = 0
        """Number of requests whose time followed from the rate."""
        self._latest: OrderedDict[str, tuple[int, Moment]] = OrderedDict()
        """Index and time of the latest turn, by session."""

    def next(
        self, index: int, time_s: Seconds | None, session: str, delay_s: Seconds | None, field: str
    ) -> Moment:
        """Return the time of request `index` of `session`, which is "" for a request without one.

        `field` is the name of the time in the trace. Raises `FieldError` if the time is missing.
        """
        before = self._latest.pop(session, None) if session else None
        if before is not None and (time_s is None or delay_s is not None):
            after, earlier = before
            earliest_s = earlier.time_s + (delay_s or 0.0)
            moment = Moment(
                # If both are known, the later of the two is the earliest time.
                time_s=earliest_s if time_s is None else max(time_s, earliest_s),
                after=after,
                think_s=delay_s or 0.0,
                turn=earlier.turn + 1,
            )
        else:
            turn = 0 if before is None else before[1].turn + 1
            if time_s is None:
                if self._timed:
                    raise FieldError(field, "Expected a time, as the first request has one")
                time_s = self._options.at_rate_s(self._begun)
                self._begun += 1
            moment = Moment(time_s=time_s, turn=turn)
        if session:
            self._latest[session] = (index, moment)
            if len(self._latest) > SESSIONS_MAX:
                self._latest.popitem(last=False)
        return moment
