"""The simulated clients: they send requests, wait for answers, and abort or retry."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final

from epp.core.types import Seconds
from sim.cluster.gateway import Gateway
from sim.cluster.loop import Loop
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_request import Failure, Fate, SimulatedRequest
from sim.traces.arrival import Arrival

RETRIED: Final = frozenset({429, 503})
"""HTTP statuses after which a simulated client sends a request again, if it has retries left."""

_ASKED_AGAIN: Final = frozenset(
    {Failure.POD_DIED, Failure.PREFILL_POD_DIED, Failure.KV_TRANSFER, Failure.NO_PICKER}
)
"""Failures of a request after which a simulated client sends the request again, if it has retries
left.
"""

ENDED_MAX: Final = 65_536
"""Maximum number of ended requests whose end time is stored, for following turns that arrive
later.
"""


class Clients:
    """The clients that send the requests of `arrivals` through `gateway`. `tell_ended` is called
    with each request when it has ended.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        loop: Loop,
        gateway: Gateway,
        arrivals: Iterable[Arrival],
        *,
        seed: int,
        tell_ended: Callable[[SimulatedRequest], None],
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._gateway = gateway
        self._tell_ended = tell_ended
        self.requests: dict[int, SimulatedRequest] = {}
        """Requests that have arrived and not ended, by sequence number in order of arrival."""
        self.arrived = 0
        self.retried = 0
        """Number of times that clients sent a request again so far, over all clients."""
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        """Number of ended requests by their result for the client."""
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._pending_arrivals = 0
        self._next_arrival_at: Seconds = 0.0
        self._thinking: list[Seconds] = []
        """Heap of the times at which turns that wait for their client's think time will be sent."""
        self._under_way: set[int] = set()
        """Indices in the trace of the requests that were sent, or wait to be sent, and have not
        ended.
        """
        self._waiting: dict[int, list[Arrival]] = {}
        """Turns that wait for the answer to another request, by the index of that request in the
        trace.
        """
        self._ended_at: dict[int, Seconds] = {}
        """Times at which the last `ENDED_MAX` requests ended, by index in the trace."""
        self._random_abort = Random(f"{seed}:abort")
        self._pull()

    @property
    def done(self) -> bool:
        """True if no request is in progress and no further request will be sent."""
        return not self.requests and not self._pending_arrivals

    @property
    def next_sent_at(self) -> Seconds:
        """Earliest known time at which a new request may be sent (retries excluded); infinite if
        there is none.
        """
        return min(self._next_arrival_at, self._thinking[0] if self._thinking else math.inf)

    def go_on(self, arrivals: Iterable[Arrival]) -> None:
        """Continue with the requests of `arrivals`. All earlier arrivals must have been taken from
        their trace before.
        """
        assert self._next_arrival_at == math.inf, "all earlier arrivals were sent"
        self._arrivals = iter(arrivals)
        self._pull()

    def end(self, request: SimulatedRequest, fate: Fate) -> None:
        """Record that an attempt of `request` ended as `fate`: retry the request if its client
        retries after that, else end it.

        The end schedules the turns that waited for this request. The end of the last request stops
        the loop.
        """
        if self._is_retried(request, fate):
            self._retry(request)
            return
        now = self._loop.now
        request.fate = fate
        request.ended_at = now
        self.fates[fate] += 1
        del self.requests[request.sequence]
        index = request.arrival.index
        self._under_way.discard(index)
        self._ended_at[index] = now
        if len(self._ended_at) > ENDED_MAX:
            del self._ended_at[next(iter(self._ended_at))]
        for turn in self._waiting.pop(index, ()):
            self._pending_arrivals -= 1
            self._think(turn, now + turn.think_s)
        self._tell_ended(request)
        if self.done:
            self._loop.stop()

    def _pull(self) -> None:
        """Take the next arrival from the trace and schedule it, if there is one."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._next_arrival_at = math.inf
            return
        self._pending_arrivals += 1
        self._next_arrival_at = max(self._loop.now, arrival.time_s)
        self._loop.at(self._next_arrival_at, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._pending_arrivals -= 1
        self._pull()
        first = arrival.after
        if first is None:
            self._send(arrival)
        elif first in self._under_way:
            self._pending_arrivals += 1
            self._under_way.add(arrival.index)
            self._waiting.setdefault(first, []).append(arrival)
        else:
            # The answer already exists, unless the trace has lost it.
            self._think(arrival, self._ended_at.get(first, -arrival.think_s) + arrival.think_s)

    def _think(self, arrival: Arrival, until: Seconds) -> None:
        self._pending_arrivals += 1
        self._under_way.add(arrival.index)
        send_at = max(self._loop.now, until)
        heapq.heappush(self._thinking, send_at)
        self._loop.at(send_at, self._send_turn, arrival)

    def _send_turn(self, arrival: Arrival) -> None:
        self._pending_arrivals -= 1
        heapq.heappop(self._thinking)
        self._send(arrival)

    def _send(self, arrival: Arrival) -> None:
        settings, loop, leave = self._settings, self._loop, self._gateway.hang_up
        request = SimulatedRequest(self.arrived, arrival, loop.now)
        self.requests[request.sequence] = request
        self._under_way.add(arrival.index)
        self.arrived += 1
        self._gateway.take(request)
        if settings.clients.timeout_s is not None:
            loop.after(settings.clients.timeout_s, leave, request)
        if settings.abort_share:
            leaves = self._random_abort.random() < settings.abort_share
            patience_s = self._random_abort.expovariate(1 / settings.abort_after_s)
            if leaves:
                loop.after(patience_s, leave, request)

    def _is_retried(self, request: SimulatedRequest, fate: Fate) -> bool:
        if request.retries >= self._settings.clients.retries or fate is Fate.ABORTED:
            return False
        return request.status in RETRIED or request.failure in _ASKED_AGAIN

    def _retry(self, request: SimulatedRequest) -> None:
        """Count a retry, and send the request again after a pause. Turns that wait for its answer
        continue to wait.
        """
        pause_s = self._settings.clients.pause_before_s(request.retries)
        request.retries += 1
        self.retried += 1
        request.forget_attempt()
        self._gateway.take(request, pause_s)
