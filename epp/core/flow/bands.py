"""Waiting requests of one priority: one queue for each flow, served in turns by what each was charged.

The turns follow Virtual Token Counter (VTC, Sheng et al., OSDI 2024). Each flow has a counter of the
tokens that it was charged, divided by its weight, and the flow with the lowest counter is served
next. A flow that begins to wait gets at least the lowest counter of the flows that wait already, so
that it gains nothing by having been idle. Other rules are variations: `Fairness.REQUESTS` charges 1
for each request, and `Fairness.DECAYING_TOKENS` has a half-life instead of that minimum.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Final

import xxhash
from msgspec import Struct

from epp.core.flow.settings import BandSettings, Fairness, Ordering
from epp.core.flow.shares import FlowShares, key_of
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

FLOWS_MAX: Final = 1_024
"""Maximum number of flows of a band with a queue of their own. Later flows share `SHARED_FLOWS`
queues, so that a client that invents a flow for each request gains nothing. Agent sessions always
have queues of their own.
"""
SHARED_FLOWS: Final = 64
LOUDEST_OF: Final = 64
"""Number of flows that are compared to find the one with most waiting tickets again, once that has
lost half of its tickets. They are those that have had waiting tickets for the longest time.
"""


class State(StrEnum):
    """State of a ticket, that is, of a request in flow control. All but `NEW` and `WAITING` are
    final.
    """

    NEW = "new"
    WAITING = "waiting"
    PLACED = "placed"
    REFUSED = "refused"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DISPLACED = "displaced"
    DRAINED = "drained"


class Ticket(Struct, kw_only=True, eq=False):
    """One request in flow control, from `enqueue` to its verdict."""

    request: InferenceRequest
    flow: str = ""
    """Id of the flow, for example the tenant; "" for requests without one."""
    body_bytes: int = 0
    """Bytes that the picker stores for the request while it waits."""
    wait_s_max: Seconds | None = None
    """Maximum wait of this request in seconds while the pool has endpoints, or None for the maximum
    of the settings. A value above that maximum has no effect.
    """
    answer_within_s: Seconds | None = None
    """Seconds after its arrival at which the gateway ends the request if it still waits, or None if
    the gateway does not.
    """
    first_token_within_s: Seconds | None = None
    """Seconds after the request's arrival within which the client expects the first token, or None.
    """
    state: State = State.NEW
    enqueued_at_s: Seconds = 0.0
    held_since_s: Seconds | None = None
    """Time at which the ticket first let others take the room, because an endpoint without room had
    more of its prompt cached; None if it never did.
    """
    number: int = 0
    """Position in the order of all tickets that ever waited."""
    ahead: int = 0
    """Number of tickets that waited when this one began to."""
    behind: str = ""
    """Id of the flow of the same band that had most waiting tickets when this ticket began to wait."""
    behind_requests: int = 0
    """Number of tickets of the flow `behind` that waited when this ticket began to."""
    queue: str = ""
    """Name of the queue in which the ticket waits; set by `Band.add`."""
    charged_tokens: float = 0.0
    """Tokens that the request costs its flow: an estimate when it was placed, later corrected to the
    tokens that it used.
    """


class _Flow:
    """The waiting tickets of one queue in their order, and its counter. They belong to one flow, or
    to several that share the queue.
    """

    __slots__ = ("_heap", "charged_at_s", "counter", "key", "name", "tickets", "weight")

    def __init__(self, name: str, weight: float, key: int) -> None:
        self.name = name
        self.weight = weight
        self.key = key
        """Hash that stands for the flow in messages between pickers."""
        self.counter = 0.0
        self.charged_at_s = 0.0
        """Time up to which the decay of charges is included in `counter`; without a meaning if
        charges do not decay.
        """
        self.tickets: dict[int, Ticket] = {}
        self._heap: list[tuple[float, int]] = []
        """Sort key and number of each ticket; tickets that were removed may still be in it."""

    def add(self, ticket: Ticket, key: float) -> None:
        self.tickets[ticket.number] = ticket
        heapq.heappush(self._heap, (key, ticket.number))

    def head(self) -> Ticket:
        """Return the waiting ticket of this flow that is served first. The flow must have a waiting
        ticket.
        """
        heap, tickets = self._heap, self.tickets
        while heap[0][1] not in tickets:
            heapq.heappop(heap)
        return tickets[heap[0][1]]

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.number]
        if len(self._heap) > 2 * len(self.tickets) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in self.tickets]
            heapq.heapify(self._heap)


class Band:
    """The waiting tickets of one priority. `heads` yields the next ticket of each flow in turn."""

    def __init__(
        self, settings: BandSettings, priority: int = 0, shares: FlowShares | None = None
    ) -> None:
        self.settings = settings
        self._priority = priority
        self._shares = shares or FlowShares()
        self.bytes = 0
        """Number of body bytes of the band's waiting tickets."""
        self.counter = 0.0
        """Tokens that the band was charged while bands shared room, divided by its weight. When the
        band begins to wait, the counter is at least the lowest one of the waiting bands.
        """
        self._flows: dict[str, _Flow] = {}
        self._waiting: dict[str, _Flow] = {}
        """Flows of the band that have a waiting ticket, by name of the flow's queue."""
        self._tickets: OrderedDict[int, Ticket] = OrderedDict()
        """All waiting tickets by number, oldest first."""
        self._counts: dict[str, int] = {}
        """Number of waiting tickets by the id of their flow, whatever queue they are in."""
        self._loudest = ""
        self._loudest_most = 0
        """Number of waiting tickets of the flow `_loudest` when it was found, or when a ticket was
        last added to it.
        """

    def __repr__(self) -> str:
        return f"<Band [{self.requests} requests of {self.flows} flows, {self.bytes} bytes]>"

    @property
    def requests(self) -> int:
        """Return the number of waiting tickets."""
        return len(self._tickets)

    @property
    def flows(self) -> int:
        """Return the number of queues with a waiting ticket: one under `Fairness.NONE`, else one for
        each flow that does not share a queue.
        """
        return len(self._waiting)

    @property
    def of_agents(self) -> bool:
        """Return whether each flow of the band is an agent session, which must be admitted."""
        return self.settings.fairness is Fairness.SESSIONS

    @property
    def loudest(self) -> tuple[str, int]:
        """Return the id of the flow with most waiting tickets, and their number. Another flow may
        have more, because flows are not compared again each time that a ticket leaves.
        """
        return self._loudest, self._counts.get(self._loudest, 0)

    def most_waiting(self, flows_max: int) -> list[tuple[str, int]]:
        """Return the ids of the `flows_max` flows with most waiting tickets and their numbers, most
        first.
        """
        return heapq.nlargest(flows_max, self._counts.items(), key=lambda entry: entry[1])

    def is_full(self, body_bytes: int) -> bool:
        """Return whether a limit of the band forbids one more ticket with `body_bytes`."""
        settings, shares = self.settings, self._shares
        return self.requests >= shares.share_of(settings.requests_max) or shares.exceeds_bytes(
            self.bytes, body_bytes, settings.bytes_max
        )

    def add(self, ticket: Ticket, wait_s_max: Seconds, now: Seconds) -> None:
        """Add `ticket` to the queue of its flow. `wait_s_max` is the longest wait of a request that
        has no shorter one itself; 0 for no limit.
        """
        name = self._name_of(ticket.flow)
        flow = self._flows.get(name)
        if flow is None:
            # An agent session has a queue of its own only while it waits.
            if not self.of_agents:
                self._forget_decayed()
            key = key_of(self.settings.fairness, self._priority, name)
            flow = self._flows[name] = _Flow(name, self.settings.weights.get(name, 1.0), key)
        if name not in self._waiting:
            self._begin(flow, now)
        ticket.queue = name
        self._count(ticket.flow, 1)
        flow.add(ticket, self._key_of(ticket, wait_s_max))
        self._tickets[ticket.number] = ticket
        self.bytes += ticket.body_bytes

    def remove(self, ticket: Ticket) -> None:
        """Remove the waiting `ticket`."""
        flow = self._flows[ticket.queue]
        flow.remove(ticket)
        if not flow.tickets:
            del self._waiting[ticket.queue]
            if self.of_agents:
                del self._flows[ticket.queue]
        del self._tickets[ticket.number]
        self._count(ticket.flow, -1)
        self.bytes -= ticket.body_bytes

    def _count(self, flow: str, change: int) -> None:
        """Count a ticket of `flow` that is added or removed, and find the flow with most tickets
        again if the flow that had most has lost half of them.
        """
        counts = self._counts
        count = counts[flow] = counts.get(flow, 0) + change
        if not count:
            del counts[flow]
        if count > counts.get(self._loudest, 0) or (flow == self._loudest and change > 0):
            self._loudest, self._loudest_most = flow, count
        elif flow == self._loudest and 2 * count <= self._loudest_most:
            self._loudest = max(islice(counts, LOUDEST_OF), key=counts.__getitem__, default="")
            self._loudest_most = counts.get(self._loudest, 0)

    def charge(self, ticket: Ticket, tokens: float, now: Seconds) -> None:
        """Charge the flow of `ticket`, which has waited and was placed, with `tokens`, or with one
        request under `Fairness.REQUESTS`, and record the charge for peers, except under
        `Fairness.NONE`. Only set `ticket.charged_tokens` if its flow is no longer known here.
        """
        ticket.charged_tokens = tokens
        self._add(ticket, 1.0 if self.settings.fairness is Fairness.REQUESTS else tokens, now)

    def correct(self, ticket: Ticket, tokens: float, now: Seconds) -> None:
        """Correct the charge of `ticket` to the `tokens` that it used, and record the correction for
        peers as `charge` does. A charge of one request stays (`Fairness.REQUESTS`).
        """
        if self.settings.fairness is not Fairness.REQUESTS:
            self._add(ticket, tokens - ticket.charged_tokens, now)
        ticket.charged_tokens = tokens

    def _add(self, ticket: Ticket, amount: float, now: Seconds) -> None:
        flow = self._flows.get(ticket.queue)
        if flow is not None:
            self._decay(flow, now)
            flow.counter += amount / flow.weight
            if self.settings.fairness is not Fairness.NONE:
                self._shares.charge(flow.key, amount)

    def add_charges(self, charges: Mapping[int, float], now: Seconds) -> None:
        """Add `charges` by other pickers, by `_Flow.key`, to the flows that are known here."""
        for flow in self._flows.values():
            amount = charges.get(flow.key)
            if amount is not None:
                self._decay(flow, now)
                flow.counter += amount / flow.weight

    def heads(
        self,
        flows_max: int,
        now: Seconds,
        ranks_of: Callable[[Sequence[Ticket]], Sequence[int]],
    ) -> Iterator[Ticket]:
        """Yield the next ticket of each waiting flow, flows with the lowest counters first.

        In a band of agent sessions, tickets with the lowest rank of `ranks_of` come first, and among
        equal ranks the oldest one. At most `flows_max` tickets are yielded.
        """
        if len(self._waiting) == 1:
            (flow,) = self._waiting.values()
            yield flow.head()
            return
        if self.of_agents:
            heads = [flow.head() for flow in self._waiting.values()]
            numbers = [head.number for head in heads]
            ranked = zip(ranks_of(heads), numbers, heads, strict=True)
            yield from (head for _, _, head in heapq.nsmallest(flows_max, ranked))
            return
        for flow in self._waiting.values():
            self._decay(flow, now)
        for flow in heapq.nsmallest(flows_max, self._waiting.values(), key=_turn):
            yield flow.head()

    def of_flow(self, ticket: Ticket) -> Iterator[Ticket]:
        """Yield the tickets that wait in the same queue as `ticket`, oldest first."""
        return iter(self._flows[ticket.queue].tickets.values())

    def tickets(self) -> Iterator[Ticket]:
        """Yield all waiting tickets, oldest first. No ticket may be added or removed meanwhile."""
        return iter(self._tickets.values())

    def newest_first(self) -> Iterator[Ticket]:
        """Yield all waiting tickets, newest first. No ticket may be added or removed meanwhile."""
        return reversed(self._tickets.values())

    def forget_idle(self) -> None:
        """Forget the counters of the band's flows if no ticket waits in it, unless charges decay."""
        if not self.requests and self.settings.fairness is not Fairness.DECAYING_TOKENS:
            self._flows.clear()

    def _begin(self, flow: _Flow, now: Seconds) -> None:
        """Add `flow` to the waiting flows, and raise its counter to the lowest counter among them,
        or let its charges decay until `now`.
        """
        if self.settings.fairness is not Fairness.DECAYING_TOKENS:
            counters = [each.counter for each in self._waiting.values()]
            flow.counter = max(flow.counter, min(counters, default=0.0))
        else:
            self._decay(flow, now)
        self._waiting[flow.name] = flow

    def _decay(self, flow: _Flow, now: Seconds) -> None:
        if self.settings.fairness is Fairness.DECAYING_TOKENS:
            age_s = max(0.0, now - flow.charged_at_s)
            flow.counter *= 0.5 ** (age_s / self.settings.half_life_s)
            flow.charged_at_s = now

    def _forget_decayed(self) -> None:
        """Keep the number of flows bounded: if there are too many, forget the one with the lowest
        counter among those without a waiting ticket.
        """
        if len(self._flows) < FLOWS_MAX + SHARED_FLOWS:
            return
        idle = [flow for flow in self._flows.values() if not flow.tickets]
        if idle:
            del self._flows[min(idle, key=lambda flow: flow.counter).name]

    def _key_of(self, ticket: Ticket, wait_s_max: Seconds) -> float:
        """Return the sort key of `ticket` within its flow. Equal keys are served by arrival."""
        if self.settings.ordering is Ordering.ARRIVAL:
            return 0.0
        limits = [wait_s_max or math.inf]
        if ticket.wait_s_max is not None:
            limits.append(ticket.wait_s_max)
        within_s = min(limits)
        target_s = ticket.first_token_within_s
        if self.settings.ordering is Ordering.FIRST_OUTPUT and target_s is not None:
            within_s = target_s
        return ticket.enqueued_at_s + within_s

    def _name_of(self, flow: str) -> str:
        if self.settings.fairness is Fairness.NONE:
            return ""
        if flow in self._flows or len(self._flows) < FLOWS_MAX or self.of_agents:
            return flow
        return f"\0{xxhash.xxh32_intdigest(flow.encode()) % SHARED_FLOWS}"


def _turn(flow: _Flow) -> tuple[float, int]:
    return flow.counter, flow.head().number
