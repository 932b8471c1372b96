"""The queue of one picker: it connects flow control with sessions and the scheduler.

A session calls `enter` to place its request. `enter` returns the decision or the refusal at once, or
a `Place` in the queue. The session is resumed with the verdict later, never inside `enter`.

The queue has no clock and no loop. A `Waker` calls `pump` soon after an event that may make room, and
at the time when the wait of a request ends. While nothing waits, events cost nothing: the scheduler
reports them only as long as a request waits.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, TypeAlias, final

from msgspec import Struct, field, structs

from epp.core.decision.account import Queued
from epp.core.decision.decision import Decision
from epp.core.decision.scheduler import Scheduler
from epp.core.duration import parse_duration
from epp.core.flow.agent_admission import AgentAdmission, Rank
from epp.core.flow.bands import State, Ticket
from epp.core.flow.control import FlowControl, Verdicts
from epp.core.flow.eviction import Running
from epp.core.flow.settings import HELD_BY_PLUGINS, Fairness, FlowSettings
from epp.core.flow.uses import FlowUses
from epp.core.knowledge.agent_sessions import AgentSessions, SessionCounts, Standing
from epp.core.knowledge.inflight import OUTPUT_TOKENS_ESTIMATE, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.messages import FIRST_TOKEN_HEADERS, FLOW_HEADERS, TTL_HEADER, first_of
from epp.core.protocol.waiting import Resume
from epp.core.types import Refusal, Seconds

OUTPUT_WEIGHT: Final = 2.0
"""Tokens of a prompt that a token of an answer counts as in the charge of a flow. VTC, AIBrix and
llm-d-router use this weight.
"""

_ANY_REQUEST: Final = InferenceRequest(request_id="")
"""Request that any endpoint may serve, for the saturation of the whole pool."""
FLOWS_SHOWN: Final = 8
"""Maximum number of flows of a band that `waiting_flows` returns."""
FLOW_CHARACTERS_MAX: Final = 256
"""Maximum length of a flow's id; clients may send any length, and the rest is ignored."""

Result: TypeAlias = Decision | Refusal


class Waker(Protocol):
    """A timer that calls `FlowQueue.pump` after the present event or at a given time."""

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
    """Number of requests that waited until they were placed or refused, by state and priority;
    cancelled ones do not count.
    """
    waited_s: dict[tuple[State, int], Seconds]
    """Sum of the waits, in seconds, of the requests that are counted in `waits`, by state and
    priority.
    """


class WaitingFlow(Struct, frozen=True):
    """The number of waiting requests of one flow of a band, for operators."""

    flow: str
    """Id of the flow, or "" for the requests without one."""
    requests: int
    oldest_wait_s: Seconds


class BandSnapshot(Struct, frozen=True):
    """The state of a band for one metrics page: its waiting requests, their flows and waits."""

    priority: int
    requests: int
    bytes: int
    flows: int
    oldest_wait_s: Seconds
    light_wait_ratio: float | None = None
    """Mean wait of the flows that used little, relative to that of all flows of the band, or None if
    it is unknown (`FlowUses`).
    """


class QueueSnapshot(Struct, frozen=True):
    """The state of the queue for one metrics page."""

    totals: FlowTotals
    bands: tuple[BandSnapshot, ...]
    saturation: float | None
    """Mean load of the endpoints of the fullest stage, or None without a gate."""
    evicted: Mapping[int, int] = field(default_factory=dict)
    """Number of evicted requests since the start of the picker, by priority; empty if none was."""
    agents: SessionCounts | None = None
    """Counts of the agent sessions, or None if the queue does not admit sessions."""
    agents_waiting: int = 0
    """Number of agent sessions with a waiting request; the requests of a band without a session
    count as one.
    """


@final
class Place:
    """The place of one request in the queue. The session keeps it until the response ends, so it
    stores neither the prompts nor a reference to the session once the request has a verdict.
    """

    __slots__ = ("_queue", "_resume", "ticket", "why")

    def __init__(self, queue: "FlowQueue", ticket: Ticket, resume: Resume, why: str) -> None:
        self._queue = queue
        self._resume: Resume | None = resume
        self.ticket = ticket
        self.why = why

    def cancel(self) -> None:
        """Leave the queue, because the stream ended; do nothing if the request has a verdict."""
        self._queue.leave(self)

    def resume(self, result: Result) -> None:
        """Pass the verdict to the session, unless it has left."""
        resume = self._resume
        self.release()
        if resume is not None:
            resume(result)

    def release(self) -> None:
        """Drop the prompts and the reference to the session, because the request has a verdict."""
        self._resume = None
        self.ticket.request = self.ticket.request.without_prompts()


class FlowQueue:
    """The queue of a picker, by the settings of its scheduler."""

    def __init__(
        self, scheduler: Scheduler, waker: Waker, now: Seconds, *, bytes_max: int = 0
    ) -> None:
        """Create the queue. `bytes_max` is the maximum size in bytes of the bodies of all waiting
        requests, beside the limits in the settings; 0 for no limit.
        """
        self._bytes_max = bytes_max
        self._scheduler = scheduler
        self._waker = waker
        self._pool = _SchedulerPool(scheduler)
        self._settings = self._wanted() or HELD_BY_PLUGINS
        self._agents = self._settings.agents
        self.control = FlowControl(self._settings, self._pool, now, scheduler.state.shares)
        self.totals = FlowTotals(Counter(), Counter(), {})
        self._uses = FlowUses(now)
        self._at_once: defaultdict[int, int] = defaultdict(int)
        """Number of requests that had room and were placed at once, by priority; they did not enter
        the queue.
        """
        self._places: dict[int, Place] = {}
        """The place in the queue of each waiting request, by the number of its ticket."""
        self._owed: list[tuple[Place, Refusal]] = []
        """Verdicts of displaced requests, which are delivered by the next `pump`."""
        self._pumping = False
        self._releasing = False
        """True while the settings have no queue, since they were last applied: `pump` then places all
        requests that still wait, whether there is room or not.
        """

    def __repr__(self) -> str:
        return f"<FlowQueue {self.control!r}>"

    @property
    def active(self) -> bool:
        """Return whether requests may have to wait, by the present settings of the scheduler."""
        return self._wanted() is not None

    def longest_wait_s(self, priority: int) -> Seconds:
        """Return the maximum wait in seconds, by the settings, of requests with `priority`; 0 for
        no limit.
        """
        return self.control.settings.longest_wait_s(priority)

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
        headers = request.headers
        plain = self._agents is None and not self._settings.identity_headers
        flow = (
            first_of(headers, FLOW_HEADERS)[:FLOW_CHARACTERS_MAX]
            if plain
            else self._flow_of(request)
        )
        if gate is not None and gate.rivalry.met(
            flow, request.priority, now, request.prompt_tokens
        ):
            gate.rivalry.flow_of = self._flow_of
            gate.look_again()
        admission = scheduler.admission
        fits = self._agents is None or self._pool.fits_session(request, now)
        if (
            fits
            and not control.requests
            and (
                # The first condition saves most requests a call.
                (gate is not None and not admission.may_hold and gate.certainly_open(request))
                or admission.has_room(request, now)
            )
        ):
            result = scheduler.schedule(request, now)
            # `isinstance` would be one more function call for most requests.
            if type(result) is Refusal:
                self.totals.outcomes[State.REFUSED, request.priority] += 1
            else:
                self._at_once[request.priority] += 1
            return result
        ticket = Ticket(
            request=request,
            flow=flow,
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
        why = self._pool.why_full(request, now)
        place = self._places[ticket.number] = Place(self, ticket, resume, why)
        self._scheduler.changed = self._waker.soon
        if gate is not None:
            gate.rivalry.holding = True
        self._waker.soon()
        return place

    def leave(self, place: Place) -> None:
        """Remove the request at `place` from the queue, and count it as cancelled. If it was
        displaced and not resumed yet, its refusal is no longer delivered. Do nothing after another
        verdict.
        """
        ticket = place.ticket
        if self.control.cancel(ticket):
            del self._places[ticket.number]
            self.totals.outcomes[State.CANCELLED, ticket.request.priority] += 1
            self._waker.soon()
        self._owed = [entry for entry in self._owed if entry[0] is not place]
        place.release()

    def pump(self, now: Seconds) -> None:
        """Place waiting requests that have room, refuse those that have waited too long, and resume
        the sessions of both and of requests that were displaced before.
        """
        # A request that is resumed may end another one, and the waker may be called from there.
        if self._pumping:
            self._waker.soon()
            return
        self._pumping = True
        try:
            owed, self._owed = self._owed, []
            for place, refusal in owed:
                place.resume(refusal)
            control = self.control
            due = control.release(now) if self._releasing else control.expire(now)
            self._deliver(due, now)
        finally:
            self._pumping = False
            self._rest(now)

    def configure(self, now: Seconds) -> None:
        """Apply the present settings of the scheduler. Waiting requests move to their new bands, or
        are placed if requests no longer wait.
        """
        wanted = self._wanted()
        self._releasing = wanted is None
        if wanted is None:
            self._deliver(self.control.release(now), now)
        self._settings = wanted or HELD_BY_PLUGINS
        self._agents = self._settings.agents
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
        """Correct the charge of the request at `place`, which was placed and has ended, by the
        number of tokens in its answer. Do nothing if that is unknown.
        """
        if outcome.output_tokens is None:
            return
        ticket = place.ticket
        estimate = self._pool.answer_tokens(ticket.request)
        more = OUTPUT_WEIGHT * (outcome.output_tokens - estimate)
        self.control.settled(ticket, max(1.0, ticket.charged_tokens + more), now)

    def placed(self, decision: Decision, evict: Callable[[Refusal], None]) -> Running | None:
        """Note a placed request of priority below 0, whose response has not begun. `evict` ends it
        with a refusal. Return what `spare` needs, or None if the settings allow no eviction.
        """
        if not self.control.settings.evicts:
            return None
        running = Running(decision.lease.request.priority, decision.lease, evict)
        self.control.evictions.add(running)
        return running

    def spare(self, running: Running) -> None:
        """Note that `running` must not be evicted any more, because its response begins or it ends."""
        self.control.evictions.remove(running)

    def know_priorities(self, priorities: Iterable[int]) -> None:
        """Note the priorities that objectives give to requests, for the gate; do nothing without a
        gate.
        """
        if self._scheduler.state.gate is not None:
            self._scheduler.state.gate.know_priorities(priorities)

    def snapshot(self, now: Seconds) -> QueueSnapshot | None:
        """Return the state of the queue, or None if the settings let no request wait."""
        if not self.active:
            return None
        gate = self._scheduler.state.gate
        ratios = self._uses.light_wait_ratios(now)
        bands = tuple(
            BandSnapshot(
                priority,
                band.requests,
                band.bytes,
                band.flows,
                max(
                    (now - ticket.enqueued_at_s for ticket in islice(band.tickets(), 1)), default=0
                ),
                ratios.get(priority),
            )
            for priority, band in self.control.bands()
        )
        outcomes = Counter(self.totals.outcomes)
        for priority, count in self._at_once.items():
            outcomes[State.PLACED, priority] += count
        totals = FlowTotals(outcomes, self.totals.waits, self.totals.waited_s)
        evicted = dict(self.control.evictions.evicted)
        saturation = None if gate is None else self._pool.saturation(_ANY_REQUEST, now)
        agents = sum(band.flows for _, band in self.control.bands() if band.of_agents)
        return QueueSnapshot(totals, bands, saturation, evicted, self._pool.agents(), agents)

    def waiting_flows(self, now: Seconds) -> dict[int, list[WaitingFlow]]:
        """Return the flows with most waiting requests of each band, by priority. Each band has at
        most `FLOWS_SHOWN`, most requests first.

        The time is linear in the number of waiting requests.
        """
        found: dict[int, list[WaitingFlow]] = {}
        for priority, band in self.control.bands():
            if band.requests:
                since_s: dict[str, Seconds] = {}
                for ticket in band.tickets():
                    since_s.setdefault(ticket.flow, ticket.enqueued_at_s)
                found[priority] = [
                    WaitingFlow(flow, requests, now - since_s[flow])
                    for flow, requests in band.most_waiting(FLOWS_SHOWN)
                ]
        return found

    def wait_of(self, place: Place, now: Seconds) -> Queued:
        """Return the wait of the request at `place`, which has a verdict, for records."""
        ticket = place.ticket
        return Queued(
            waited_s=now - ticket.enqueued_at_s,
            flow=ticket.flow,
            priority=ticket.request.priority,
            ahead=ticket.ahead,
            behind=ticket.behind,
            behind_requests=ticket.behind_requests,
            charged_tokens=ticket.charged_tokens,
            why=place.why,
        )

    def _wanted(self) -> FlowSettings | None:
        scheduler = self._scheduler
        holding = HELD_BY_PLUGINS if scheduler.admission.may_hold else None
        wanted = scheduler.settings.flow or holding
        return None if wanted is None else wanted.within(self._bytes_max)

    def _flow_of(self, request: InferenceRequest) -> str:
        """Return the id of the flow of `request`, or "" if it names none."""
        settings = self._settings
        band = settings.band(request.priority if settings.by_priority else 0)
        if band.fairness is Fairness.SESSIONS:
            return self._pool.session_of(request)[:FLOW_CHARACTERS_MAX]
        found = first_of(request.headers, (*FLOW_HEADERS, *settings.identity_headers))
        return found[:FLOW_CHARACTERS_MAX]

    def _deliver(self, verdicts: Verdicts, now: Seconds) -> None:
        """Resume the sessions of tickets that have a verdict, and count their waits."""
        for verdict in verdicts:
            ticket, result = verdict.ticket, verdict.result
            place = self._places.pop(ticket.number)
            self._count(ticket, now)
            if isinstance(result, Decision):
                account = structs.replace(result.account, queued=self.wait_of(place, now))
                place.resume(structs.replace(result, account=account))
            elif isinstance(result, Refusal):
                place.resume(result)

    def _owe(self, ticket: Ticket, result: object, now: Seconds) -> None:
        assert isinstance(result, Refusal), "a displaced request is refused"
        self._count(ticket, now)
        self._owed.append((self._places.pop(ticket.number), result))

    def _count(self, ticket: Ticket, now: Seconds) -> None:
        key = ticket.state, ticket.request.priority
        waited_s = now - ticket.enqueued_at_s
        self.totals.outcomes[key] += 1
        self.totals.waits[key] += 1
        self.totals.waited_s[key] = self.totals.waited_s.get(key, 0.0) + waited_s
        self._uses.left(
            ticket.request.priority,
            ticket.flow,
            tokens=ticket.charged_tokens,
            waited_s=waited_s,
            now=now,
        )

    def _rest(self, now: Seconds) -> None:
        """Set the time at which the waker calls `pump` next. If no request waits, set none, and
        stop the scheduler's reports of changes.
        """
        if not self.control.requests:
            self._scheduler.changed = None
            if self._scheduler.state.gate is not None:
                self._scheduler.state.gate.rivalry.holding = False
            self._waker.at(None)
            return
        wake_s = now if self._releasing else self.control.next_wake(now)
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


class _SchedulerPool:
    """The `Pool` of flow control, backed by a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def is_empty(self, now: Seconds) -> bool:
        return not len(self._scheduler.pool.ready(None, now))

    def has_room(self, request: InferenceRequest, now: Seconds) -> bool:
        return self._scheduler.admission.has_room(request, now)

    def hold_s(self, request: InferenceRequest, now: Seconds) -> Seconds:
        return self._scheduler.admission.hold_s(request, now)

    def session_of(self, request: InferenceRequest) -> str:
        """Return the agent session of `request`, or "" if it names none."""
        sessions = self._sessions
        return "" if sessions is None else sessions.session_of(request)

    def agents(self) -> SessionCounts | None:
        """Return the counts of the agent sessions, or None if the queue does not admit sessions."""
        sessions = self._sessions
        return None if sessions is None else sessions.counts()

    def fits_session(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether a new request need not wait for the admission of its agent session."""
        if self._agents is None or not self._of_agents(request):
            return True
        sessions = self._sessions
        admitted = sessions is None or sessions.standing(request) is Standing.ADMITTED
        return admitted or self.admits(request, 0.0, now)

    def ranks(self, tickets: Sequence[Ticket], now: Seconds) -> Sequence[Rank]:
        sessions, agents = self._sessions, self._agents
        if sessions is None or agents is None:
            return [Rank.ADMITTED] * len(tickets)
        return [
            agents.rank(sessions.standing(one.request), now - one.enqueued_at_s) for one in tickets
        ]

    def admits(self, request: InferenceRequest, waited_s: Seconds, now: Seconds) -> bool:
        sessions, agents = self._sessions, self._agents
        slots = self._scheduler.pool.ready(request.subset, now)
        if sessions is None or agents is None or not len(slots):
            return True
        room = sessions.rooms(request, len(self._scheduler.pool.columns.endpoints), now)
        return float(room[slots].max()) >= agents.least_room(waited_s)

    @property
    def _agents(self) -> AgentAdmission | None:
        flow = self._scheduler.settings.flow
        return None if flow is None else flow.agents

    def _of_agents(self, request: InferenceRequest) -> bool:
        flow = self._scheduler.settings.flow
        return flow is not None and flow.band(request.priority).fairness is Fairness.SESSIONS

    @property
    def _sessions(self) -> AgentSessions | None:
        """Return the index of agent sessions, or None if it is missing, because it failed or is not
        configured. All requests then pass.
        """
        agents = self._agents
        index = None if agents is None else self._scheduler.indexes.get(agents.index)
        return index if isinstance(index, AgentSessions) else None

    def saturation(self, request: InferenceRequest, now: Seconds) -> float:
        return self._scheduler.admission.saturation(request, now)

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
        if not self.fits_session(request, now):
            return f"no endpoint has room for an agent session of {request.prompt_tokens} tokens"
        return self._scheduler.admission.why_full(request, now)

    def slots_for(self, request: InferenceRequest, now: Seconds) -> Collection[int]:
        scheduler = self._scheduler
        if scheduler.admission.holds(request, now):
            # More room would not end this wait.
            return ()
        return frozenset(scheduler.pool.ready(request.subset, now).tolist())
