"""End a simulated run in which requests would wait for ever.

A simulated client waits for its answer without limit. A plugin or a detector may keep requests in the
picker's queue for good, for example while no metrics page can be read, and the queue may have no limit
of time. Such a run has scrapes without end, but nothing else happens any more.
"""

import math
from typing import Final

from epp.core.types import Seconds
from sim.experiments.run import Run

IDLE_HOURS: Final = 4
"""Simulated time between two looks at a run. If no request ends between them, although no pod serves
a request and no client will send one, the run is stopped. No gateway lets a request wait so long.
"""
_IDLE_S: Final[Seconds] = IDLE_HOURS * 3_600.0


class IdleWatch:
    """Looks at a run now and then, and stops it if its requests wait for ever."""

    def __init__(self, one: Run) -> None:
        """Watch `one`, which has not begun."""
        self._run = one
        self._ended = -1
        self.problem = ""
        """Why the run was stopped, in one sentence; "" if it was not."""
        one.cluster.loop.after(_IDLE_S, self._look)

    def _look(self) -> None:
        cluster = self._run.cluster
        clients = cluster.clients
        waiting = len(clients.requests)
        ended = clients.arrived - waiting
        idle = clients.next_sent_at == math.inf and not any(pod.requests for pod in cluster.pods)
        if idle and waiting and ended == self._ended:
            self.problem = (
                f"{waiting} requests wait in the picker after {cluster.loop.now:,.0f} s of simulated "
                f"time, and nothing happened for {IDLE_HOURS} hours that could place them: expected "
                "an endpoint with room, or a limit of the wait such as `defaultRequestTTL`"
            )
            self._run.stop()
            return
        self._ended = ended
        cluster.loop.after(_IDLE_S, self._look)
