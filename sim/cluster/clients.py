"""The clients of a cluster: they send requests, wait for answers, and leave or ask again."""

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
"""What a server says that is worth asking again."""

_ASKED_AGAIN: Final = frozenset({Failure.POD_DIED, Failure.NO_PICKER})
"""What clients send again besides."""

ENDED_MAX: Final = 65_536
"""Requests of which the end is remembered for the turns that come after them."""


class Clients:
    """Send `arrivals` through `gateway`; `tell_ended` gets each request when it has its fate."""

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
        """What has arrived and not ended, by sequence number."""
        self.arrived = 0
        self.retried = 0
        """Times that a client has sent a request again."""
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        """How many requests have ended so."""
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._pending_arrivals = 0
        self._next_arrival_at: Seconds = 0.0
        self._thinking: list[Seconds] = []
        """Heap of the instants at which the next turns will be sent."""
        self._under_way: set[int] = set()
        """Indices of the requests that were sent, or are going to be, and have not ended."""
        self._waiting: dict[int, list[Arrival]] = {}
        """Index of a request under way -> the turns that wait for its answer."""
        self._ended_at: dict[int, Seconds] = {}
        """When the last ones ended, by index."""
        self._random_abort = Random(f"{seed}:abort")
        self._pull()

    @property
    def done(self) -> bool:
        """No request is under way and none will arrive."""
        return not self.requests and not self._pending_arrivals

    @property
    def next_sent_at(self) -> Seconds:
        """When the next request that is known of will be sent; infinite if there is none."""
        return min(self._next_arrival_at, self._thinking[0] if self._thinking else math.inf)

    def go_on(self, arrivals: Iterable[Arrival]) -> None:
        """Send these where all that was there before has been sent."""
        assert self._next_arrival_at == math.inf, "the arrivals before have come"
        self._arrivals = iter(arrivals)
        self._pull()

    def end(self, request: SimulatedRequest, fate: Fate) -> None:
        """The client of `request` has its answer, or none; it may ask again."""
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
        """Schedule the next arrival of the trace, if there is one."""
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
            # Its answer is there already, unless the trace has lost it.
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
        """The client asks again; a turn that waits for the answer goes on waiting."""
        pause_s = self._settings.clients.pause_before_s(request.retries)
        request.retries += 1
        self.retried += 1
        request.forget_attempt()
        self._gateway.take(request, pause_s)
