"""The requests in flight: counted at the decision, and released exactly once.

Scraped metrics lag by a scrape interval. Without these counts, all requests of a burst would see
the same idle endpoint. The uncached prefill tokens of a request are released by its first output,
if it is seen, or by its end (design D6, D25). If the endpoint's metrics page counts first outputs
(`first_outputs`), each page releases the tokens of the oldest requests, and the others keep all of
theirs. Between pages, or without such a counter, tokens drain first in, first out. The rate is the
measured or the configured speed.

A request that several endpoints serve has one lease. It holds a lease for each endpoint that
prefills or encodes (`Lease.earlier`), which ends with the first sign of that stage's end and no
later than the request. Every lease counts at its own endpoint; one that is closed, or whose
endpoint left, has no effect on the others.

An endpoint that decodes a prompt which another endpoint computes receives KV blocks for it. Until
its first output, the tokens of these blocks count at both endpoints: as received at one, and as
sent at the other. Half of them count once the prefill has ended, because a transfer that has begun
is halfway through on average.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from math import isnan
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct, field

from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.first_outputs import PAGE_S_MAX, FirstOutputs
from epp.core.knowledge.hit_accuracy import Expected
from epp.core.knowledge.latency import PlacedPrediction
from epp.core.knowledge.prefill_speed import LearntSpeed
from epp.core.prompt.request import InferenceRequest
from epp.core.types import DECODE, ENCODE, Endpoint, EndpointMetrics, Seconds, Stage

OUTPUT_TOKENS_ESTIMATE: Final = 256
"""Assumed answer length in tokens of a request that sets no limit: the typical length in public
chat traces.
"""
SECONDS_PER_OUTPUT_TOKEN_ESTIMATE: Final = 0.025
"""Assumed decode time of one answer token in seconds: that of a loaded 8B to 70B model on
data-centre GPUs, rounded up.
"""

BUSY_S_MAX: Final = 0.5
"""Longest time in seconds between two observations of an endpoint, the first of which showed
pending prefill tokens, for which the endpoint may count as busy in between.
"""
ARRIVAL_S_PER_TOKEN: Final = 20e-6
"""Longest time in seconds that a server takes to tokenize a prompt, for each of its tokens, before
the engine counts the request as waiting. Source: twice the front-end time of the simulator's
profiles.
"""
UNSEEN_PREFILL_S: Final = 1.0
"""Time in seconds from the estimated end of a prefill or encode stage until its lease is closed,
used if no event shows the end of the stage.
"""
SHOWN_S_MAX: Final = 10.0
"""Time in seconds since the last first chunk of an answer from an endpoint after which the picker
assumes that the gateway no longer shows answers. If the endpoint's metrics page counts first
outputs, it has an effect only while there are peers.
"""


MAY_BE_FULL: Final = frozenset({429, 503})
"""HTTP statuses with which an endpoint may report that it is full."""


class Ending(StrEnum):
    """The way in which a request ended, as far as the picker can see it."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client-disconnect"
    ERROR = "error"
    UNSEEN = "unseen"
    """The gateway does not show responses to the picker, so that the request may still run."""
    EVICTED = "evicted"
    """The picker refused the request after it was placed and before its response."""


class Outcome(Struct, frozen=True, kw_only=True, gc=False):
    """The outcome of a request: how it ended, with what status and how many tokens."""

    ending: Ending = Ending.COMPLETE
    status: int | None = None
    """HTTP status of the response, or None if no response headers were seen."""
    by_gateway: bool = False
    """True if the gateway seems to have answered instead of the endpoint, because the response has
    neither a `date` nor a `server` header.
    """
    output_tokens: int | None = None
    """Number of output tokens as counted by the engine, or None if not reported."""
    cached_tokens: int | None = None
    """Number of prompt tokens that the engine reported as cached, or None if not reported."""
    retry_after_s: Seconds | None = None
    """Seconds after which a response 429 or 503 allows another attempt, or None if it has no
    `retry-after`.
    """

    @property
    def failed(self) -> bool:
        """Return whether the request failed, at the endpoint or on the way to it."""
        return self.ending is Ending.ERROR or (self.status is not None and self.status >= 500)

    @property
    def full(self) -> bool:
        """Return whether the endpoint refused the request for lack of capacity."""
        if self.by_gateway:
            return False
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)

    @property
    def unserved(self) -> bool:
        """Return whether the prompt counts as not computed by the engine, because the request
        failed, was refused or was invalid.
        """
        return self.failed or (self.status is not None and self.status >= 400)

    @property
    def answered(self) -> bool:
        """Return whether the client got a complete answer, which shows that the engine computed the
        prompt.
        """
        return self.ending is Ending.COMPLETE and not self.unserved


class Recorded(Struct, frozen=True, gc=False):
    """The data that undoes what an affinity index recorded for a request."""

    index: object
    undo: Any
    """Result of the index's `record`."""


class Lease(Struct, eq=False, gc=False):
    """One request's share of an endpoint's load, from the decision until the request or its stage
    ends.
    """

    request: InferenceRequest
    slot: int
    """Slot of the endpoint at which the request counts; -1 once the lease is closed."""
    generation: int
    matched_blocks: int
    """Number of blocks of the prompt that the endpoint was estimated to have cached before this
    request was recorded there.
    """
    opened_at_s: Seconds
    """Time at which the request was sent to the endpoint in `slot`."""
    expected: Expected | None = None
    """Prediction of the cache hit that is compared with the engine's counters, or None if nothing
    is compared.
    """
    first_output_at_s: Seconds | None = None
    ahead_tokens: float = 0.0
    """Number of uncached prompt tokens that the endpoint had to compute when the request was sent,
    this request's included. The number assumes the endpoint's configured prefill speed. It is never
    above the ledger's estimate, which is lower if the endpoint was observed to be faster.
    """
    prefill_tokens: float = 0.0
    """Estimate of how many of this request's uncached prompt tokens are still to be computed."""
    uncached_tokens: float = 0.0
    """Number of this request's prompt tokens that the endpoint had to compute when the request was
    sent, because they were estimated not to be cached; 0 if another endpoint computes the prompt.
    """
    prefilled: bool = False
    """True once the prompt of this request is known to be computed at the endpoint or known never
    to be, or is assumed to be computed because no evidence of its first output came in time.
    """
    assumed: bool = False
    """True if the prompt of this request was assumed to be computed without evidence of any first
    output. A first output that is seen later is then not counted again.
    """
    recorded: dict[str, Recorded] = field(default_factory=dict)
    """Data that undoes what each affinity index recorded for this request, by name of the index."""
    rank: int = -1
    """Data-parallel rank that must serve the request; -1 if the engine chooses."""
    probe: bool = False
    """True if the request is a probe of an ejected endpoint (module `ejection`)."""
    stage: Stage = Stage.DECODE
    """Stage of the request on which the endpoint in `slot` works."""
    earlier: tuple["Lease", ...] = ()
    """Leases of the endpoints that prefill and encode for this request. It is () if the endpoint in
    `slot` does everything, and for these leases themselves.
    """
    latency: PlacedPrediction | None = None
    """Predicted latency at the endpoint in `slot`, or None if nothing was predicted for it."""
    counted: bool = True
    """False if another lease of the same request counts the request at the endpoint in `slot`."""
    moved_tokens: float = 0.0
    """Number of prompt tokens whose KV blocks the endpoint in `slot` receives from an endpoint that
    computes the prompt; 0 if it computes the prompt itself.
    """
    transfer_tokens: float = 0.0
    """Estimate of how many of `moved_tokens` have not arrived."""
    sender: tuple[int, int] = (-1, 0)
    """Slot and generation of the endpoint that computes the prompt and sends its KV blocks to the
    endpoint in `slot`; the sender's slot is -1 if it is unknown or if nothing is sent.
    """

    def undrain(self) -> float:
        """Count all uncached tokens of the request as tokens to compute again. Return how many of
        them had been assumed to be computed.
        """
        drained = self.uncached_tokens - self.prefill_tokens
        self.prefill_tokens = self.uncached_tokens
        return drained

    def __repr__(self) -> str:
        where = f"slot {self.slot}" if self.slot >= 0 else "closed"
        return f"<Lease [{self.stage}, {where}, {self.prefill_tokens:.0f} prefill tokens left]>"


class _Backlog:
    """The requests at one endpoint whose first output the picker has not seen, oldest first."""

    __slots__ = (
        *("begun_tokens", "busy_since_s", "counted_last", "drained", "first_outputs", "queue"),
        *("received_total", "receiving", "steps_s", "scraped_at_s", "seen_tokens"),
        *("seen_at_s", "seen_transfer_tokens", "shown_at_s", "speed"),
        *("unhindered_at_s", "unhindered_tokens"),
    )

    def __init__(self, believed_tokens_per_s: float) -> None:
        self.queue: deque[Lease] = deque()
        self.drained: deque[Lease] = deque()
        """Requests that are older than those in `queue` and whose prompts are assumed to be
        computed. Evidence of their first outputs is still expected.
        """
        self.receiving: dict[Lease, None] = {}
        """Requests whose prompts other endpoints compute, without a first output, oldest first.
        They are not in `queue`, because their first outputs do not come in its order.
        """
        self.received_total = math.nan
        """Number of prompt tokens whose KV blocks the engine has received since it started, on the
        last metrics page; NaN if not reported.
        """
        self.seen_transfer_tokens = 0.0
        """Number of prompt tokens whose KV blocks the engine received for requests whose first
        output the picker saw after the last metrics page.
        """
        self.first_outputs = FirstOutputs()
        self.scraped_at_s: Seconds = -math.inf
        self.shown_at_s: Seconds = -math.inf
        """Time at which the picker last saw the first chunk of a streamed answer from the endpoint
        while its metrics pages neither counted first outputs nor reported adapters; -inf if never.
        """
        self.seen_at_s: Seconds = -math.inf
        """Time at which the gateway last showed that the endpoint had computed a prompt: by the first
        chunk of a streamed answer, or because the request went on elsewhere. The end of an answer
        shows it too late.
        """
        self.speed = LearntSpeed(believed_tokens_per_s)
        self.busy_since_s: Seconds = -math.inf
        """Time at which a metrics page or an answer last showed that the endpoint had prefill
        tokens to compute; -inf if the last one showed none.
        """
        self.counted_last = False
        """True if the prefill speed was measured between the last two observations of the endpoint,
        and the last one showed tokens to compute.
        """
        self.begun_tokens = 0.0
        """Estimated number of uncached prompt tokens of the requests in `queue` that the endpoint
        had computed when the last metrics page was read.
        """
        self.seen_tokens = 0.0
        """Number of uncached prompt tokens of the requests that a first output or an answer showed
        to be computed after the last metrics page. The next page counts these first outputs, and
        the tokens count as computed then.
        """
        self.steps_s = (-math.inf, -math.inf)
        """Times of the last two metrics pages that showed the end of an engine step, the earlier one
        first.
        """
        self.unhindered_tokens = 0.0
        """Number of prefill tokens that would be left at `unhindered_at_s` if the endpoint had its
        configured speed. Slow endpoints are detected by comparison with it.
        """
        self.unhindered_at_s: Seconds = -math.inf

    def ahead_of(
        self, prefill_tokens: float, pending_tokens: float, tokens_per_s: float, now: Seconds
    ) -> float:
        """Subtract from `unhindered_tokens` what the endpoint computes until `now` at its
        configured speed, add the tokens of a new request, and return the sum, at most
        `pending_tokens`.

        `pending_tokens` is the estimate of all prefill tokens that the endpoint has to compute, the
        new request's included. An endpoint that is faster than its configured speed has fewer of
        them than the sum. Without this limit, the sum would grow as long as such an endpoint
        receives more than its configured speed allows.
        """
        drained = (now - self.unhindered_at_s) * tokens_per_s
        left = max(self.unhindered_tokens - drained, 0.0) + prefill_tokens
        if left > pending_tokens:  # noqa: PLR1730  a call takes longer
            left = pending_tokens
        self.unhindered_tokens = left
        self.unhindered_at_s = now
        return self.unhindered_tokens

    def let_go(self, first: Lease, now: Seconds) -> None:
        """Record that the prompt of `first`, the oldest request in the queue, is assumed to be
        computed.
        """
        counted = self.first_outputs.counted
        shown = first.request.stream and self.shown_at_s > -math.inf
        if first.prefilled:
            return
        if not (counted or shown):
            first.assumed = True
            self.first_outputs.assumed()
            return
        self.drained.append(first)
        # Evidence may be absent for long after this time.
        until_s = self.scraped_at_s + PAGE_S_MAX if counted else self.shown_at_s + SHOWN_S_MAX
        while self.drained and now > until_s:
            assumed = self.drained.popleft()
            if not assumed.prefilled:
                assumed.prefilled = True
                self.first_outputs.assumed()

    def restore(self) -> float:
        """Count the tokens of requests in `queue` and `drained` that were only assumed to be
        computed as pending again. Return how many these were.
        """
        queue, restored = self.queue, 0.0
        if queue and not queue[0].prefilled:
            restored = queue[0].undrain()
        for lease in reversed(self.drained):
            if not lease.prefilled:
                restored += lease.undrain()
                queue.appendleft(lease)
        self.drained.clear()
        return restored

    def worked(self, computed: float, now: Seconds, *, busy: bool) -> bool:
        """Measure the prefill speed of the endpoint in the interval since the last observation.
        Return False if the interval does not count.

        `computed` is the number of tokens that were computed in the interval. `busy` is True if
        tokens are pending now. The interval in which the last prompt ends counts as a whole if the
        interval before it counted. This makes up for the interval in which the first prompt begins,
        which does not count.
        """
        interval_s = now - self.busy_since_s
        counts = (busy or self.counted_last) and 0.0 <= interval_s <= BUSY_S_MAX
        self.counted_last = counts and busy
        if counts:
            self.speed.worked(computed, interval_s)
        return counts

    def progress(self, computed: float, since_s: Seconds) -> float:
        """Return the estimated number of prompt tokens of the requests in `queue` that the endpoint
        computed before the metrics page that was read now.

        `computed` are the tokens of the prompts whose first output this page shows. `since_s` is
        the time since the page before. The engine does not pause while prompts wait. All that it
        computed beyond `computed` belongs to the oldest prompt, because that prompt has no first
        output yet.
        """
        worked = since_s * self.speed.tokens_per_s
        begun, self.begun_tokens = self.begun_tokens + worked - computed, 0.0
        head = self.head()
        if head is not None and head.opened_at_s <= self.scraped_at_s - since_s:
            most = min(head.uncached_tokens, worked) if computed else head.uncached_tokens
            self.begun_tokens = min(max(begun, 0.0), most)
        return self.begun_tokens

    def head(self) -> Lease | None:
        """Return the oldest lease in `queue` whose prompt is still to be computed, or None if there
        is none.
        """
        return next((lease for lease in self.queue if not lease.prefilled), None)

    def surplus(self, now: Seconds) -> int:
        """Return the number of oldest requests in `queue` whose first output was attributed to
        another request.

        A metrics page may be of an engine step that began before a request arrived. After two pages
        that show the end of a step, the next one includes the request.
        """
        first_outputs = self.first_outputs
        if not first_outputs.stepped:
            return 0
        before_s, last_s = self.steps_s
        self.steps_s = last_s, now
        if len(self.queue) <= first_outputs.to_come_max:
            return 0
        there = 0
        for lease in self.queue:
            arrived_s = lease.opened_at_s + ARRIVAL_S_PER_TOKEN * lease.request.prompt_tokens
            there += not lease.prefilled and arrived_s < before_s
        return max(0, there - int(first_outputs.to_come_max))

    def attributed(self, first_outputs: int, now: Seconds) -> int:
        """Return how many of the oldest requests in `queue` are computed if a metrics page shows
        `first_outputs` that the picker did not see, and peers use the endpoint too.

        They are those of peers while the gateway shows the first outputs of all requests in
        `queue` to this picker.
        """
        shows = now - self.seen_at_s <= SHOWN_S_MAX
        return 0 if shows and all(map(_shown, self.queue)) else first_outputs

    def release(self, requests: int) -> float:
        """Mark the oldest `requests` requests in `queue` as computed. Return the number of tokens
        that they still had to compute.
        """
        queue, tokens = self.queue, 0.0
        while requests and queue:
            first = queue.popleft()
            if not first.prefilled:
                first.prefilled = True
                tokens += first.prefill_tokens
                first.prefill_tokens = 0.0
                requests -= 1
        return tokens

    def arrived(self, received_total: float, first_outputs: int) -> list[Lease]:
        """Return those of the oldest `first_outputs` requests without a first output that are in
        `receiving`.

        `received_total` is the number of tokens in all KV blocks that the engine received, as its
        metrics page counts them at the first output. It shows which first outputs are of
        `receiving`, those whose prefill has ended before all others. If it is not reported, the
        first outputs are assumed to come in the order of the requests.
        """
        rise = received_total - self.received_total
        self.received_total = received_total
        seen_tokens, self.seen_transfer_tokens = self.seen_transfer_tokens, 0.0
        receiving = sorted(self.receiving, key=_not_begun)
        if isnan(rise):
            waiting = [*receiving, *(lease for lease in self.queue if not lease.prefilled)]
            waiting.sort(key=lambda lease: (_not_begun(lease), lease.opened_at_s))
            return [lease for lease in waiting[:first_outputs] if lease.moved_tokens]
        tokens = rise * self.first_outputs.share - seen_tokens
        found: list[Lease] = []
        for lease in receiving:
            # The number of tokens is an estimate, so it is rounded to whole requests.
            if len(found) < first_outputs and lease.moved_tokens < 2.0 * tokens:
                tokens -= lease.moved_tokens
                found.append(lease)
        return found


def _shown(lease: Lease) -> bool:
    """Return whether a gateway that shows responses shows when the prompt of `lease` is computed."""
    return lease.stage is not DECODE or lease.request.stream


def _not_begun(lease: Lease) -> bool:
    """Return whether the transfer of the KV blocks of `lease` is not known to have begun."""
    return bool(lease.moved_tokens) and lease.transfer_tokens == lease.moved_tokens


class InflightLedger:
    """The ledger of requests in flight: the open leases, and their sums in the columns of the pool."""

    def __init__(
        self, columns: Columns, ended: Callable[[Lease, Seconds], None] | None = None
    ) -> None:
        """Create a ledger. `ended` is called with each live lease that is closed, and must not
        raise.
        """
        self._columns = columns
        self._ended = ended
        self._backlogs: dict[int, _Backlog] = {}
        self._generations: dict[int, int] = {}
        self._sent: dict[int, dict[int, int]] = {}
        """Number of live leases at each data-parallel rank, by slot, then by rank. Ranks without a
        lease are omitted.
        """
        self._unseen: dict[int, list[tuple[Seconds, Lease]]] = {}
        """Leases to be closed with the time of each, by the whole second of this time. A heap would
        compare entries that have long left the processor's cache.
        """
        self.open_leases = 0
        """Number of requests with an open lease; the leases of their prefill and encode stages do
        not count.
        """

    def open(
        self,
        request: InferenceRequest,
        slot: int,
        *,
        matched_blocks: int,
        prefill_tokens: float,
        now: Seconds,
        stage: Stage = Stage.DECODE,
    ) -> Lease:
        """Open a lease for a request at `slot`: count the request and its uncached tokens there."""
        generation = self._generations.get(slot, 0)
        lease = Lease(request, slot, generation, matched_blocks, now, stage=stage)
        self.open_leases += stage is DECODE
        self._charge(lease, prefill_tokens, now)
        return lease

    def receive(self, lease: Lease, tokens: float, sender: tuple[int, int]) -> None:
        """Count the KV blocks of `tokens` prompt tokens as in transfer to the endpoint of `lease`,
        which was opened or moved there just now, because another endpoint computes the prompt.

        `sender` is the slot and the generation of that endpoint; the slot is -1 if it is unknown.
        """
        backlog = self._backlogs[lease.slot]
        if backlog.queue and backlog.queue[-1] is lease:
            backlog.queue.pop()
        backlog.receiving[lease] = None
        lease.moved_tokens, lease.sender = tokens, sender
        self._count_transfer(lease, tokens)

    def _count_transfer(self, lease: Lease, tokens: float) -> None:
        """Add `tokens` to those in transfer for `lease`, at the endpoints that receive and send
        them.
        """
        lease.transfer_tokens += tokens
        columns, (sender, generation) = self._columns, lease.sender
        columns.receiving_tokens[lease.slot] = columns.receiving_tokens.item(lease.slot) + tokens
        if sender >= 0 and generation == self._generations.get(sender, 0):
            columns.sending_tokens[sender] = columns.sending_tokens.item(sender) + tokens

    def _begin_transfer(self, lease: Lease) -> None:
        """Record that the prefill of `lease` has ended, and that its KV blocks are in transfer. If
        no metrics page will show the end of the transfer, it is assumed to end at once.
        """
        if not (_not_begun(lease) and self.is_live(lease)):
            return
        if self._backlogs[lease.slot].first_outputs.counted:
            self._count_transfer(lease, -lease.moved_tokens / 2.0)
        else:
            self._end_transfer(lease)

    def _end_transfer(self, lease: Lease) -> None:
        """Stop counting the KV blocks of a live lease as in transfer, because they have arrived or
        are not needed any longer.
        """
        self._backlogs[lease.slot].receiving.pop(lease, None)
        if lease.transfer_tokens:
            self._count_transfer(lease, -lease.transfer_tokens)

    def join(self, lease: Lease) -> None:
        """Stop counting the request of `lease` and its prompt length at its endpoint, because
        another lease of the same request counts them there. Its uncached tokens stay counted.
        """
        self._uncount(lease)
        lease.counted = False
        unreported = self._columns.unreported_requests
        unreported[lease.slot] = unreported.item(lease.slot) - 1

    def place(self, lease: Lease, rank: int) -> None:
        """Set the data-parallel rank of `lease`, which has none yet, and count the request at that
        rank of its endpoint.
        """
        lease.rank = rank
        self._count_rank(lease, 1)

    def sent_to_ranks(self, slot: int, ranks: int) -> list[int]:
        """Return the number of live leases at each of the first `ranks` ranks of the endpoint in
        `slot`.
        """
        sent = self._sent.get(slot, {})
        return [sent.get(rank, 0) for rank in range(ranks)]

    def first_output(self, lease: Lease, now: Seconds) -> None:
        """Record the first output of the request of `lease`, which shows that its prompt is
        prefilled. Close the leases of its prefill and encode stages.
        """
        if lease.first_output_at_s is None:
            lease.first_output_at_s = now
        if lease.earlier:
            self.close_earlier(lease, now)
        if lease.prefilled or not self.is_live(lease):
            return
        if lease.moved_tokens:
            self._see_transfer(lease)
        backlog = self._backlogs[lease.slot]
        if lease.request.stream:
            backlog.seen_at_s = now
        adapters_reported = self._columns.adapter_generation.item(lease.slot)
        if backlog.first_outputs.counted or adapters_reported or not lease.request.stream:
            self._release_prefill(lease, now, computed=True)
            return
        # The first outputs of the other streamed requests are not known to have come, because no
        # page counts them.
        self._drain(lease.slot, now)
        backlog.shown_at_s = now
        left = self._columns.prefill_backlog_tokens.item(lease.slot) + backlog.restore()
        computed, lease.prefill_tokens = lease.prefill_tokens, 0.0
        lease.prefilled = True
        backlog.first_outputs.known()
        self._take_stock(lease.slot, backlog, left - computed, computed, now)

    def _see_transfer(self, lease: Lease) -> None:
        """Record that the picker saw that the KV blocks of a live lease have arrived, which the
        next metrics page counts.
        """
        if not lease.prefilled:
            self._backlogs[lease.slot].seen_transfer_tokens += lease.moved_tokens
        self._end_transfer(lease)

    def _release_prefill(self, lease: Lease, now: Seconds, *, computed: bool) -> None:
        """Stop counting the tokens of a live lease as pending. `computed` is True if an output or
        an answer showed that the prompt is computed.
        """
        columns, slot = self._columns, lease.slot
        self._drain(slot, now)
        if lease.prefill_tokens:
            backlog = columns.prefill_backlog_tokens.item(slot)
            columns.prefill_backlog_tokens[slot] = backlog - lease.prefill_tokens
            lease.prefill_tokens = 0.0
        queued = self._backlogs[slot]
        if lease.prefilled:
            return
        lease.prefilled = True
        if not computed:
            queued.begun_tokens -= lease.uncached_tokens
            return
        queued.seen_tokens += lease.uncached_tokens
        if lease.stage is not DECODE:
            queued.seen_at_s = now
        if not lease.assumed:
            queued.first_outputs.known()

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Read a metrics page of the endpoint in `slot` after a successful scrape. Update the
        endpoint's pending tokens if the page counts first outputs.
        """
        backlog = self._backlogs.get(slot)
        if backlog is None:
            if isnan(metrics.first_outputs_total):
                return
            backlog = self._open_backlog(slot)
        columns, first_outputs = self._columns, backlog.first_outputs
        since_s = now - backlog.scraped_at_s
        seen_tokens, backlog.seen_tokens = backlog.seen_tokens, 0.0
        empty = not (backlog.queue or backlog.drained)
        if empty:
            # Rounding must not leave tokens behind after requests have moved away.
            columns.prefill_backlog_tokens[slot] = 0.0
        elif not first_outputs.counted or since_s > PAGE_S_MAX:
            self._drain(slot, now)
        # Drained requests are kept for this long after the page before this one.
        backlog.scraped_at_s = now
        inflight_requests = columns.inflight_requests.item(slot)
        released = first_outputs.scraped(metrics, inflight_requests, since_s=since_s)
        if metrics.transfers is not None or backlog.receiving:
            released -= self._take_arrived(backlog, metrics, released)
        if not first_outputs.counted:
            self._drain(slot, now)
            if backlog.shown_at_s == -math.inf:
                backlog.drained.clear()
                self._believe_speed(slot, backlog)
            return
        if empty and not seen_tokens:
            backlog.busy_since_s = -math.inf
            return
        # Tokens that drained since then are restored with the rest.
        columns.prefill_drained_at_s[slot] = now
        left = columns.prefill_backlog_tokens.item(slot) + backlog.restore()
        if columns.peers:
            released = backlog.attributed(released, now)
        computed = backlog.release(released)
        left -= computed
        computed += seen_tokens
        # The time of the surplus is unknown, so that no speed is learned from it.
        left -= backlog.release(backlog.surplus(now))
        self._take_stock(slot, backlog, left, computed, now)
        begun_tokens = backlog.progress(computed, since_s)
        if begun_tokens:
            # Both `_drain` and `Candidates` subtract what drained since that time.
            speed = columns.prefill_drain_tokens_per_s.item(slot)
            columns.prefill_drained_at_s[slot] = now - begun_tokens / speed

    def _take_arrived(self, backlog: _Backlog, metrics: EndpointMetrics, released: int) -> int:
        """End the transfers that a metrics page shows to have arrived, `released` first outputs of
        this picker's requests among them. Return their number.

        If the page cannot be used, all transfers that have begun are assumed to have arrived.
        """
        transfers = metrics.transfers
        total = math.nan if transfers is None else transfers.received_tokens
        arrived = backlog.arrived(total, released)
        for lease in arrived:
            lease.prefilled = True
            self._end_transfer(lease)
        if not backlog.first_outputs.counted:
            for lease in [one for one in backlog.receiving if not _not_begun(one)]:
                self._end_transfer(lease)
        return len(arrived)

    def _take_stock(
        self, slot: int, backlog: _Backlog, left: float, computed: float, now: Seconds
    ) -> None:
        """Apply an observation of the endpoint in `slot`: it computed `computed` tokens since the
        last observation, and `left` tokens are pending.
        """
        columns = self._columns
        # Less than one token is a rounding error.
        busy = left >= 1.0
        if backlog.worked(computed, now, busy=busy):
            columns.prefill_drain_tokens_per_s[slot] = backlog.speed.tokens_per_s
        backlog.busy_since_s = now if busy else -math.inf
        columns.prefill_backlog_tokens[slot] = left if busy else 0.0

    def close(self, lease: Lease, now: Seconds, *, answered: bool = False) -> bool:
        """Close the lease and those of its prefill and encode stages: stop counting the request and
        its tokens at their endpoints. Return False if it was closed before.
        `answered` is True if an answer showed that the prompt was computed.
        """
        if lease.slot < 0:
            return False
        if lease.earlier:
            self.close_earlier(lease, now, answered=answered)
        if self.is_live(lease):
            if lease.moved_tokens:
                self._see_transfer(lease) if answered else self._end_transfer(lease)
            self._release_prefill(lease, now, computed=answered)
            if lease.counted:
                self._uncount(lease)
            if not self._columns.inflight_requests.item(lease.slot):
                self._backlogs[lease.slot].unhindered_tokens = 0.0
            if self._ended is not None:
                self._ended(lease, now)
        lease.slot = -1
        self.open_leases -= lease.stage is DECODE
        return True

    def close_earlier(self, lease: Lease, now: Seconds, *, answered: bool = True) -> None:
        """Close the leases of the prefill and encode stages of `lease`, because these stages have
        ended. The transfer of the KV blocks to its endpoint then counts as begun.
        """
        for earlier in lease.earlier:
            self.close(earlier, now, answered=answered)
        if lease.moved_tokens:
            self._begin_transfer(lease)

    def close_later(self, lease: Lease, now: Seconds, at_most_s: Seconds) -> None:
        """Schedule the lease to be closed when its request has probably ended, at most `at_most_s`
        seconds from now, because no more events of the request will come.
        """
        ends_at_s = now + min(at_most_s, self._remaining_s(lease, now))
        self._unseen.setdefault(int(ends_at_s), []).append((ends_at_s, lease))
        for earlier in lease.earlier:
            self.close_later(earlier, now, at_most_s)

    def close_due(self, now: Seconds) -> None:
        """Close those leases whose time has come, as `close_later` set it."""
        for second in sorted(second for second in self._unseen if second <= now):
            leases = sorted(self._unseen.pop(second), key=itemgetter(0))
            due = bisect_right(leases, now, key=itemgetter(0))
            if due < len(leases):
                self._unseen[second] = leases[due:]
            for _, lease in leases[:due]:
                self.close(lease, now)

    def move(self, lease: Lease, slot: int, prefill_tokens: float, now: Seconds) -> None:
        """Move the lease, its request and tokens, to the endpoint in `slot`, which serves the
        request instead. The leases in `lease.earlier` stay at their endpoints.
        """
        if self.is_live(lease):
            if lease.moved_tokens:
                self._end_transfer(lease)
            self._release_prefill(lease, now, computed=False)
            if lease.counted:
                self._uncount(lease)
            self._leave_queue(lease)
        lease.moved_tokens = lease.transfer_tokens = 0.0
        lease.counted = True
        lease.slot = slot
        lease.opened_at_s = now
        lease.first_output_at_s = None
        lease.latency = None
        lease.generation = self._generations.get(slot, 0)
        self._charge(lease, prefill_tokens, now)

    def set_speed(self, slot: int, prefill_tokens_per_s: float, now: Seconds) -> None:
        """Set the configured prefill speed of the endpoint in `slot`, in tokens per second, from
        `now` on. If it changes, forget the measured speed.
        """
        columns = self._columns
        if columns.prefill_tokens_per_s.item(slot) != prefill_tokens_per_s:
            self._drain(slot, now)
            columns.prefill_tokens_per_s[slot] = prefill_tokens_per_s
            self._believe_speed(slot, self._backlogs.get(slot))

    def set_speeds(
        self,
        endpoints: Iterable[tuple[int, Endpoint]],
        speed_of: Callable[[Endpoint], float],
        now: Seconds,
    ) -> None:
        """Set the configured prefill speed of each endpoint to the result of `speed_of`. Each
        endpoint is given with its slot.
        """
        for slot, endpoint in endpoints:
            self.set_speed(slot, speed_of(endpoint), now)

    def forget(self, slot: int) -> None:
        """Invalidate all leases at the endpoint in `slot`, because it left or restarted."""
        backlog = self._backlogs.get(slot)
        for lease in [] if backlog is None else [*backlog.receiving]:
            self._end_transfer(lease)
        self._generations[slot] = self._generations.get(slot, 0) + 1
        self._columns.receiving_tokens[slot] = self._columns.sending_tokens[slot] = 0.0
        self._backlogs.pop(slot, None)
        self._sent.pop(slot, None)
        self._believe_speed(slot, None)

    def is_live(self, lease: Lease) -> bool:
        """Return whether the lease is open and its endpoint has neither left nor restarted since
        the lease was opened.
        """
        return lease.slot >= 0 and lease.generation == self._generations.get(lease.slot, 0)

    def _charge(self, lease: Lease, prefill_tokens: float, now: Seconds) -> None:
        slot = lease.slot
        self._drain(slot, now)
        lease.prefill_tokens = lease.uncached_tokens = prefill_tokens
        lease.prefilled = False
        if lease.rank >= 0:
            self._count_rank(lease, 1)
        columns = self._columns
        columns.recounted.add(slot)
        # Python numbers are used, because arithmetic on numpy scalars costs three times as much.
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) + 1
        columns.unreported_requests[slot] = columns.unreported_requests.item(slot) + 1
        context = columns.inflight_context_tokens.item(slot)
        if lease.stage is not ENCODE:
            columns.inflight_context_tokens[slot] = context + lease.request.prompt_tokens
        backlog = columns.prefill_backlog_tokens.item(slot)
        backlog += prefill_tokens
        columns.prefill_backlog_tokens[slot] = backlog
        queued = self._backlogs.get(slot) or self._open_backlog(slot)
        queued.queue.append(lease)
        speed = columns.prefill_tokens_per_s.item(slot)
        lease.ahead_tokens = queued.ahead_of(prefill_tokens, backlog, speed, now)

    def _believe_speed(self, slot: int, backlog: _Backlog | None) -> None:
        """Set the speed at which the pending tokens of `slot` are assumed to fall to the configured
        prefill speed, and forget the measured one.
        """
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
        columns.recounted.add(slot)
        if lease.rank >= 0:
            self._count_rank(lease, -1)
        columns.inflight_requests[slot] = columns.inflight_requests.item(slot) - 1
        if lease.stage is not ENCODE:
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
        """Subtract the tokens that the endpoint in `slot` is assumed to have prefilled since the
        last call, oldest prompt first.
        """
        columns = self._columns
        elapsed_s = now - columns.prefill_drained_at_s.item(slot)
        if elapsed_s < 0.0:
            # A page may be processed later than it was read; time does not run backwards.
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
        # Rounding must not leave tokens behind when the queue is empty.
        columns.prefill_backlog_tokens[slot] = max(left, 0.0) if queue else 0.0

    def _remaining_s(self, lease: Lease, now: Seconds) -> Seconds:
        if not self.is_live(lease):
            return 0.0
        self._drain(lease.slot, now)
        columns = self._columns
        ahead = columns.prefill_backlog_tokens.item(lease.slot)
        speed = columns.prefill_drain_tokens_per_s.item(lease.slot)
        if lease.stage is not DECODE:
            return ahead / speed + UNSEEN_PREFILL_S
        output_tokens = lease.request.output_tokens_max or OUTPUT_TOKENS_ESTIMATE
        return ahead / speed + output_tokens * SECONDS_PER_OUTPUT_TOKEN_ESTIMATE
