"""One simulated vLLM V1 engine without I/O: the caller passes requests and the time `now`, and
receives steps.

A pass is what vLLM's scheduler does once for each forward pass (`v1/core/sched/scheduler.py`):

1. Running requests get their next tokens within the token budget: a chunk of prompt, or one token.
   A request without a free block preempts the youngest running request. That one gives up its
   blocks, must be computed again, and goes to the head of the queue.
2. Unless a request was preempted, waiting requests are admitted in order. Each needs a rest of the
   budget (without chunked prefill, for all its uncached tokens), a place among the sequences,
   blocks for its *whole* prompt, and a slot for its adapter, if any. It reuses the longest cached
   head of at most `tokens - 1`. A request that only lacks an adapter slot is passed over; a request
   that lacks something else blocks all behind it.
3. Full blocks are registered as they are scheduled, including those of generated tokens.
4. Each request computed up to its last known token gets one token at the end of the pass.

The engine knows no text: a request brings the chained hashes of its prompt *and* its answer. With a
`PromptCache`, the engine also asks the cache which part of a prompt need not be computed.

The engine can be driven in two ways. `step(now)` does one pass; the state is then that at its end,
`Step.ends_at`, and the next pass starts no earlier. `begin(now)` and `end()` do as many passes as
must follow each other regardless of events from outside. While all running requests decode, none
can be admitted and none ends, so these passes are one step, which costs about as much as one pass.
`submit` and `cut` shorten such a step to the pass in progress, so read `ends_at` again after them.
Both ways give the same times (up to rounding), hits, evictions and preemptions.

Decoding requests move in lockstep, one token per pass. Therefore one count, `_passes_done`,
describes the progress of all of them. It determines when a new block, a full block or the last
token is due.

With a `KVConnector`, the engine also serves legs of disaggregated requests (`legs.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain
from math import sqrt
from operator import attrgetter
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import BlockPool
from sim.engine.legs import KVConnector, Legs
from sim.engine.profiles import Profile, StepWork
from sim.engine.prompt_cache import PromptCache
from sim.engine.request import EngineRequest

_IN_ORDER = attrgetter("admission")
_ROUNDING: Final = 1e-6
"""Distance of a computed number of passes from a whole number, below which rounding could decide.
Within it, the engine compares exact sums.
"""


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The settings of a simulated engine, named like the flags of `vllm serve`. Raises `ValueError`
    for invalid ones.
    """

    blocks_total: int
    """Number of KV-cache blocks (`num_gpu_blocks` of vLLM), at least 2, of which one is
    reserved.
    """
    block_size_tokens: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    """Maximum number of tokens that a pass computes, at least `max_num_seqs` as in vLLM."""
    max_loras: int = 0
    """Number of LoRA adapter slots; 0 disables LoRA."""
    chunked_prefill: bool = True
    """False if each prompt is computed in one pass. It then waits for a pass with room for all of
    it, and the requests behind it wait too.
    """
    kv_connector: KVConnector | None = None
    """Connector for disaggregated requests, or None if the engine serves only whole requests."""

    def __post_init__(self) -> None:
        if self.blocks_total < 2:
            raise ValueError(f"blocks_total is {self.blocks_total}; expected at least 2.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; expected at least "
                f"max_num_seqs, {self.max_num_seqs}."
            )

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the usable KV-cache blocks."""
        return (self.blocks_total - 1) * self.block_size_tokens

    @property
    def request_tokens_max(self) -> int:
        """Maximum number of tokens in prompt and answer of one request. Without chunked prefill,
        one pass must have room for both, because after a preemption the answer is computed again
        like a prompt.
        """
        if self.chunked_prefill:
            return self.kv_tokens
        return min(self.kv_tokens, self.max_num_batched_tokens)


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """The state of an engine as its metrics page shows it (`Engine.snapshot`)."""

    running: int
    waiting: int
    """Number of requests that have no computed token yet, or were preempted. Decode legs whose
    blocks are in transfer, or have arrived and are not computed yet, are included.
    """
    deferred: int
    """Number of requests in `waiting` that only lack an adapter slot, or whose KV blocks are in
    transfer or have just arrived."""
    kv_cache_usage: float
    adapters: tuple[str, ...]
    """Names of the LoRA adapters with a running or waiting request, sorted."""
    preemptions: int
    """Number of preemptions since the engine started."""
    fetching: int = 0
    """Number of decode legs in `deferred` whose blocks are reserved and not received."""
    fetched: int = 0
    """Number of decode legs in `deferred` whose blocks are received."""
    to_fetch: int = 0
    """Number of decode legs in `waiting` that have not reserved blocks yet."""


class Step(Struct, kw_only=True):
    """One scheduler pass of an engine with its forward pass, or several passes with the same
    requests.
    """

    started_at: Seconds
    duration_s: Seconds
    passes: int
    work: StepWork
    """Work of the first pass of the step."""
    admitted: list[EngineRequest]
    """Requests that this step admitted for the first time, with `cached_tokens` set."""
    outputs: list[EngineRequest]
    """Requests that got a token at the end of the step; finished ones have left the engine. A step
    that `Engine.end` returns lists only requests with their first token since admission, or their
    last token.
    """

    @property
    def ends_at(self) -> Seconds:
        return self.started_at + self.duration_s


class _Pending(Struct):
    """An engine step that has begun and not ended. Its pass j, counted from 0, takes `first_s + j *
    growth_s` seconds.
    """

    started_at: Seconds
    work: StepWork
    admitted: list[EngineRequest]
    chunks: list[EngineRequest]
    first_s: Seconds
    growth_s: Seconds
    passes: int = 1

    def until_pass_s(self, number: int) -> Seconds:
        """Return the time in seconds from the start of the step to the start of its pass `number`,
        counted from 0.
        """
        return number * self.first_s + self.growth_s * (number * (number - 1) // 2)

    def passes_begun(self, elapsed_s: Seconds) -> int:
        """Return how many passes of the step have started before `elapsed_s` seconds: at least 1,
        at most all.
        """
        if self.passes == 1 or elapsed_s <= self.first_s:
            return 1
        growth = self.growth_s / 2
        linear = self.first_s - growth
        root = sqrt(linear * linear + 4 * growth * elapsed_s)
        ended = 2 * elapsed_s / (linear + root)
        number = min(self.passes, int(ended))
        if number < self.passes and _ROUNDING < ended - number < 1 - _ROUNDING:
            return number + 1
        while number < self.passes and self.until_pass_s(number) < elapsed_s:
            number += 1
        while number > 1 and self.until_pass_s(number - 1) >= elapsed_s:
            number -= 1
        return number


class Engine:
    """A simulated engine: its queues, KV-cache blocks and adapter slots."""

    def __init__(
        self, settings: EngineSettings, profile: Profile, cache: PromptCache | None = None
    ) -> None:
        """Create an engine without requests. `cache` is a prompt cache besides the block pool; None
        for vLLM's own, which is the pool itself.
        """
        self.settings = settings
        self.profile = profile
        self._pass_s: Callable[[StepWork], Seconds] = profile.step_s
        self.cache = cache
        self.pool = (BlockPool if cache is None else cache.pool)(settings.blocks_total)
        self.running: dict[EngineRequest, None] = {}
        """Requests that are being computed, the one with the oldest admission first."""
        self.waiting: deque[EngineRequest] = deque()
        # None without a connector.
        self.legs = Legs(self.pool, settings.block_size_tokens) if settings.kv_connector else None
        self.preemptions = 0
        self.first_tokens = 0
        """Number of requests whose first token has been generated, since the engine started."""
        self.received_tokens = 0
        """Number of prompt tokens that other engines computed, over all requests whose first token
        has been generated; vLLM counts them then.
        """
        self.answers = 0
        """Number of requests with a complete answer since the engine started, finished prefill legs
        included.
        """
        self.answer_tokens = 0
        """Number of output tokens of the completely answered requests."""
        self.slowness = 1.0
        """Factor on the duration of engine steps that begin from now on."""
        self.pass_by_pass = False
        """True if each step that `begin` begins has one pass, so that blocks stored in a pass are
        known at its end.
        """
        self._pending: _Pending | None = None
        self._aborted: list[EngineRequest] = []
        """Requests that were aborted during the running step, and that leave the engine at its end.
        """
        self._deferred = 0
        self._resident: dict[str, None] = {}
        """LoRA adapters in slots, the least recently used first."""
        self._adapters_running: dict[str, int] = {}
        self._admissions = 0
        self._ended_at: Seconds = 0.0
        """Simulated time in seconds at which the engine's last pass ended."""
        self._saved_at: Seconds = 0.0
        """Time when the prompt cache will have finished writing. No pass computes before it."""
        self._partial: EngineRequest | None = None
        """Running request whose prompt is not completely computed, or None. It is the youngest one;
        all others decode.
        """
        self._blocked_on: int | None = None
        """First uncached key of the request that blocks the queue, because blocks or room in a pass
        are missing. None if no request blocks it.
        """
        self._passes_done = 0
        self._context_tokens = 0
        """Sum over all decoding requests of their known tokens (prompt and generated so far)."""
        self._due: list[tuple[int, int, EngineRequest]] = []
        """Heap of (number of passes after which the request ends, admission, request). An entry is
        void if its number differs from the request's `due`.
        """
        self._longest: list[tuple[int, int, EngineRequest]] = []
        """Heap of (minus the request's `lead`, admission, request), used only if the profile has a
        skew. An entry is void if its number does not match the request's `lead`.
        """
        self._phases: list[dict[EngineRequest, None]] = [
            {} for _ in range(settings.block_size_tokens)
        ]
        """Decoding requests by their `lead` modulo the block size, which determines the passes in
        which they need a new block.
        """
        self._taken: list[int] | None = None
        """Number of KV blocks that the passes after the first one of the running step use: element
        n is for n such passes, up to one block size. None until it is needed.
        """

    @property
    def ends_at(self) -> Seconds | None:
        """Time when the running step ends, or None if no step is running."""
        pending = self._pending
        if pending is None:
            return None
        return pending.started_at + pending.until_pass_s(pending.passes)

    @property
    def passes(self) -> int:
        """Number of passes of the running step; 0 if no step is running."""
        return self._pending.passes if self._pending else 0

    @property
    def tokens_begun(self) -> int:
        """Number of tokens computed in the first pass of the running step; 0 if no step is
        running.
        """
        return self._pending.work.tokens if self._pending else 0

    @property
    def leaving(self) -> set[str]:
        """Ids of requests that were aborted in the running step and leave at its end."""
        return {request.request_id for request in self._aborted}

    def submit(self, request: EngineRequest, now: Seconds) -> None:
        """Add `request` to the waiting queue, and shorten the running step to the pass in progress.
        Raises `ValueError` if the engine can never serve it; nothing has changed then.
        """
        needed = request.prompt_tokens + request.output_tokens
        if needed > self.settings.kv_tokens:
            raise ValueError(
                f"Request {request.request_id} needs {needed} tokens of KV cache, the engine has "
                f"{self.settings.kv_tokens}."
            )
        if needed > self.settings.request_tokens_max:
            raise ValueError(
                f"Request {request.request_id} has {needed} tokens, the engine computes prompts "
                f"in one pass of at most {self.settings.max_num_batched_tokens} tokens."
            )
        if request.adapter and not self.settings.max_loras:
            raise ValueError(
                f"Request {request.request_id} names adapter {request.adapter!r}, the engine has "
                "no adapter slots."
            )
        if (request.fetches or request.hands_over) and self.legs is None:
            raise ValueError(
                f"Request {request.request_id} is a leg of a disaggregated request, the engine has "
                "no KV connector."
            )
        request.queued_at = now
        if request.arrived_at is None:
            request.arrived_at = now
        self.waiting.append(request)
        if self.legs is not None:
            self.legs.stalled = False
        self.cut(now)

    def received(self, request: EngineRequest, now: Seconds) -> None:
        """Report that the blocks of a decode leg have arrived.

        The leg gets its first token in a pass that begins from now on. An aborted leg leaves.
        """
        self._legs_at(now).received(request)

    def give_up(self, request: EngineRequest, now: Seconds) -> None:
        """Remove a decode leg whose reserved blocks will not arrive."""
        self._legs_at(now).give_up(request)

    def release(self, request: EngineRequest, now: Seconds) -> None:
        """Release the held blocks of a finished prefill leg."""
        self._legs_at(now).release(request)

    def _legs_at(self, now: Seconds) -> Legs:
        """Return the legs of disaggregated requests for a change at `now`. Shorten the running step
        to the pass in progress before, because the change may affect later passes.
        """
        assert self.legs is not None, "an engine with legs has a connector"
        self.cut(now)
        self.legs.stalled = False
        return self.legs

    def abort(self, request_id: str) -> bool:
        """Remove a request and release its blocks; return False if the engine does not have it, or
        if it was aborted before.

        A request in a running step leaves at the end of the step, unless it ends by then. Call
        `cut` first. The blocks of an aborted prefill leg are not held; a finished one is not
        aborted. A decode leg in transfer keeps its blocks until `received` or `give_up`.
        """
        if self.legs is not None:
            self.legs.stalled = False
        for request in self.running:
            if request.request_id == request_id:
                if self._pending is None:
                    self._withdraw(request)
                elif request in self._aborted:
                    return False
                else:
                    self._aborted.append(request)
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        return self.legs is not None and self.legs.abort(request_id)

    def forget_adapter(self, adapter: str) -> None:
        """Free the slot of a LoRA adapter, because it was unloaded; its next use loads it again."""
        self._resident.pop(adapter, None)

    def step(self, now: Seconds) -> Step | None:
        """Do one pass that starts at `now` and return its result. None if there is no request, or
        if none can be computed before a KV transfer or a KV lease ends.
        """
        decoding = dict.fromkeys(self.running)
        if self._partial is not None:
            del decoding[self._partial]
        before_s = self._ended_at
        if self._begin_pass(now) is None:
            return None
        step = self.end()
        for request in decoding:
            if request.due >= 0:
                self._settle(request, step.ends_at, before_s)
        begun = [request for request in step.outputs if request not in decoding]
        # Preempted requests are left out.
        outputs = [request for request in decoding if request.due >= 0 or request.finished]
        step.outputs = outputs + begun
        return step

    def begin(self, now: Seconds) -> Seconds | None:
        """Begin a step of one or more passes at `now`; return the time of its end. None if there is
        no request, or if none can be computed before a KV transfer or a KV lease ends.
        """
        preemptions = self.preemptions
        pending = self._begin_pass(now)
        if pending is None:
            return None
        if not pending.chunks and self._partial is None and self.preemptions == preemptions:
            if pending.work.restore_s:
                # A step of many passes would include the restore time only in its first pass.
                return self.ends_at
            if not self.pass_by_pass:
                pending.passes = self._passes_alike()
        return self.ends_at

    def cut(self, now: Seconds) -> None:
        """Shorten the running step, if any, so that it ends with the pass in progress at `now`."""
        pending = self._pending
        if pending is not None:
            pending.passes = pending.passes_begun(now - pending.started_at)

    def wait_for(self, duration_s: Seconds) -> None:
        """Extend the running step, which must have one pass, to `duration_s`, because it waits for
        the other data-parallel ranks.
        """
        pending = self._pending
        assert pending is not None, "a step has begun"
        assert pending.passes == 1, "others are waited for in each pass"
        pending.first_s = duration_s

    def end(self) -> Step:
        """End the running step, update its requests, and return its result."""
        pending = self._pending
        assert pending is not None, "a step has begun"
        passes = pending.passes
        duration_s = pending.until_pass_s(passes)
        ends_at = pending.started_at + duration_s
        before_s = self._ended_at
        if passes > 1:
            before_s = pending.started_at + pending.until_pass_s(passes - 1)
            self._fill_blocks(passes)
        self._pending = self._taken = None
        self._ended_at = ends_at
        self._passes_done += passes
        outputs = self._finish_due(ends_at, before_s)
        for request in pending.chunks:
            if request is not self._partial:
                self._give_token(request, ends_at)
                outputs.append(request)
        for request in self._aborted:
            if request in self.running:
                self._withdraw(request)
        self._aborted.clear()
        return Step(
            started_at=pending.started_at,
            duration_s=duration_s,
            passes=passes,
            work=pending.work,
            admitted=pending.admitted,
            outputs=outputs,
        )

    def snapshot(self, now: Seconds | None = None) -> EngineSnapshot:
        """Return the state of the engine as its metrics page shows it.

        During a step of several passes, it is the state in the first pass, or in the pass at the
        time `now` if that is given.
        """
        adapters: tuple[str, ...] = ()
        if self.settings.max_loras:
            named = {request.adapter for request in (*self.running, *self.waiting)}
            adapters = tuple(sorted(named - {""}))
        waiting, deferred = len(self.waiting), min(self._deferred, len(self.waiting))
        fetching = fetched = to_fetch = 0
        if self.legs is not None:
            fetching, fetched = self.legs.fetching_now, len(self.legs.fetched)
            to_fetch = sum(request.fetches for request in self.waiting)
            waiting += fetching + fetched
            deferred += fetching + fetched
        return EngineSnapshot(
            running=len(self.running),
            waiting=waiting,
            deferred=deferred,
            kv_cache_usage=self.kv_cache_usage(now),
            adapters=adapters,
            preemptions=self.preemptions,
            fetching=fetching,
            fetched=fetched,
            to_fetch=to_fetch,
        )

    def kv_cache_usage(self, now: Seconds | None = None) -> float:
        """Return the share of the KV-cache blocks that requests use, at the time that `snapshot`
        describes.
        """
        pool, pending = self.pool, self._pending
        used = pool.blocks_used
        if pending is not None and now is not None:
            used += self._blocks_for(pending.passes_begun(now - pending.started_at))
        return used / pool.blocks_usable

    def check(self) -> None:
        """Check that the states of the engine's blocks and requests agree. Raises AssertionError if
        they do not.
        """
        self.pool.check()
        decoding = [request for request in self.running if request is not self._partial]
        if self._pending is None:
            self._check_decoding(decoding)
        assert not any(request.holding.blocks for request in self.waiting), (
            "a waiting request holds no blocks"
        )
        if self.legs is not None:
            self.legs.check()
        held = sum(request.holding.blocks for request in self.holders())
        assert held == self.pool.blocks_used + self.pool.duplicate_blocks, "all holders are known"

    def holders(self) -> Iterator[EngineRequest]:
        """Yield the requests that hold KV blocks: running ones, and legs of disaggregated requests."""
        yield from self.running
        if self.legs is not None:
            yield from self.legs

    def _check_decoding(self, decoding: list[EngineRequest]) -> None:
        """Check the context and the blocks of decoding requests between two passes. Raises
        AssertionError if the counts of tokens or blocks do not agree.
        """
        size = self.settings.block_size_tokens
        assert sum(len(phase) for phase in self._phases) == len(decoding)
        known = sum(request.lead + self._passes_done for request in decoding)
        assert known == self._context_tokens, "the context is that of all that decode"
        for request in decoding:
            computed = request.lead + self._passes_done - 1
            assert request.holding.blocks == -(-computed // size), "blocks for all tokens"

    def _begin_pass(self, now: Seconds) -> _Pending | None:
        assert self._pending is None, "the last step has ended"
        legs = self.legs
        if not self.running and not self.waiting and not (legs is not None and legs.fetched):
            return None
        work = StepWork()
        admitted: list[EngineRequest] = []
        chunks: list[EngineRequest] = []
        budget, preempted = self._continue_running(work, chunks)
        self._blocked_on = None
        # A pass in which the last running request was preempted takes no time.
        if not preempted or not work.tokens:
            self._admit(work, chunks, budget, admitted, now)
        if self._saved_at > now:
            work.restore_s += self._saved_at - now
        if not work.tokens:
            assert legs is not None, "an engine with whole requests always makes progress"
            legs.stalled = True
            return None
        shared = self.pool.duplicate_blocks
        if legs is not None:
            shared -= legs.shared_blocks
        for request in chunks:
            shared -= request.shared_blocks
        work.shared_tokens = max(0, shared) * self.settings.block_size_tokens
        slowness = self.slowness
        self._pending = _Pending(
            started_at=now,
            work=work,
            admitted=admitted,
            chunks=chunks,
            first_s=self._pass_s(work) * slowness,
            growth_s=self.profile.decode_s_per_context_token * work.decodes * slowness,
        )
        return self._pending

    def _continue_running(self, work: StepWork, chunks: list[EngineRequest]) -> tuple[int, bool]:
        """Schedule the next tokens of running requests in this pass. Return the remaining token
        budget, and whether any request was preempted.
        """
        size = self.settings.block_size_tokens
        before = self.preemptions
        takers = self._phases[(1 - self._passes_done) % size]
        if len(takers) <= self.pool.blocks_free:
            self.pool.take(len(takers))
            for request in takers:
                request.holding.open_blocks += 1
        else:
            self._take_or_preempt(sorted(takers, key=_IN_ORDER))
        self._register_full(self._passes_done)
        partial = self._partial
        decodes = len(self.running) - (partial is not None)
        if decodes:
            work.decodes = work.tokens = decodes
            work.decode_context_tokens = self._context_tokens
            work.longest_context_tokens = self._longest_context_tokens()
            self._context_tokens += decodes
        work.sequences = decodes
        budget = self.settings.max_num_batched_tokens - decodes
        if partial is not None:
            # The budget is not used up, so this request runs too, and at most `max_num_seqs` run.
            tokens = min(partial.known_tokens - partial.computed_tokens, budget)
            if self._grow(partial, tokens):
                self._schedule(partial, tokens, work)
                chunks.append(partial)
                budget -= tokens
            else:
                self._preempt(partial)
        work.with_adapter = bool(self._adapters_running)
        return budget, self.preemptions > before

    def _take_or_preempt(self, takers: Sequence[EngineRequest]) -> None:
        """Allocate a block for each request, the oldest first, preempting the youngest running
        request whenever none is free.
        """
        for request in takers:
            while request in self.running:
                if self.pool.blocks_free:
                    self.pool.take(1)
                    request.holding.open_blocks += 1
                    break
                self._preempt(next(reversed(self.running)))

    def _admit(
        self,
        work: StepWork,
        chunks: list[EngineRequest],
        budget: int,
        admitted: list[EngineRequest],
        now: Seconds,
    ) -> None:
        size = self.settings.block_size_tokens
        active = self._adapters_running
        whole_prompts = not self.settings.chunked_prefill
        passed_over: list[EngineRequest] = []
        legs = self.legs
        if legs is not None and legs.fetched:
            budget = self._admit_fetched(legs, work, chunks, budget, admitted, now)
        while self.waiting and budget and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            no_slot = request.adapter not in active and len(active) >= self.settings.max_loras
            if request.adapter and no_slot:
                passed_over.append(self.waiting.popleft())
                continue
            known = request.known_tokens
            chain, ends = request.chain, request.chain_ends
            hit, hit_free = self.pool.match(chain, ends, (known - 1) // size)
            if -(-known // size) - hit + hit_free > self.pool.blocks_free or (
                whole_prompts and known - hit * size > budget
            ):
                self._blocked_on = next(
                    (key for key, end in zip(chain, ends, strict=True) if end > hit), None
                )
                break
            if request.fetches and legs is not None:
                legs.reserve(self.waiting.popleft(), hit, hit_free)
                continue
            computed = hit * size
            if self.cache is not None:
                found = self.cache.fetch(request, computed, now)
                if found is None:
                    break
                computed = max(computed, min(found.tokens, known - 1))
                work.restore_s += found.restore_s
            self.waiting.popleft()
            request.holding = self.pool.hold(chain, ends, hit)
            request.shared_blocks = hit - hit_free
            request.computed_tokens = computed
            if request.scheduled_at is None:
                request.scheduled_at = now
                request.cached_tokens = request.computed_tokens
                admitted.append(request)
            self._admissions += 1
            request.admission = self._admissions
            self.running[request] = None
            if request.adapter:
                self._occupy_slot(request.adapter, work)
            tokens = min(known - request.computed_tokens, budget)
            grown = self._grow(request, tokens)
            assert grown, "blocks for the whole prompt were counted"
            self._schedule(request, tokens, work)
            chunks.append(request)
            budget -= tokens
        self._deferred = len(passed_over)
        self.waiting.extendleft(reversed(passed_over))

    def _admit_fetched(
        self,
        legs: Legs,
        work: StepWork,
        chunks: list[EngineRequest],
        budget: int,
        admitted: list[EngineRequest],
        now: Seconds,
    ) -> int:
        """Let decode legs whose blocks have arrived compute the last tokens of their prompts, in
        the order of arrival, as far as there is room; return the remaining budget.
        """
        settings, active = self.settings, self._adapters_running
        left: deque[EngineRequest] = deque()
        while legs.fetched:
            request = legs.fetched.popleft()
            no_slot = request.adapter not in active and len(active) >= settings.max_loras
            no_room = not budget or len(self.running) >= settings.max_num_seqs
            if no_room or (request.adapter and no_slot):
                left.append(request)
                continue
            legs.continued(request)
            request.scheduled_at = now
            admitted.append(request)
            self._admissions += 1
            request.admission = self._admissions
            self.running[request] = None
            if request.adapter:
                self._occupy_slot(request.adapter, work)
            work.received += 1
            self._schedule(request, 1, work)
            chunks.append(request)
            budget -= 1
        legs.fetched = left
        return budget

    def _grow(self, request: EngineRequest, tokens: int) -> bool:
        """Allocate blocks for the next `tokens` tokens of a request. Return False without a change
        if there are too few free blocks.
        """
        size = self.settings.block_size_tokens
        missing = -(-(request.computed_tokens + tokens) // size) - request.holding.blocks
        if missing > self.pool.blocks_free:
            return False
        if missing > 0:
            self.pool.take(missing)
            request.holding.open_blocks += missing
        return True

    def _schedule(self, request: EngineRequest, tokens: int, work: StepWork) -> None:
        """Schedule `tokens` tokens of a request in this pass: add them to the work, and register
        the blocks that they fill.
        """
        context = request.computed_tokens
        work.tokens += tokens
        if tokens == 1 and (request.generated_tokens or request.fetched_tokens):
            work.decodes += 1
            work.decode_context_tokens += context + 1
            work.longest_context_tokens = max(work.longest_context_tokens, context + 1)
        else:
            work.prefills += 1
            work.attention_pairs += tokens * (context + tokens / 2)
        request.computed_tokens = context + tokens
        whole = request.computed_tokens == request.known_tokens
        work.sequences += whole
        if whole and request.hands_over:
            work.handed_over += 1
        self._partial = None if whole else request
        full = request.computed_tokens // self.settings.block_size_tokens
        self.pool.register(request.holding, request.chain, request.chain_ends, full)

    def _occupy_slot(self, adapter: str, work: StepWork) -> None:
        """Count one more running request of `adapter`. If the adapter is in no slot, load it into a
        free slot, or in place of the idle one that was least recently used.
        """
        active, resident = self._adapters_running, self._resident
        active[adapter] = active.get(adapter, 0) + 1
        loaded = adapter not in resident
        resident.pop(adapter, None)
        if loaded and len(resident) >= self.settings.max_loras:
            idle = next(name for name in resident if name not in active)
            del resident[idle]
        resident[adapter] = None
        work.adapters_loaded += loaded
        work.with_adapter = True

    def _passes_alike(self) -> int:
        """Return how many passes with the same requests the running step may have: at least one."""
        if self._blocked_on is not None and any(
            self._blocked_on in request.chain[request.holding.piece :] for request in self.running
        ):
            # The tokens about to be generated are the prefix that the head of the queue waits for.
            return 1
        due = self._due
        while due[0][2].due != due[0][0]:
            heappop(due)
        size, free, decodes = (
            self.settings.block_size_tokens,
            self.pool.blocks_free,
            len(self.running),
        )
        passes = due[0][0] - self._passes_done
        cycles = free // decodes
        if passes - 1 <= cycles * size:
            return passes
        free -= cycles * decodes
        most = cycles * size + 1
        while most < passes:
            free -= len(self._phases[(1 - self._passes_done - most) % size])
            if free < 0:
                break
            most += 1
        return most

    def _blocks_for(self, passes: int) -> int:
        """Return how many KV blocks the passes after the first one use, in a running step of
        `passes` passes.
        """
        size = self.settings.block_size_tokens
        cycles, rest = divmod(passes - 1, size)
        if self._taken is None:
            last = -self._passes_done % size
            turn = chain(self._phases[last::-1], self._phases[:last:-1])
            self._taken = [0, *accumulate(map(len, turn))]
        return cycles * len(self.running) + self._taken[rest]

    def _fill_blocks(self, passes: int) -> None:
        """Allocate and register the KV blocks of all passes after the first one of the running
        step.
        """
        size = self.settings.block_size_tokens
        self.pool.take(self._blocks_for(passes))
        self._context_tokens += len(self.running) * (passes - 1)
        due: list[int] = []
        for place, phase in enumerate(self._phases):
            if not phase:
                continue
            # The first pass, counted from the step's first one, in which they take a block ...
            taken = (1 - self._passes_done - place) % size or size
            blocks = (passes - 1 - taken) // size + 1
            alone = True
            for request in phase:
                holding = request.holding
                holding.open_blocks += blocks
                full = (request.lead + self._passes_done + passes - 1) // size
                if full > holding.registered_blocks:
                    alone &= self.pool.extend(holding, request.chain, request.chain_ends, full)
            if not alone:
                # ... and in which they fill one.
                due.append((-self._passes_done - place) % size)
        due.sort()
        for cycle in range(0, passes if due else 0, size):
            for place in due:
                if 0 < cycle + place < passes:
                    self._register_full(self._passes_done + cycle + place)

    def _register_full(self, passes_done: int) -> None:
        """Register the KV blocks of decoding requests that become full in the next pass after
        `passes_done` passes.
        """
        size = self.settings.block_size_tokens
        phase = self._phases[-passes_done % size]
        register = self.pool.register
        for request in sorted(phase, key=_IN_ORDER) if len(phase) > 1 else phase:
            full = (request.lead + passes_done) // size
            register(request.holding, request.chain, request.chain_ends, full)

    def _longest_context_tokens(self) -> int:
        if not self.profile.skew:
            return 0
        longest = self._longest
        while longest[0][2].due < 0 or longest[0][2].lead != -longest[0][0]:
            heappop(longest)
        return self._passes_done - longest[0][0]

    def _finish_due(self, at: Seconds, before: Seconds) -> list[EngineRequest]:
        finished: list[EngineRequest] = []
        due = self._due
        while due and due[0][0] <= self._passes_done:
            passes, _, request = heappop(due)
            if request.due != passes:
                continue
            self._settle(request, at, before)
            self._leave(request)
            finished.append(request)
        return finished

    def _give_token(self, request: EngineRequest, at: Seconds) -> None:
        """Give a request its token after the last chunk of its prompt has run, and let the prompt
        cache store the prompt. The request decodes from now on, or it ends if this is its last
        token.
        """
        if self.cache is not None:
            self._save(self.cache.computed(request, at))
        request.generated_tokens += 1
        if request.last_token_at is None:
            request.first_token_at = at
            self.first_tokens += 1
            self.received_tokens += request.fetched_tokens
        else:
            request.token_gap_s = at - request.last_token_at
        request.last_token_at = at
        if request.finished:
            self._leave(request)
        else:
            self._decode(request)

    def _decode(self, request: EngineRequest) -> None:
        """Add a request to the decoding ones, which get a token in each pass of the engine."""
        size = self.settings.block_size_tokens
        request.lead = request.known_tokens - self._passes_done
        request.due = self._passes_done + request.output_tokens - request.generated_tokens
        self._phases[request.lead % size][request] = None
        self._context_tokens += request.known_tokens
        heappush(self._due, (request.due, request.admission, request))
        if self.profile.skew:
            heappush(self._longest, (-request.lead, request.admission, request))

    def _settle(self, request: EngineRequest, at: Seconds, before: Seconds) -> None:
        """Update the token counts and times of a decoding request, whose last two tokens came at
        `before` and `at`.
        """
        known = request.lead + self._passes_done
        request.generated_tokens = known - request.prompt_tokens
        request.computed_tokens = known - 1
        request.last_token_at = at
        request.token_gap_s = at - before

    def _leave(self, request: EngineRequest) -> None:
        """Remove a request from the running ones, finished or not, and release its blocks; those of
        a finished prefill leg that was not aborted are held for the decode engine. Count a complete answer, and let the
        prompt cache store what it keeps of the request.
        """
        del self.running[request]
        if request.finished:
            self.answers += 1
            self.answer_tokens += request.generated_tokens
        if request is self._partial:
            self._partial = None
        if request.due >= 0:
            self._context_tokens -= request.lead + self._passes_done
            del self._phases[request.lead % self.settings.block_size_tokens][request]
            request.due = -1
        if request.adapter:
            self._adapters_running[request.adapter] -= 1
            if not self._adapters_running[request.adapter]:
                del self._adapters_running[request.adapter]
        if request.hands_over and request.finished and request not in self._aborted:
            assert self.legs is not None, "`submit` refuses it otherwise"
            self.legs.hold(request)
        else:
            self.pool.release(request.holding)
        if self.cache is not None:
            self._save(self.cache.left(request, self._ended_at))

    def _save(self, save_s: Seconds) -> None:
        """Delay the engine by `save_s` seconds, in which the prompt cache writes. They begin at the
        end of the last pass or of the last writing.
        """
        self._saved_at = max(self._saved_at, self._ended_at) + save_s

    def _withdraw(self, request: EngineRequest) -> None:
        """Remove an unfinished request from the running ones, between two passes."""
        if request.due >= 0:
            self._settle(request, self._ended_at, self._ended_at - request.token_gap_s)
        self._leave(request)

    def _preempt(self, request: EngineRequest) -> None:
        self._withdraw(request)
        request.computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
