"""One simulated pod: an engine, its metrics page, and its faults."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from epp.core.types import (
    AdapterReport,
    Endpoint,
    EndpointMetrics,
    KvTransfers,
    MetricsTarget,
    Seconds,
)
from epp.plugins.filters import ROLE_LABEL
from sim.caches.behaviour import CacheBehaviour, Stores
from sim.caches.offload import OffloadedBlocks
from sim.cluster.event_log import EventLog
from sim.cluster.loop import Loop
from sim.engine.engine import Engine, EngineSettings, Step
from sim.engine.features import Feature, WholePrompts, batched_tokens, open_engine, ranks_of
from sim.engine.legs import KVConnector
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import PromptCache
from sim.engine.ranks import RankedEngine
from sim.engine.request import EngineRequest

_PORT: Final = 8000
_DEVICE_TIER: Final = "device"
"""Name of the GPU's tier in `EndpointMetrics.tier_hit_tokens`."""


class PodKind(Struct, frozen=True, kw_only=True):
    """The properties of a pod: the profile of its hardware and model, the settings of its engine,
    and its labels.
    """

    profile: Profile
    engine: EngineSettings
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the pod in Kubernetes, which discovery announces."""
    speed: float = 1.0
    """Speed of the pod's passes as a multiple of the profile's speed."""
    cache: CacheBehaviour | None = None
    """Prompt cache that the engine has instead of vLLM's own, or behind it; None for vLLM's alone.
    """
    advertised_blocks: int | None = None
    """Number of KV-cache blocks of one engine that the pod's metrics page reports; None for the
    real number.
    """
    features: tuple[Feature, ...] = ()
    """Features that the pod's engine was started with. `engine` already has the settings that they
    change.
    """
    nics: int = 1
    """Number of NICs for KV transfers, usually one for each GPU."""

    @classmethod
    def of(
        cls,
        profile: Profile,
        *,
        block_size_tokens: int = 16,
        max_loras: int = 0,
        labels: Mapping[str, str] = MappingProxyType({}),
        speed: float = 1.0,
        cache: CacheBehaviour | None = None,
        features: tuple[Feature, ...] = (),
    ) -> "PodKind":
        """Return the kind of pod that `vllm serve` starts on the profile's hardware with these
        `features`.

        `cache`, if not None, replaces vLLM's prompt cache or lies behind it.
        """
        kv_tokens = profile.kv_tokens if cache is None else cache.kv_tokens(profile)
        return cls(
            profile=profile,
            labels=dict(labels),
            speed=speed,
            cache=cache,
            features=features,
            engine=EngineSettings(
                blocks_total=kv_tokens // block_size_tokens + 1,
                block_size_tokens=block_size_tokens,
                max_num_seqs=profile.max_num_seqs,
                max_num_batched_tokens=batched_tokens(features, profile),
                max_loras=max_loras,
                chunked_prefill=WholePrompts() not in features,
            ),
        )

    def with_role(
        self, role: str, *, nics: int = 1, connector: KVConnector | None = None
    ) -> "PodKind":
        """Return this kind with the label of a role, for disaggregated requests.

        Its engine has `connector`, by default one with the usual lease.
        """
        return replace(
            self,
            labels={**self.labels, ROLE_LABEL: role},
            engine=replace(self.engine, kv_connector=connector or KVConnector()),
            nics=nics,
        )

    @property
    def role(self) -> str:
        """Role of the pod by its label, or "" if it has none."""
        return self.labels.get(ROLE_LABEL, "")

    @property
    def transfers(self) -> bool:
        """True if the engine of the pod sends or receives KV blocks."""
        return self.engine.kv_connector is not None

    @property
    def request_tokens_max(self) -> int:
        """Maximum number of tokens in prompt and answer of one request for which the KV cache, and
        without chunked prefill one pass, has room.
        """
        if self.cache is None:
            return self.engine.request_tokens_max
        return min(self.cache.request_tokens_max(self.engine), self.engine.request_tokens_max)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed of the pod by its profile in tokens per second, without `speed`, all
        data-parallel ranks together. It is that of steps of `max_num_batched_tokens` tokens (of the
        profile, without chunked prefill), and at most of the model's maximum length.
        """
        tokens = min(self.engine.max_num_batched_tokens, self.profile.max_model_len_tokens)
        if not self.engine.chunked_prefill:
            # Passes are as long as prompts here, and the model's maximum length is not a typical
            # prompt.
            tokens = min(tokens, self.profile.max_num_batched_tokens)
        return self.profile.prefill_tokens_per_s(tokens) * self.ranks

    @property
    def ranks(self) -> int:
        """Number of engines in the pod, one for each data-parallel rank."""
        return ranks_of(self.features)

    def open_rank(self, cache: PromptCache | None) -> Engine:
        """Return a new engine for one data-parallel rank of the pod, without requests."""
        return open_engine(self.features, self.engine, self.profile, cache)


class Scraper(Protocol):
    """The interface of an object that scrapes a pod's metrics page."""

    @property
    def next_at(self) -> Seconds:
        """Time at which the next scrape of the pod is due."""
        ...

    def catch_up(self, now: Seconds) -> None:
        """Compute the scrapes of the pod that were due before `now`."""
        ...


class SimulatedPod:
    """A simulated pod that runs its engine in simulated time. `stepped` is called with each engine
    step when it ends.

    A pass in progress is not interrupted; requests submitted meanwhile wait for its end.
    """

    def __init__(
        self,
        number: int,
        uid: str,
        kind: PodKind,
        loop: Loop,
        stepped: Callable[["SimulatedPod", Step], None],
        *,
        tells: bool = False,
        stores: Stores | None = None,
        reserved: Callable[["SimulatedPod", EngineRequest], None] | None = None,
    ) -> None:
        """Start the pod. If `tells` is true it publishes KV-cache events; `stores` holds the caches
        that pods share. `reserved` is called with each decode leg when the engine has reserved its
        blocks; only a pod with a KV connector needs it.
        """
        self._connected = kind.engine.kv_connector is not None
        self._tell_reserved = reserved
        self.number = number
        self.events: tuple[EventLog, ...] = ()
        """Log of KV-cache events of each rank's present or last process; empty if the pod publishes
        no events.
        """
        self._tells = tells
        self.name = f"pod-{number}"
        self.uid = uid
        self.kind = kind
        self.alive = True
        self.restarts = 0
        self.draining = False
        """True if the pod is withdrawn from discovery and finishes its requests."""
        self.returns = False
        """True if the pod is ending or has ended, and will restart."""
        self._slowness = 1.0 / kind.speed
        self.life = 0
        """Counter that increases whenever the pod's process starts or ends."""
        self.requests: dict[str, Any] = {}
        """Requests that the pod serves, in its engine or at its sidecar, by request id. A prefill
        leg is represented by its handover. The owner of the pod adds and removes them.
        """
        self.scrapers: list[Scraper] = []
        """Scrapers of the pod. They are called before anything changes that the metrics page
        shows.
        """
        self.leaving: set[str] = set()
        """Ids of requests that were aborted during the running pass, and that stay in the engine
        until it ends.
        """
        self._loop = loop
        self._stepped = stepped
        self._frozen: EndpointMetrics | None = None
        self._stores: Stores = {} if stores is None else stores
        self._tier_tokens_before: Mapping[str, float] = {}
        """Prompt tokens found in each cache tier by earlier processes of the pod."""
        self._caches: list[PromptCache | None] = [None] * kind.ranks
        self._shown: EndpointMetrics
        """Metrics page with the pod's state at the end of the last pass, and the present count of
        requests.
        """
        self._start()

    def __repr__(self) -> str:
        state = "alive" if self.alive else "dead"
        return (
            f"<SimulatedPod {self.name} [{state}, {self.running} running, {self.waiting} waiting]>"
        )

    @property
    def place(self) -> str:
        """Name of the pod that seeds random numbers about it; it is the same in all runs."""
        return f"{self.name}:{_PORT}"

    @property
    def endpoint(self) -> Endpoint:
        """The pod as the endpoint that discovery announces."""
        # 10.x.y.z has a distinct address for each of a million pods.
        high, low = divmod(self.number + 1, 250)
        address = f"10.{high // 250}.{high % 250}.{low + 1}:{_PORT}"
        return Endpoint(
            endpoint_id=f"{self.uid}:{_PORT}",
            name=self.name,
            address=address,
            incarnation=str(self.restarts),
            labels=self.kind.labels,
            metrics=MetricsTarget(port=_PORT),
        )

    @property
    def announced(self) -> bool:
        """True if discovery lists the pod: it runs and is not draining."""
        return self.alive and not self.draining

    @property
    def running(self) -> int:
        return len(self.engine.running)

    @property
    def waiting(self) -> int:
        waiting = len(self.engine.waiting)
        return waiting + self._in_transfer() if self._connected else waiting

    @property
    def tier_tokens(self) -> Mapping[str, float] | None:
        """Prompt tokens found in each cache tier, summed over all processes of the pod; None unless
        its cache is `offload`.
        """
        if not self._offloaded:
            return None
        return _summed(self._tier_tokens_before, self._tier_tokens())

    def submit(self, request: EngineRequest, rank: int | None = None) -> None:
        """Queue `request` in the engine, at data-parallel rank `rank` if given. Raises `ValueError`
        if the engine can never serve it.
        """
        self._catch_up()
        if isinstance(self.engine, RankedEngine):
            self.engine.submit(request, self._loop.now, rank)
        else:
            self.engine.submit(request, self._loop.now)
        self._requests += 1
        self._shown = replace(self._shown, requests_total=self._requests)
        self._follow()

    def abort(self, request_id: str) -> None:
        """Remove the request with this id from the engine, because its answer is no longer needed.
        A request in a running pass leaves at the end of the pass.
        """
        self._catch_up()
        self.engine.cut(self._loop.now)
        if self.engine.abort(request_id) and self.engine.passes:
            self.leaving.add(request_id)
        self._follow()

    def pulled(self, size_bytes: float, transfer_s: Seconds) -> None:
        """Count a transfer of `size_bytes` to this pod that took `transfer_s` seconds. Each NIC counts
        its part as a transfer, like each rank of vLLM.
        """
        self._catch_up()
        self._received_bytes += size_bytes
        self._transfers_ended += self.kind.nics
        self._transfers_ended_s += self.kind.nics * transfer_s

    def received(self, request: EngineRequest) -> None:
        """Let a decode leg continue, because its blocks have arrived; an aborted leg leaves the
        engine.
        """
        self._catch_up()
        self._rank_with(request).received(request, self._loop.now)
        self._changed()

    def awaits(self, request: EngineRequest) -> bool:
        """Return whether blocks are reserved for a decode leg and have not arrived."""
        return any(rank.legs is not None and request in rank.legs.fetching for rank in self.ranks)

    def give_up(self, request: EngineRequest) -> None:
        """Remove a decode leg whose reserved blocks will not arrive."""
        self._catch_up()
        self._rank_with(request).give_up(request, self._loop.now)
        self._changed()

    def release(self, request: EngineRequest) -> None:
        """Release the held blocks of a finished prefill leg."""
        self._catch_up()
        self._rank_with(request).release(request, self._loop.now)
        self._changed()

    def page(self, at: Seconds) -> EndpointMetrics | None:
        """Return the metrics page that a scrape at the time `at` reads, or None if the pod does not
        answer.

        The page shows the state at the end of the last pass and the present count of requests, or
        the frozen state. `at` must be between the last change of the pod and now.
        """
        if not self.alive:
            return None
        return self._frozen or self._metrics(at)

    def slow_down(self, factor: float) -> None:
        """Make the pod's passes that begin from now on take `factor` times as long as usual."""
        self._catch_up()
        self._slowness = factor / self.kind.speed
        self.engine.cut(self._loop.now)
        self.engine.slowness = self._slowness
        self._follow()

    def freeze_page(self, frozen: bool) -> None:
        """Freeze the pod's metrics page in its present state if `frozen` is true, else unfreeze
        it.
        """
        self._catch_up()
        self._frozen = self._metrics(self._loop.now) if frozen else None

    def die(self) -> None:
        """End the pod's process; the engine loses its whole state. The pod no longer answers
        scrapes.
        """
        self._catch_up()
        self.alive = False
        self._frozen = None
        self.life += 1
        for log in self.events:
            log.end(self._loop.now)

    def restart(self) -> None:
        """Start a new process in the same pod, with the same name and address and an empty KV
        cache. A prompt cache on a disk, and stores that pods share, keep their content.
        """
        self._catch_up()
        self.restarts += 1
        self._tier_tokens_before = self.tier_tokens or {}
        self.alive = True
        self.draining = False
        self.returns = False
        self._start()

    def _start(self) -> None:
        kind = self.kind
        if kind.cache is not None:
            self._caches = [
                kind.cache.open_in(self._stores, kind.profile, kind.engine, before)
                for before in self._caches
            ]
        self._offloaded = [cache for cache in self._caches if isinstance(cache, OffloadedBlocks)]
        self.ranks = [kind.open_rank(cache) for cache in self._caches]
        """Engines of the pod's process, one for each data-parallel rank."""
        self.engine: Engine | RankedEngine = (
            self.ranks[0] if len(self.ranks) == 1 else RankedEngine(self.ranks)
        )
        self.engine.slowness = self._slowness
        advertised = kind.advertised_blocks
        each = kind.engine.blocks_total if advertised is None else advertised
        self._advertised_blocks = len(self.ranks) * each
        if self._tells:
            self.events = tuple(EventLog(kind.engine.block_size_tokens) for _ in self.ranks)
            for rank, log in zip(self.ranks, self.events, strict=True):
                rank.pool.watcher = log
                rank.pass_by_pass = True
        self._started_at = self._loop.now
        self._requests = 0
        self._queried_tokens = self._hit_tokens = 0.0
        self._received_bytes = self._transfers_ended_s = 0.0
        self._transfers_ended = 0
        self._show()
        self._due: Seconds | None = None
        self.leaving.clear()
        self.life += 1

    def _show(self) -> None:
        """Set the content of the metrics page to the present state of the engine, between two
        passes.
        """
        engine, settings = self.engine, self.kind.engine
        adapters: AdapterReport | None = None
        if settings.max_loras:
            active = frozenset(engine.snapshot().adapters)
            adapters = AdapterReport(active=active, slots_max=settings.max_loras)
        waiting = len(engine.waiting)
        if self._connected:
            waiting += self._in_transfer()
        self._shown = EndpointMetrics(
            waiting_requests=waiting,
            running_requests=len(engine.running),
            kv_cache_usage=engine.kv_cache_usage(),
            adapters=adapters,
            block_size_tokens=settings.block_size_tokens,
            blocks_total=self._advertised_blocks,
            process_started_at_s=self._started_at,
            requests_total=self._requests,
            cache_queried_tokens=self._queried_tokens,
            cache_hit_tokens=self._hit_tokens,
            tier_hit_tokens=self._tier_tokens() if self._offloaded else None,
            ttft_count=engine.first_tokens,
            first_outputs_total=engine.first_tokens,
            transfers=KvTransfers(
                received_tokens=engine.received_tokens,
                received_bytes=self._received_bytes,
                ended=self._transfers_ended,
                ended_s=self._transfers_ended_s,
            )
            if self._connected
            else None,
            answers_total=engine.answers,
            answer_tokens_total=engine.answer_tokens,
        )

    def _catch_up(self) -> None:
        now = self._loop.now
        for scraper in self.scrapers:
            if scraper.next_at < now:
                scraper.catch_up(now)

    def _follow(self) -> None:
        """Schedule the end of the engine's running step, or begin a step if there is work and none
        is running. Then report decode legs with newly reserved blocks to the pod's owner.
        """
        ends_at = self.engine.ends_at
        if ends_at is None:
            ends_at = self.engine.begin(self._loop.now)
            if ends_at is None:
                self._due = None
                self._show()
        if ends_at is not None and ends_at != self._due:
            self._due = ends_at
            self._loop.at(ends_at, self._end_step, ends_at, self.life)
        if self._connected and self.alive:
            # Last, because the owner may change the engine again.
            self._announce_reserved()

    def _changed(self) -> None:
        """Continue after blocks of KV transfers were received, released or dropped. If no step
        runs, the metrics page shows the change at once.
        """
        if self.engine.ends_at is None:
            self._show()
        self._follow()

    def _announce_reserved(self) -> None:
        """Report the decode legs whose blocks the engine has reserved since the last call to the
        pod's owner.
        """
        for rank in self.ranks:
            assert rank.legs is not None
            if rank.legs.reserved:
                assert self._tell_reserved is not None, "a pod with a connector has an owner"
                reserved, rank.legs.reserved = rank.legs.reserved, []
                for request in reserved:
                    self._tell_reserved(self, request)

    def _rank_with(self, request: EngineRequest) -> Engine:
        """Return the rank that reserved or holds blocks for `request`."""
        return next(rank for rank in self.ranks if rank.legs is not None and rank.legs.has(request))

    def _in_transfer(self) -> int:
        """Return how many decode legs have reserved or received blocks and are not computed yet."""
        return sum(rank.legs.waiting for rank in self.ranks if rank.legs is not None)

    def _end_step(self, due: Seconds, life: int) -> None:
        if life != self.life or due != self._due:
            return
        self._catch_up()
        step = self.engine.end()
        self._count(step)
        if self.events:
            for rank, log in zip(self.ranks, self.events, strict=True):
                # The events of a rank are sent when its own step has ended.
                if rank.ends_at is None:
                    log.end_step(self._loop.now)
        self._due = None
        if self.leaving:
            self.leaving = self.engine.leaving
        self._show()
        self._stepped(self, step)
        self._follow()

    def _count(self, step: Step) -> None:
        """Add the prompt tokens that the step's admitted requests looked up and found in the cache
        to the counters of the metrics page.
        """
        for request in step.admitted:
            self._queried_tokens += request.prompt_tokens
            self._hit_tokens += request.cached_tokens

    def _tier_tokens(self) -> Mapping[str, float]:
        """Return the prompt tokens found in each cache tier by the pod's present process. The pod
        must have caches that offload.
        """
        told: Mapping[str, float] = {}
        for cache in self._offloaded:
            told = _summed(told, cache.hit_tokens)
        return {_DEVICE_TIER: self._hit_tokens - sum(told.values()), **told}

    def _metrics(self, at: Seconds) -> EndpointMetrics:
        if self.engine.passes > 1:
            # No request came or left, but the answers have grown.
            return replace(self._shown, kv_cache_usage=self.engine.kv_cache_usage(at))
        return self._shown


def _summed(some: Mapping[str, float], others: Mapping[str, float]) -> Mapping[str, float]:
    """Return the sum of the values in `some` and `others` for each name in `others`. A name that is
    missing in `some` counts as 0; `some` has no names that `others` lacks.
    """
    return {name: some.get(name, 0.0) + tokens for name, tokens in others.items()}
