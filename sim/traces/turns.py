"""Arrival times for traces in which some or all requests have no time of their own.

A turn of a session that has a delay waits for the previous answer and then for the delay. A turn
without a time waits for the previous answer too. If a trace has no times at all, its requests and
the first turns of its sessions are sent at a constant rate.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.traces.arrival import FieldError
from sim.traces.reading import ReadOptions

SESSIONS_MAX: Final = 1_000_000
"""Maximum number of sessions whose latest turn is remembered."""


class ArrivalTime(Struct, frozen=True):
    """The arrival time of one request; the fields have the meaning of those of `Arrival`."""

    time_s: Seconds
    after: int | None = None
    think_s: Seconds = 0.0
    turn: int = 0


class Turns:
    """A calculator of the arrival times of one trace, request by request in the order of its lines."""

    def __init__(self, options: ReadOptions, *, timed: bool) -> None:
        """Create the calculator.

        `timed` is True if the first request has a time; a first turn without a time is then
        malformed.
        """
        self._options = options
        self._timed = timed
        self._begun = 0
        """Number of requests so far whose time was computed from the constant rate, because the
        trace has none for them.
        """
        self._latest: OrderedDict[str, tuple[int, ArrivalTime]] = OrderedDict()
        """Index and arrival time of the latest turn of each session, by the session's name."""

    def next(
        self, index: int, time_s: Seconds | None, session: str, delay_s: Seconds | None, field: str
    ) -> ArrivalTime:
        """Return the arrival time of request `index` of `session` ("" if it has no session), and
        remember it as the latest turn of the session.

        `time_s` and `delay_s` are None if the trace has none for this request. `field` is the name
        of the time column, for errors. Raises `FieldError` if a needed time is missing.
        """
        before = self._latest.pop(session, None) if session else None
        if before is not None and (time_s is None or delay_s is not None):
            after, earlier = before
            earliest_s = earlier.time_s + (delay_s or 0.0)
            moment = ArrivalTime(
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
            moment = ArrivalTime(time_s=time_s, turn=turn)
        if session:
            self._latest[session] = (index, moment)
            if len(self._latest) > SESSIONS_MAX:
                self._latest.popitem(last=False)
        return moment
