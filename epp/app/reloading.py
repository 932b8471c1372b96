"""Apply a new configuration, new endpoints or new keys while the picker serves.

A configuration comes from its file or its ConfigMap, and keys of session tokens from their file.
The number of endpoints determines the allowed age of metrics. Each change of the scheduler's
settings ends in `Reloading._decide_by`. An invalid change leaves the previous state in force.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct

from epp.app.sources import Sources
from epp.configuration.config import ConfigError
from epp.configuration.live import LiveConfiguration, Offer
from epp.core.decision.inputs import PoolReplaced, Reconfigured
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.topology import places_of
from epp.core.types import Endpoint
from epp.flags.serve import ServeFlags
from epp.plugins.filters import ROLE_LABEL
from epp.shell.engines.endpoint_pages import EndpointPages, prepare
from epp.shell.engines.first_tokens import FirstTokensSeen
from epp.shell.engines.kv_events import KVEventListener
from epp.shell.engines.scrape import Scraper
from epp.shell.engines.sources import page_reader, scraped_from
from epp.shell.engines.tokens.service import Tokens
from epp.shell.engines.trust import trust_of
from epp.shell.files.endpoints_file import EndpointsFileError, load_endpoints
from epp.shell.files.session_keys import Keys
from epp.shell.found import Found
from epp.shell.gateway.sessions import Sessions
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.journal import InputsFolder
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.peers.service import Peers

if TYPE_CHECKING:
    from epp.shell.kubernetes.cluster import Cluster

INTERVAL_CHANGE_MIN: Final = 0.1
"""Relative change of the scrape interval (0.1 is 10 %) above which the allowed age of metrics is
computed again.
"""

_log = structlog.get_logger(__name__)


class AffectedComponents(Struct, frozen=True, kw_only=True):
    """Components of the picker that are updated when the configuration or the endpoints change."""

    scheduler: Scheduler
    sessions: Sessions
    scraper: Scraper
    pages: EndpointPages
    listener: KVEventListener
    tokens: Tokens
    first_tokens: FirstTokensSeen
    peers: Peers
    telemetry: Telemetry
    recent: RecentDecisions
    changes: ConfigurationChanges
    capture: InputsFolder | None


class Reloading:
    """The configuration and endpoints in force, and the operations that replace them."""

    def __init__(
        self,
        flags: ServeFlags,
        live: LiveConfiguration,
        sources: Sources,
        concerned: AffectedComponents,
        cluster: "Cluster | None",
    ) -> None:
        self._flags = flags
        self._live = live
        self._sources = sources
        self._concerned = concerned
        self._cluster = cluster
        self._found = Found()
        self._warned_of_places = False

    def start(self, found: Found, settings: SchedulerSettings, seed: int) -> None:
        """Start the scheduler with the endpoints in `found`, record and log that `settings` are in
        force, and count a rejected configuration if they are those of a last-good copy.
        """
        self._count_configured(settings)
        self._replace(found)
        if self._sources.kept_config.in_force:
            self._concerned.telemetry.config_rejected()
        self._tell_kept()
        _log.info(
            "configuration loaded",
            seed=seed,
            config=self._live.config.source,
            hash=self._live.hash,
            endpoints=len(found.endpoints),
        )

    def file_changed(self, content: bytes) -> None:
        """Apply the new `content` of the file `--config-file`, unless a watched ConfigMap is in
        force instead of it.
        """
        if self._cluster is not None:
            # The cluster knows whether the file or the watched ConfigMap is in force.
            self._cluster.config.file_changed(content)
        else:
            self.config_changed(content, self._flags.config_file)

    def config_changed(self, content: bytes, told_by: str) -> None:
        """Apply the configuration in `content`, read from the file or ConfigMap `told_by`, and
        store it as last-good copy.

        If it is invalid or a plugin fails, the problem is logged, counted and, in a cluster,
        reported to the API server, and the last valid one stays in force.
        """
        told = self._concerned
        try:
            offer = self._live.read(content, told_by, len(self._found.endpoints))
            metrics = offer.config.metrics
            trust, pages = trust_of(metrics.source), prepare(metrics)
            tokens = told.tokens.prepare(offer.config.tokens_asked)
            restarted = self._decide_by(offer, len(self._found.endpoints))
        except ConfigError as error:
            for problem in error.problems:
                _log.error(
                    "configuration rejected, the last valid one stays in force", problem=problem
                )
            self._refuse("; ".join(error.problems))
            return
        except BaseException:  # noqa: BLE001  the boundary of a reload: an installed plugin may fail
            _log.exception(
                "applying a valid configuration failed, the last applied one stays in force"
            )
            self._refuse("a plugin failed while the configuration was applied")
            return
        self._sources.kept_config.keep(content)
        told.tokens.accept(tokens)
        told.sessions.configure(self._live.parsers, told.tokens.resolver)
        told.scraper.configure(page_reader(metrics.extractor), trust, metrics.source.interval_s)
        told.pages.configure(pages)
        self._replace(self._found)
        self._count_configured(offer.settings, offer.changes)
        self._tell_kept()
        _log.info(
            "configuration replaced",
            hash=self._live.hash,
            generation=self._live.generation,
            changes=list(offer.changes),
            indexes_started_anew=list(restarted),
        )
        what = "; ".join(offer.changes) or "no effective change"
        self._tell(applied=True, message=f"generation {self._live.generation}: {what}")

    def endpoints_changed(self, content: bytes) -> None:
        """Apply the new `content` of `--endpoints-file`, and store it as last-good copy.

        If it is invalid, the problems are logged and the previous endpoints stay in force.
        """
        try:
            found = load_endpoints(content, self._flags.endpoints_file)
        except EndpointsFileError as error:
            for problem in error.problems:
                _log.error("endpoints rejected, the last valid ones stay in force", problem=problem)
            return
        self.take(found)
        self._sources.kept_endpoints.keep(content)
        self._tell_kept()
        _log.info("endpoints replaced", endpoints=len(found.endpoints))

    def keys_changed(self, keys: Keys) -> None:
        """Replace the keys that sign session tokens by `keys`."""
        self._live.sign_with(keys)
        self._decide_by_what_is_in_force(len(self._found.endpoints))

    def take(self, found: Found) -> None:
        """Replace the pool's endpoints, objectives and model rewrites by those that the endpoints
        file or the API server reported.

        If the new number of endpoints changes the scrape interval by more than
        `INTERVAL_CHANGE_MIN`, the allowed age of metrics is computed first.
        """
        interval_s = self._flags.refresh_interval_s
        before_s = interval_s(len(self._found.endpoints))
        if abs(interval_s(len(found.endpoints)) - before_s) > INTERVAL_CHANGE_MIN * before_s:
            # The allowed age of metrics depends on the scrape interval.
            self._decide_by_what_is_in_force(len(found.endpoints))
        self._replace(found)

    def _decide_by_what_is_in_force(self, endpoints: int) -> None:
        self._decide_by(self._live.current(endpoints), endpoints)

    def _decide_by(self, offer: Offer, endpoints: int) -> Sequence[str]:
        """Apply the settings in `offer`, a valid configuration, for a pool of `endpoints`
        endpoints, log its warnings, and write it to the capture. Return the names of the affinity
        indexes that were reset.

        If it raises, the previous settings stay in force.
        """
        settings = settings_of(offer)
        scheduler, capture = self._concerned.scheduler, self._concerned.capture
        restarted = scheduler.take(Reconfigured(settings), time.monotonic()).restarted
        self._live.accept(offer)
        if capture is not None:
            capture.tell(self._live.told(endpoints))
        return restarted

    def _replace(self, found: Found) -> None:
        """Replace the endpoints of all components by those in `found`, and scrape each at the
        address that the configuration determines. The built-in default for their roles is chosen
        first, if no configuration is given.
        """
        told = self._concerned
        self._found = found
        self._choose_default(found.endpoints)
        endpoints = scraped_from(found.endpoints, self._live.config.metrics.source)
        told.scheduler.take(PoolReplaced(endpoints), time.monotonic())
        told.scraper.replace(endpoints)
        told.pages.replace(endpoints)
        told.listener.replace(endpoints)
        told.tokens.replace(found.endpoints)
        told.first_tokens.replace([endpoint.endpoint_id for endpoint in endpoints])
        told.telemetry.endpoints_replaced(endpoints)
        told.sessions.know(found)
        self._warn_of_places(endpoints)
        if found.endpoints:
            told.peers.endpoints_known()

    def _warn_of_places(self, endpoints: Sequence[Endpoint]) -> None:
        """Log a warning, once, if plugins compare the regions, zones or racks of endpoints and no
        endpoint has a label with one.
        """
        settings = self._concerned.scheduler.settings
        if self._warned_of_places or not endpoints or not _compares_places(settings):
            return
        *wider, _ = places_of(endpoints, settings.topology).tolist()
        if not any(map(any, wider)):
            self._warned_of_places = True
            _log.warning(
                "no endpoint has a label of a region, zone or rack, so topology plugins compare "
                "only hosts: set --node-labels, or the labels of a topology-extractor",
                labels=settings.topology.names,
            )

    def _choose_default(self, endpoints: Sequence[Endpoint]) -> None:
        """Change to the built-in default for the roles of `endpoints`, if no configuration is given
        and another default is in force.
        """
        offer = self._live.default_for(endpoints)
        if offer is None:
            return
        self._decide_by(offer, len(endpoints))
        roles = Counter(endpoint.labels.get(ROLE_LABEL, "no role") for endpoint in endpoints)
        told = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        why = f"roles of endpoints: {told or 'no endpoints'}"
        self._count_configured(offer.settings, (why, *offer.changes))
        _log.info(
            "default configuration chosen by roles of endpoints",
            config=offer.config.source,
            hash=self._live.hash,
            generation=self._live.generation,
            roles=dict(roles),
        )

    def _count_configured(self, settings: SchedulerSettings, changes: Sequence[str] = ()) -> None:
        live, told = self._live, self._concerned
        told.recent.configured(live.generation, settings)
        stages = settings.stages
        weights = {
            scorer.name if stages.alone else f"{name} {scorer.name}": scorer.weight
            for name, profile in stages.profiles()
            for scorer in profile.scorers
        }
        told.changes.apply(live.generation, live.hash, live.config.source, changes, weights)
        told.telemetry.config_applied(settings, config_hash=live.hash, generation=live.generation)

    def _refuse(self, why: str) -> None:
        self._concerned.telemetry.config_rejected()
        self._tell(applied=False, message=why)
        self._concerned.changes.refuse(why)

    def _tell(self, *, applied: bool, message: str) -> None:
        if self._cluster is not None:
            self._cluster.tell(applied=applied, message=message)

    def _tell_kept(self) -> None:
        for kept in (self._sources.kept_config, self._sources.kept_endpoints):
            self._concerned.telemetry.last_good_in_force(kept.name, kept.in_force)


def _compares_places(settings: SchedulerSettings) -> bool:
    """Return whether a filter or scorer of any stage declares that it reads how near endpoints are
    to each other.
    """
    members = [one for _, profile in settings.stages.profiles() for one in profile.members]
    return any("nearness" in (one.plugin.abilities.reads or ()) for one in members)


def settings_of(offer: Offer) -> SchedulerSettings:
    """Return the scheduler's settings in `offer`, a valid configuration that may come into force,
    and log its warnings.
    """
    for warning in offer.warnings:
        _log.warning(warning)
    return offer.settings
