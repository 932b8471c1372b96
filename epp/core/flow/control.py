"""The state machine of flow control. It has no clock: each call gives the time.

A request that no endpoint has room for waits in the band of its priority. `pump` places the waiting
requests, by default higher bands first, as soon as the gate sees room for them. The decision is made inside
the same step. A decision therefore sees all decisions before it, and no request is released for
room that another one has taken.
"""

import heapq
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from msgspec import Struct

from epp.core.flow.agent_admission import Rank
from epp.core.flow.bands import Band, State, Ticket
from epp.core.flow.drain_rate import DrainRate
from epp.core.flow.eviction import EVICT_AFTER_S, PAUSE_S, Evictions
from epp.core.flow.settings import FlowSettings
from epp.core.flow.shares import FlowShares
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal, RefusalReason, Seconds

PLACED_MAX: Final = 64
"""Maximum number of waiting requests that are placed at once (in one call, or after one eviction),
and maximum number that one call refuses because they have waited too long. `next_wake` then asks for another call at once, so that a burst
does not block the event loop.
"""
HEADS_MAX: Final = 16
"""Maximum number of flows of a band whose next request is compared with the gate to place one
request, and of requests of one flow that may be placed instead of its next one. It is also the
number of the oldest requests of a band for which others are evicted.
"""
EVICTED_MAX: Final = 16
"""Maximum number of running requests that one call of `pump` evicts."""


_SHUTTING_DOWN: Final = Refusal(
    reason=RefusalReason.SHUTTING_DOWN,
    status=503,
    message="the picker shuts down, and another replica may take the request",
)


class Pool(Protocol):
    """The interface through which flow control asks about the endpoints and places a request."""

    def is_empty(self, now: Seconds) -> bool:
        """Return whether no endpoint is ready."""
        ...

    def has_room(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` need not wait, usually because an endpoint that may serve it has
        room for its priority.
        """
        ...

    def hold_s(self, request: InferenceRequest, now: Seconds) -> Seconds:
        """Return how long `request` should wait for an endpoint that has no room but more of its
        prompt cached than those with room.
        """
        ...

    def ranks(self, tickets: Sequence[Ticket], now: Seconds) -> Sequence[Rank]:
        """Return the rank of each of `tickets` in a band of agent sessions."""
        ...

    def admits(self, request: InferenceRequest, waited_s: Seconds, now: Seconds) -> bool:
        """Return whether the session of `request`, which is not admitted, may be admitted after a
        wait of `waited_s`.
        """
        ...

    def saturation(self, request: InferenceRequest, now: Seconds) -> float:
        """Return the mean load of the endpoints that may serve `request`; 1.0 is full."""
        ...

    def place(self, request: InferenceRequest, now: Seconds) -> object:
        """Place `request` now. Return the decision, or a `Refusal`."""
        ...

    def cost_tokens(self, request: InferenceRequest, decision: object) -> float:
        """Return the tokens that the flow of `request` is charged for `decision`, above 0."""
        ...

    def why_full(self, request: InferenceRequest, now: Seconds) -> str:
        """Return a phrase about the endpoints that have no room, for a refusal."""
        ...

    def slots_for(self, request: InferenceRequest, now: Seconds) -> Collection[int]:
        """Return the slots of the endpoints that may serve `request` once they have room."""
        ...


class Verdict(Struct, frozen=True):
    """The result of a request's wait in flow control: its ticket, and the decision or refusal."""

    ticket: Ticket
    result: object
    """The decision, or the `Refusal` for the client; None if the client left."""


Verdicts = list[Verdict]


class FlowControl:
    """The picker's queue. A caller must call `pump` soon after each event that may make room, after each
    `enqueue` of a ticket that waits and after each `cancel`; and `expire` at `next_wake`.

    Every ticket gets exactly one verdict, from whichever call causes it.
    """

    def __init__(
        self, settings: FlowSettings, pool: Pool, now: Seconds, shares: FlowShares | None = None
    ) -> None:
        self.settings = settings
        self._shares = shares or FlowShares()
        self.requests = 0
        """Number of waiting tickets."""
        self.bytes = 0
        """Number of body bytes of all waiting tickets."""
        self.evictions = Evictions()
        self._pool = pool
        self._bands: dict[int, Band] = {}
        """Bands of all priorities that tickets had since the last `configure`, by priority, highest
        first.
        """
        self._numbers = 0
        self._limited: list[tuple[Seconds, int, Ticket]] = []
        """Heap of (time of the end, number, ticket) of tickets that have a limit of their own;
        tickets that wait no longer may still be in it.
        """
        self._empty_pool = pool.is_empty(now)
        self._since_s = now
        """Time at which the pool became empty or got its first endpoint again."""
        self._draining = False
        self._rate = DrainRate()
        self._held_until_s: Seconds = math.inf
        """Time until which no ticket that left room to others in the last pump takes it; inf if none
        did.
        """
        self._again_at_s: Seconds | None = None
        """Time of the last pump if it stopped at `PLACED_MAX` or `EVICTED_MAX`, so that another
        pump is due at once; None otherwise.
        """

    def __repr__(self) -> str:
        return f"<FlowControl [{self.requests} requests wait, {self.bytes} bytes]>"

    def bands(self) -> Iterator[tuple[int, Band]]:
        """Yield the priority and the band of each priority that a ticket had since the last
        `configure`, whether or not it waited, highest priority first.
        """
        return iter(self._bands.items())

    def enqueue(self, ticket: Ticket, now: Seconds) -> Verdicts:
        """Place `ticket`, let it wait, or refuse it. Return its verdict, if it has one, after those
        of the tickets that it displaced.

        Raises `ValueError` if the ticket is not new.
        """
        if ticket.state is not State.NEW:
            raise ValueError(f"the ticket is {ticket.state}, expected {State.NEW}")
        ticket.enqueued_at_s = now
        priority = self._priority_of(ticket)
        band = self._band(priority)
        self._note_pool(now)
        waits = not self._empty_pool or self.settings.waits_for_endpoints
        if not waits or self._goes_at_once(ticket, band, priority, now):
            return [self._place(ticket, band, now)]
        verdicts: Verdicts = []
        self._add_charges(now)
        if self._draining:
            return [_refused(ticket, State.DRAINED, _SHUTTING_DOWN)]
        if band.is_full(ticket.body_bytes) or not self._make_space(ticket, verdicts, now):
            return [*verdicts, _refused(ticket, State.REFUSED, self._no_space(ticket, now))]
        self._numbers += 1
        ticket.number = self._numbers
        ticket.ahead = self.requests
        ticket.behind, ticket.behind_requests = band.loudest
        ticket.state = State.WAITING
        if not self.requests:
            self._rate.begin(now)
        self._add(ticket, band, now)
        return verdicts

    def cancel(self, ticket: Ticket) -> Verdicts:
        """Remove `ticket`, because its client left; do nothing if it has a verdict already."""
        if ticket.state is not State.WAITING:
            return []
        self._take_out(ticket)
        ticket.state = State.CANCELLED
        return [Verdict(ticket, None)]

    def pump(self, now: Seconds) -> Verdicts:
        """Place waiting tickets while there is room, and return their verdicts. Evict running requests
        for those that have waited long, if the settings allow.
        """
        verdicts = self._place_waiting(now)
        if not (self.settings.evicts and self.requests and self.evictions):
            return verdicts
        for _ in range(EVICTED_MAX):
            if self._again_at_s is not None or not self._evict(now):
                return verdicts
            placed = self._place_waiting(now)
            if not placed:
                self.evictions.paused_until_s = now + PAUSE_S
                return verdicts
            verdicts += placed
        self._again_at_s = now
        return verdicts

    def _place_waiting(self, now: Seconds) -> Verdicts:
        """Place waiting tickets while there is room, and return their verdicts."""
        self._note_pool(now)
        self._add_charges(now)
        self._again_at_s, self._held_until_s = None, math.inf
        verdicts: Verdicts = []
        if self._empty_pool:
            return verdicts
        weights = self._weights(now)
        closed: set[int] = set()
        while (at := self._turn(weights, closed)) is not None:
            band = self._bands[at]
            ticket = self._next_of(band, now)
            if ticket is None:
                if weights is None and band.flows > HEADS_MAX and not band.of_agents:
                    # A flow that was not looked at may have room, which no lower band may take.
                    break
                closed.add(at)
                continue
            if len(verdicts) == PLACED_MAX:
                self._again_at_s = now
                break
            self._take_out(ticket)
            self._rate.placed(now)
            verdicts.append(self._place(ticket, band, now))
            if weights is not None:
                band.counter += ticket.charged_tokens / weights[at]
            band.forget_idle()
        return verdicts

    def expire(self, now: Seconds) -> Verdicts:
        """Place what has room now, then refuse the tickets that have waited too long, at most
        `PLACED_MAX` in one call. Return their verdicts.
        """
        verdicts = self.pump(now)
        late: list[Ticket] = []
        for _, band in self._in_order():
            for ticket in islice(band.tickets(), PLACED_MAX - len(late)):
                if self._end_in(band, ticket) > now:
                    break
                late.append(ticket)
        while len(late) < PLACED_MAX and self._limited and self._limited[0][0] <= now:
            _, _, ticket = heapq.heappop(self._limited)
            if ticket.state is State.WAITING and self._own_end_s(ticket) <= now:
                late.append(ticket)
        # The refusals count all that wait, so they come first.
        refusals = {ticket: self._expired(ticket, now) for ticket in late}
        for ticket, refusal in refusals.items():
            self._take_out(ticket)
            verdicts.append(_refused(ticket, State.EXPIRED, refusal))
        return verdicts

    def next_wake(self, now: Seconds) -> Seconds | None:
        """Return the time until which no call of `expire` is needed, or None if no request waits or
        no wait has a limit.
        """
        if self._again_at_s is not None:
            return now
        if not self.requests:
            return None
        ends_s = [self._end_in(band, next(band.tickets())) for _, band in self._in_order()]
        while self._limited and self._limited[0][2].state is not State.WAITING:
            heapq.heappop(self._limited)
        if self._limited:
            ends_s.append(max(now, self._limited[0][0]))
        if self.settings.evicts and self.evictions and not self._empty_pool:
            ends_s += self._next_evictions_s(now)
        end_s = min(*ends_s, max(now, self._held_until_s))
        return None if end_s == math.inf else end_s

    def settled(self, ticket: Ticket, tokens: float, now: Seconds) -> None:
        """Correct what the flow of a placed `ticket` was charged to the `tokens` that it used."""
        band = self._bands.get(self._priority_of(ticket))
        if band is not None:
            band.correct(ticket, tokens, now)

    def configure(self, settings: FlowSettings, now: Seconds) -> None:
        """Apply `settings`. Waiting tickets move to their new bands and keep the time since which
        they wait, also above a lowered limit. All charges of flows are forgotten.
        """
        waiting = [ticket for _, band in self._in_order() for ticket in band.tickets()]
        self.settings = settings
        self._bands.clear()
        self._limited.clear()
        self.requests = self.bytes = self._shares.waiting = 0
        for ticket in sorted(waiting, key=lambda ticket: ticket.number):
            self._add(ticket, self._band(self._priority_of(ticket)), now)

    def drain(self) -> Verdicts:
        """Refuse all waiting tickets, and each later one that would have to wait, because the picker
        shuts down.
        """
        self._draining = True
        verdicts: Verdicts = []
        for _, band in self._in_order():
            for ticket in tuple(band.tickets()):
                self._take_out(ticket)
                verdicts.append(_refused(ticket, State.DRAINED, _SHUTTING_DOWN))
        return verdicts

    def release(self, now: Seconds) -> Verdicts:
        """Place at most `PLACED_MAX` waiting tickets whether there is room or not, oldest first in
        each band, because flow control is switched off. Call it again while any waits.
        """
        verdicts: Verdicts = []
        for _, band in self._in_order():
            for ticket in tuple(islice(band.tickets(), PLACED_MAX - len(verdicts))):
                self._take_out(ticket)
                verdicts.append(self._place(ticket, band, now))
        return verdicts

    def _priority_of(self, ticket: Ticket) -> int:
        return ticket.request.priority if self.settings.by_priority else 0

    def _band(self, priority: int) -> Band:
        band = self._bands.get(priority)
        if band is None:
            self._bands[priority] = band = Band(
                self.settings.band(priority), priority, self._shares
            )
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        return band

    def _in_order(self) -> Iterator[tuple[int, Band]]:
        """Yield priority and band of the bands with waiting tickets, highest priority first."""
        return (entry for entry in tuple(self._bands.items()) if entry[1].requests)

    def _weights(self, now: Seconds) -> Mapping[int, float] | None:
        """Return the weights by which the waiting bands share the room, or None if a higher band is
        served first.
        """
        if not self.settings.selection.shares or not self.requests:
            return None
        waiting = list(self._in_order())
        first = next(waiting[0][1].tickets()).request
        saturation = self._pool.saturation(first, now)
        weights: Mapping[int, float] | None = self.settings.selection.weights(
            saturation, [priority for priority, _ in waiting]
        )
        return weights

    def _turn(self, weights: Mapping[int, float] | None, closed: Container[int]) -> int | None:
        """Return the priority of the waiting band that is next, without those in `closed`, or None
        if there is none.
        """
        waiting = [entry for entry in self._in_order() if entry[0] not in closed]
        if weights is not None:
            waiting.sort(key=lambda entry: entry[1].counter)
        return waiting[0][0] if waiting else None

    def _waits_before(self, priority: int) -> bool:
        """Return whether a request waits whose turn may come before that of a new one with
        `priority`.
        """
        if not self.requests or self.settings.selection.shares:
            return bool(self.requests)
        return any(band.requests for at, band in self._bands.items() if at >= priority)

    def _goes_at_once(self, ticket: Ticket, band: Band, priority: int, now: Seconds) -> bool:
        """Return whether the new `ticket` need not wait in `band`."""
        if self._empty_pool:
            return False
        if self._waits_before(priority) and not self._passes(ticket, band, priority, now):
            return False
        if band.of_agents and not self._admits(ticket, now):
            return False
        return self._pool.has_room(ticket.request, now) and not self._is_held(ticket, now)

    def _is_held(self, ticket: Ticket, now: Seconds) -> bool:
        """Return whether `ticket` leaves the room to others, because it waits for an endpoint that
        has more of its prompt cached. Note since when it does, and until when at most.
        """
        hold_s = self._pool.hold_s(ticket.request, now)
        if not hold_s:
            return False
        if ticket.held_since_s is None:
            ticket.held_since_s = now
        until_s = ticket.held_since_s + hold_s
        if now >= until_s:
            return False
        self._held_until_s = min(self._held_until_s, until_s)
        return True

    def _passes(self, ticket: Ticket, band: Band, priority: int, now: Seconds) -> bool:
        """Return whether the new `ticket` belongs to an admitted agent session and only sessions
        that are not admitted wait before it.
        """
        if not band.of_agents or self.settings.selection.shares or self._rank(ticket, now):
            return False
        if any(other.requests for at, other in self._bands.items() if at > priority):
            return False
        first = next(band.heads(1, now, self._ranks(now)), None)
        return first is None or self._rank(first, now) > Rank.ADMITTED

    def _rank(self, ticket: Ticket, now: Seconds) -> Rank:
        return self._pool.ranks((ticket,), now)[0]

    def _ranks(self, now: Seconds) -> Callable[[Sequence[Ticket]], Sequence[Rank]]:
        return lambda tickets: self._pool.ranks(tickets, now)

    def _admits(self, ticket: Ticket, now: Seconds) -> bool:
        if self._rank(ticket, now) is Rank.ADMITTED:
            return True
        return self._pool.admits(ticket.request, now - ticket.enqueued_at_s, now)

    def _next_of(self, band: Band, now: Seconds) -> Ticket | None:
        """Return the first ticket of `band`, in the order in which its flows take turns, that may
        be placed now. Return None if there is none, or if an agent session before it waits for
        admission.
        """
        if not band.requests:
            return None
        held = False
        for ticket in band.heads(HEADS_MAX, now, self._ranks(now)):
            if band.of_agents and not self._admits(ticket, now):
                if ticket.request.subset is None:
                    # Later sessions must not take the room for which this one waits.
                    return None
                continue
            if self._pool.has_room(ticket.request, now):
                if not self._is_held(ticket, now):
                    return ticket
                # To look behind every held request would take long.
                other = None if held else self._unheld_behind(band, ticket, now)
                if other is not None:
                    return other
                held = True
                continue
            # The endpoints of its subset are full, which need not hold for others of its flow.
            if ticket.request.subset is not None:
                other = self._behind(band, ticket, now)
                if other is not None:
                    return other
        return None

    def _behind(self, band: Band, head: Ticket, now: Seconds) -> Ticket | None:
        """Return the first ticket in the flow of `head` that has room and another subset hint than
        `head`, or None if there is none.
        """
        full = {head.request.subset}
        for ticket in islice(band.of_flow(head), HEADS_MAX):
            subset = ticket.request.subset
            if subset in full:
                continue
            if self._pool.has_room(ticket.request, now):
                return ticket
            full.add(subset)
        return None

    def _unheld_behind(self, band: Band, head: Ticket, now: Seconds) -> Ticket | None:
        """Return the first ticket in the flow of `head` that may take the room which `head` leaves to
        it, or None.
        """
        for ticket in islice(band.of_flow(head), HEADS_MAX):
            if ticket is head or not self._pool.has_room(ticket.request, now):
                continue
            if not self._is_held(ticket, now):
                return ticket
        return None

    def _evict(self, now: Seconds) -> bool:
        """Evict one running request for a ticket of higher priority that has waited long enough.
        Return False if there is no such ticket or request, or while evictions pause.
        """
        if self._empty_pool or now < self.evictions.paused_until_s:
            return False
        for priority, band in self._in_order():
            if not self.evictions.any_below(priority):
                break
            for ticket in islice(band.tickets(), HEADS_MAX):
                if now < self._evicts_from_s(ticket, band):
                    break
                slots = self._pool.slots_for(ticket.request, now)
                victim = self.evictions.victim(priority, slots)
                if victim is not None:
                    self.evictions.end(victim, self._evicted_for(ticket, victim.priority, now))
                    return True
        return False

    def _evicts_from_s(self, ticket: Ticket, band: Band) -> Seconds:
        """Return the time from which `ticket`, which waits in `band`, may have a running request
        evicted. It is the time of its arrival if the next request would be refused for lack of space.
        """
        arrived_s = ticket.enqueued_at_s
        if band.is_full(0) or self._exceeds(self.requests + 1, self.bytes, 0):
            return arrived_s
        longest_s = self._own_end_s(ticket) - arrived_s
        budget_s = self.settings.budget_s(band.settings, empty_pool=False)
        if budget_s:
            longest_s = min(longest_s, budget_s)
        return arrived_s + min(EVICT_AFTER_S, longest_s / 2.0)

    def _next_evictions_s(self, now: Seconds) -> list[Seconds]:
        """Return the later times at which a band may have a running request evicted."""
        bands = (entry for entry in self._in_order() if self.evictions.any_below(entry[0]))
        from_s = [self._evicts_from_s(next(band.tickets()), band) for _, band in bands]
        times_s = [max(one, self.evictions.paused_until_s) for one in from_s]
        return [time_s for time_s in times_s if time_s > now]

    def _place(self, ticket: Ticket, band: Band, now: Seconds) -> Verdict:
        result = self._pool.place(ticket.request, now)
        if isinstance(result, Refusal):
            ticket.state = State.REFUSED
        else:
            ticket.state = State.PLACED
            band.charge(ticket, self._pool.cost_tokens(ticket.request, result), now)
        return Verdict(ticket, result)

    def _add(self, ticket: Ticket, band: Band, now: Seconds) -> None:
        if not band.requests:
            # A band gains nothing by having been idle.
            counters = [each.counter for _, each in self._in_order()]
            band.counter = max(band.counter, min(counters, default=0.0))
        band.add(ticket, self.settings.budget_s(band.settings, empty_pool=False), now)
        self.requests += 1
        self.bytes += ticket.body_bytes
        self._shares.waiting = self.requests
        if ticket.wait_s_max is not None or ticket.answer_within_s is not None:
            heapq.heappush(self._limited, (self._own_end_s(ticket), ticket.number, ticket))

    def _take_out(self, ticket: Ticket) -> None:
        self._bands[self._priority_of(ticket)].remove(ticket)
        self.requests -= 1
        self.bytes -= ticket.body_bytes
        self._shares.waiting = self.requests
        if len(self._limited) > 2 * self.requests + PLACED_MAX:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Keep the heap of limits as small as the queue, however late its limits end."""
        self._limited = [entry for entry in self._limited if entry[2].state is State.WAITING]
        heapq.heapify(self._limited)

    def _end_in(self, band: Band, ticket: Ticket) -> Seconds:
        """Return the time at which the settings end the wait of `ticket` in `band`; inf for never."""
        budget_s = self.settings.budget_s(band.settings, empty_pool=self._empty_pool)
        return max(ticket.enqueued_at_s, self._since_s) + (budget_s or math.inf)

    def _own_end_s(self, ticket: Ticket) -> Seconds:
        """Return the time at which the ticket's own limits end its wait.

        The limit that the client asked for does not apply while the pool is empty.
        """
        ends_s = []
        if ticket.answer_within_s is not None:
            ends_s.append(ticket.enqueued_at_s + ticket.answer_within_s)
        if ticket.wait_s_max is not None and not self._empty_pool:
            ends_s.append(max(ticket.enqueued_at_s, self._since_s) + ticket.wait_s_max)
        return min(ends_s, default=math.inf)

    def _make_space(self, ticket: Ticket, verdicts: Verdicts, now: Seconds) -> bool:
        """Displace the newest tickets of lower bands until `ticket` fits into the limits of the whole
        queue. Return False, without displacing any, if it cannot fit.
        """
        requests, size = self.requests, self.bytes
        more = ticket.body_bytes
        if not self._exceeds(requests + 1, size + more, more):
            return True
        own = self._priority_of(ticket)
        below = (band for priority, band in reversed(self._bands.items()) if priority < own)
        displaced: list[Ticket] = []
        for each in (each for band in below for each in band.newest_first()):
            displaced.append(each)
            requests -= 1
            size -= each.body_bytes
            if not self._exceeds(requests + 1, size + more, more):
                break
        else:
            return False
        for each in displaced:
            self._take_out(each)
            verdicts.append(_refused(each, State.DISPLACED, self._no_space(each, now)))
        return True

    def _exceeds(self, requests: int, size: int, body_bytes: int) -> bool:
        """Return whether a queue with so many requests and bytes exceeds this picker's share of the
        limits of the whole queue, or its own memory. `size` includes `body_bytes` of the last
        request.
        """
        settings, shares = self.settings, self._shares
        if settings.memory_bytes_max and size > settings.memory_bytes_max:
            return True
        if settings.requests_max and requests > shares.share_of(settings.requests_max):
            return True
        used = size - body_bytes
        return bool(
            settings.bytes_max and shares.exceeds_bytes(used, body_bytes, settings.bytes_max)
        )

    def _add_charges(self, now: Seconds) -> None:
        """Add the charges that other pickers reported to the flows of every band."""
        if self._shares.fresh:
            charges = self._shares.take_fresh()
            for band in self._bands.values():
                band.add_charges(charges, now)

    def _note_pool(self, now: Seconds) -> None:
        """Restart the maximum wait of all waiting tickets if the pool became empty, or is no longer
        empty.
        """
        empty = self._pool.is_empty(now)
        if empty == self._empty_pool:
            return
        self._empty_pool, self._since_s = empty, now
        limited = (entry[2] for entry in self._limited if entry[2].state is State.WAITING)
        self._limited = [(self._own_end_s(each), each.number, each) for each in limited]
        heapq.heapify(self._limited)

    def _expired(self, ticket: Ticket, now: Seconds) -> Refusal:
        waited_s = now - ticket.enqueued_at_s
        if self._empty_pool:
            return Refusal(
                reason=RefusalReason.NO_ENDPOINTS,
                status=503,
                message=f"waited {waited_s:.1f} s, and the pool has no ready endpoint",
            )
        return Refusal(
            reason=RefusalReason.WAIT_EXPIRED,
            status=429,
            message=f"waited {waited_s:.1f} s: {self._pool.why_full(ticket.request, now)}",
            retry_after_s=self._retry_after_s(self._priority_of(ticket), now),
        )

    def _no_space(self, ticket: Ticket, now: Seconds) -> Refusal:
        """Return the refusal of a request for which the queue has no space."""
        if self._empty_pool:
            return Refusal(
                reason=RefusalReason.NO_ENDPOINTS,
                status=503,
                message="the pool has no ready endpoint, and the picker's queue has no space for the request",
            )
        why = self._pool.why_full(ticket.request, now)
        return Refusal(
            reason=RefusalReason.SATURATED,
            status=429,
            message=f"{why}, and the picker's queue has no space for the request: {self.requests} "
            "requests wait in it",
            retry_after_s=self._retry_after_s(self._priority_of(ticket), now),
        )

    def _evicted_for(self, ticket: Ticket, priority: int, now: Seconds) -> Refusal:
        """Return the refusal of a running request of `priority` that is evicted for `ticket`."""
        waited_s = now - ticket.enqueued_at_s
        return Refusal(
            reason=RefusalReason.EVICTED,
            status=429,
            message=f"evicted before its response began, for a request of priority "
            f"{ticket.request.priority} that has waited {waited_s:.1f} s",
            retry_after_s=self._retry_after_s(priority, now),
        )

    def _retry_after_s(self, own: int, now: Seconds) -> int:
        """Return the `retry-after` of a refused request of priority `own`: the time until the requests
        that wait now in its band and above are expected to be placed.
        """
        before = sum(band.requests for priority, band in self._bands.items() if priority >= own)
        return self._rate.retry_after_s(before, now)


def _refused(ticket: Ticket, state: State, refusal: Refusal) -> Verdict:
    ticket.state = state
    return Verdict(ticket, refusal)
