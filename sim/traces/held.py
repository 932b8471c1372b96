"""A trace in memory, for many runs of the same requests."""

from collections.abc import Iterator
from typing import Final

from sim.traces.arrival import Arrival
from sim.traces.plausibility import warnings_of
from sim.traces.reading import Trace

HELD_REQUESTS_MAX: Final = 20_000
"""Maximum size of a trace in memory; each run reads a larger one again. Requests of the leaderboard
take 0.6 to 3.5 KB.
"""


class HeldTrace(Trace):
    """A trace that was read once; iterating over it does not read the file, which may be gone."""

    def __init__(self, trace: Trace) -> None:
        """Read all of `trace`, which has at most `HELD_REQUESTS_MAX` requests. Raises what reading
        raises.
        """
        super().__init__(trace.path, trace.format, trace.options)
        self.warnings = tuple(warnings_of(trace))
        self._arrivals_held = tuple(super().__iter__())

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the same arrivals each time; the counters remain those of the reading."""
        return iter(self._arrivals_held)
