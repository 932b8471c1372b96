"""A trace that is held in memory, for many runs of the same requests."""

from collections.abc import Iterator
from typing import Final

from sim.traces.arrival import Arrival
from sim.traces.plausibility import warnings_of
from sim.traces.reading import Trace

HELD_REQUESTS_MAX: Final = 20_000
"""Maximum number of requests of a trace that is held in memory; each run reads a larger trace from
its file again. A request of the leaderboard takes 0.6 to 3.5 KB of memory.
"""


class HeldTrace(Trace):
    """A trace whose requests are in memory. Iterating over it does not read the file, which may
    have been deleted.
    """

    def __init__(self, trace: Trace) -> None:
        """Read all requests of `trace` into memory; the caller checks that there are at most
        `HELD_REQUESTS_MAX`. Raises the errors of iterating over `trace`.
        """
        super().__init__(trace.path, trace.format, trace.options)
        self.warnings = tuple(warnings_of(trace))
        self._arrivals_held = tuple(super().__iter__())

    def __iter__(self) -> Iterator[Arrival]:
        """Yield the requests in memory; the counters, such as `bad_lines`, remain those of the
        first reading.
        """
        return iter(self._arrivals_held)
