"""The room that each endpoint has for more requests, learned from its pages and the own counts.

Room has three dimensions, because it ends at three times:

- Slots, until the end of a request. An engine that queues requests shows on its page how many it
  runs at once. Before it ever queued, the default of vLLM is assumed.
- Tokens of the KV cache, until the end. The page has the size and the used share. What was sent
  since the page, and the growth of the answers that are being written, is added.
- Prefill tokens, until the first output. An endpoint may have as many pending as it computes
  between two pages, because the picker learns no sooner that it has finished.

The picker's own counts are read first. A page only corrects them.
"""

import math
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Candidates, Columns, Floats
from epp.core.knowledge.inflight import OUTPUT_TOKENS_ESTIMATE, Lease
from epp.core.types import EndpointMetrics, Seconds

SLOTS_ASSUMED: Final = 256.0
"""Number of requests that an engine is assumed to run at once before it has queued any: the default
`max_num_seqs` of vLLM.
"""
SLOTS_MAX: Final = 4_096.0
"""Upper bound of the learned number of slots."""
QUEUE_MIN: Final = 5.0
"""Number of requests that may wait in an engine, so that it never idles between the end of a request
and the next decision: the default `queueDepthThreshold` of llm-d-router.
"""
SLOTS_GROWTH: Final = 1.25
"""Factor by which the learned slots grow with each page without a queue on which all are used."""
INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 2.0
"""Bounds of the time between two pages for which an endpoint may have prefill tokens pending."""

_ROWS: Final = (
    "slots",
    "queue",
    "others",
    "sent_tokens",
    "sent_requests",
    "page_at_s",
    "interval_s",
)


class RoomOf(Struct, frozen=True, kw_only=True):
    """The room of one endpoint in numbers, for explanations."""

    requests: float
    """Requests at the endpoint, as far as known."""
    slots: float
    """Learned number of slots."""
    queue: float
    """Number of requests that may wait in the engine besides."""
    kv_share: float
    """Used share of the KV cache with the expected growth; NaN if unknown."""
    prefill_tokens: float
    prefill_tokens_max: float
    load: float

    @property
    def more(self) -> int:
        """Return the number of further requests for which the slots suffice."""
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


class Rooms:
    """What was learned of each endpoint's room, by slot of the pool."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._rows: Floats = np.empty((len(_ROWS), 0))
        self.answer_tokens = float(OUTPUT_TOKENS_ESTIMATE)
        """Expected number of tokens of an answer."""
        self.version = 0
        """Number of pages, forgotten endpoints and corrections; a cached result of an older version
        is invalid.
        """
        self._grow()

    def __repr__(self) -> str:
        return f"<Rooms [{self._rows.shape[1]} slots, {self.version} pages]>"

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Learn from a good page of the endpoint in `slot`."""
        self.version += 1
        if slot >= self._rows.shape[1]:
            self._grow()
        rows = self._rows
        slots, _, _, _, sent, page_at_s, _ = rows[:, slot].tolist()
        running, waiting = metrics.running_requests, metrics.waiting_requests
        if not math.isnan(running + waiting):
            slots = _learned(slots, running, waiting)
            own = self._columns.inflight_requests.item(slot)
            rows[2, slot] = max(0.0, running + waiting - own)
        interval_s = now - page_at_s
        # As many as were sent between two pages may wait: the engine took them in that time.
        queue = max(QUEUE_MIN, sent) if interval_s <= INTERVAL_S_MAX else QUEUE_MIN
        rows[0, slot] = slots
        rows[1, slot] = queue
        rows[3, slot] = rows[4, slot] = 0.0
        rows[5, slot] = now
        rows[6, slot] = min(max(interval_s, INTERVAL_S_MIN), INTERVAL_S_MAX)

    def sent(self, lease: Lease) -> None:
        """Count a request that was sent to the endpoint of `lease`."""
        slot = lease.slot
        if slot >= self._rows.shape[1]:
            self._grow()
        rows = self._rows
        limit = lease.request.output_tokens_max
        answer = self.answer_tokens if limit is None else min(self.answer_tokens, limit)
        rows[3, slot] = rows.item(3, slot) + lease.uncached_tokens + answer
        rows[4, slot] = rows.item(4, slot) + 1.0

    def forget(self, slot: int) -> None:
        """Drop what was learned of `slot`, because its endpoint left or restarted."""
        self.version += 1
        if slot < self._rows.shape[1]:
            self._rows[:, slot] = _UNKNOWN

    def load(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the largest of the three shares of room that are used."""
        slots, queue, requests, kv, pending, pending_max = self._parts(candidates)
        load: Floats = np.maximum(requests / (slots + queue), pending / pending_max)
        return np.fmax(load, kv)

    def hard_load(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the larger of the used shares of slots and KV cache."""
        slots, queue, requests, kv, _, _ = self._parts(candidates)
        load: Floats = np.fmax(requests / (slots + queue), kv)
        return load

    def unstarted_requests(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the requests sent since the last page whose prompts are estimated to be
        pending still.
        """
        sent = self._known(candidates)[4]
        pending = candidates.inflight_prefill_tokens
        tokens = self._known(candidates)[3] - sent * self.answer_tokens
        mean = np.maximum(tokens, 1.0) / np.maximum(sent, 1.0)
        found: Floats = np.minimum(sent, np.ceil(pending / np.maximum(mean, 1.0)))
        return found

    def spare(self, candidates: Candidates) -> tuple[float, float]:
        """Return the number of requests and of tokens that any candidate can take at least before
        its load reaches 1.0; (0, 0) if one is full already.

        The result stays valid until `version` changes, however the requests are divided.
        """
        slots, queue, requests, kv, pending, pending_max = self._parts(candidates)
        if (
            np.fmax(np.maximum(requests / (slots + queue), pending / pending_max), kv) >= 1.0
        ).any():
            return 0.0, 0.0
        capacity = candidates.kv_capacity_tokens
        growth = np.where(np.isnan(kv), math.inf, (1.0 - kv) * capacity)
        tokens = float(np.minimum(np.fmin(growth, math.inf), pending_max - pending).min())
        return float((slots + queue - requests).min()), tokens

    def of(self, candidates: Candidates) -> list[RoomOf]:
        """Return the room of each candidate, for explanations."""
        parts = self._parts(candidates)
        loads = self.load(candidates).tolist()
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

    def _parts(self, candidates: Candidates) -> tuple[Floats, ...]:
        """Return slots, queue, requests, used share of the KV cache (NaN if unknown), pending
        prefill tokens and their maximum, float64[n] each.
        """
        known = self._known(candidates)
        slots, queue, others, sent_tokens, _, _, interval_s = known
        requests = candidates.inflight_requests + others
        capacity = candidates.kv_capacity_tokens
        growing = np.fmax(candidates.running_requests, 0.0) * (self.answer_tokens / 2.0)
        kv = candidates.kv_cache_usage + (sent_tokens + growing) / capacity
        pending = candidates.inflight_prefill_tokens
        speed = self._columns.prefill_drain_tokens_per_s[candidates.slot]
        pending_max = speed * interval_s
        return slots, queue, requests, kv, pending, np.maximum(pending_max, 1.0)

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


_UNKNOWN: Final = np.array([SLOTS_ASSUMED, QUEUE_MIN, 0.0, 0.0, 0.0, -math.inf, INTERVAL_S_MAX])


def _learned(slots: float, running: float, waiting: float) -> float:
    """Return the number of slots after a page with `running` and `waiting` requests."""
    if waiting > 0.0 and running > 0.0:
        # The engine runs this many at once and queues the rest.
        return min(running, SLOTS_MAX)
    if running >= slots:
        return min(max(slots, running) * SLOTS_GROWTH + 1.0, SLOTS_MAX)
    return slots
