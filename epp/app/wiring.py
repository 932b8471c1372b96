"""Build all components of the picker in order, and own every task."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry

from epp.app.readiness import Readiness
from epp.app.reloading import AffectedComponents, Reloading, settings_of
from epp.app.sources import Sources, or_start_error
from epp.configuration.build import oldest_metrics_s
from epp.configuration.memory_plan import memory_plan
from epp.core.decision.inputs import (
    IndexMemoryLimited,
    PageScraped,
    ScrapeFailed,
    Tick,
)
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.peers.exchange import PeerExchange
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import SessionSettings
from epp.core.types import Endpoint, EndpointMetrics, Seconds
from epp.flags.serve import ServeFlags
from epp.journal.frames import frame_of
from epp.journal.records import Applied, RefusedDocument, told_change
from epp.shell.engines.endpoint_pages import EndpointPages, prepare
from epp.shell.engines.first_tokens import FirstTokensSeen
from epp.shell.engines.kv_events import KVEventListener
from epp.shell.engines.scrape import BACKOFF_S_MAX, ScrapeFailure, Scraper
from epp.shell.engines.sources import page_reader
from epp.shell.engines.tokens.service import Tokens
from epp.shell.engines.trust import trust_of
from epp.shell.gateway.ext_proc import ExtProc
from epp.shell.gateway.health import Health
from epp.shell.gateway.queue_waker import open_queue
from epp.shell.gateway.service import GatewayService
from epp.shell.gateway.sessions import Sessions
from epp.shell.gateway.wire import Decoder
from epp.shell.kubernetes.api_errors import KubeConfigError
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.recent_decisions import RecentDecisions, recent_decisions
from epp.shell.operators.journal import (
    DecisionsFolder,
    InputsFolder,
    Journal,
    JournalSnapshot,
    decisions_limits,
    inputs_limits,
    read_salt,
)
from epp.shell.operators.live.live_pages import LIVE_PAGES, LivePages
from epp.shell.operators.live.live_view import LiveView
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.logs.failing_plugins import FailingPluginsLog
from epp.shell.operators.logs.outliers_log import OutliersLog
from epp.shell.operators.logs.standings_log import StandingsLog
from epp.shell.operators.metrics.field_metrics import FIELD_NAMES, WithFieldNames
from epp.shell.operators.metrics.snapshot import pool_snapshot
from epp.shell.operators.metrics.telemetry import PoolSnapshot, Telemetry
from epp.shell.operators.observation import Observation
from epp.shell.operators.pages.bearer_token import BearerToken
from epp.shell.operators.pages.debug_pages import PAGES, DebugPages
from epp.shell.operators.pages.metrics_server import MetricsServer
from epp.shell.operators.pages.page_queue import PageQueue
from epp.shell.peers.secret import Identity, peer_identity
from epp.shell.peers.service import Peers
from epp.shell.process.garbage import GarbageCollection
from epp.shell.process.loop_lag import LoopLag
from epp.shell.process.memory import (
    MemoryReturn,
    malloc_trim,
    memory_limit_bytes,
)
from epp.shell.process.own_process import OwnProcess
from epp.shell.process.pressure import LONG_BODY_BYTES, MemoryPressure
from epp.shell.starting import EVERYWHERE, StartError, cannot_listen
from epp.shell.supervision import Loop, Supervisor

if TYPE_CHECKING:
    from epp.shell.kubernetes.cluster import Cluster
    from epp.shell.operators.traces.tracing import Tracer

TICK_S: Final = 1.0

_log = structlog.get_logger(__name__)


class EndpointPicker:
    """One picker process. `serve` runs it, and `scheduler` makes its decisions."""

    def __init__(self, flags: ServeFlags) -> None:
        """Read the configuration and the endpoints and build all components. Raises `StartError`.

        A component that calls another one created later gets a lambda that looks it up when it is
        called.
        """
        self.flags = flags
        self._seed = secrets.randbits(32) if flags.seed is None else flags.seed
        self._supervisor = Supervisor(
            lambda task, ends: self.telemetry.task_ended(task, ends),
            lambda: self.readiness.update(),
        )
        limit_bytes = flags.memory_limit or memory_limit_bytes()
        self._memory = memory_plan(limit_bytes, flags.held_body_bytes_max(limit_bytes))
        self.pressure = MemoryPressure(limit_bytes)

        # Parts that decide: the configuration, the endpoints, the scheduler and its peers.
        self._cluster = None if flags.endpoints_file else self._open_cluster()
        self._sources = self._open_sources()
        self.live = self._sources.configuration(self._memory, self._config_started)
        found = self._sources.endpoints()
        settings = settings_of(self.live.current(len(found.endpoints)))
        self._journal = Journal(flags.instance)
        self.capture = _inputs(self._journal, flags, self._seed)
        self.scheduler = self._open_scheduler(settings, len(found.endpoints))
        self.exchange, identity = self._open_exchange()

        # Parts that show decisions to operators, and the connections to peers.
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(self.registry, self._snapshot, could_not=self._could_not)
        self._process = OwnProcess(LoopLag(self.telemetry.loop_lagged))
        self._first_tokens = FirstTokensSeen()
        self._history = _history(self._journal, flags)
        self._recent = self._open_recent()
        self.peers = self._open_peers(identity)
        self._states = EndpointStates(
            self.scheduler,
            lambda endpoint: self._scraper.problem_of(endpoint),
            self._recent.know_states,
        )
        self._debug = self._open_debug_pages()
        self._changes = ConfigurationChanges(tell=self._changed)
        self._live_pages = LivePages(self._open_live_view())
        self._debug_token = _debug_token(flags)

        # Parts that receive data of engines: pages, KV-cache events and tokens.
        self._scraper = self._open_scraper()
        self._pages = EndpointPages(seed=self._seed, supervisor=self._supervisor)
        self._pages.configure(or_start_error(lambda: prepare(self.live.config.metrics)))
        self._listener = KVEventListener(
            self.scheduler, seed=self._seed, supervisor=self._supervisor
        )
        self._tracer = _open_tracer(flags) if flags.tracing else None
        self.observation = self._open_observation()
        self.tokens = Tokens(self.observation, self.scheduler.held)
        asked = self.live.config.tokens_asked
        self.tokens.accept(or_start_error(lambda: self.tokens.prepare(asked)))

        # Parts that serve the gateway: streams, and the memory of their bodies.
        self.bodies = BodyBudget(self._memory.bodies_bytes)
        self.memory_return = MemoryReturn(
            lambda: self.bodies.held_bytes,
            trim=malloc_trim(),
            pressure=self.pressure,
            pressed=self._pressed,
        )
        self.queue = open_queue(
            self.scheduler,
            count=self.telemetry.task_ended,
            # The other half is for bodies that arrive meanwhile.
            bytes_max=self.bodies.bytes_max // 2,
        )
        self.sessions = self._open_sessions()
        self.decoder = Decoder()
        self.ext_proc = self._open_ext_proc()
        self.health = Health()
        self._gateway = self._open_gateway()

        # Parts that depend on all others: the log of endpoints, readiness and reloading.
        self._standings = StandingsLog(
            self.scheduler,
            self._scraper.problem_of,
            staleness_s=flags.metrics_staleness_threshold,
        )
        self.readiness = self._open_readiness()
        self.reloading = self._open_reloading()
        self.reloading.start(found, settings, self._seed)

    async def serve(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Serve gateways until `stop` is set, then drain the running requests.

        If `hurry` is set, the drain ends early. Raises `StartError` if a port is unavailable, or
        the certificate or the kubeconfig is invalid.
        """
        flags = self.flags
        async with contextlib.AsyncExitStack() as opened:
            await opened.enter_async_context(self._gateway)
            await opened.enter_async_context(self.peers)
            turn = asyncio.Lock()
            debug = PageQueue(turn)
            metrics = MetricsServer(
                WithFieldNames(self.registry, FIELD_NAMES[flags.compat_metrics]),
                lambda: self.health.ready,
                host=None
                if flags.metrics_bind_address == EVERYWHERE
                else flags.metrics_bind_address,
                port=flags.metrics_port,
                routes=(
                    *self._debug.routes(debug, self._debug_token),
                    *self._live_pages.routes(debug, self._debug_token),
                ),
                pages=PAGES | LIVE_PAGES,
                turn=turn,
            )
            try:
                await opened.enter_async_context(metrics)
            except OSError as error:
                where = flags.metrics_port, error, flags.metrics_bind_address
                raise cannot_listen("--metrics-port", *where) from error
            if self._tracer is not None:
                await opened.enter_async_context(self._tracer.export)
            if self._cluster is not None:
                opened.push_async_callback(self._cluster.close)
                await _connect(self._cluster)
            await self._gateway.start()
            async with asyncio.TaskGroup() as tasks:
                owned = self._start(tasks)
                self.readiness.update()
                loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
                _log.info(
                    "picker serving",
                    grpc_port=flags.grpc_port,
                    secure=flags.secure_serving,
                    event_loop=loop,
                )
                await stop.wait()
                if self._cluster is not None:
                    self._cluster.retire()
                await self._gateway.drain(hurry or asyncio.Event())
                if self._cluster is not None:
                    # If this were cancelled, the next leader would wait until the Lease expires.
                    await self._cluster.retired()
                # Decisions that are still queued are written before the tasks end.
                self._recent.fold()
                for task in owned:
                    task.cancel()
        _log.info("picker stopped", decisions=self.scheduler.decisions)

    @property
    def has_gateway(self) -> bool:
        """True if a gateway is connected, as far as the gRPC server can tell."""
        return self._gateway.has_gateway

    def _start(self, tasks: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Start every supervised task that runs beside the gRPC server, and return the tasks."""
        # Without these loops the time limits of requests and connections are not enforced.
        essential = self._gateway.loops()
        return [
            tasks.create_task(
                self._supervisor.keep(name, loop, essential=name in essential), name=name
            )
            for name, loop in (self._loops() | essential).items()
        ]

    def _loops(self) -> dict[str, Loop]:
        """Return the supervised loops of this picker except those of the gateway service, by the
        name of their task.
        """
        loops: dict[str, Loop] = {
            "tick": self._tick,
            "loop lag": self._process.lag.run,
            "memory": self.memory_return.run,
            "garbage": GarbageCollection().run,
            "scrape": self._scraper.run,
            "endpoint pages": self._pages.run,
            "KV events": self._listener.run,
            "tokens": self.tokens.run,
            "standings": self._standings.run,
            **self.peers.loops(),
            **self._sources.loops(),
        }
        if self._journal.folders:
            loops["journal"] = self._journal.run
        if self._debug_token is not None:
            loops["debug token"] = self._debug_token.run
        if self._cluster is not None:
            loops["endpoints"] = self._cluster.run
        return loops

    async def _tick(self) -> None:
        reports = self._reports()
        while True:
            await asyncio.sleep(TICK_S)
            self.scheduler.take(Tick(), time.monotonic())
            self._expect_peers()
            self.telemetry.fold()
            self.readiness.endpoint_scraped()
            self._recent.expire()
            for expected_s, observed_s in self._recent.first_tokens():
                self.telemetry.first_token_compared(expected_s, observed_s)
            self._process.look()
            self.tokens.look(time.monotonic())
            for report in reports:
                report()

    def _reports(self) -> list[Callable[[], None]]:
        """Return the functions that are called once per second to report news. All but one write to
        the log; the other compares the states of endpoints for pages and recorded decisions.
        """
        reports = [
            FailingPluginsLog(self.scheduler.failures).report,
            FailingPluginsLog(
                self.scheduler.shadow_failures,
                "plugin of the shadow profile failed; it routes no requests",
            ).report,
            OutliersLog(self.scheduler).report,
            lambda: self._states.look(time.monotonic()),
        ]
        if self._tracer is not None:
            reports.append(self._tracer.export.report)
        return reports

    def _could_not(self, event: str, error: Exception) -> None:
        """Report to `observation` that recording `event` failed, for example in metrics.
        `observation` is created after the components that call this.
        """
        self.observation.could_not(event, error)

    def _expect_peers(self) -> None:
        """Report to the peer exchange how many replicas decide at the same time. Do nothing if this
        picker does not share state, or with leader election, where only one replica decides.
        """
        if self.flags.shares and not self.flags.ha_enable_leader_election:
            self.exchange.expect(
                1 + max(self.flags.replicas_besides, self.peers.known), time.monotonic()
            )

    # One method for each component that takes more than a line to build, in the order of
    # `__init__`.

    def _open_cluster(self) -> "Cluster":
        # The import takes 0.4 s and 18 MB, so it is done only in Kubernetes.
        from epp.shell.kubernetes.cluster import Cluster  # noqa: PLC0415

        return Cluster(
            self.flags,
            on_found=lambda found: self.reloading.take(found),
            on_ready=lambda: self.readiness.update(),
            on_config=lambda content, told_by: self.reloading.config_changed(content, told_by),
            on_peers=lambda addresses: self.peers.discovered(addresses),
            seed=self._seed,
            supervisor=self._supervisor,
        )

    def _open_sources(self) -> Sources:
        return Sources(
            self.flags,
            on_config=lambda content: self.reloading.file_changed(content),
            on_endpoints=lambda content: self.reloading.endpoints_changed(content),
            on_keys=lambda keys: self.reloading.keys_changed(keys),
            on_not_kept=lambda name: self.telemetry.last_good_not_kept(name),
        )

    def _config_started(self, content: bytes) -> None:
        if self._cluster is not None:
            self._cluster.config.started(content)

    def _open_scheduler(self, settings: SchedulerSettings, endpoints: int) -> Scheduler:
        flags, scheduler = self.flags, Scheduler(settings, seed=self._seed)
        scheduler.placements.keeps_costs = bool(
            flags.decision_records_keep or flags.decisions_dir or flags.explain_headers
        )
        if self.capture is not None:
            self.capture.tell(self.live.told(endpoints))
            scheduler.witness = self.capture.witness(scheduler)
        return scheduler

    def _open_exchange(self) -> tuple[PeerExchange, Identity]:
        """Return the exchange of scheduler state between replicas, and the identity of this replica
        in it.

        Without peers, the exchange only stores snapshots. Raises `StartError`.
        """
        flags = self.flags
        identity = peer_identity(flags.peer_secret_file if flags.meshes else "")
        exchange = PeerExchange(
            self.scheduler,
            origin=identity.origin,
            now=time.monotonic(),
            replicas=1 + flags.replicas_besides,
            has_peers=flags.shares,
        )
        return exchange, identity

    def _open_recent(self) -> RecentDecisions:
        return recent_decisions(
            self.scheduler.pool,
            self.flags.decision_records_max_bytes,
            self.flags.decision_records_keep,
            self._could_not,
            self._history,
        )

    def _open_peers(self, identity: Identity) -> Peers:
        return Peers(
            self.flags,
            self.exchange,
            identity=identity,
            on_ready=lambda: self.readiness.update(),
            on_snapshot=self.telemetry.peer_snapshot,
            seed=self._seed,
        )

    def _open_debug_pages(self) -> DebugPages:
        return DebugPages(
            self.scheduler,
            self._recent,
            lambda: (self.live.config, self.live.generation),
            self._states,
            peers=self.peers.rows,
            first_tokens=self._first_tokens.lately,
            kv_events=lambda endpoint: self._listener.row_of(endpoint),
            pages=lambda endpoint: self._pages.row_of(endpoint),
            tokens=lambda: self.tokens.described(),
        )

    def _open_live_view(self) -> LiveView:
        return LiveView(
            self.scheduler,
            self._recent,
            self._changes,
            self._states,
            self.flags.pool_name,
            process=self._process.lately,
            first_tokens=self._first_tokens.lately,
            capture=self._captured,
            kv_events=lambda endpoint: self._listener.row_of(endpoint),
            queue=lambda: self.queue,
        )

    def _open_scraper(self) -> Scraper:
        flags, metrics = self.flags, self.live.config.metrics
        return Scraper(
            self._observe,
            self._scrape_failed,
            scraped=lambda elapsed_s: self.telemetry.scraped(elapsed_s=elapsed_s),
            reader=page_reader(metrics.extractor),
            seed=self._seed,
            interval_s=flags.refresh_interval_s,
            idle_oldest_s=self._oldest_metrics_s if flags.adaptive_scraping else None,
            busy=self._has_work,
            # Two attempts fit into the time until metrics are stale.
            backoff_s_max=min(BACKOFF_S_MAX, flags.metrics_staleness_threshold / 2),
            supervisor=self._supervisor,
            trust=or_start_error(lambda: trust_of(metrics.source)),
            interval_s_min=metrics.source.interval_s,
        )

    def _open_observation(self) -> Observation:
        """Return the observer of decisions and requests; with a tracer, it also creates spans."""
        flags = self.flags
        make: Callable[..., Observation] = Observation
        if self._tracer is not None:
            from epp.shell.operators.traces.tracing import TracedObservation  # noqa: PLC0415

            make = partial(TracedObservation, self._tracer)
        return make(
            self.telemetry,
            DecisionLog(structlog.get_logger("decisions"), level=flags.log_level),
            self._recent if flags.decision_records_keep or self._history else None,
            answered=self._scraper.answered,
            picked=self._scraper.picked,
            served=self._served,
        )

    def _open_sessions(self) -> Sessions:
        flags = self.flags
        return Sessions(
            self.scheduler,
            SessionSettings(
                request_body_bytes_max=flags.request_body_max_bytes,
                trust_model_rewrite=flags.trust_model_rewrite_header,
                parsers=self.live.parsers,
                parse_response_usage=flags.parse_response_usage,
                decline_response_bodies=flags.decline_response_bodies,
                request_load_metrics=flags.request_load_metrics,
                engine_priority=flags.engine_priority,
                explain_headers=flags.explain_headers,
                subset_filter=not flags.disable_endpoint_subset_filter,
            ),
            self.observation,
            self.bodies,
            seed=self._seed,
            resolver=self.tokens.resolver,
            queue=self.queue,
        )

    def _open_ext_proc(self) -> ExtProc:
        return ExtProc(
            self.sessions.open,
            self.observation,
            streams_max=self.flags.concurrent_streams_max,
            request_timeout_s=self.flags.request_timeout,
            decoder=self.decoder,
        )

    def _open_gateway(self) -> GatewayService:
        return GatewayService(
            self.flags,
            self.ext_proc,
            self.health,
            self.observation,
            self.bodies,
            lag=self._process.lag,
            seed=self._seed,
            refuse_waiting=lambda: self.queue.drain(time.monotonic()),
        )

    def _open_readiness(self) -> Readiness:
        return Readiness(
            cluster=self._cluster,
            peers=self.peers,
            pool=self.scheduler.pool,
            scraper=self._scraper,
            supervisor=self._supervisor,
            health=self.health,
            gateway=self._gateway,
        )

    def _open_reloading(self) -> Reloading:
        concerned = AffectedComponents(
            scheduler=self.scheduler,
            sessions=self.sessions,
            scraper=self._scraper,
            pages=self._pages,
            listener=self._listener,
            tokens=self.tokens,
            first_tokens=self._first_tokens,
            peers=self.peers,
            telemetry=self.telemetry,
            recent=self._recent,
            changes=self._changes,
            capture=self.capture,
        )
        return Reloading(self.flags, self.live, self._sources, concerned, self._cluster)

    # Callbacks of other components.

    def _observe(self, endpoint: Endpoint, metrics: EndpointMetrics) -> None:
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            now = time.monotonic()
            told = self._pages.attributes_of(endpoint, asyncio.get_running_loop().time())
            if told:
                attributes = {**metrics.attributes, **told}
                metrics = structs.replace(metrics, attributes=attributes)
            self.scheduler.take(PageScraped(slot, metrics), now)
            self._first_tokens.observe(endpoint.endpoint_id, metrics, now)
        self.readiness.endpoint_scraped()

    def _served(self, request: InferenceRequest, endpoint: Endpoint, now: Seconds) -> None:
        self.tokens.served(request, endpoint, now)

    def _oldest_metrics_s(self) -> Seconds:
        return oldest_metrics_s(self.scheduler.settings)

    def _has_work(self, endpoint: Endpoint) -> bool:
        """Return True if `endpoint` must be scraped often: this picker has requests in flight
        there, or the endpoint is saturated.

        A saturated endpoint becomes usable after its next good scrape, so that scrape must be soon.
        """
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is None:
            return False
        columns = self.scheduler.pool.columns
        return bool(columns.inflight_requests[slot] or columns.saturated[slot])

    def _pressed(self, pressure: MemoryPressure) -> None:
        self.scheduler.take(IndexMemoryLimited(pressure.index_share), time.monotonic())
        self.sessions.pass_from(LONG_BODY_BYTES if pressure.bodies_pass else None)
        _log.warning(
            "memory pressure changed",
            level=pressure.level,
            index_share=pressure.index_share,
            limit_bytes=pressure.limit_bytes,
        )

    def _scrape_failed(self, endpoint: Endpoint, kind: ScrapeFailure, sentence: str) -> None:
        self.telemetry.scrape_failed(kind)
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            self.scheduler.take(ScrapeFailed(slot=slot, answered=kind.answered), time.monotonic())
        self.readiness.endpoint_scraped()
        _log.debug("scrape failed", endpoint=endpoint.name, kind=kind, problem=sentence)

    def _changed(self, change: Applied | RefusedDocument) -> None:
        if self._history is not None:
            self._history.tell(frame_of(told_change(change)))

    def _captured(self) -> JournalSnapshot | None:
        return None if self.capture is None else self.capture.snapshot()

    def _snapshot(self) -> PoolSnapshot:
        cluster = self._cluster.snapshot() if self._cluster is not None else None
        shown = pool_snapshot(
            self.scheduler,
            self.flags.pool_name,
            self.bodies,
            self.pressure,
            cluster,
            time.monotonic(),
            messages=self.decoder.paths(),
            peers=self.exchange if self.flags.shares else None,
        )
        shown = structs.replace(
            shown,
            process=self._process.snapshot(),
            pages_unread=self._pages.unread(),
            kv_events=self._listener.snapshot(),
            first_tokens=self._first_tokens.lately(time.monotonic()),
            streams=self.ext_proc.open_streams,
            connected=self._gateway.connected(),
            tokens=self.tokens.snapshots(),
            queue=self.queue.snapshot(time.monotonic()),
        )
        if self._tracer is not None:
            shown = structs.replace(shown, spans=self._tracer.export.totals())
        shown = structs.replace(shown, capture=self._captured())
        if self._history is not None:
            shown = structs.replace(shown, history=self._history.snapshot())
        if not self.peers.enabled:
            return shown
        return structs.replace(shown, peer_links=self.peers.snapshot())


def _open_tracer(flags: ServeFlags) -> "Tracer | None":
    """Return the tracer with its exporter, or None, with a warning in the log, if the environment
    disables tracing.

    Raises `StartError` if a library is not installed or an `OTEL_*` variable is invalid.
    """
    # The imports take 12 MB and 0.2 s, so they are done only with `--tracing`.
    try:
        from epp.shell.operators.traces.otlp import OtelVariableError, open_export  # noqa: PLC0415
        from epp.shell.operators.traces.tracing import Tracer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        sentence = "--tracing needs the extra `otel`: pip install homing-epp[otel]"
        raise StartError(sentence) from error
    try:
        export = open_export(os.environ)
        if export is not None:
            return Tracer(export, instance=flags.instance, namespace=flags.own_namespace)
    except OtelVariableError as error:
        raise StartError(f"--tracing: {error}") from error
    _log.warning(
        "--tracing has no effect because OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER disables it"
    )
    return None


async def _connect(cluster: "Cluster") -> None:
    try:
        await cluster.connect()
    except KubeConfigError as error:
        raise StartError(str(error)) from error


def _debug_token(flags: ServeFlags) -> BearerToken | None:
    return BearerToken(Path(flags.debug_token_file)) if flags.debug_token_file else None


def _inputs(journal: Journal, flags: ServeFlags, seed: int) -> InputsFolder | None:
    """Return the folder that stores the scheduler's inputs, or None without `--capture`.

    Raises `StartError`.
    """
    if not flags.capture:
        return None
    limits = inputs_limits(
        flags.capture_file_max_bytes, flags.capture_file_max_age, flags.capture_max_bytes
    )
    salt = read_salt(flags.capture_salt_file) if flags.capture_salt_file else None
    return InputsFolder(
        journal, flags.capture, limits, seed=seed, salt=salt, share=flags.capture_share
    )


def _history(journal: Journal, flags: ServeFlags) -> DecisionsFolder | None:
    """Return the folder that stores decisions, or None without `--decisions-dir`."""
    if not flags.decisions_dir:
        return None
    limits = decisions_limits(flags.decisions_max_bytes, flags.decisions_max_age)
    return DecisionsFolder(journal, flags.decisions_dir, limits)
