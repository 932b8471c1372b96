"""The queue of one picker: it connects flow control with sessions and the scheduler.

A session calls `enter` to place its request. `enter` returns the decision or the refusal at once, or
a `Place` in the queue. The session is resumed with the verdict later, never inside `enter`.

The queue has no clock and no loop. A `Waker` calls `pump` soon after an event that may make room, and
at the time when the wait of a request ends. While nothing waits, events cost nothing: the scheduler
reports them only as long as a request waits.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol, TypeAlias

from msgspec import Struct, structs

from epp.core.decision.account import Queued
from epp.core.decision.decision import Decision
from epp.core.decision.scheduler import Scheduler
from epp.core.duration import parse_duration
from epp.core.flow.bands import State, Ticket
from epp.core.flow.control import FlowControl, Verdicts
from epp.core.flow.settings import HELD_BY_PLUGINS, FlowSettings
from epp.core.knowledge.inflight import OUTPUT_TOKENS_ESTIMATE, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.messages import FIRST_TOKEN_HEADERS, FLOW_HEADERS, TTL_HEADER, first_of
from epp.core.protocol.waiting import Resume
from epp.core.types import Refusal, Seconds

OUTPUT_WEIGHT: Final = 2.0
"""Tokens of a prompt that a token of an answer counts as in the charge of a flow. VTC, AIBrix and
llm-d-router use this weight.
"""

FLOW_CHARACTERS_MAX: Final = 256
"""Maximum length of a flow's id; clients may send any length, and the rest is ignored."""

Result: TypeAlias = Decision | Refusal


class Waker(Protocol):
    """Calls `FlowQueue.pump` later."""

    def soon(self) -> None:
        """Call `pump` once after the present event; repeated calls before that have no effect."""
        ...

    def at(self, time_s: Seconds | None) -> None:
        """Call `pump` at `time_s` instead of the time that was set before; None to not call it."""
        ...


class FlowTotals(Struct):
    """Counts of the queue since the start of the picker."""

    outcomes: Counter[tuple[State, int]]
    """Number of requests that left the queue or did not have to wait, by state and priority."""
    waits: Counter[tuple[State, int]]
    """Number of requests that waited, by state and priority."""
    waited_s: dict[tuple[State, int], Seconds]
    """Sum of their waits in seconds."""


class BandSnapshot(Struct, frozen=True):
    """The waiting requests of one priority."""

    priority: int
    requests: int
    bytes: int
    flows: int
    oldest_wait_s: Seconds


class QueueSnapshot(Struct, frozen=True):
    """The state of the queue for one metrics page."""

    totals: FlowTotals
    bands: tuple[BandSnapshot, ...]
    saturation: float | None
    """Mean load of the endpoints at the last look, or None without a gate."""


class Place:
    """The place of one request in the queue."""

    __slots__ = ("_queue", "_resume", "ticket", "why")

    def __init__(self, queue: "FlowQueue", ticket: Ticket, resume: Resume, why: str) -> None:
        self._queue = queue
        self._resume = resume
        self.ticket = ticket
        self.why = why

    def cancel(self) -> None:
        """Leave the queue, because the stream ended; do nothing if the request has a verdict."""
        self._queue.leave(self)

    def resume(self, result: Result) -> None:
        self._resume(result)


class FlowQueue:
    """The queue of a picker, by the settings of its scheduler."""

    def __init__(self, scheduler: Scheduler, waker: Waker, now: Seconds) -> None:
        self._scheduler = scheduler
        self._waker = waker
        self._pool = _SchedulerPool(scheduler)
        self._settings = self._wanted() or HELD_BY_PLUGINS
        self.control = FlowControl(self._settings, self._pool, now)
        self.totals = FlowTotals(Counter(), Counter(), {})
        self._at_once: defaultdict[int, int] = defaultdict(int)
        """Number of requests that did not wait, by priority."""
        self._places: dict[int, Place] = {}
        """Places of the waiting tickets by their numbers."""
        self._owed: list[tuple[Place, Refusal]] = []
        """Verdicts of displaced requests, which are delivered by the next `pump`."""
        self._pumping = False

    def __repr__(self) -> str:
        return f"<FlowQueue {self.control!r}>"

    @property
    def active(self) -> bool:
        """Return whether requests may have to wait, by the present settings of the scheduler."""
        return self._wanted() is not None

    @property
    def wait_s_max(self) -> Seconds:
        """Return the longest wait in seconds in either state of the pool; 0 for no limit."""
        settings = self.control.settings
        limits_s = (settings.wait_s_max, settings.empty_pool_wait_s_max)
        return max(limits_s) if all(limits_s) else 0.0

    def enter(
        self,
        request: InferenceRequest,
        resume: Resume,
        now: Seconds,
        *,
        body_bytes: int = 0,
        answer_within_s: Seconds | None = None,
    ) -> Result | Place:
        """Place `request` or refuse it, or return its place in the queue.

        `resume` is called with the verdict later. `body_bytes` is what the picker stores for the
        request meanwhile. `answer_within_s` is the time after which the gateway gives up, or None.
        """
        control, scheduler = self.control, self._scheduler
        gate = scheduler.state.gate
        if not control.requests and (
            # The first condition saves most requests a call.
            (gate is not None and not scheduler.admission.may_hold and gate.certainly_open(request))
            or scheduler.admission.has_room(request, now)
        ):
            self._at_once[request.priority] += 1
            return scheduler.schedule(request, now)
        headers = request.headers
        ticket = Ticket(
            request=request,
            flow=first_of(headers, FLOW_HEADERS)[:FLOW_CHARACTERS_MAX],
            body_bytes=body_bytes,
            wait_s_max=_duration_s(headers.get(TTL_HEADER, "")),
            answer_within_s=answer_within_s,
            first_token_within_s=_milliseconds(first_of(headers, FIRST_TOKEN_HEADERS)),
        )
        own = None
        for verdict in control.enqueue(ticket, now):
            if verdict.ticket is ticket:
                own = verdict.result
                self.totals.outcomes[ticket.state, request.priority] += 1
            else:
                self._owe(verdict.ticket, verdict.result, now)
        if own is not None:
            assert isinstance(own, Decision | Refusal)
            return own
        why = self._scheduler.admission.why_full(request, now)
        place = self._places[ticket.number] = Place(self, ticket, resume, why)
        self._scheduler.changed = self._waker.soon
        self._waker.soon()
        return place

    def leave(self, place: Place) -> None:
        """Remove the request at `place` from the queue; do nothing if it has a verdict."""
        ticket = place.ticket
        if self.control.cancel(ticket):
            del self._places[ticket.number]
            self.totals.outcomes[State.CANCELLED, ticket.request.priority] += 1
            self._waker.soon()
        self._owed = [entry for entry in self._owed if entry[0] is not place]

    def pump(self, now: Seconds) -> None:
        """Place what has room, refuse what has waited too long, and resume both."""
        # A request that is resumed may end another one, and the waker may be called from there.
        if self._pumping:
            self._waker.soon()
            return
        self._pumping = True
        try:
            owed, self._owed = self._owed, []
            for place, refusal in owed:
                place.resume(refusal)
            self._deliver(self.control.expire(now), now)
        finally:
            self._pumping = False
            self._rest(now)

    def configure(self, now: Seconds) -> None:
        """Apply the present settings of the scheduler. Waiting requests move to their new bands, or
        are placed if requests no longer wait.
        """
        wanted = self._wanted()
        if wanted is None:
            self._deliver(self.control.release(now), now)
        self._settings = wanted or HELD_BY_PLUGINS
        self.control.configure(self._settings, now)
        if self.control.requests:
            self._waker.soon()

    def drain(self, now: Seconds) -> None:
        """Refuse all waiting requests, and from now on each that would have to wait, because the
        picker shuts down.
        """
        self._deliver(self.control.drain(), now)
        self._rest(now)

    def settled(self, place: Place, outcome: Outcome, now: Seconds) -> None:
        """Correct the charge of the request at `place`, which was placed and has ended."""
        if outcome.output_tokens is None:
            return
        ticket = place.ticket
        estimate = self._pool.answer_tokens(ticket.request)
        more = OUTPUT_WEIGHT * (outcome.output_tokens - estimate)
        self.control.settled(ticket, max(1.0, ticket.charged_tokens + more), now)

    def know_priorities(self, priorities: Iterable[int]) -> None:
        """Note the priorities that objectives give to requests."""
        if self._scheduler.state.gate is not None:
            self._scheduler.state.gate.know_priorities(priorities)

    def snapshot(self, now: Seconds) -> QueueSnapshot | None:
        """Return the state of the queue, or None if requests do not wait."""
        if not self.active:
            return None
        gate = self._scheduler.state.gate
        bands = tuple(
            BandSnapshot(
                priority,
                band.requests,
                band.bytes,
                band.flows,
                max(
                    (now - ticket.enqueued_at_s for ticket in islice(band.tickets(), 1)), default=0
                ),
            )
            for priority, band in self.control.bands()
        )
        outcomes = Counter(self.totals.outcomes)
        for priority, count in self._at_once.items():
            outcomes[State.PLACED, priority] += count
        totals = FlowTotals(outcomes, self.totals.waits, self.totals.waited_s)
        return QueueSnapshot(totals, bands, None if gate is None else gate.saturation)

    def _wanted(self) -> FlowSettings | None:
        scheduler = self._scheduler
        if scheduler.settings.flow is not None:
            return scheduler.settings.flow
        return HELD_BY_PLUGINS if scheduler.admission.may_hold else None

    def _deliver(self, verdicts: Verdicts, now: Seconds) -> None:
        """Resume the sessions of tickets that have a verdict."""
        for verdict in verdicts:
            ticket, result = verdict.ticket, verdict.result
            place = self._places.pop(ticket.number)
            self._count(ticket, now)
            if isinstance(result, Decision):
                place.resume(_with_wait(result, place, now))
            elif isinstance(result, Refusal):
                place.resume(result)

    def _owe(self, ticket: Ticket, result: object, now: Seconds) -> None:
        assert isinstance(result, Refusal), "a displaced request is refused"
        self._count(ticket, now)
        self._owed.append((self._places.pop(ticket.number), result))

    def _count(self, ticket: Ticket, now: Seconds) -> None:
        key = ticket.state, ticket.request.priority
        self.totals.outcomes[key] += 1
        self.totals.waits[key] += 1
        waited_s = self.totals.waited_s
        waited_s[key] = waited_s.get(key, 0.0) + now - ticket.enqueued_at_s

    def _rest(self, now: Seconds) -> None:
        """Set when the queue is pumped again."""
        if not self.control.requests:
            self._scheduler.changed = None
            self._waker.at(None)
            return
        wake_s = self.control.next_wake(now)
        if wake_s is not None and wake_s <= now:
            self._waker.soon()
        else:
            self._waker.at(wake_s)


def _duration_s(text: str) -> Seconds | None:
    """Return the duration of a header in seconds, or None if it is missing, malformed or not above
    0.
    """
    try:
        seconds = float(parse_duration(text)) if text else 0.0
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def _milliseconds(text: str) -> Seconds | None:
    """Return the milliseconds of a header in seconds, or None if they are missing, malformed or not
    above 0.
    """
    try:
        seconds = float(text) / 1000.0 if text else 0.0
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def _with_wait(decision: Decision, place: Place, now: Seconds) -> Decision:
    """Return `decision` with the wait of its request in the decision record."""
    ticket = place.ticket
    queued = Queued(
        waited_s=now - ticket.enqueued_at_s,
        flow=ticket.flow,
        priority=ticket.request.priority,
        ahead=ticket.ahead,
        charged_tokens=ticket.charged_tokens,
        why=place.why,
    )
    return structs.replace(decision, account=structs.replace(decision.account, queued=queued))


class _SchedulerPool:
    """The scheduler as flow control sees it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def is_empty(self, now: Seconds) -> bool:
        return not len(self._scheduler.pool.ready(None, now))

    def has_room(self, request: InferenceRequest, now: Seconds) -> bool:
        return self._scheduler.admission.has_room(request, now)

    def place(self, request: InferenceRequest, now: Seconds) -> Result:
        return self._scheduler.schedule(request, now)

    def cost_tokens(self, request: InferenceRequest, decision: object) -> float:
        assert isinstance(decision, Decision)
        legs = decision.account.legs
        uncached = sum(leg.lease.uncached_tokens for leg in legs)
        return max(1.0, uncached + OUTPUT_WEIGHT * self.answer_tokens(request))

    def answer_tokens(self, request: InferenceRequest) -> float:
        """Return the estimated number of tokens of the answer to `request`."""
        estimate = self._scheduler.answer_lengths.tokens or float(OUTPUT_TOKENS_ESTIMATE)
        limit = request.output_tokens_max
        return estimate if limit is None else min(estimate, float(limit))

    def why_full(self, request: InferenceRequest, now: Seconds) -> str:
        return self._scheduler.admission.why_full(request, now)
