"""Work that was sent out and has not ended: counted at the decision, given back exactly once.

Scraped metrics lag by a scrape interval; without these counts a burst of requests would all see the
same idle endpoint. The uncached prefill tokens of a request are released by its first output, where
that is seen, or its end (design D6, D25). Where the endpoint's page counts first outputs
(`first_outputs`), each page releases those of the oldest requests, and the others have all of their
tokens still. From page to page, and where nothing is counted, tokens drain first-in-first-out: at the
speed that was seen at this endpoint, or is believed.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from math import isnan
from typing import Any, Final

from msgspec import Struct, field

from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.first_outputs import PAGE_S_MAX, FirstOutputs
from epp.core.knowledge.hit_accuracy import Expected
from epp.core.knowledge.prefill_speed import LearntSpeed
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Seconds

OUTPUT_TOKENS_ESTIMATE: Final = 256
"""Answer length where the request sets no limit: the order of public chat traces."""
SECONDS_PER_OUTPUT_TOKEN_ESTIMATE: Final = 0.025
"""Decode speed of a loaded 8B to 70B model on data-centre cards, rounded up."""

BUSY_S_MAX: Final = 0.5
"""Whoever had something to compute at two sights that are further apart may have been idle between them."""
SHOWN_S_MAX: Final = 10.0
"""Where no page counts and the last first chunk was longer ago, too: the gateway may show none any more."""


MAY_BE_FULL: Final = frozenset({429, 503})
"""Statuses by which an endpoint may say that it has no room."""


class Ending(StrEnum):
    """How a request ended, as far as the picker can see."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client-disconnect"
    ERROR = "error"
    UNSEEN = "unseen"
    """The gateway shows no responses: the work goes on, unseen."""


class Outcome(Struct, frozen=True, kw_only=True, gc=False):
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
    retry_after_s: Seconds | None = None
    """Seconds after which a 429 or 503 asks the client to try again; None: it does not say."""

    @property
    def failed(self) -> bool:
        """It was an error, of the endpoint or on the way to it."""
        return self.ending is Ending.ERROR or (self.status is not None and self.status >= 500)

    @property
    def full(self) -> bool:
        """Whether the endpoint refused the request for want of room."""
        if self.by_gateway:
            return False
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)

    @property
    def unserved(self) -> bool:
        """The prompt was not computed: it was an error, a refusal or nothing that can be served."""
        return self.failed or (self.status is not None and self.status >= 400)

    @property
    def answered(self) -> bool:
        """There was a whole answer, so that the prompt was computed."""
        return self.ending is Ending.COMPLETE and not self.unserved


class Lease(Struct, eq=False, gc=False):
    """One request's share of an endpoint's load. Only the ledger writes to it, and `ejection`."""

    request: InferenceRequest
    slot: int
    """-1 once it is closed."""
    generation: int
    matched_blocks: int
    """Blocks that the endpoint held before this request was recorded there."""
    opened_at_s: Seconds
    """When it was sent to where it is."""
    expected: Expected | None = None
    """The prediction that is compared with the counters of the engine; None: there is none."""
    first_output_at_s: Seconds | None = None
    ahead_tokens: float = 0.0
    """Uncached prompt tokens that the endpoint had to compute then, its own included, if it is as
    fast as is said."""
    prefill_tokens: float = 0.0
    """Uncached prompt tokens of it that are, by estimate, still to be computed."""
    uncached_tokens: float = 0.0
    """All of them."""
    prefilled: bool = False
    """It was seen that they are computed, or will not be."""
    assumed: bool = False
    """They drained while nothing told of first outputs: no later evidence is of this request."""
    recorded: dict[str, tuple[object, Any]] = field(default_factory=dict)
    """Name of an affinity index -> the index, and what its `record` returned for this request."""
    rank: int = -1
    """The rank of the endpoint that was told to serve the request; -1: its engine chose."""
    probe: bool = False
    """It is to show whether an endpoint on trial is back: `ejection`."""

    def undrain(self) -> float:
        """Have all of its tokens to compute again; how many had drained."""
        drained = self.uncached_tokens - self.prefill_tokens
        self.prefill_tokens = self.uncached_tokens
        return drained

    def __repr__(self) -> str:
        where = f"slot {self.slot}" if self.slot >= 0 else "closed"
        return f"<Lease [{where}, {self.prefill_tokens:.0f} prefill tokens left]>"


class _Backlog:
    """The requests of one life of an endpoint whose first output was not seen yet, oldest first."""

    __slots__ = (
        *("busy_since_s", "drained", "first_outputs", "queue", "scraped_at_s"),
        *("shown_at_s", "speed", "unhindered_at_s", "unhindered_tokens"),
    )

    def __init__(self, believed_tokens_per_s: float) -> None:
        self.queue: deque[Lease] = deque()
        self.drained: deque[Lease] = deque()
        """Ahead of `queue`: their tokens have drained since evidence was there, and more is to come."""
        self.first_outputs = FirstOutputs()
        self.scraped_at_s: Seconds = -math.inf
        self.shown_at_s: Seconds = -math.inf
        """When the first chunk of a streamed answer was seen last."""
        self.speed = LearntSpeed(believed_tokens_per_s)
        self.busy_since_s: Seconds = -math.inf
        """When evidence showed last that there was something to compute; -inf: the last showed nothing."""

        self.unhindered_tokens = 0.0
        """What would be left by `unhindered_at_s`, were it as fast as is said: who is slow is compared to that."""
        self.unhindered_at_s: Seconds = -math.inf

    def ahead_of(self, prefill_tokens: float, tokens_per_s: float, now: Seconds) -> float:
        """`unhindered_tokens` with those of one more request."""
        drained = (now - self.unhindered_at_s) * tokens_per_s
        self.unhindered_tokens = max(self.unhindered_tokens - drained, 0.0) + prefill_tokens
        self.unhindered_at_s = now
        return self.unhindered_tokens

    def let_go(self, first: Lease, now: Seconds) -> None:
        """`first`, the oldest, has drained."""
        counted = self.first_outputs.counted
        shown = first.request.stream and self.shown_at_s > -math.inf
        if first.prefilled:
            return
        if not (counted or shown):
            first.assumed = True
            self.first_outputs.assumed()
            return
        self.drained.append(first)
        # After that nothing may be seen for long.
        until_s = self.scraped_at_s + PAGE_S_MAX if counted else self.shown_at_s + SHOWN_S_MAX
        while self.drained and now > until_s:
            assumed = self.drained.popleft()
            if not assumed.prefilled:
                assumed.prefilled = True
                self.first_outputs.assumed()

    def restore(self) -> float:
        """Let none of their tokens have drained; how many these were."""
        queue, restored = self.queue, 0.0
        if queue and not queue[0].prefilled:
            restored = queue[0].undrain()
        for lease in reversed(self.drained):
            if not lease.prefilled:
                restored += lease.undrain()
                queue.appendleft(lease)
        self.drained.clear()
        return restored

    def release(self, requests: int) -> float:
        """The oldest `requests` of the queue are computed: how many tokens these had left."""
        queue, tokens = self.queue, 0.0
        while requests and queue:
            first = queue.popleft()
            if not first.prefilled:
                first.prefilled = True
                tokens += first.prefill_tokens
                first.prefill_tokens = 0.0
                requests -= 1
        return tokens


class InflightLedger:
    """The open leases, and their sums in the columns of the pool."""

    def __init__(
        self, columns: Columns, ended: Callable[[Lease, Seconds], None] | None = None
    ) -> None:
        """`ended` is told of each live lease that is closed, and must not raise."""
        self._columns = columns
        self._ended = ended
        self._backlogs: dict[int, _Backlog] = {}
        self._generations: dict[int, int] = {}
        self._sent: dict[int, dict[int, int]] = {}
        """Slot -> rank -> live leases that are placed there; none that is 0."""
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

    def place(self, lease: Lease, rank: int) -> None:
        """The request of `lease`, which is placed nowhere yet, is sent to this rank of its endpoint."""
        lease.rank = rank
        self._count_rank(lease, 1)

    def sent_to_ranks(self, slot: int, ranks: int) -> list[int]:
        """Live leases that are placed at each of the first `ranks` ranks of the endpoint in `slot`."""
        sent = self._sent.get(slot, {})
        return [sent.get(rank, 0) for rank in range(ranks)]

    def first_output(self, lease: Lease, now: Seconds) -> None:
        """The endpoint produced something: this prompt is prefilled."""
        if lease.first_output_at_s is None:
            lease.first_output_at_s = now
        if lease.prefilled or not self.is_live(lease):
            return
        backlog = self._backlogs[lease.slot]
        adapters_reported = self._columns.adapter_generation.item(lease.slot)
        if backlog.first_outputs.counted or adapters_reported or not lease.request.stream:
            self._release_prefill(lease, now, computed=True)
            return
        # Where pages tell nothing: of the others that are streamed this was not seen.
        self._drain(lease.slot, now)
        backlog.shown_at_s = now
        left = self._columns.prefill_backlog_tokens.item(lease.slot) + backlog.restore()
        computed, lease.prefill_tokens = lease.prefill_tokens, 0.0
        lease.prefilled = True
        backlog.first_outputs.known()
        self._take_stock(lease.slot, backlog, left - computed, computed, now)

    def _release_prefill(self, lease: Lease, now: Seconds, *, computed: bool) -> None:
        """Of a live lease. `computed`: it is seen to be, where it was not told by a page."""
        columns, slot = self._columns, lease.slot
        self._drain(slot, now)
        if lease.prefill_tokens:
            backlog = columns.prefill_backlog_tokens.item(slot)
            columns.prefill_backlog_tokens[slot] = backlog - lease.prefill_tokens
            lease.prefill_tokens = 0.0
        if computed and not (lease.prefilled or lease.assumed):
            self._backlogs[slot].first_outputs.known()
        lease.prefilled = True

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """A good page of the endpoint in `slot`: it may count first outputs."""
        backlog = self._backlogs.get(slot)
        if backlog is None:
            if isnan(metrics.first_outputs_total):
                return
            backlog = self._open_backlog(slot)
        columns, first_outputs = self._columns, backlog.first_outputs
        since_s = now - backlog.scraped_at_s
        idle = not (backlog.queue or backlog.drained)
        if idle:
            # Rounding of what was moved away must not leave a ghost.
            columns.prefill_backlog_tokens[slot] = 0.0
        elif not first_outputs.counted or since_s > PAGE_S_MAX:
            self._drain(slot, now)
        # What has drained is kept for so long after the page before this.
        backlog.scraped_at_s = now
        inflight_requests = columns.inflight_requests.item(slot)
        released = first_outputs.scraped(metrics, inflight_requests, since_s=since_s)
        if not first_outputs.counted:
            self._drain(slot, now)
            if backlog.shown_at_s == -math.inf:
                backlog.drained.clear()
                self._believe_speed(slot, backlog)
            return
        if idle:
            backlog.busy_since_s = -math.inf
            return
        # What has drained since is restored with the rest.
        columns.prefill_drained_at_s[slot] = now
        left = columns.prefill_backlog_tokens.item(slot) + backlog.restore()
        computed = backlog.release(released)
        self._take_stock(slot, backlog, left - computed, computed, now)

    def _take_stock(
        self, slot: int, backlog: _Backlog, left: float, computed: float, now: Seconds
    ) -> None:
        """There is evidence of `slot`: `computed` tokens since the last, and `left` tokens to compute."""
        columns = self._columns
        # Less than a token is rounding.
        busy = left >= 1.0
        busy_s = now - backlog.busy_since_s
        if busy and 0.0 <= busy_s <= BUSY_S_MAX:
            backlog.speed.worked(computed, busy_s)
            columns.prefill_drain_tokens_per_s[slot] = backlog.speed.tokens_per_s
        backlog.busy_since_s = now if busy else -math.inf
        columns.prefill_backlog_tokens[slot] = left if busy else 0.0

    def close(self, lease: Lease, now: Seconds, *, answered: bool = False) -> bool:
        """Give back all that the lease holds; False if it was closed before.

        `answered`: its prompt was computed.
        """
        if lease.slot < 0:
            return False
        if self.is_live(lease):
            self._release_prefill(lease, now, computed=answered)
            self._uncount(lease)
            if not self._columns.inflight_requests.item(lease.slot):
                self._backlogs[lease.slot].unhindered_tokens = 0.0
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
        if self.is_live(lease):
            self._release_prefill(lease, now, computed=False)
            self._uncount(lease)
            self._leave_queue(lease)
        lease.slot = slot
        lease.opened_at_s = now
        lease.first_output_at_s = None
        lease.generation = self._generations.get(slot, 0)
        self._charge(lease, prefill_tokens, now)

    def set_speed(self, slot: int, prefill_tokens_per_s: float, now: Seconds) -> None:
        """The endpoint in `slot` is said to prefill so fast, from `now` on."""
        columns = self._columns
        if columns.prefill_tokens_per_s.item(slot) != prefill_tokens_per_s:
            self._drain(slot, now)
            columns.prefill_tokens_per_s[slot] = prefill_tokens_per_s
            self._believe_speed(slot, self._backlogs.get(slot))

    def forget(self, slot: int) -> None:
        """The endpoint left or restarted: its leases count nowhere any more."""
        self._generations[slot] = self._generations.get(slot, 0) + 1
        self._backlogs.pop(slot, None)
        self._sent.pop(slot, None)
        self._believe_speed(slot, None)

    def is_live(self, lease: Lease) -> bool:
        """It is open, and the endpoint that it was opened on is still there, not restarted."""
        return lease.slot >= 0 and lease.generation == self._generations.get(lease.slot, 0)

    def _charge(self, lease: Lease, prefill_tokens: float, now: Seconds) -> None:
        slot = lease.slot
        self._drain(slot, now)
        lease.prefill_tokens = lease.uncached_tokens = prefill_tokens
        lease.prefilled = False
        if lease.rank >= 0:
            self._count_rank(lease, 1)
        columns = self._columns
        # Items as Python's own numbers: arithmetic on numpy's costs three times as much.
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) + 1
        columns.unreported_requests[slot] = columns.unreported_requests.item(slot) + 1
        context = columns.inflight_context_tokens.item(slot)
        columns.inflight_context_tokens[slot] = context + lease.request.prompt_tokens
        backlog = columns.prefill_backlog_tokens.item(slot)
        columns.prefill_backlog_tokens[slot] = backlog + prefill_tokens
        queued = self._backlogs.get(slot) or self._open_backlog(slot)
        queued.queue.append(lease)
        speed = columns.prefill_tokens_per_s.item(slot)
        lease.ahead_tokens = queued.ahead_of(prefill_tokens, speed, now)

    def _believe_speed(self, slot: int, backlog: _Backlog | None) -> None:
        """Nothing is known of how fast `slot` is but what is said."""
        speed = self._columns.prefill_tokens_per_s.item(slot)
        self._columns.prefill_drain_tokens_per_s[slot] = speed
        if backlog is not None:
            backlog.speed = LearntSpeed(speed)
            backlog.busy_since_s = -math.inf

    def _open_backlog(self, slot: int) -> _Backlog:
        opened = _Backlog(self._columns.prefill_tokens_per_s.item(slot))
        self._backlogs[slot] = opened
        return opened

    def _count_rank(self, lease: Lease, requests: int) -> None:
        sent = self._sent.setdefault(lease.slot, {})
        left = sent.get(lease.rank, 0) + requests
        if left:
            sent[lease.rank] = left
            return
        del sent[lease.rank]
        if not sent:
            del self._sent[lease.slot]

    def _uncount(self, lease: Lease) -> None:
        columns, slot = self._columns, lease.slot
        if lease.rank >= 0:
            self._count_rank(lease, -1)
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) - 1
        context = columns.inflight_context_tokens.item(slot)
        columns.inflight_context_tokens[slot] = context - lease.request.prompt_tokens

    def _leave_queue(self, lease: Lease) -> None:
        backlog = self._backlogs.get(lease.slot)
        if backlog is None:
            return
        for queue in (backlog.queue, backlog.drained):
            if lease in queue:
                queue.remove(lease)

    def _drain(self, slot: int, now: Seconds) -> None:
        """Let `slot` have prefilled since it was last looked at, the oldest prompt first."""
        columns = self._columns
        elapsed_s = now - columns.prefill_drained_at_s.item(slot)
        if elapsed_s < 0.0:
            # A page is told of later than it was read: nothing is computed backwards.
            return
        done = elapsed_s * columns.prefill_drain_tokens_per_s.item(slot)
        columns.prefill_drained_at_s[slot] = now
        backlog = self._backlogs.get(slot)
        if backlog is None or not backlog.queue:
            columns.prefill_backlog_tokens[slot] = 0.0
            return
        queue = backlog.queue
        left: float = columns.prefill_backlog_tokens.item(slot)
        while queue and queue[0].prefill_tokens <= done:
            first = queue.popleft()
            done -= first.prefill_tokens
            left -= first.prefill_tokens
            first.prefill_tokens = 0.0
            backlog.let_go(first, now)
        if queue:
            queue[0].prefill_tokens -= done
            left -= done
        # Rounding must not leave a ghost of work behind an empty queue.
        columns.prefill_backlog_tokens[slot] = max(left, 0.0) if queue else 0.0

    def _remaining_s(self, lease: Lease, now: Seconds) -> Seconds:
        if not self.is_live(lease):
            return 0.0
        self._drain(lease.slot, now)
        columns = self._columns
        ahead = columns.prefill_backlog_tokens.item(lease.slot)
        speed = columns.prefill_drain_tokens_per_s.item(lease.slot)
        output_tokens = lease.request.output_tokens_max or OUTPUT_TOKENS_ESTIMATE
        return ahead / speed + output_tokens * SECONDS_PER_OUTPUT_TOKEN_ESTIMATE
