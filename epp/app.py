"""Composition root of `epp serve`: builds everything in order, by hand, and owns every task."""

import asyncio
import contextlib
import gc
import resource
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio
import msgspec
import structlog
from prometheus_client import CollectorRegistry

from epp.configuration.build import build_settings, plugin_tables, settings_warnings
from epp.configuration.config import (
    CONFIG_MAX_BYTES,
    DEFAULT_CONFIG,
    DEFAULT_SOURCE,
    ConfigError,
    PickerConfig,
    config_hash,
    diff_configs,
    load_config,
)
from epp.configuration.flags import ServeFlags
from epp.core.decision.scheduler import Scheduler, SchedulerSettings
from epp.core.prompt.parse import ParserName, ParserSet
from epp.core.protocol.session import Gateway, Session, SessionSettings
from epp.core.types import Endpoint, EndpointMetrics
from epp.shell.engines.scrape import Scraper
from epp.shell.engines.sources import page_reader, scraped_from
from epp.shell.files.endpoints_file import EndpointsFileError, load_endpoints
from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.found import Found
from epp.shell.gateway.health import Health
from epp.shell.gateway.listening import listen
from epp.shell.gateway.server import ExtProcServer, grpc_server
from epp.shell.gateway.tls import ServerCertificate
from epp.shell.kubernetes.api_errors import KubeConfigError
from epp.shell.operators.debug_pages import DebugPages, RecentDecisions
from epp.shell.operators.logs import DecisionLog, configure_logging
from epp.shell.operators.metrics_server import MetricsServer
from epp.shell.operators.observation import Observation
from epp.shell.operators.snapshot import pool_snapshot
from epp.shell.operators.telemetry import PoolSnapshot, Telemetry
from epp.shell.starting import StartError, cannot_listen

if TYPE_CHECKING:
    from epp.shell.kubernetes.cluster import Cluster

TICK_S: Final = 1.0
HEALTH_MESSAGE_BYTES_MAX: Final = 65_536
CERTIFICATE_POLL_S: Final = 10.0
INTERVAL_CHANGE_MIN: Final = 0.1
"""By what share the interval between scrapes changes before its limits are set anew."""
GARBAGE_THRESHOLDS: Final = (50_000, 20, 20)
"""The collector looks when so many objects were added. With Python's 700 it goes through each large
body several times while it is decoded: 8 MB of small arrays take twice as long."""
STOP_S: Final = 0.5
"""What stopping takes once nothing is left to wait for."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


def run(flags: ServeFlags) -> int:
    """`epp serve`: until SIGTERM or SIGINT, then drain. 0 when all went well, 1 if it cannot start."""
    configure_logging(flags.log_format.value, flags.log_level)
    _raise_open_files_limit()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    for warning in flags.warnings:
        _log.warning(warning)
    try:
        picker = EndpointPicker(flags)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
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


async def _until_signal(picker: "EndpointPicker") -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def received() -> None:
        # The first signal drains, a second one does not wait for it.
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    await picker.serve(stop, hurry)


class EndpointPicker:
    """One picker process. `serve` runs it; `scheduler` is what it decides with."""

    def __init__(self, flags: ServeFlags) -> None:
        """Read the configuration and the endpoints. Raises `StartError`."""
        self.flags = flags
        seed = secrets.randbits(32) if flags.seed is None else flags.seed
        self._tables = _or_start_error(plugin_tables)
        self._config_watcher = FileWatcher(
            Path(flags.config_file), self._file_changed, _report_file, bytes_max=CONFIG_MAX_BYTES
        )
        self._endpoints_watcher = FileWatcher(
            Path(flags.endpoints_file), self._endpoints_changed, _report_file
        )
        self._cluster = None if flags.endpoints_file else self._open_cluster(seed)
        self._config = self._read_config()
        self._generation = 1
        self._found = self._read_endpoints() if flags.endpoints_file else Found()
        settings = self._settings(self._config, self._found)
        self.scheduler = Scheduler(settings, seed=seed)
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(self.registry, self._snapshot)
        decisions = DecisionLog(structlog.get_logger("decisions"), level=flags.log_level)
        recent = RecentDecisions(self.scheduler.pool)
        self._debug = DebugPages(self.scheduler, recent, lambda: (self._config, self._generation))
        self._observation = Observation(self.telemetry, decisions, recent)
        self._request_ids = Random(f"{seed}:request-id")  # noqa: S311  names, not secrets
        self._rewrite_dice = Random(f"{seed}:rewrite")  # noqa: S311  weights, not secrets
        self._session_settings = SessionSettings(
            request_body_bytes_max=flags.request_body_max_bytes,
            parsers=parser_set(self._config),
            parse_response_usage=flags.parse_response_usage,
            subset_filter=not flags.disable_endpoint_subset_filter,
        )
        self.ext_proc = ExtProcServer(self._new_session, self._observation)
        self.health = Health()
        self._scraper = Scraper(
            self._observe,
            self._scrape_failed,
            scraped=lambda elapsed_s: self.telemetry.scraped(elapsed_s=elapsed_s),
            reader=page_reader(self._config.metrics.extractor),
            seed=seed,
            interval_s=flags.refresh_interval_s,
        )
        self._replace(self._found)
        self.telemetry.config_applied(
            settings, config_hash=config_hash(self._config), generation=self._generation
        )
        _log.info(
            "configured",
            seed=seed,
            config=self._config.source,
            hash=config_hash(self._config),
            endpoints=len(self._found.endpoints),
        )

    async def serve(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set, then drain; `hurry` cuts the drain short.

        Raises `StartError` when a port cannot be had or the certificate cannot be used.
        """
        flags = self.flags
        async with contextlib.AsyncExitStack() as opened:
            server = grpc_server(flags.receive_message_max_bytes)
            opened.push_async_callback(server.stop, None)
            self.ext_proc.add_to(server)
            self.health.add_to(server)
            certificate = self._bind(server)
            health_server = grpc_server(HEALTH_MESSAGE_BYTES_MAX)
            opened.push_async_callback(health_server.stop, None)
            self.health.add_to(health_server)
            listen(health_server, "--grpc-health-port", flags.grpc_health_port)
            metrics = MetricsServer(
                self.registry,
                lambda: self.health.ready,
                port=flags.metrics_port,
                routes=self._debug.routes(),
            )
            try:
                await opened.enter_async_context(metrics)
            except OSError as error:
                raise cannot_listen("--metrics-port", flags.metrics_port, error) from error
            if self._cluster is not None:
                opened.push_async_callback(self._cluster.close)
                await _connect(self._cluster)
            await server.start()
            await health_server.start()
            async with asyncio.TaskGroup() as tasks:
                owned = [
                    tasks.create_task(loop, name=name)
                    for name, loop in self._loops(certificate).items()
                ]
                self._update_ready()
                loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
                _log.info(
                    "serving",
                    grpc_port=flags.grpc_port,
                    secure=flags.secure_serving,
                    event_loop=loop,
                )
                await stop.wait()
                await self._drain(server, hurry or asyncio.Event())
                if self._cluster is not None:
                    # Cut off, the next leader would wait for the Lease to run out.
                    await self._cluster.retired()
                for task in owned:
                    task.cancel()
        _log.info("stopped", decisions=self.scheduler.decisions)

    def _loops(self, certificate: ServerCertificate | None) -> dict[str, Coroutine[Any, Any, None]]:
        """Everything that runs beside the server, by the name of its task."""
        flags = self.flags
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "tick": self._tick(),
            "scrape": self._scraper.run(),
            "endpoints": (self._cluster or self._endpoints_watcher).run(),
        }
        if flags.config_file:
            loops["config"] = self._config_watcher.run()
        if certificate is not None and flags.enable_cert_reload:
            loops["certificate"] = certificate.watch(CERTIFICATE_POLL_S, _report_certificate)
        return loops

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.scheduler.tick(time.monotonic())

    async def _drain(self, server: grpc.aio.Server, hurry: asyncio.Event) -> None:
        """Not ready; new streams for `drain_grace`; then end what can end, wait for the rest."""
        flags = self.flags
        ends_at_s = time.monotonic() + flags.drain_timeout
        self.health.close()
        if self._cluster is not None:
            self._cluster.retire()
        _log.info("draining", streams=self.ext_proc.open_streams)
        await _wait(hurry, min(flags.drain_grace, flags.drain_timeout))
        self.ext_proc.end_bypassed()
        left_s = 0.0 if hurry.is_set() else max(0.0, ends_at_s - time.monotonic() - STOP_S)
        # From here on new streams are refused; those that are open go on.
        stopping = asyncio.create_task(server.stop(left_s + STOP_S), name="stop")
        hurried = asyncio.create_task(hurry.wait(), name="hurry")
        await asyncio.wait({stopping, hurried}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        cut = self.ext_proc.open_streams
        if cut:
            self._observation.drain_cut(cut)
            _log.warning("streams were cut by the end of the drain", streams=cut)
        await server.stop(None)
        await stopping

    def _bind(self, server: grpc.aio.Server) -> ServerCertificate | None:
        flags = self.flags
        if not flags.secure_serving:
            listen(server, "--grpc-port", flags.grpc_port)
            return None
        directory = Path(flags.cert_path) if flags.cert_path else None
        try:
            certificate = ServerCertificate.open(directory)
        except ValueError as error:
            raise StartError(f"--cert-path: {error}") from error
        listen(server, "--grpc-port", flags.grpc_port, certificate.credentials)
        return certificate

    # Configuration and endpoints: at start a problem is fatal, later the last good state stays.

    def _read_config(self) -> PickerConfig:
        flags = self.flags
        if flags.config_file:
            content = first_read(self._config_watcher, f"--config-file {flags.config_file}")
            if self._cluster is not None:
                self._cluster.config.started(content)
            text: bytes | str = content
            source = flags.config_file
        elif flags.config_text:
            text, source = flags.config_text, "--config-text"
        else:
            text, source = DEFAULT_CONFIG, DEFAULT_SOURCE
        return _or_start_error(lambda: load_config(text, source, self._tables))

    def _read_endpoints(self) -> Found:
        name = self.flags.endpoints_file
        content = first_read(self._endpoints_watcher, f"--endpoints-file {name}")
        try:
            return load_endpoints(content, name)
        except EndpointsFileError as error:
            raise StartError("\n".join(error.problems)) from error

    def _settings(self, config: PickerConfig, found: Found) -> SchedulerSettings:
        """What decides; warnings of `config` are logged."""
        flags = self.flags
        refresh_interval_s = flags.refresh_interval_s(len(found.endpoints))
        with_flags: dict[str, Any] = {
            "metrics_staleness_s": flags.metrics_staleness_threshold,
            "refresh_interval_s": refresh_interval_s,
            "fallback_endpoints_max": flags.fallback_endpoints_max,
        }
        for warning in (*config.warnings, *settings_warnings(config, **with_flags)):
            _log.warning(warning)
        return msgspec.structs.replace(
            build_settings(config, **with_flags),
            lease_ttl_without_response_phase_s=flags.lease_ttl_without_response_phase,
        )

    def _file_changed(self, content: bytes) -> None:
        if self._cluster is not None:
            # It knows whether the file or the watched ConfigMap counts.
            self._cluster.config.file_changed(content)
        else:
            self._config_changed(content)

    def _config_changed(self, content: bytes) -> None:
        try:
            config = load_config(content, self.flags.config_file, self._tables)
            settings = self._settings(config, self._found)
            restarted = self.scheduler.configure(settings, time.monotonic())
        except ConfigError as error:
            self.telemetry.config_rejected()
            for problem in error.problems:
                _log.error("configuration refused, the last good one stays", problem=problem)
            self._tell(applied=False, message="; ".join(error.problems))
            return
        except Exception:  # noqa: BLE001  the boundary of a reload: an installed plugin may fail
            self.telemetry.config_rejected()
            _log.exception("configuration not applied, the last good one stays")
            self._tell(applied=False, message="a plugin failed while it was applied")
            return
        changes = diff_configs(self._config, config)
        self._session_settings = msgspec.structs.replace(
            self._session_settings, parsers=parser_set(config)
        )
        self._scraper.configure(page_reader(config.metrics.extractor))
        self._config = config
        self._replace(self._found)
        self._generation += 1
        self.telemetry.config_applied(
            settings, config_hash=config_hash(config), generation=self._generation
        )
        _log.info(
            "configured anew",
            hash=config_hash(config),
            generation=self._generation,
            changes=changes,
            indexes_started_anew=restarted,
        )
        what = "; ".join(changes) or "no change in effect"
        self._tell(applied=True, message=f"generation {self._generation}: {what}")

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
        _log.info("endpoints replaced", endpoints=len(endpoints.endpoints))

    def _open_cluster(self, seed: int) -> "Cluster":
        # Imported where it is needed: it takes 0.4 s and 18 MB.
        from epp.shell.kubernetes.cluster import Cluster  # noqa: PLC0415

        return Cluster(
            self.flags,
            on_found=self._take,
            on_ready=self._update_ready,
            on_config=self._config_changed,
            seed=seed,
        )

    def _take(self, found: Found) -> None:
        """The file or the API server told of other endpoints, objectives or rewrites."""
        interval_s = self.flags.refresh_interval_s
        before_s = interval_s(len(self._found.endpoints))
        if abs(interval_s(len(found.endpoints)) - before_s) > INTERVAL_CHANGE_MIN * before_s:
            # How old metrics may be depends on how often they can be read.
            self.scheduler.configure(self._settings(self._config, found), time.monotonic())
        self._replace(found)

    def _replace(self, found: Found) -> None:
        """The pool is now `found`, scraped where the configuration says."""
        self._found = found
        endpoints = scraped_from(found.endpoints, self._config.metrics.source)
        self.scheduler.replace(endpoints, time.monotonic())
        self._scraper.replace(endpoints)
        self.telemetry.endpoints_replaced(endpoints)
        self._session_settings = msgspec.structs.replace(
            self._session_settings,
            priorities=found.objectives,
            rewrite=partial(found.rewrites.target, random=self._rewrite_dice)
            if found.rewrites
            else None,
        )

    def _update_ready(self) -> None:
        self.health.set_ready(self._cluster is None or self._cluster.ready)

    # What others call back.

    def _new_session(self, gateway: Gateway) -> Session:
        return Session(
            self.scheduler,
            self._session_settings,
            gateway,
            self._observation,
            lambda: f"{self._request_ids.getrandbits(128):032x}",
        )

    def _observe(self, endpoint: Endpoint, metrics: EndpointMetrics) -> None:
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            self.scheduler.observe(slot, metrics, time.monotonic())

    def _scrape_failed(self, endpoint: Endpoint, kind: str, sentence: str) -> None:
        self.telemetry.scrape_failed(kind)
        _log.debug("scrape failed", endpoint=endpoint.name, kind=kind, problem=sentence)

    def _snapshot(self) -> PoolSnapshot:
        cluster = self._cluster.snapshot() if self._cluster is not None else None
        return pool_snapshot(self.scheduler, self.flags.pool_name, cluster, time.monotonic())


async def _connect(cluster: "Cluster") -> None:
    try:
        await cluster.connect()
    except KubeConfigError as error:
        raise StartError(str(error)) from error


def _or_start_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except ConfigError as error:
        raise StartError("\n".join(error.problems)) from error


def parser_set(config: PickerConfig) -> ParserSet:
    """The parsers that the configuration names."""
    return frozenset(ParserName(name) for name in config.parsers)


def _report_file(problem: str) -> None:
    _log.error("a watched file cannot be read, its last content stays in force", problem=problem)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until `event` or for `timeout_s`, whichever is first."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _report_certificate(sentence: str, good: bool) -> None:
    (_log.info if good else _log.error)(sentence)
