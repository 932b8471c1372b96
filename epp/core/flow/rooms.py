"""The room that each endpoint has for more requests, learned from its pages and the own counts.

Room has three dimensions, because a request uses each of them until another time:

- Slots, until the end of a request. An engine whose slots are used queues requests and runs the same
  number, the highest ever, while requests begin or while none computes its prompt. Before that,
  `SLOTS_ASSUMED` slots are assumed.
- Tokens of the KV cache, until the end. The page has the size and the used share. What was sent
  since the page or is not computed yet, and the growth of the answers that are being written, is
  added.
- Prefill tokens, until the first output. Their limit applies only if flows or priorities compete
  for the endpoints (`Lead`).

The picker's own counts are read first. A page only corrects them.
"""

import math
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.flow.shares import FlowShares
from epp.core.knowledge.candidates import Candidates, Columns, Floats
from epp.core.knowledge.inflight import ARRIVAL_S_PER_TOKEN, OUTPUT_TOKENS_ESTIMATE, Lease
from epp.core.types import EndpointMetrics, Seconds

SLOTS_ASSUMED: Final = 256.0
"""Number of requests that an engine is assumed to run at once, until it runs more or its slots are
learned from a queue: the default `max_num_seqs` of vLLM on smaller GPUs (1,024 on larger ones).
"""
SLOTS_MAX: Final = 4_096.0
"""Upper bound of the learned number of slots."""
QUEUE_MIN: Final = 5.0
"""Least number of requests that may wait in an engine, so that it never idles between the end of a
request and the next decision: the default `queueDepthThreshold` of llm-d-router.
"""
SLOTS_GROWTH: Final = 1.25
"""Factor by which the slots are assumed to exceed the number of running requests once an engine runs
more than were known; they are then at least `SLOTS_ASSUMED` and at most `SLOTS_MAX`.
"""
SLOTS_S: Final = 0.5
"""Seconds for which an engine must run the same number of requests and queue others, on page after
page, before that number is assumed to be its slots. One long step of an engine takes less time.
"""
KV_KEPT: Final = 0.05
"""Share of the KV cache, for each picker, that an endpoint keeps free of a request while requests of
higher priority compete with it. It makes up for answers that become longer than expected, and for
requests that several pickers send at once. Otherwise, there would be no room for the next request of
higher priority.
"""
KV_KEPT_MAX: Final = 0.25
"""Largest share of the KV cache that an endpoint keeps free in this way, however many pickers there are.
"""
KV_FULL: Final = 0.9
"""Used share of the KV cache from which a queue may be caused by the cache instead of the slots."""
FIRST_FACTOR: Final = 2.0
"""Factor of the limit of prefill tokens for a request that others must let pass, with several pickers.
They hear late that a prompt is computed. Simulations of four pickers chose it (docs/flow-control.md).
"""
OUTRANKED_FACTOR: Final = 2 / 3
"""Factor of the limit of prefill tokens for a request of lower priority, with several pickers. Together,
they would else send more prompts before one of higher priority than one picker does. Simulations of
four pickers chose it.
"""
INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 2.0
"""Bounds of the time between two pages for which an endpoint may have prefill tokens pending."""

_ROWS: Final = (
    *("slots", "queue", "others", "sent_tokens", "sent_requests", "page_at_s", "interval_s"),
    *("others_before", "queued_running", "steady_s", "running_max", "first_outputs"),
    *("untold", "untold_tokens"),
)
"""Names of what is stored of each endpoint. `others_before` are the requests of other clients by
the last page alone. `queued_running` is the number of running requests on the last page if it
showed a queue for slots, else NaN. `steady_s` is the time since then in which pages show the slots.
`first_outputs` is their counter on the last page. `untold` and `untold_tokens` are the requests and
their uncached tokens that were sent since this picker last reported its load to its peers.
"""
_SLOTS, _QUEUE, _OTHERS, _SENT_TOKENS, _SENT, _PAGE_AT, _INTERVAL = range(7)
_BEFORE, _RUNNING, _STEADY, _MOST, _OUTPUTS, _UNTOLD, _UNTOLD_TOKENS = range(7, len(_ROWS))


class RoomOf(Struct, frozen=True, kw_only=True):
    """The room of one endpoint in numbers, for explanations."""

    requests: float
    """Number of waiting and running requests at the endpoint, by the picker's estimate. With several
    pickers, it may be higher, so that each picker leaves the others their share of the room.
    """
    slots: float
    """Number of requests that the engine is assumed to run at once, learned from its pages."""
    queue: float
    """Number of requests that may wait in the engine beside those in its slots."""
    kv_share: float
    """Share of the part of the KV cache that the request may use (all, or less if outranked:
    `KV_KEPT`) that is used, or will be by prompts that were placed and by answers that grow; NaN if
    unknown.
    """
    prefill_tokens: float
    prefill_tokens_max: float
    load: float

    @property
    def more(self) -> int:
        """Return the number of further requests for which the engine's slots and its queue suffice,
        at least 0.
        """
        return max(0, math.floor(self.slots + self.queue - self.requests))

    def sentence(self, name: str) -> str:
        """Return one sentence about the room of the endpoint `name`."""
        kv = "" if math.isnan(self.kv_share) else f", {100 * self.kv_share:.0f} % of KV"
        used = f"{self.requests:.0f} of {self.slots:.0f} slots{kv}"
        if self.load < 1.0:
            return f"{name} has room for {max(1, self.more)} more requests: {used}"
        if not self.more:
            return f"{name} is full: {used}"
        if self.kv_share >= 1.0:
            return f"{name} is full, because its requests will need its whole KV cache: {used}"
        pending = f"{self.prefill_tokens:.0f} of {self.prefill_tokens_max:.0f} prefill tokens"
        return f"{name} is full: {pending} are pending, {used}"


class Lead(Struct, frozen=True):
    """The prefill work that may be pending at an endpoint that has room for a request.

    An endpoint needs other work until the request reaches its engine. The next page tells which
    prompts are computed, and is half an interval away on average. With less pending it would idle
    while requests wait. With more, a prompt would wait in the engine for those before it.
    A request that competes with none may as well wait in the engine, as long as the KV cache has
    room for its prompt.
    """

    prompt_tokens: int = 0
    """Length of the prompt of the request; with 0, the limit holds for any length."""
    alone: bool = False
    """True if no other flow or priority competes for the endpoints."""
    outranked: bool = False
    """True if requests of higher priority compete, for which a part of the KV cache stays free."""
    first: bool = False
    """True if the request is of a light flow, or of the highest priority, while others compete. Few
    such requests are sent, so that pickers need not divide the room among them.
    """

    def tokens_max(self, speed: Floats, unseen_s: Floats) -> Floats:
        """Return float64[n]: the most pending tokens, at endpoints that compute `speed` tokens a
        second, and of which the picker learns after `unseen_s` seconds; inf without a limit.
        """
        if self.alone:
            return np.full(len(speed), math.inf)
        found: Floats = speed * (unseen_s + ARRIVAL_S_PER_TOKEN * self.prompt_tokens)
        return np.maximum(found, 1.0)

    def least_share(self, unseen_s: Floats) -> Floats | float:
        """Return the share of `tokens_max` that holds for a prompt of any length, float64[n] or for
        all endpoints.
        """
        if self.alone:
            return 1.0
        return unseen_s / (unseen_s + ARRIVAL_S_PER_TOKEN * self.prompt_tokens)


class Spare(Struct, frozen=True):
    """A lower bound of what may be placed at endpoints, wherever it goes.

    To fill an endpoint takes requests whose shares `per_request` + `per_token` * tokens add up to 1
    at least. Some endpoint is open while the shares of all requests add up to less than `endpoints`.
    """

    endpoints: float
    """Number of endpoints with room."""
    per_request: float
    per_token: float
    requests: float
    """Number of further requests for which each of the endpoints with room has slots, or places in
    its queue, at least.
    """
    tokens: float
    """Number of further tokens for which the KV cache of each of the endpoints with room has space
    at least; inf if unknown.
    """
    slots: frozenset[int]
    """Slots of the endpoints with room."""


NO_SPARE: Final = Spare(0.0, 0.0, 0.0, 0.0, 0.0, frozenset())
NO_LEAD: Final = Lead()


class Rooms:
    """The learned room of each endpoint, by slot of the pool."""

    def __init__(self, columns: Columns, shares: FlowShares | None = None) -> None:
        self._columns = columns
        self._shares = shares or FlowShares()
        self._reports = 0
        """Value of `FlowShares.reports` when `untold` and `untold_tokens` were last set to 0."""
        self._rows: Floats = np.empty((len(_ROWS), 0))
        self.answer_tokens = float(OUTPUT_TOKENS_ESTIMATE)
        """Expected number of tokens of an answer, by which the KV cache for a new request is
        estimated.
        """
        self._grow()

    def __repr__(self) -> str:
        return f"<Rooms [{self._rows.shape[1]} slots]>"

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> tuple[float, float]:
        """Learn from a good page of the endpoint in `slot`, and restart the counts of requests and
        tokens that were sent to it since its last page. Return
        the number of further requests and of tokens of the KV cache for which it has room; the
        tokens are inf if unknown.
        """
        if slot >= self._rows.shape[1]:
            self._grow()
        rows = self._rows
        known = rows[:, slot].tolist()
        running, waiting = metrics.running_requests, metrics.waiting_requests
        if not math.isnan(running + waiting):
            self._learn_slots(slot, known, metrics, now)
            # The page is older than the own counts. A request that has ended since looks like that
            # of another client, but only on one page.
            others = max(0.0, running + waiting - self._inflight(slot))
            rows[_OTHERS, slot] = min(others, known[_BEFORE])
            rows[_BEFORE, slot] = others
        # As many as were sent between two pages may wait: the engine took them in that time.
        rows[_QUEUE, slot] = max(QUEUE_MIN, known[_SENT] * self._shares.pickers)
        rows[_SENT_TOKENS, slot] = rows[_SENT, slot] = 0.0
        rows[_PAGE_AT, slot] = now
        rows[_INTERVAL, slot] = min(max(now - known[_PAGE_AT], INTERVAL_S_MIN), INTERVAL_S_MAX)
        columns = self._columns
        requests = self._inflight(slot) + rows.item(_OTHERS, slot)
        spare = rows.item(_SLOTS, slot) + rows.item(_QUEUE, slot) - requests
        capacity = columns.kv_capacity_tokens.item(slot)
        free = (1.0 - metrics.kv_cache_usage) * capacity
        if not math.isnan(running):
            free -= running * self.answer_tokens / 2.0
        return spare, math.inf if math.isnan(free) else free

    def sent(self, lease: Lease) -> None:
        """Count a request that was sent to the endpoint of `lease`."""
        slot = lease.slot
        if slot >= self._rows.shape[1]:
            self._grow()
        rows = self._rows
        limit = lease.request.output_tokens_max
        answer = self.answer_tokens if limit is None else min(self.answer_tokens, limit)
        rows[_SENT_TOKENS, slot] += lease.uncached_tokens + answer
        rows[_SENT, slot] += 1.0
        if self._shares.pickers > 1:
            self._begin_untold()
            rows[_UNTOLD, slot] += 1.0
            rows[_UNTOLD_TOKENS, slot] += lease.uncached_tokens

    def forget(self, slot: int) -> None:
        """Drop what was learned of `slot`, because its endpoint left or restarted."""
        if slot < self._rows.shape[1]:
            self._rows[:, slot] = _UNKNOWN

    def load(self, candidates: Candidates, lead: Lead = NO_LEAD) -> Floats:
        """Return float64[n], the load of each candidate: the largest of the used shares of its
        slots and queue, of its KV cache and of its limit of prefill tokens.
        """
        slots, queue, requests, kv, pending, pending_max = self._parts(candidates, lead)
        load: Floats = np.maximum(requests / (slots + queue), pending / pending_max)
        return np.fmax(load, kv)

    def unstarted_requests(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the requests of all pickers since the last page whose prompts are
        estimated to be pending still.
        """
        known = self._known(candidates)
        sent, pending = known[_SENT], candidates.inflight_prefill_tokens
        tokens = known[_SENT_TOKENS] - sent * self.answer_tokens
        mean = np.maximum(tokens, 1.0) / np.maximum(sent, 1.0)
        found: Floats = np.minimum(sent, np.ceil(pending / np.maximum(mean, 1.0)))
        # Each peer may have sent as many.
        return self._shares.pickers * found

    @property
    def pickers(self) -> int:
        """Return the number of pickers that use the endpoints: this one, and those from which it
        receives reports.
        """
        return self._shares.pickers

    def divided_requests(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the number of requests to count at each candidate, so that this picker
        leaves its peers their shares of the room.
        """
        requests = candidates.inflight_requests.astype(np.float64)
        none = np.zeros(len(candidates))
        found, _ = self._divided(candidates, requests, none, none, self.pickers - 1)
        return found

    def spare(self, candidates: Candidates, lead: Lead) -> tuple[Spare, bool]:
        """Return how much may be placed at `candidates`, wherever it goes, before they are full, and
        whether any has room for a request with `lead`.

        The former holds for prompts of any length.
        """
        slots, queue, requests, kv, pending, pending_max = self._parts(candidates, lead)
        places = slots + queue - requests
        cache = (1.0 - kv) * candidates.kv_capacity_tokens
        cache[np.isnan(cache)] = math.inf
        lasting = (places > 0.0) & (cache > 0.0)
        any_open = bool((lasting & (pending < pending_max)).any())
        prefill = (
            pending_max * lead.least_share(self._unseen_s(self._known(candidates)[_INTERVAL]))
            - pending
        )
        is_open = lasting & (prefill > 0.0)
        found = candidates.slot[is_open].tolist()
        if not found:
            return NO_SPARE, any_open
        fewest, least = float(places[is_open].min()), float(cache[is_open].min())
        spare = Spare(
            endpoints=float(len(found)),
            per_request=1.0 / fewest,
            per_token=1.0 / float(prefill[is_open].min()) + 1.0 / least,
            requests=fewest,
            tokens=least,
            slots=frozenset(found),
        )
        return spare, any_open

    def of(self, candidates: Candidates, lead: Lead = NO_LEAD) -> list[RoomOf]:
        """Return the room of each candidate, for explanations."""
        parts = self._parts(candidates, lead)
        loads = self.load(candidates, lead).tolist()
        columns = (part.tolist() for part in parts)
        return [
            RoomOf(
                slots=slots,
                queue=queue,
                requests=requests,
                kv_share=kv,
                prefill_tokens=pending,
                prefill_tokens_max=pending_max,
                load=load,
            )
            for slots, queue, requests, kv, pending, pending_max, load in zip(
                *columns, loads, strict=True
            )
        ]

    def _parts(self, candidates: Candidates, lead: Lead) -> tuple[Floats, ...]:
        """Return slots, queue, requests, used share of the KV cache (NaN if unknown), pending
        prefill tokens and their maximum, float64[n] each.
        """
        slots, queue, others, sent_tokens, _, _, interval_s, *_ = self._known(candidates)
        requests = candidates.inflight_requests + others
        pending = candidates.inflight_prefill_tokens
        growing = np.fmax(candidates.running_requests, 0.0) * (self.answer_tokens / 2.0)
        # Prompts that wait in the engine use none of its cache yet.
        coming = np.maximum(sent_tokens, pending) + growing
        kv = candidates.kv_cache_usage + coming / candidates.kv_capacity_tokens
        unseen_s = self._unseen_s(interval_s)
        pending_max = lead.tokens_max(candidates.prefill_measured_tokens_per_s, unseen_s)
        if lead.outranked:
            kv = kv / (1.0 - min(KV_KEPT * self._shares.pickers, KV_KEPT_MAX))
        peers = self._shares.pickers - 1
        if peers:
            kv = kv + peers * sent_tokens / candidates.kv_capacity_tokens
            pending_max = pending_max * self._speed_ratio(candidates, requests)
            if lead.outranked:
                pending_max *= OUTRANKED_FACTOR
            if lead.first:
                pending_max *= FIRST_FACTOR
            else:
                requests, pending = self._divided(candidates, requests, others, pending, peers)
        return slots, queue, requests, kv, pending, pending_max

    def _learn_slots(
        self, slot: int, known: list[float], metrics: EndpointMetrics, now: Seconds
    ) -> None:
        """Learn the slots of the endpoint in `slot`, of which `known` was stored, from a page that
        counts its requests.
        """
        rows, running = self._rows, metrics.running_requests
        rows[_MOST, slot] = most = max(known[_MOST], running)
        rows[_OUTPUTS, slot] = metrics.first_outputs_total
        if running > known[_SLOTS]:
            rows[_SLOTS, slot] = min(max(SLOTS_ASSUMED, running * SLOTS_GROWTH), SLOTS_MAX)
        if not _queues_for_slots(metrics) or running < most:
            rows[_RUNNING, slot], rows[_STEADY, slot] = math.nan, 0.0
            return
        # A number that stays the same because a long prompt is computed is no evidence.
        outputs = metrics.first_outputs_total
        shows = outputs != known[_OUTPUTS] or running + metrics.answers_total <= outputs
        steady_s = 0.0
        if running == known[_RUNNING]:
            steady_s = known[_STEADY] + shows * (now - known[_PAGE_AT])
        rows[_RUNNING, slot], rows[_STEADY, slot] = running, steady_s
        if steady_s >= SLOTS_S:
            rows[_SLOTS, slot] = min(running, SLOTS_MAX)

    def _unseen_s(self, interval_s: Floats) -> Floats:
        """Return float64[n]: for how long each endpoint may compute prompts before this picker knows
        of it, in seconds. The next page is half an interval of `interval_s` away on average.

        Several pickers divide the limit that follows from it. It is twice as long for them, because
        a part of it would be less than one prompt.
        """
        return interval_s if self._shares.pickers > 1 else interval_s / 2.0

    def _speed_ratio(self, candidates: Candidates, requests: Floats) -> Floats:
        """Return float64[n], at least 1: the estimated prefill speed of each candidate divided by
        the speed that was measured with the requests of this picker, which are some of `requests`.

        The engine computes the prompts of all pickers in turn. Its speed is at most the configured
        one, unless the picker measured a higher one.
        """
        own = np.maximum(self._columns.inflight_requests[candidates.slot], 1)
        measured = self._columns.prefill_drain_tokens_per_s[candidates.slot]
        most = candidates.prefill_tokens_per_s / measured
        ratio: Floats = np.maximum(np.minimum(requests / own, most), 1.0)
        return ratio

    def _divided(
        self,
        candidates: Candidates,
        requests: Floats,
        others: Floats,
        pending: Floats,
        peers: int,
    ) -> tuple[Floats, Floats]:
        """Return the requests and the pending prefill tokens to count, so that this picker leaves its
        peers their shares of the room, float64[n] each.
        """
        self._begin_untold()
        untold, untold_tokens = self._rows[_UNTOLD:, candidates.slot]
        waiting = self._shares.pickers_waiting
        own = self._columns.inflight_requests[candidates.slot]
        return (
            np.maximum(requests + peers * untold, waiting * own + others),
            np.maximum(pending + peers * untold_tokens, waiting * candidates.own_prefill_tokens),
        )

    def _inflight(self, slot: int) -> float:
        """Return the number of requests of this picker and its peers at the endpoint in `slot`."""
        columns = self._columns
        own = columns.inflight_requests.item(slot)
        if columns.peers is None:
            return float(own)
        return float(own + columns.peers.requests(np.array([slot]), len(columns)).item(0))

    def _begin_untold(self) -> None:
        """Set to 0 the requests and tokens that were sent to endpoints and not yet reported to
        peers, if a report was made since the last call.
        """
        if self._reports != self._shares.reports:
            self._reports = self._shares.reports
            self._rows[_UNTOLD:] = 0.0

    def _known(self, candidates: Candidates) -> Floats:
        slot = candidates.slot
        if len(slot) and slot.item(-1) >= self._rows.shape[1]:
            self._grow()
        found: Floats = self._rows[:, slot]
        return found

    def _grow(self) -> None:
        before = self._rows.shape[1]
        capacity = max(8, 2 * before, len(self._columns))
        grown = np.repeat(_UNKNOWN[:, None], capacity, axis=1)
        grown[:, :before] = self._rows
        self._rows = grown


_UNKNOWN: Final = np.array(
    [
        *(SLOTS_ASSUMED, QUEUE_MIN, 0.0, 0.0, 0.0, -math.inf, INTERVAL_S_MAX),
        *(0.0, math.nan, 0.0, 0.0, math.nan, 0.0, 0.0),
    ]
)


def _queues_for_slots(metrics: EndpointMetrics) -> bool:
    """Return whether requests wait in the engine, and neither for memory nor for the place of an
    adapter.
    """
    if not metrics.waiting_requests > 0.0 or metrics.kv_cache_usage >= KV_FULL:
        return False
    adapters = metrics.adapters
    if adapters is None or not adapters.slots_max:
        return True
    # A page that lists what is loaded does not tell which adapters requests wait for.
    if adapters.resident_known:
        return len(adapters.gpu) < adapters.slots_max
    return len(adapters.active) <= adapters.slots_max
