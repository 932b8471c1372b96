"""Work that was sent out and has not ended: counted at the decision, given back exactly once.

Scraped metrics lag by a scrape interval; without these counts a burst of requests would all see the
same idle endpoint. An endpoint's uncached prefill tokens drain first-in-first-out at its prefill
speed; the first output of a request, or its end, releases what is left of its own (design D6).
"""

import heapq
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.hit_accuracy import Expected
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

OUTPUT_TOKENS_ESTIMATE: Final = 256
"""Answer length where the request sets no limit: the order of public chat traces."""
SECONDS_PER_OUTPUT_TOKEN_ESTIMATE: Final = 0.025
"""Decode speed of a loaded 8B to 70B model on data-centre cards, rounded up."""


class Ending(StrEnum):
    """How a request ended, as far as the picker can see."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client-disconnect"
    ERROR = "error"
    UNSEEN = "unseen"
    """The gateway shows no responses: the work goes on, unseen."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What `Scheduler.complete` is told."""

    ending: Ending = Ending.COMPLETE
    status: int | None = None
    """HTTP status of the response; None: no response headers were seen."""
    by_gateway: bool = False
    """The gateway answered in the endpoint's place: it did not get through to it."""
    output_tokens: int | None = None
    """As the engine counted them, where its response is parsed; None: nobody said."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine had in its cache, as it said."""

    @property
    def failed(self) -> bool:
        """It was an error, of the endpoint or on the way to it."""
        return self.ending is Ending.ERROR or (self.status is not None and self.status >= 500)

    @property
    def unserved(self) -> bool:
        """The prompt was not computed: it was an error, a refusal or nothing that can be served."""
        return self.failed or (self.status is not None and self.status >= 400)


class Lease:
    """One request's share of an endpoint's load. Only the ledger writes to it, and `ejection`."""

    __slots__ = (
        "ahead_tokens",
        "expected",
        "first_output_at_s",
        "generation",
        "matched_blocks",
        "opened_at_s",
        "prefill_tokens",
        "probe",
        "recorded",
        "request",
        "slot",
    )

    def __init__(
        self,
        request: InferenceRequest,
        slot: int,
        generation: int,
        matched_blocks: int,
        opened_at_s: Seconds,
    ) -> None:
        self.request = request
        self.slot = slot
        """-1 once it is closed."""
        self.generation = generation
        self.matched_blocks = matched_blocks
        """Blocks that the endpoint held before this request was recorded there."""
        self.expected: Expected | None = None
        """What is compared with what its engine counts; None: nothing."""
        self.opened_at_s = opened_at_s
        """When it was sent to where it is."""
        self.first_output_at_s: Seconds | None = None
        self.ahead_tokens = 0.0
        """Uncached prompt tokens that the endpoint had to compute then, its own included."""
        self.prefill_tokens = 0.0
        """Uncached prompt tokens of it that are, by estimate, still to be computed."""
        self.recorded: dict[str, tuple[object, Any]] = {}
        """Name of an affinity index -> the index, and what its `record` returned for this request."""
        self.probe = False
        """It is to show whether an endpoint on trial is back: `ejection`."""

    def __repr__(self) -> str:
        where = f"slot {self.slot}" if self.slot >= 0 else "closed"
        return f"<Lease [{where}, {self.prefill_tokens:.0f} prefill tokens left]>"


class InflightLedger:
    """The open leases, and their sums in the columns of the pool."""

    def __init__(
        self, columns: Columns, ended: Callable[[Lease, Seconds], None] | None = None
    ) -> None:
        """`ended` is told of each live lease that is closed, and must not raise."""
        self._columns = columns
        self._ended = ended
        self._queues: dict[int, deque[Lease]] = {}
        self._generations: dict[int, int] = {}
        self._unseen: list[tuple[Seconds, int, Lease]] = []
        self._unseen_count = 0
        self.open_leases = 0

    def open(
        self,
        request: InferenceRequest,
        slot: int,
        *,
        matched_blocks: int,
        prefill_tokens: float,
        now: Seconds,
    ) -> Lease:
        """Count one more request and its uncached tokens at `slot`."""
        lease = Lease(request, slot, self._generations.get(slot, 0), matched_blocks, now)
        self.open_leases += 1
        self._charge(lease, prefill_tokens, now)
        return lease

    def first_output(self, lease: Lease, now: Seconds) -> None:
        """The endpoint produced something: this prompt is prefilled."""
        if lease.first_output_at_s is None:
            lease.first_output_at_s = now
        self._release_prefill(lease, now)

    def _release_prefill(self, lease: Lease, now: Seconds) -> None:
        if self.is_live(lease):
            self._drain(lease.slot, now)
            self._columns.prefill_backlog_tokens[lease.slot] -= lease.prefill_tokens
            lease.prefill_tokens = 0.0

    def close(self, lease: Lease, now: Seconds) -> bool:
        """Give back all that the lease holds; False if it was closed before."""
        if lease.slot < 0:
            return False
        self._release_prefill(lease, now)
        if self.is_live(lease):
            self._uncount(lease)
            if self._ended is not None:
                self._ended(lease, now)
        lease.slot = -1
        self.open_leases -= 1
        return True

    def close_later(self, lease: Lease, now: Seconds, at_most_s: Seconds) -> None:
        """Nothing more will be heard of this request: close it when it has probably ended."""
        self._unseen_count += 1
        ends_at_s = now + min(at_most_s, self._remaining_s(lease, now))
        heapq.heappush(self._unseen, (ends_at_s, self._unseen_count, lease))

    def close_due(self, now: Seconds) -> None:
        """Close what `close_later` scheduled until now."""
        while self._unseen and self._unseen[0][0] <= now:
            self.close(heapq.heappop(self._unseen)[2], now)

    def move(self, lease: Lease, slot: int, prefill_tokens: float, now: Seconds) -> None:
        """Another endpoint serves the request: move its share there."""
        self._release_prefill(lease, now)
        if self.is_live(lease):
            self._uncount(lease)
            self._leave_queue(lease)
        lease.slot = slot
        lease.opened_at_s = now
        lease.first_output_at_s = None
        lease.generation = self._generations.get(slot, 0)
        self._charge(lease, prefill_tokens, now)

    def set_speed(self, slot: int, prefill_tokens_per_s: float, now: Seconds) -> None:
        """The endpoint in `slot` prefills so fast from `now` on."""
        columns = self._columns
        if columns.prefill_tokens_per_s.item(slot) != prefill_tokens_per_s:
            self._drain(slot, now)
            columns.prefill_tokens_per_s[slot] = prefill_tokens_per_s

    def forget(self, slot: int) -> None:
        """The endpoint left or restarted: its leases count nowhere any more."""
        self._generations[slot] = self._generations.get(slot, 0) + 1
        self._queues.pop(slot, None)

    def is_live(self, lease: Lease) -> bool:
        """It is open, and the endpoint that it was opened on is still there, not restarted."""
        return lease.slot >= 0 and lease.generation == self._generations.get(lease.slot, 0)

    def _charge(self, lease: Lease, prefill_tokens: float, now: Seconds) -> None:
        slot = lease.slot
        self._drain(slot, now)
        lease.prefill_tokens = prefill_tokens
        columns = self._columns
        # Items as Python's own numbers: arithmetic on numpy's costs three times as much.
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) + 1
        columns.unreported_requests[slot] = columns.unreported_requests.item(slot) + 1
        context = columns.inflight_context_tokens.item(slot)
        columns.inflight_context_tokens[slot] = context + lease.request.prompt_tokens
        backlog = columns.prefill_backlog_tokens.item(slot)
        columns.prefill_backlog_tokens[slot] = lease.ahead_tokens = backlog + prefill_tokens
        queue = self._queues.get(slot)
        if queue is None:
            queue = self._queues[slot] = deque()
        queue.append(lease)

    def _uncount(self, lease: Lease) -> None:
        columns, slot = self._columns, lease.slot
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) - 1
        context = columns.inflight_context_tokens.item(slot)
        columns.inflight_context_tokens[slot] = context - lease.request.prompt_tokens

    def _leave_queue(self, lease: Lease) -> None:
        queue = self._queues.get(lease.slot)
        if queue and lease in queue:
            queue.remove(lease)

    def _drain(self, slot: int, now: Seconds) -> None:
        """Let `slot` have prefilled since it was last looked at, the oldest prompt first."""
        columns = self._columns
        elapsed_s = now - columns.prefill_drained_at_s.item(slot)
        done = elapsed_s * columns.prefill_tokens_per_s.item(slot)
        columns.prefill_drained_at_s[slot] = now
        queue = self._queues.get(slot)
        if not queue:
            columns.prefill_backlog_tokens[slot] = 0.0
            return
        backlog: float = columns.prefill_backlog_tokens.item(slot)
        while queue and queue[0].prefill_tokens <= done:
            first = queue.popleft()
            done -= first.prefill_tokens
            backlog -= first.prefill_tokens
            first.prefill_tokens = 0.0
        if queue:
            queue[0].prefill_tokens -= done
            backlog -= done
        # Rounding must not leave a ghost of work behind an empty queue.
        columns.prefill_backlog_tokens[slot] = max(backlog, 0.0) if queue else 0.0

    def _remaining_s(self, lease: Lease, now: Seconds) -> Seconds:
        if not self.is_live(lease):
            return 0.0
        self._drain(lease.slot, now)
        columns = self._columns
        ahead = columns.prefill_backlog_tokens.item(lease.slot)
        speed = columns.prefill_tokens_per_s.item(lease.slot)
        output_tokens = lease.request.output_tokens_max or OUTPUT_TOKENS_ESTIMATE
        return ahead / speed + output_tokens * SECONDS_PER_OUTPUT_TOKEN_ESTIMATE
