"""One vLLM V1 engine, sans-IO: requests and `now` go in, steps come out.

A step is what vLLM's scheduler does in one pass (`v1/core/sched/scheduler.py`):

1. Running requests get their next tokens inside the token budget: a chunk of prompt, or one token.
   One that finds no block preempts the youngest running request, which gives up its blocks, is to
   be computed anew and goes to the head of the queue.
2. Unless something was preempted, waiting requests are admitted in order while the budget, the
   number of sequences, the blocks for the *whole* prompt and the adapter slots allow. Each takes
   the longest cached head of at most `tokens - 1`. One that only lacks an adapter slot is passed
   over; the others behind it are not.
3. Full blocks are registered as they are scheduled, those of generated tokens too.
4. Each request computed up to its last known token gets one token at the end of the step.

The engine knows no text: a request brings the chained hashes of its prompt *and* its answer. What
`step` returns is the state at the end of the step, `Step.ends_at`; the next one starts no earlier.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from msgspec import Struct

from epp.core.types import Seconds
from sim.blocks import BlockPool
from sim.profiles import Profile, StepWork


class EngineSettings(Struct, frozen=True, kw_only=True):
    """What `vllm serve` is started with."""

    blocks_total: int
    """`num_gpu_blocks`: one of them is reserved."""
    block_size_tokens: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_loras: int = 0
    """Adapter slots; 0: LoRA is off."""

    @property
    def kv_tokens(self) -> int:
        """What the usable blocks hold."""
        return (self.blocks_total - 1) * self.block_size_tokens


class EngineRequest:
    """One request inside the engine; the caller makes it, the engine fills in what happens to it.

    `chain` holds the hash of every full block of prompt and answer together. Times are the `now`
    of the engine's caller; None: not yet.
    """

    __slots__ = (
        "adapter",
        "arrived_at",
        "blocks",
        "cached_tokens",
        "chain",
        "computed_tokens",
        "first_token_at",
        "generated_tokens",
        "last_token_at",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "queued_at",
        "registered_blocks",
        "request_id",
        "scheduled_at",
        "token_gap_s",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        chain: Sequence[int],
        adapter: str = "",
    ) -> None:
        """`output_tokens` are generated, no more and no fewer; at least one of each kind."""
        assert prompt_tokens > 0
        assert output_tokens > 0
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.chain = chain
        self.adapter = adapter
        self.arrived_at: Seconds | None = None
        """At the server, before its front end; the engine sets it if the caller did not."""
        self.queued_at: Seconds = 0.0
        self.scheduled_at: Seconds | None = None
        self.first_token_at: Seconds | None = None
        self.last_token_at: Seconds | None = None
        self.token_gap_s: Seconds = 0.0
        """Between the last two tokens."""
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache at the first admission, as `usage` reports them."""
        self.preemptions = 0
        self.blocks: list[int] = []
        self.registered_blocks = 0

    @property
    def known_tokens(self) -> int:
        """Prompt and what was generated so far."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def finished(self) -> bool:
        return self.generated_tokens >= self.output_tokens


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """What the metrics page says of the engine at the end of a step."""

    running: int
    waiting: int
    deferred: int
    """Of `waiting`: those that only lack an adapter slot."""
    kv_cache_usage: float
    adapters: tuple[str, ...]
    """Adapters with a running or waiting request, in order of their name."""
    preemptions: int
    """Since the engine started."""


class Step(Struct, kw_only=True):
    """One pass of the scheduler and the forward pass that it set off."""

    started_at: Seconds
    duration_s: Seconds
    work: StepWork
    admitted: list[EngineRequest]
    """Admitted for the first time, `cached_tokens` set."""
    outputs: list[EngineRequest]
    """Each has one token more at `ends_at`; the finished ones have left the engine."""
    after: EngineSnapshot

    @property
    def ends_at(self) -> Seconds:
        return self.started_at + self.duration_s


class Engine:
    """Queues, blocks and adapter slots of one engine."""

    def __init__(self, settings: EngineSettings, profile: Profile) -> None:
        self.settings = settings
        self.profile = profile
        self.pool = BlockPool(settings.blocks_total)
        self.running: list[EngineRequest] = []
        """Oldest admission first."""
        self.waiting: deque[EngineRequest] = deque()
        self.preemptions = 0
        self._deferred = 0
        self._resident: OrderedDict[str, None] = OrderedDict()
        """Adapters in slots, least recently used first."""

    def submit(self, request: EngineRequest, now: Seconds) -> None:
        """Queue `request`. ValueError if it can never fit; then nothing has changed."""
        needed = request.prompt_tokens + request.output_tokens
        if needed > self.settings.kv_tokens:
            raise ValueError(
                f"Request {request.request_id} needs {needed} tokens of KV cache, the engine has "
                f"{self.settings.kv_tokens}."
            )
        if request.adapter and not self.settings.max_loras:
            raise ValueError(
                f"Request {request.request_id} names adapter {request.adapter!r}, the engine has "
                "no adapter slots."
            )
        request.queued_at = now
        if request.arrived_at is None:
            request.arrived_at = now
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and let its blocks go; False if it is not here (any more)."""
        for request in self.running:
            if request.request_id == request_id:
                self.running.remove(request)
                self.pool.release(request.blocks)
                request.blocks = []
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        return False

    def forget_adapter(self, adapter: str) -> None:
        """Free the slot of an adapter that was unloaded; the next use loads it again."""
        self._resident.pop(adapter, None)

    def step(self, now: Seconds) -> Step | None:
        """Schedule at `now`; None when there is nothing to do."""
        if not self.running and not self.waiting:
            return None
        work = StepWork()
        admitted: list[EngineRequest] = []
        scheduled, budget, preempted = self._continue_running(work)
        if not preempted:
            self._admit(work, scheduled, budget, admitted, now)
        assert scheduled, "an engine with requests always makes progress"
        work.held_tokens = self.pool.blocks_used * self.settings.block_size_tokens
        duration_s = self.profile.step_s(work)
        outputs = self._give_tokens(scheduled, now + duration_s)
        return Step(
            started_at=now,
            duration_s=duration_s,
            work=work,
            admitted=admitted,
            outputs=outputs,
            after=self.snapshot(),
        )

    def snapshot(self) -> EngineSnapshot:
        """The engine as its metrics page shows it."""
        adapters: set[str] = set()
        if self.settings.max_loras:
            adapters = {request.adapter for request in (*self.running, *self.waiting)} - {""}
        return EngineSnapshot(
            running=len(self.running),
            waiting=len(self.waiting),
            deferred=min(self._deferred, len(self.waiting)),
            kv_cache_usage=self.pool.usage,
            adapters=tuple(sorted(adapters)),
            preemptions=self.preemptions,
        )

    def _continue_running(self, work: StepWork) -> tuple[list[EngineRequest], int, bool]:
        """Next tokens for the running requests: who got some, the budget left, any preempted."""
        budget = self.settings.max_num_batched_tokens
        scheduled: list[EngineRequest] = []
        preempted = False
        running = self.running
        index = 0
        while index < len(running) and budget:
            request = running[index]
            tokens = min(request.known_tokens - request.computed_tokens, budget)
            while not self._grow(request, tokens):
                victim = running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                self._schedule(request, tokens, work)
                scheduled.append(request)
                budget -= tokens
                index += 1
        return scheduled, budget, preempted

    def _admit(
        self,
        work: StepWork,
        scheduled: list[EngineRequest],
        budget: int,
        admitted: list[EngineRequest],
        now: Seconds,
    ) -> None:
        size = self.settings.block_size_tokens
        active = {request.adapter for request in scheduled if request.adapter}
        passed_over: list[EngineRequest] = []
        while self.waiting and budget and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            no_slot = request.adapter not in active and len(active) >= self.settings.max_loras
            if request.adapter and no_slot:
                passed_over.append(self.waiting.popleft())
                continue
            known = request.known_tokens
            hit = self.pool.match(request.chain, (known - 1) // size)
            needed = -(-known // size) - len(hit) + self.pool.free_among(hit)
            if needed > self.pool.blocks_free:
                break
            self.waiting.popleft()
            self.pool.hold(hit)
            request.blocks = hit
            request.registered_blocks = len(hit)
            request.computed_tokens = len(hit) * size
            if request.scheduled_at is None:
                request.scheduled_at = now
                request.cached_tokens = request.computed_tokens
                admitted.append(request)
            if request.adapter:
                active.add(request.adapter)
                work.adapters_loaded += self._occupy_slot(request.adapter, active)
            tokens = min(known - request.computed_tokens, budget)
            grown = self._grow(request, tokens)
            assert grown, "blocks for the whole prompt were counted"
            self._schedule(request, tokens, work)
            self.running.append(request)
            scheduled.append(request)
            budget -= tokens
        self._deferred = len(passed_over)
        self.waiting.extendleft(reversed(passed_over))

    def _grow(self, request: EngineRequest, tokens: int) -> bool:
        """Blocks for `tokens` more; False, and nothing changed, if there are too few."""
        size = self.settings.block_size_tokens
        missing = -(-(request.computed_tokens + tokens) // size) - len(request.blocks)
        if missing > 0:
            if missing > self.pool.blocks_free:
                return False
            request.blocks.extend(self.pool.take(missing))
        return True

    def _schedule(self, request: EngineRequest, tokens: int, work: StepWork) -> None:
        """Count `tokens` as computed: add them to the work, register the blocks they fill."""
        context = request.computed_tokens
        work.tokens += tokens
        if tokens == 1 and request.generated_tokens:
            work.decodes += 1
            work.decode_context_tokens += context + 1
        else:
            work.prefills += 1
            work.attention_pairs += tokens * (context + tokens / 2)
        if request.adapter:
            work.with_adapter = True
        request.computed_tokens = context + tokens
        full = request.computed_tokens // self.settings.block_size_tokens
        registered = request.registered_blocks
        if full > registered:
            self.pool.register(request.blocks[registered:full], request.chain[registered:full])
            request.registered_blocks = full

    def _preempt(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.registered_blocks = 0
        request.computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _occupy_slot(self, adapter: str, active: set[str]) -> int:
        """Make `adapter` resident; 1 if it had to be loaded, in the place of an idle one."""
        resident = self._resident
        if adapter in resident:
            resident.move_to_end(adapter)
            return 0
        if len(resident) >= self.settings.max_loras:
            idle = next(name for name in resident if name not in active)
            del resident[idle]
        resident[adapter] = None
        return 1

    def _give_tokens(self, scheduled: list[EngineRequest], at: Seconds) -> list[EngineRequest]:
        outputs: list[EngineRequest] = []
        any_finished = False
        for request in scheduled:
            if request.computed_tokens < request.known_tokens:
                continue
            request.generated_tokens += 1
            if request.last_token_at is None:
                request.first_token_at = at
            else:
                request.token_gap_s = at - request.last_token_at
            request.last_token_at = at
            outputs.append(request)
            if request.finished:
                any_finished = True
                self.pool.release(request.blocks)
                request.blocks = []
        if any_finished:
            self.running = [request for request in self.running if not request.finished]
        return outputs
