"""This module places the requests of traces that tell the times of only some of them.

A turn of a session that has a delay waits for the answer before it and then for the delay. So does,
without a delay, a turn that has no time. A trace without any times is sent at a constant rate.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.traces.arrival import FieldError
from sim.traces.reading import ReadOptions

SESSIONS_MAX: Final = 1_000_000
"""The latest turns of this many sessions are remembered."""


class Moment(Struct, frozen=True):
    """A moment says when a request arrives; its members are those of `Arrival` with these names."""

    time_s: Seconds
    after: int | None = None
    think_s: Seconds = 0.0
    turn: int = 0


class Turns:
    """This class gives the moments of the requests of one trace, in the order of its lines."""

    def __init__(self, options: ReadOptions, *, timed: bool) -> None:
        """`timed`: the trace has times; a first turn without one is malformed then."""
        self._options = options
        self._timed = timed
        self._begun = 0
        """This many requests got their time by the rate."""
        self._latest: OrderedDict[str, tuple[int, Moment]] = OrderedDict()
        """Each session maps to the index and the moment of its latest turn."""

    def next(
        self, index: int, time_s: Seconds | None, session: str, delay_s: Seconds | None, field: str
    ) -> Moment:
        """Return the moment of request `index` of `session`, which is "" for a request without one.

        `field` is the name of the time in the trace. Raises `FieldError` if the time is missing.
        """
        before = self._latest.pop(session, None) if session else None
        if before is not None and (time_s is None or delay_s is not None):
            after, earlier = before
            earliest_s = earlier.time_s + (delay_s or 0.0)
            moment = Moment(
                # Where both are told, the later of the two is the earliest moment.
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
