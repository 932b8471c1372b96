"""Composition root of `epp serve`: builds everything in order, by hand, and owns every task."""

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry

from epp.configuration.build import oldest_metrics_s, plugin_tables
from epp.configuration.config import CONFIG_MAX_BYTES, ConfigError
from epp.configuration.flags import ServeFlags
from epp.configuration.live import LiveConfiguration, Offer
from epp.configuration.memory_plan import memory_plan
from epp.core.capture.witness import CaptureWitness
from epp.core.decision.inputs import (
    IndexMemoryLimited,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    ScrapeFailed,
    Tick,
)
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.peers.exchange import PeerExchange
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import SessionSettings
from epp.core.types import Endpoint, EndpointMetrics, Seconds
from epp.shell.engines.first_tokens import FirstTokensSeen
from epp.shell.engines.scrape import BACKOFF_S_MAX, ScrapeFailure, Scraper
from epp.shell.engines.sources import page_reader, scraped_from
from epp.shell.files.endpoints_file import EndpointsFileError, load_endpoints
from epp.shell.files.last_good import LastGood
from epp.shell.files.session_keys import Keys, SessionKeys
from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.found import Found
from epp.shell.gateway.ext_proc import ExtProc
from epp.shell.gateway.health import Health
from epp.shell.gateway.service import GatewayService
from epp.shell.gateway.sessions import Sessions
from epp.shell.gateway.wire import Decoder
from epp.shell.kubernetes.api_errors import KubeConfigError
from epp.shell.operators.capture import Capture, CaptureLimits, CaptureSnapshot, read_salt
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.decision_history import DecisionHistory
from epp.shell.operators.decisions.endpoint_states import EndpointStates
from epp.shell.operators.decisions.recent_decisions import recent_decisions
from epp.shell.operators.live.live_pages import LIVE_PAGES, LivePages
from epp.shell.operators.live.live_view import LiveView
from epp.shell.operators.logs.failing_plugins import FailingPluginsLog
from epp.shell.operators.logs.logs import DecisionLog, configure_logging
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
from epp.shell.process.garbage import GarbageCollection, spare_what_is_there
from epp.shell.process.loop_lag import LoopLag
from epp.shell.process.memory import (
    MemoryReturn,
    malloc_trim,
    memory_limit_bytes,
    tune_allocator,
)
from epp.shell.process.own_process import OwnProcess
from epp.shell.process.pressure import LONG_BODY_BYTES, MemoryPressure
from epp.shell.process.standard_error import StandardError
from epp.shell.starting import EVERYWHERE, StartError, cannot_listen
from epp.shell.supervision import Loop, Supervisor

if TYPE_CHECKING:
    from epp.shell.kubernetes.cluster import Cluster
    from epp.shell.operators.traces.tracing import Tracer

TICK_S: Final = 1.0
FIRST_PASS_S_MAX: Final = 10.0
"""Endpoints that do not answer keep the picker from being ready no longer than this."""
INTERVAL_CHANGE_MIN: Final = 0.1
"""By what share the interval between scrapes changes before its limits are set anew."""
INTERRUPTED_DRAIN_S_MAX: Final = 30.0
"""Whoever is at the keyboard waits no longer for streams to end, whatever `--drain-timeout` says."""
GARBAGE_THRESHOLDS: Final = (50_000, 20, 20)
"""The collector looks when so many objects were added. With Python's 700 it goes through each large
body several times while it is decoded: 8 MB of small arrays, as many as are let in, take a fifth
longer."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


def run(flags: ServeFlags) -> int:
    """`epp serve`: until SIGTERM or SIGINT, then drain. 0 when all went well, 1 if it cannot start."""
    configure_logging(flags.log_format.value, flags.log_level)
    standard_error = StandardError()
    standard_error.take_over()
    _raise_open_files_limit()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    tune_allocator()
    for warning in flags.warnings:
        _log.warning(warning)
    try:
        picker = EndpointPicker(flags)
        spare_what_is_there()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.get_loop().set_exception_handler(standard_error.task_failed)
            runner.run(_until_signal(picker))
    except StartError as error:
        for line in str(error).splitlines():
            _log.error(line)
        return 1
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop; None, where it is not installed: asyncio's own."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415
    except ImportError:
        return None
    return new_event_loop


def _raise_open_files_limit() -> None:
    """Allow as many open files as the hard limit: each endpoint's scrape keeps a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_signal(
    picker: "EndpointPicker", interrupted_max_s: Seconds = INTERRUPTED_DRAIN_S_MAX
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        # The first signal drains, a second one does not wait for it. Nor does a Ctrl-C that no
        # gateway would notice; after SIGTERM one may still be sent here by what it was told before.
        if stop.is_set() or (number == signal.SIGINT and not picker.has_gateway):
            hurry.set()
        elif number == signal.SIGINT:
            loop.call_later(interrupted_max_s, hurry.set)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    # Its default would end the picker without a drain. Who sends it wants files to be read again,
    # as other servers do at this signal; ours are read whenever they change.
    loop.add_signal_handler(
        signal.SIGHUP, _log.warning, "SIGHUP is ignored: files are read again when they change"
    )
    await picker.serve(stop, hurry)


class EndpointPicker:
    """One picker process. `serve` runs it; `scheduler` is what it decides with."""

    def __init__(self, flags: ServeFlags) -> None:
        """Read the configuration and the endpoints. Raises `StartError`."""
        self.flags = flags
        seed = secrets.randbits(32) if flags.seed is None else flags.seed
        self._supervisor = Supervisor(
            lambda task, ends: self.telemetry.task_ended(task, ends),  # noqa: PLW0108  that is made after it
            self._update_ready,
        )
        self._config_watcher = FileWatcher(
            Path(flags.config_file), self._file_changed, _report_file, bytes_max=CONFIG_MAX_BYTES
        )
        limit_bytes = flags.memory_limit or memory_limit_bytes()
        self._memory = memory_plan(limit_bytes, flags.held_body_bytes_max(limit_bytes))
        self.pressure = MemoryPressure(limit_bytes)
        self._known_since_s: Seconds | None = None
        self._scraped = False
        """The first pass over the endpoints is done, or has taken long enough."""
        self._endpoints_watcher = FileWatcher(
            Path(flags.endpoints_file), self._endpoints_changed, _report_file
        )
        self._kept_config = self._keeper("configuration")
        self._kept_endpoints = self._keeper("endpoints")
        self._cluster = None if flags.endpoints_file else self._open_cluster(seed)
        self._session_keys = SessionKeys(flags.session_token_key_file, self._keys_changed)
        self.live = self._read_config()
        self._found = self._read_endpoints() if flags.endpoints_file else Found()
        settings = _settings(self.live.current(len(self._found.endpoints)))
        self.capture = _capture(flags, seed)
        self.scheduler = self._open_scheduler(settings, seed)
        self.exchange, identity = self._open_exchange()
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(
            self.registry,
            self._snapshot,
            could_not=self._could_not,
        )
        self._process = OwnProcess(LoopLag(self.telemetry.loop_lagged))
        self._first_tokens = FirstTokensSeen()
        self._history = _history(flags)
        self._recent = recent_decisions(
            self.scheduler.pool,
            flags.decision_records_max_bytes,
            flags.decision_records_keep,
            self._could_not,
            self._history,
        )
        self.peers = Peers(
            flags,
            self.exchange,
            identity=identity,
            on_ready=self._update_ready,
            on_snapshot=self.telemetry.peer_snapshot,
            seed=seed,
        )
        self._states = EndpointStates(
            self.scheduler,
            lambda endpoint: self._scraper.problem_of(endpoint),  # noqa: PLW0108  that is made below
            self._recent.know_states,
        )
        self._debug = DebugPages(
            self.scheduler,
            self._recent,
            lambda: (self.live.config, self.live.generation),
            self._states,
            peers=self.peers.rows,
            first_tokens=self._first_tokens.lately,
        )
        self._changes = (
            ConfigurationChanges(tell=self._history.changed)
            if self._history is not None
            else ConfigurationChanges()
        )
        self._live_pages = LivePages(
            LiveView(
                self.scheduler,
                self._recent,
                self._changes,
                self._states,
                flags.pool_name,
                process=self._process.lately,
                first_tokens=self._first_tokens.lately,
                capture=self._captured,
            )
        )
        self._debug_token = (
            BearerToken(Path(flags.debug_token_file)) if flags.debug_token_file else None
        )
        self._scraper = Scraper(
            self._observe,
            self._scrape_failed,
            scraped=lambda elapsed_s: self.telemetry.scraped(elapsed_s=elapsed_s),
            reader=page_reader(self.live.config.metrics.extractor),
            seed=seed,
            interval_s=flags.refresh_interval_s,
            idle_oldest_s=self._oldest_metrics_s if flags.adaptive_scraping else None,
            busy=self._has_work,
            # Two tries before metrics are stale.
            backoff_s_max=min(BACKOFF_S_MAX, flags.metrics_staleness_threshold / 2),
            supervisor=self._supervisor,
        )
        self._tracer = _open_tracer(flags) if flags.tracing else None
        self.observation = self._observation(
            self.telemetry,
            DecisionLog(structlog.get_logger("decisions"), level=flags.log_level),
            self._recent if flags.decision_records_keep or self._history else None,
            answered=self._scraper.answered,
            picked=self._scraper.picked,
        )
        self.bodies = BodyBudget(self._memory.bodies_bytes)
        self.memory_return = MemoryReturn(
            lambda: self.bodies.held_bytes,
            trim=malloc_trim(),
            pressure=self.pressure,
            pressed=self._pressed,
        )
        self.sessions = Sessions(
            self.scheduler,
            SessionSettings(
                request_body_bytes_max=flags.request_body_max_bytes,
                trust_model_rewrite=flags.trust_model_rewrite_header,
                parsers=self.live.parsers,
                parse_response_usage=flags.parse_response_usage,
                decline_response_bodies=flags.decline_response_bodies,
                request_load_metrics=flags.request_load_metrics,
                explain_headers=flags.explain_headers,
                subset_filter=not flags.disable_endpoint_subset_filter,
            ),
            self.observation,
            self.bodies,
            seed=seed,
        )
        self.decoder = Decoder()
        self.ext_proc = ExtProc(
            self.sessions.open,
            self.observation,
            streams_max=flags.concurrent_streams_max,
            request_timeout_s=flags.request_timeout,
            decoder=self.decoder,
        )
        self.health = Health()
        self._gateway = GatewayService(
            flags,
            self.ext_proc,
            self.health,
            self.observation,
            self.bodies,
            lag=self._process.lag,
            seed=seed,
        )
        self._standings = StandingsLog(
            self.scheduler,
            self._scraper.problem_of,
            staleness_s=flags.metrics_staleness_threshold,
        )
        self._replace(self._found)
        self._tell_start(settings, seed)

    async def serve(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set, then drain; `hurry` cuts the drain short.

        Raises `StartError` when a port cannot be had or the certificate cannot be used.
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
                self._update_ready()
                loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
                _log.info(
                    "serving",
                    grpc_port=flags.grpc_port,
                    secure=flags.secure_serving,
                    event_loop=loop,
                )
                await stop.wait()
                if self._cluster is not None:
                    self._cluster.retire()
                await self._gateway.drain(hurry or asyncio.Event())
                if self._cluster is not None:
                    # Cut off, the next leader would wait for the Lease to run out.
                    await self._cluster.retired()
                # What waits is written with the rest.
                self._recent.fold()
                for task in owned:
                    task.cancel()
        _log.info("stopped", decisions=self.scheduler.decisions)

    @property
    def has_gateway(self) -> bool:
        """Whether a gateway is connected, as far as can be known."""
        return self._gateway.has_gateway

    def _start(self, tasks: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Everything that runs beside the server, looked after."""
        # Without these no request and no connection is bounded in time any more.
        essential = self._gateway.loops()
        return [
            tasks.create_task(
                self._supervisor.keep(name, loop, essential=name in essential), name=name
            )
            for name, loop in (self._loops() | essential).items()
        ]

    def _loops(self) -> dict[str, Loop]:
        """What runs beside the gateway's own, by the name of its task."""
        loops: dict[str, Loop] = {
            "tick": self._tick,
            "loop lag": self._process.lag.run,
            "memory": self.memory_return.run,
            "garbage": GarbageCollection().run,
            "scrape": self._scraper.run,
            "standings": self._standings.run,
            "endpoints": (self._cluster or self._endpoints_watcher).run,
            **self.peers.loops(),
        }
        if self.capture is not None:
            loops["capture"] = self.capture.run
        if self._history is not None:
            loops["decisions"] = self._history.run
        if self._debug_token is not None:
            loops["debug token"] = self._debug_token.run
        if self.flags.config_file:
            loops["config"] = self._config_watcher.run
        if self.flags.session_token_key_file:
            loops["session-keys"] = self._session_keys.run
        if self.flags.last_good_dir:
            loops["kept configuration"] = self._kept_config.run
            loops["kept endpoints"] = self._kept_endpoints.run
        return loops

    async def _tick(self) -> None:
        reports = self._reports()
        while True:
            await asyncio.sleep(TICK_S)
            self.scheduler.take(Tick(), time.monotonic())
            self._expect_peers()
            self.telemetry.fold()
            self._asked()
            self._recent.expire()
            self._process.look()
            for report in reports:
                report()

    def _reports(self) -> list[Callable[[], None]]:
        """What tells the log about once a second, if there is anything."""
        reports = [
            FailingPluginsLog(self.scheduler.failures).report,
            FailingPluginsLog(
                self.scheduler.shadow_failures,
                "a plugin of the shadow profile fails, no request is routed by it",
            ).report,
            OutliersLog(self.scheduler).report,
            lambda: self._states.look(time.monotonic()),
        ]
        if self._tracer is not None:
            reports.append(self._tracer.export.report)
        return reports

    def _could_not(self, event: str, error: Exception) -> None:
        """As of the observation, which is made after those that tell it this."""
        self.observation.could_not(event, error)

    def _observation(self, *told: Any, **more: Any) -> Observation:
        """The observer; where tracing is on, one that tells a tracer besides."""
        if self._tracer is None:
            return Observation(*told, **more)
        from epp.shell.operators.traces.tracing import TracedObservation  # noqa: PLC0415

        return TracedObservation(self._tracer, *told, **more)

    # At start a problem of the configuration or the endpoints is fatal, unless a copy was kept.

    def _read_config(self) -> LiveConfiguration:
        flags = self.flags
        keys = self._session_keys.keys

        def read() -> bytes:
            content = first_read(self._config_watcher, f"--config-file {flags.config_file}")
            if self._cluster is not None:
                self._cluster.config.started(content)
            return content

        def made(content: bytes | None) -> LiveConfiguration:
            return _or_start_error(
                lambda: LiveConfiguration(flags, plugin_tables(), content, keys, self._memory)
            )

        return self._kept_config.start(read, made) if flags.config_file else made(None)

    def _read_endpoints(self) -> Found:
        name = self.flags.endpoints_file
        return self._kept_endpoints.start(
            lambda: first_read(self._endpoints_watcher, f"--endpoints-file {name}"),
            lambda content: _or_start_error(lambda: load_endpoints(content, name)),
        )

    def _keeper(self, name: str) -> LastGood:
        return LastGood(
            self.flags.last_good_dir, name, lambda: self.telemetry.last_good_not_kept(name)
        )

    def _tell_start(self, settings: SchedulerSettings, seed: int) -> None:
        self._count_configured(settings)
        if self._kept_config.in_force:
            self.telemetry.config_rejected()
        self._tell_kept()
        _log.info(
            "configured",
            seed=seed,
            config=self.live.config.source,
            hash=self.live.hash,
            endpoints=len(self._found.endpoints),
        )

    def _tell_kept(self) -> None:
        for kept in (self._kept_config, self._kept_endpoints):
            self.telemetry.last_good_in_force(kept.name, kept.in_force)

    # Later the last good state stays.

    def _file_changed(self, content: bytes) -> None:
        if self._cluster is not None:
            # It knows whether the file or the watched ConfigMap counts.
            self._cluster.config.file_changed(content)
        else:
            self._config_changed(content, self.flags.config_file)

    def _config_changed(self, content: bytes, told_by: str) -> None:
        try:
            offer = self.live.read(content, told_by, len(self._found.endpoints))
            settings = _settings(offer)
            restarted = self.scheduler.take(Reconfigured(settings), time.monotonic()).restarted
        except ConfigError as error:
            self.telemetry.config_rejected()
            for problem in error.problems:
                _log.error("configuration refused, the last good one stays", problem=problem)
            self._tell(applied=False, message="; ".join(error.problems))
            self._changes.refuse("; ".join(error.problems))
            return
        except BaseException:  # noqa: BLE001  the boundary of a reload: an installed plugin may fail
            self.telemetry.config_rejected()
            _log.exception("configuration not applied, the last good one stays")
            self._tell(applied=False, message="a plugin failed while it was applied")
            self._changes.refuse("a plugin failed while it was applied")
            return
        self.live.accept(offer)
        if self.capture is not None:
            self.capture.configured(self.live, len(self._found.endpoints))
        self._kept_config.keep(content)
        self.sessions.configure(self.live.parsers)
        self._scraper.configure(page_reader(offer.config.metrics.extractor))
        self._replace(self._found)
        self._count_configured(settings, offer.changes)
        self._tell_kept()
        _log.info(
            "configured anew",
            hash=self.live.hash,
            generation=self.live.generation,
            changes=list(offer.changes),
            indexes_started_anew=list(restarted),
        )
        what = "; ".join(offer.changes) or "no change in effect"
        self._tell(applied=True, message=f"generation {self.live.generation}: {what}")

    def _count_configured(self, settings: SchedulerSettings, changes: Sequence[str] = ()) -> None:
        live = self.live
        self._recent.configured(live.generation, settings)
        weights = {scorer.name: scorer.weight for scorer in settings.profile.scorers}
        self._changes.apply(live.generation, live.hash, live.config.source, changes, weights)
        self.telemetry.config_applied(
            settings, config_hash=self.live.hash, generation=self.live.generation
        )

    def _tell(self, *, applied: bool, message: str) -> None:
        if self._cluster is not None:
            self._cluster.tell(applied=applied, message=message)

    def _endpoints_changed(self, content: bytes) -> None:
        try:
            endpoints = load_endpoints(content, self.flags.endpoints_file)
        except EndpointsFileError as error:
            for problem in error.problems:
                _log.error("endpoints refused, the last good ones stay", problem=problem)
            return
        self._take(endpoints)
        self._kept_endpoints.keep(content)
        self._tell_kept()
        _log.info("endpoints replaced", endpoints=len(endpoints.endpoints))

    def _keys_changed(self, keys: Keys) -> None:
        self.live.sign_with(keys)
        endpoints = len(self._found.endpoints)
        self._configure(_settings(self.live.current(endpoints)), endpoints)

    def _open_cluster(self, seed: int) -> "Cluster":
        # Imported where it is needed: it takes 0.4 s and 18 MB.
        from epp.shell.kubernetes.cluster import Cluster  # noqa: PLC0415

        return Cluster(
            self.flags,
            on_found=self._take,
            on_ready=self._update_ready,
            on_config=self._config_changed,
            on_peers=lambda addresses: self.peers.discovered(addresses),  # noqa: PLW0108  that are made after it
            seed=seed,
            supervisor=self._supervisor,
        )

    def _take(self, found: Found) -> None:
        """The file or the API server told of other endpoints, objectives or rewrites."""
        interval_s = self.flags.refresh_interval_s
        before_s = interval_s(len(self._found.endpoints))
        if abs(interval_s(len(found.endpoints)) - before_s) > INTERVAL_CHANGE_MIN * before_s:
            # How old metrics may be depends on how often they can be read.
            endpoints = len(found.endpoints)
            self._configure(_settings(self.live.current(endpoints)), endpoints)
        self._replace(found)

    def _replace(self, found: Found) -> None:
        """The pool is now `found`, scraped where the configuration says."""
        self._found = found
        endpoints = scraped_from(found.endpoints, self.live.config.metrics.source)
        self.scheduler.take(PoolReplaced(endpoints), time.monotonic())
        self._scraper.replace(endpoints)
        self._first_tokens.replace([endpoint.endpoint_id for endpoint in endpoints])
        self.telemetry.endpoints_replaced(endpoints)
        self.sessions.know(found)
        if found.endpoints:
            self.peers.endpoints_known()

    def _update_ready(self) -> None:
        known = self._cluster is None or self._cluster.ready
        if known and self._known_since_s is None:
            self._known_since_s = time.monotonic()
            self.peers.endpoints_known()
        able = known and self._first_pass_done() and self.peers.ready
        stands_by = self._cluster is not None and self._cluster.leading is False
        self.health.set_ready(able and not self._supervisor.broken, stands_by=stands_by)
        self._gateway.stand_by(stands_by)

    def _first_pass_done(self) -> bool:
        """Whether every endpoint was asked once and somebody can serve, or `FIRST_PASS_S_MAX` passed.

        Once it is done it stays so: later endpoints join a picker that serves.
        """
        if self._scraped or self._known_since_s is None:
            return self._scraped
        now = time.monotonic()
        pool = self.scheduler.pool
        self._scraped = (
            not len(pool)
            or (self._scraper.passed and len(pool.ready(None, now)) > 0)
            or now - self._known_since_s > FIRST_PASS_S_MAX
        )
        return self._scraped

    def _open_scheduler(self, settings: SchedulerSettings, seed: int) -> Scheduler:
        scheduler = Scheduler(settings, seed=seed)
        if self.capture is not None:
            self.capture.configured(self.live, len(self._found.endpoints))
            scheduler.witness = CaptureWitness(
                scheduler,
                sample=self.capture.sample,
                tell=self.capture.tell,
                failed=self.capture.failed,
            )
        return scheduler

    def _configure(self, settings: SchedulerSettings, endpoints: int) -> None:
        """Decide by `settings`, which are of what is in force in a pool of so many `endpoints`."""
        self.scheduler.take(Reconfigured(settings), time.monotonic())
        if self.capture is not None:
            self.capture.configured(self.live, endpoints)

    def _open_exchange(self) -> tuple[PeerExchange, Identity]:
        """What is told among replicas, and who we are there.

        Where there are none, it keeps snapshots at the most. Raises `StartError`.
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

    def _expect_peers(self) -> None:
        """Replicas that decide and are not heard; those that stand by decide nothing."""
        if self.flags.shares and not self.flags.ha_enable_leader_election:
            self.exchange.expect(
                1 + max(self.flags.replicas_besides, self.peers.known), time.monotonic()
            )

    def _asked(self) -> None:
        """An endpoint was scraped, be it in vain."""
        if not self._scraped:
            self._update_ready()

    # What others call back.

    def _observe(self, endpoint: Endpoint, metrics: EndpointMetrics) -> None:
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            now = time.monotonic()
            self.scheduler.take(PageScraped(slot, metrics), now)
            self._first_tokens.observe(endpoint.endpoint_id, metrics, now)
        self._asked()

    def _oldest_metrics_s(self) -> Seconds:
        return oldest_metrics_s(self.scheduler.settings)

    def _has_work(self, endpoint: Endpoint) -> bool:
        """As far as we know ourselves; one that waits for a good scrape must not wait for long."""
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
        self._asked()
        _log.debug("scrape failed", endpoint=endpoint.name, kind=kind, problem=sentence)

    def _captured(self) -> CaptureSnapshot | None:
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
            first_tokens=self._first_tokens.lately(time.monotonic()),
            connected=self._gateway.connected(),
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
    """What makes spans and exports them; None: the environment forbids it."""
    # Imported where they are needed: they take 12 MB and a fifth of a second.
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
    _log.warning("--tracing has no effect: OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER forbids it")
    return None


async def _connect(cluster: "Cluster") -> None:
    try:
        await cluster.connect()
    except KubeConfigError as error:
        raise StartError(str(error)) from error


def _or_start_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except (ConfigError, EndpointsFileError) as error:
        raise StartError("\n".join(error.problems)) from error


def _capture(flags: ServeFlags, seed: int) -> Capture | None:
    if not flags.capture:
        return None
    return Capture(
        flags.capture,
        seed=seed,
        salt=read_salt(flags.capture_salt_file) if flags.capture_salt_file else None,
        share=flags.capture_share,
        limits=CaptureLimits(
            file_bytes_max=flags.capture_file_max_bytes,
            file_age_max_s=flags.capture_file_max_age,
            total_bytes_max=flags.capture_max_bytes,
        ),
    )


def _history(flags: ServeFlags) -> DecisionHistory | None:
    if not flags.decisions_dir:
        return None
    return DecisionHistory(
        flags.decisions_dir,
        picker=flags.instance,
        total_bytes_max=flags.decisions_max_bytes,
        age_max_s=flags.decisions_max_age,
    )


def _settings(offer: Offer) -> SchedulerSettings:
    """What decides by `offer`; its warnings are logged."""
    for warning in offer.warnings:
        _log.warning(warning)
    return offer.settings


def _report_file(problem: str) -> None:
    _log.error("a watched file cannot be read, its last content stays in force", problem=problem)
