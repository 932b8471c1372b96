"""Simulated vLLM pods whose engines run in step with the real clock.

The engine receives the time; this module reads the clock. All pods of a process share one event
loop. Each has its own engine, metrics registry and task. Simulated time runs `speed` times as fast
as real time. If the loop finishes a step late, the next step still begins at the planned end of the
last one. A busy event loop therefore does not slow the simulated engine down.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.engine import EngineSettings, Step
from sim.engine.features import Feature, open_engine, ranks_of
from sim.engine.links import DEFAULT_LINK, LINKS, Link
from sim.engine.profiles import Profile
from sim.engine.ranks import RankedEngine
from sim.engine.request import EngineRequest
from sim.pods.exposition import MetricsPage
from sim.pods.kv_events import KVEvents, TokenChain
from sim.pods.kv_transfers import (
    BlockReader,
    HeldBlocks,
    KVTransferParams,
    Leg,
    described,
)
from sim.pods.openai import AdapterBody, ApiError, Body, Json
from sim.pods.tokens import TOKEN_BYTES, Answer, chain_seed, hash_chain


class PodSettings(Struct, frozen=True, kw_only=True):
    """Settings that all pods of one `sim serve` process share."""

    profile: Profile
    engine: EngineSettings
    features: tuple[Feature, ...] = ()
    """Optional engine features; `engine` already contains the settings that follow from them."""
    model: str
    adapters: tuple[str, ...] = ()
    speed: float = 1.0
    seed: int = 1
    """Random seed that decides the answers, together with the prompt."""
    max_num_queued_reqs: int = 0
    """Number of waiting and running requests at which a pod rejects further ones with 503; 0 for no
    limit.
    """
    kv_events: bool = False
    """True if pods publish the changes of their caches as KV events."""
    stream_interval_tokens: int = 1
    """Tokens in each chunk of a streamed answer, as with vLLM's `--stream-interval`. The first chunk
    may have only one, the last one fewer, and chunks more if the reader is slow.
    """
    kv_link: Link = LINKS[DEFAULT_LINK]
    """Link over which engines with a `KVConnector` read KV blocks."""

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks (independent engines) in each pod."""
        return ranks_of(self.features)

    @property
    def max_model_len_tokens(self) -> int:
        """Maximum length of prompt and answer in tokens: the model's context length, or less if the
        KV cache (or, without chunked prefill, one pass) has room for fewer.
        """
        return min(self.profile.max_model_len_tokens, self.engine.request_tokens_max)


class Generation:
    """One answer that an engine generates.

    The pod's task updates `produced`, and the HTTP handler reads the text with `parts`.
    """

    __slots__ = ("answer", "failure", "produced", "progress", "request", "source", "tokens_max")

    def __init__(
        self,
        request: EngineRequest,
        answer: Answer,
        tokens_max: int,
        source: KVTransferParams | None = None,
    ) -> None:
        self.request = request
        self.answer = answer
        self.tokens_max = tokens_max
        self.source = source
        """Description of the KV blocks that the request fetches; None if it fetches none."""
        self.failure: ApiError | None = None
        """Error with which the generation of the answer ended, or None."""
        self.produced = 0
        self.progress = asyncio.Event()

    @property
    def finish_reason(self) -> str:
        return "stop" if self.answer.stopped else "length"

    @property
    def done(self) -> bool:
        return self.produced >= self.answer.tokens

    async def parts(self, tokens: int = 1) -> AsyncIterator[str]:
        """Yield the text of the answer as it is generated, in parts of at least `tokens` tokens.

        The first part and the last one may be shorter: the first token is never held back. Text
        that is generated while the reader is busy comes as one part. Raises `ApiError` if the
        answer failed.
        """
        sent = 0
        while not self.done or sent < self.produced:
            await self.progress.wait()
            self.progress.clear()
            if self.failure is not None:
                raise self.failure
            until = self.produced
            if until > sent and (not sent or self.done or until - sent >= tokens):
                yield self.answer.part(sent, until)
                sent = until


class _Rank:
    """One data-parallel rank of a pod: an engine with its own task."""

    def __init__(self, settings: PodSettings, number: int) -> None:
        self.engine = open_engine(settings.features, settings.engine, settings.profile)
        self.work = asyncio.Event()
        self.submitted_at = 0.0
        self.kv_events: KVEvents | None = None
        if settings.kv_events:
            self.kv_events = KVEvents(settings.engine.block_size_tokens, rank=number)
            self.engine.pool.watcher = self.kv_events


class Pod:
    """A simulated pod: one engine for each rank, and a metrics page, in step with the clock."""

    def __init__(self, name: str, settings: PodSettings) -> None:
        self.name = name
        self.settings = settings
        self._ranks = tuple(_Rank(settings, number) for number in range(settings.ranks))
        self.engines = RankedEngine([rank.engine for rank in self._ranks])
        self.page = MetricsPage(
            model=settings.model,
            settings=settings.engine,
            max_model_len_tokens=settings.max_model_len_tokens,
            ranks=settings.ranks,
        )
        self.adapters: dict[str, str] = dict.fromkeys(settings.adapters, "")
        """Path of each loaded LoRA adapter by its name, in the order of loading; "" if none was given,
        as for adapters from the command line.
        """
        self.side_channel = ("127.0.0.1", 0)
        """Host and port at which decode engines reach this engine. The server sets it."""
        self.held: HeldBlocks | None = None
        """KV blocks of prefill legs that the pod holds for decode engines; None if its engine has
        no KV connector.
        """
        self._reader: BlockReader | None = None
        connector = settings.engine.kv_connector
        if connector is not None:
            self.held = HeldBlocks(self, connector, settings.speed)
            self._reader = BlockReader(
                self,
                connector,
                settings.kv_link,
                size_bytes=settings.profile.kv_bytes,
                speed=settings.speed,
            )
        self._generations: dict[str, Generation] = {}
        self._started_at = time.monotonic()
        self._requests = 0

    @property
    def kv_events(self) -> list[KVEvents]:
        """KV-event source of each rank; empty if the pod publishes no events."""
        return [rank.kv_events for rank in self._ranks if rank.kv_events is not None]

    def clock(self) -> Seconds:
        """Return the simulated time in seconds since the pod was created."""
        return (time.monotonic() - self._started_at) * self.settings.speed

    def wall_clock(self) -> Seconds:
        """Return the current Unix time in seconds, which `speed` does not change."""
        return time.time()

    async def run(self) -> None:
        """Run the engines' steps whenever there are requests, until the task is cancelled."""
        running = [self._run(rank) for rank in self._ranks]
        if self._reader is not None:
            running.append(self._reader.run())
        try:
            await asyncio.gather(*running)
        finally:
            if self.held is not None:
                self.held.close()

    async def _run(self, rank: _Rank) -> None:
        ended_at = 0.0
        while True:
            await rank.work.wait()
            rank.work.clear()
            ended_at = max(ended_at, self.clock())
            # A step never begins before the requests that it may admit were submitted.
            while (step := self._step(rank, max(ended_at, rank.submitted_at))) is not None:
                ended_at = step.ends_at
                await self._sleep_until(ended_at)
                if rank.kv_events is not None:
                    rank.kv_events.end_step(self.wall_clock())
                self._publish(step)
            self.page.show(self.engines.snapshot(), self.wall_clock())

    def _step(self, rank: _Rank, at: Seconds) -> Step | None:
        """Do one pass of an engine that starts at `at`, and let the reader fetch blocks of the legs
        for which the pass reserved room. Return None if there is no pass to do.
        """
        step = rank.engine.step(at)
        legs = rank.engine.legs
        if legs is not None and self._reader is not None:
            for request in legs.reserved:
                self._reader.reserved(request)
            legs.reserved.clear()
        return step

    def check_room(self) -> None:
        """Raise `ApiError` 503, and count the rejection on the metrics page, if the pod has its
        maximum number of unfinished requests.
        """
        limit = self.settings.max_num_queued_reqs
        if limit and len(self._generations) >= limit:
            self.page.reject("max_num_queued_reqs")
            raise ApiError(
                503,
                f"The server has {len(self._generations)} unfinished requests, its limit is "
                f"{limit}; try again later.",
                kind="ServiceUnavailableError",
            )

    def rank_named(self, header: str | None) -> int | None:
        """Return the data-parallel rank that a request's header names, or None for any rank. A
        header that is not an integer is ignored, as in vLLM.

        Raises `ApiError` 400 if the pod does not have that rank.
        """
        try:
            rank = None if header is None else int(header)
        except ValueError:
            return None
        ranks = self.settings.ranks
        if rank is not None and not 0 <= rank < ranks:
            raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {ranks}).")
        return rank

    def prepare(self, body: Body, prompt: bytes) -> Generation:
        """Create the answer to `prompt`, without submitting it to an engine.

        Raises `ApiError` 400 if the prompt is empty, or if prompt and answer exceed the context.
        """
        prompt_tokens = len(prompt) // TOKEN_BYTES
        context = self.settings.max_model_len_tokens
        wanted = body.tokens_max()
        if not prompt_tokens:
            raise ApiError(400, "The prompt is empty; expected at least one token.", param="prompt")
        if prompt_tokens + (wanted or 1) > context:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens; the request has "
                f"{prompt_tokens} in the prompt and asks for {wanted or 1}.",
                param="max_tokens",
            )
        tokens_max = wanted or context - prompt_tokens
        answer = Answer(
            prompt, tokens_max=tokens_max, ignore_eos=body.ignore_eos, seed=self.settings.seed
        )
        adapter = body.model if body.model in self.adapters else ""
        self._requests += 1
        request = EngineRequest(
            f"{self.name}-{self._requests}",
            prompt_tokens=prompt_tokens,
            output_tokens=answer.tokens,
            chain=self._chain(prompt + answer.text.encode(), adapter, body.cache_salt),
            adapter=adapter,
        )
        params = body.kv_transfer_params
        if params is None or self._reader is None:
            return Generation(request, answer, tokens_max)
        # As in vLLM, only a leg that its limit ends hands its blocks over.
        limited = answer.tokens == 1 and not answer.stopped
        request.hands_over = params.do_remote_decode and limited
        request.fetches = params.complete
        return Generation(request, answer, tokens_max, params if request.fetches else None)

    def transfer_params(self, generations: Sequence[Generation]) -> Json | None:
        """Return the member `kv_transfer_params` of the answer to a prefill leg; None if the pod
        holds no blocks of the request, or if it has several prompts.
        """
        held, settings = self.held, self.settings
        request = generations[0].request
        if held is None or request.request_id not in held or len(generations) > 1:
            return None
        connector = settings.engine.kv_connector
        assert connector is not None, "a pod that holds blocks has one"
        return described(
            request,
            held,
            address=self.side_channel,
            block_size_tokens=settings.engine.block_size_tokens,
            expires_at_s=self.wall_clock() + connector.lease_s / settings.speed,
        )

    def reset_cache(self) -> None:
        """Clear the prefix cache of each data-parallel rank. Raises `ApiError` 503 if a cache is in
        use by running requests; the caches of other ranks are cleared all the same.
        """
        cleared = [rank.engine.pool.clear() for rank in self._ranks]
        if not all(cleared):
            raise ApiError(
                503,
                "The prefix cache is in use; it can be reset when no request runs.",
                kind="ServiceUnavailableError",
            )

    @contextlib.contextmanager
    def following(self, generations: Sequence[Generation]) -> Iterator[None]:
        """Update `generations` with the engines' progress inside the context.

        Requests that are unfinished at the end of the context are aborted. All are then counted on
        the metrics page.
        """
        for generation in generations:
            self._generations[generation.request.request_id] = generation
        try:
            yield
        finally:
            for generation in generations:
                request = generation.request
                del self._generations[request.request_id]
                reason = generation.finish_reason if generation.done else "abort"
                if generation.failure is not None:
                    reason = "error"
                if not generation.done:
                    self._abort(request)
                self.page.finish(request, reason, generation.tokens_max)

    async def submit(self, generations: Sequence[Generation], rank: int | None) -> None:
        """Submit requests to the engine of `rank`, or each to the least loaded rank if it is None,
        after the delay of a real server's front end.
        """
        arrived_at = self.clock()
        tokens = sum(generation.request.prompt_tokens for generation in generations)
        await self._sleep_until(arrived_at + self.settings.profile.frontend_delay_s(tokens))
        now = self.clock()
        for generation in generations:
            generation.request.arrived_at = arrived_at
            chosen = self._ranks[self.engines.least_loaded if rank is None else rank]
            if generation.source is not None and self._reader is not None:
                self._reader.begin(generation)
            chosen.submitted_at = now
            chosen.engine.submit(generation.request, now)
            chosen.work.set()

    # Calls from the transfers of KV blocks.

    def release(self, request: EngineRequest) -> None:
        """Release the held blocks of a prefill leg."""
        for rank in self._ranks:
            if rank.engine.legs is not None and request in rank.engine.legs.held:
                rank.engine.release(request, self._now(rank))

    def lease_expired(self, request: EngineRequest) -> None:
        """Release the held blocks of a prefill leg that no decode engine has read, and count the
        ended lease on the metrics page.
        """
        if self.page.transfers is not None:
            self.page.transfers.lease_expired()
        self.release(request)

    def received(self, leg: Leg, size_bytes: float, transfer_s: Seconds) -> None:
        """Let a decode leg continue, because its blocks have arrived, and count the transfer on the
        metrics page.
        """
        if self.page.transfers is not None:
            self.page.transfers.transferred(size_bytes, transfer_s)
        for rank in self._ranks:
            if rank.engine.legs is not None and leg.request in rank.engine.legs.fetching:
                rank.engine.received(leg.request, self._now(rank))

    def unread(self, leg: Leg, reason: str) -> None:
        """Fail a decode leg, because its blocks do not arrive, and count the failed transfer on the
        metrics page: `kv_load_failure_policy` is `fail`, which is vLLM's default.
        """
        if self.page.transfers is not None:
            self.page.transfers.transfer_failed()
        for rank in self._ranks:
            if rank.engine.legs is not None and leg.request in rank.engine.legs.fetching:
                rank.engine.give_up(leg.request, self._now(rank))
        generation = self._generations.get(leg.request.request_id)
        if generation is not None:
            generation.failure = ApiError(500, reason, kind="InternalServerError")
            generation.progress.set()

    def _now(self, rank: _Rank) -> Seconds:
        """Return the simulated time at which a rank's engine changes, record it as the earliest
        start of the next pass, and wake the rank.
        """
        rank.submitted_at = self.clock()
        rank.work.set()
        return rank.submitted_at

    def _abort(self, request: EngineRequest) -> None:
        """Remove an unfinished request from its engine and, if its blocks are not reserved, from
        the reader of KV blocks.
        """
        self.engines.abort(request.request_id)
        if self._reader is not None:
            self._reader.abandon(request.request_id)
            for rank in self._ranks:
                rank.work.set()  # the request may have kept others waiting

    def load_adapter(self, body: AdapterBody) -> str:
        """Serve the adapter `lora_name` from now on; return a message.

        Raises `ApiError` 400 if LoRA is off or the name is in use.
        """
        if not self.settings.engine.max_loras:
            raise ApiError(400, "LoRA is off; start with --max-loras of at least 1.")
        if body.lora_name in self.adapters or body.lora_name == self.settings.model:
            raise ApiError(400, f"The lora adapter '{body.lora_name}' has already been loaded.")
        self.adapters[body.lora_name] = body.lora_path
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    def unload_adapter(self, body: AdapterBody) -> str:
        """Stop serving the adapter `lora_name`; requests that run are finished.

        Return a message. Raises `ApiError` 404 if the adapter is not loaded.
        """
        if body.lora_name not in self.adapters:
            raise ApiError(
                404,
                f"The lora adapter '{body.lora_name}' cannot be found.",
                kind="NotFoundError",
            )
        del self.adapters[body.lora_name]
        for rank in self._ranks:
            rank.engine.forget_adapter(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _chain(self, tokens: bytes, adapter: str, cache_salt: str) -> list[int]:
        size = self.settings.engine.block_size_tokens
        if not self.settings.kv_events:
            seed = chain_seed(adapter, cache_salt)
            return hash_chain(tokens, block_size_tokens=size, seed=seed)
        return TokenChain(tokens, block_size_tokens=size, adapter=adapter, cache_salt=cache_salt)

    def _publish(self, step: Step) -> None:
        self.page.observe(step, self.engines.snapshot(), self.wall_clock())
        for request in step.outputs:
            generation = self._generations.get(request.request_id)
            if generation is not None:
                generation.produced = request.generated_tokens
                generation.progress.set()
            if self.held is not None and request.hands_over and request.finished:
                self.held.hold(request)

    async def _sleep_until(self, at: Seconds) -> None:
        # Even after the deadline, the sleep lets the other pods and handlers run.
        await asyncio.sleep(max(0.0, at - self.clock()) / self.settings.speed)
