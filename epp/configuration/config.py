"""Loading of an `EndpointPickerConfig`: bytes to one typed configuration, or to all of its
problems.

Nothing is read or opened here: `load_config` is a function of its arguments. The server, `epp
check-config`, hot reload and the simulator use it alike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from epp.configuration.compatibility import (
    ACCEPTED,
    API_VERSION,
    API_VERSION_DEPRECATED,
    API_VERSIONS,
    DCGM_EXTRACTOR,
    DEPRECATED,
    FEATURE_GATES,
    GPU_UTILIZATION,
    HANDLERS,
    IGNORED_SECTIONS,
    MODELS_EXTRACTOR,
    MOVED_TO_INDEX,
    NOTIFICATION_SOURCES,
    PARSERS,
    REFUSED_SECTIONS,
    CoreMetricsExtractor,
    DataParallelHandler,
    DcgmDataSource,
    InflightLoadProducer,
    MetricsDataSource,
    ModelsDataSource,
    refusal_of,
)
from epp.configuration.document import (
    CONFIG_MAX_BYTES,
    ConfigError,
    as_one_line,
    decode,
    nearest,
    read_mapping,
    sentence_of,
)
from epp.configuration.token_producer import Backend, TokenProducer
from epp.configuration.trial import failing_plugins
from epp.core.abilities import Origin
from epp.core.decision.plugin import (
    Filter,
    Picker,
    Scorer,
    declaration_fault,
    may_read_prefix,
    may_read_tokens,
)
from epp.core.decision.profile import (
    NamedFilter,
    NamedResponder,
    SchedulingProfile,
    WeightedScorer,
)
from epp.core.decision.settings import SchedulerSettings
from epp.core.failures import Interrupted, place_of
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.parameters import Parameters, Plugin
from epp.core.types import attribute_key
from epp.plugins.conformance import DestinationEndpointServedVerifier
from epp.plugins.data_parallel_rank import DataParallelRank
from epp.plugins.pull_source import PullSource

__all__ = [
    "CONFIG_MAX_BYTES",
    "DEFAULT_CONFIG",
    "DEFAULT_SOURCE",
    "ConfigError",
    "ConfiguredPlugin",
    "MetricsSettings",
    "PickerConfig",
    "PluginTables",
    "Role",
    "block_tokens_of",
    "load_config",
]

_WEIGHT: Final = 1.0
"""Weight of a scorer without one, as in the reference picker."""

PREFIX_INDEX: Final = "approx-prefix-cache-producer"
PRECISE_INDEX: Final = "precise-prefix-cache-producer"
_PRECISE_SCORER: Final = "precise-prefix-cache-scorer"
_PICKER: Final = "max-score-picker"
_DETECTOR: Final = "utilization-detector"
_BLOCK_TOKENS_MIN: Final = 64

DEFAULT_CONFIG: Final = f"""\
apiVersion: {API_VERSION}
kind: EndpointPickerConfig
plugins:
- type: added-time-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: added-time-scorer
  - pluginRef: max-score-picker
"""
"""Configuration that applies if none is given: the strategy `homing`."""
DEFAULT_SOURCE: Final = "built-in default"

T = TypeVar("T")
P = TypeVar("P", InflightLoadProducer, OutlierEjection, TokenProducer)


class PluginTables(Struct, frozen=True, kw_only=True):
    """The classes of all types that a configuration can name (made in `epp.configuration.build`)."""

    filters: Mapping[str, type[Filter]]
    scorers: Mapping[str, type[Scorer]]
    pickers: Mapping[str, type[Picker]]
    indexes: Mapping[str, type[AffinityIndexSettings]]
    deprecated: Mapping[str, str] = field(default_factory=dict)
    """Replacement of each deprecated type name."""


class Role(StrEnum):
    """The role of a plugin in the configuration."""

    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    INDEX = "index"
    HANDLER = "profile handler"
    PARSER = "parser"
    SOURCE = "data source"
    EXTRACTOR = "extractor"
    PRODUCER = "producer"
    RESPONDER = "response plugin"
    REQUEST_MARKER = "request plugin"
    NOTIFIER = "notification source"


class ConfiguredPlugin(Struct, frozen=True, kw_only=True):
    """A plugin with its name in the configuration."""

    name: str
    type_name: str
    role: Role
    where: str
    """Place of the plugin in the document, for messages."""
    plugin: Any
    """Filter, scorer, picker, index settings, or a struct of `epp.configuration.compatibility`."""
    given: frozenset[str] = frozenset()
    """Parameters that the document sets."""


class MetricsSettings(Struct, frozen=True, kw_only=True):
    """The settings of the scraper."""

    source: MetricsDataSource = field(default_factory=MetricsDataSource)
    extractor: CoreMetricsExtractor = field(default_factory=CoreMetricsExtractor)
    models: ModelsDataSource | None = None
    """Source of each endpoint's list of models, or None if it is not requested."""
    gpus: DcgmDataSource | None = None
    """Source of the metrics of each endpoint's GPUs, or None if they are not requested."""

    @property
    def pages(self) -> dict[str, ModelsDataSource | DcgmDataSource]:
        """Return the requested pages of each endpoint besides its metrics, by name."""
        asked = {"models": self.models, "gpus": self.gpus}
        return {name: source for name, source in asked.items() if source is not None}

    @property
    def attributes(self) -> frozenset[str]:
        """Return the keys of the attributes that endpoints may have."""
        keys = {
            attribute_key(metric.attribute_key)
            for engine in self.extractor.engine_configs
            for metric in engine.custom_metrics
        }
        if self.gpus is not None:
            keys.add(attribute_key(GPU_UTILIZATION, DCGM_EXTRACTOR))
        return frozenset(keys)


class PickerConfig(Struct, frozen=True, kw_only=True):
    """A complete, valid configuration, with all defaults filled in."""

    source: str
    profile: SchedulingProfile
    indexes: Mapping[str, AffinityIndexSettings]
    """Index settings by the name under which filters and scorers request the index."""
    prefix: str = ""
    """Name of the default prefix index among `indexes`, or "" if there is none."""
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    staleness_given: bool = False
    """True if the document sets the detector's staleness threshold."""
    parsers: tuple[str, ...] = PARSERS
    """Types of the parsers, in the order in which they are tried."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    inflight: InflightLoadProducer = field(default_factory=InflightLoadProducer)
    """Configured prefill speeds of endpoints."""
    ejection: OutlierEjection = field(default_factory=OutlierEjection)
    """Settings of outlier ejection, which apply to every profile."""
    tokens: TokenProducer = field(default_factory=TokenProducer)
    """Settings of the producer of token ids."""
    shadow: SchedulingProfile | None = None
    """Shadow profile, which judges the decisions of `profile` and never acts, or None."""
    shadow_share: float = 1.0
    """Share of the decisions that the shadow profile judges."""
    warnings: tuple[str, ...] = ()

    @property
    def tokens_asked(self) -> TokenProducer:
        """Return the producer of token ids, or one without effect if no part of the decision reads
        token ids.
        """
        profiles = (self.profile,) if self.shadow is None else (self.profile, self.shadow)
        return self.tokens if _reads_tokens(self.indexes, profiles) else TokenProducer()


def load_config(text: bytes | str, source: str, plugins: PluginTables) -> PickerConfig:
    """Load a configuration and try its plugins; `source` names it in messages.

    Raises `ConfigError` with every problem of the document, and with every plugin that fails on
    test endpoints.
    """
    return _Loader(source, plugins).load(read_mapping(text, source))


# --- the document -------------------------------------------------------------------------------


class _PluginSpec(Parameters, frozen=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None


class _ProfilePlugin(Parameters, frozen=True):
    plugin_ref: str
    weight: float | None = None


class _ProfileSpec(Parameters, frozen=True):
    name: str
    plugins: tuple[_ProfilePlugin, ...] = ()


class _ShadowSpec(Parameters, frozen=True):
    plugins: Annotated[tuple[_ProfilePlugin, ...], Meta(min_length=1)]
    name: str = "shadow"
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class _Reference(Parameters, frozen=True):
    plugin_ref: str


class _RequestHandler(Parameters, frozen=True):
    parsers: tuple[_Reference, ...] | None = None


class _Source(Parameters, frozen=True):
    plugin_ref: str
    extractors: tuple[_Reference, ...] = ()


class _DataLayer(Parameters, frozen=True):
    inject_defaults: bool = True
    sources: tuple[_Source, ...] = ()


class _FlowControl(Parameters, frozen=True):
    saturation_detector: _Reference | None = None
    enable_eviction: bool = False


class _NeededIndex(Struct, frozen=True):
    """The index that a filter or scorer needs."""

    name: str
    type_name: str
    parameters: dict[str, Any]


# --- the configuration --------------------------------------------------------------------------

_SECTIONS: Final = (
    "apiVersion",
    "kind",
    "featureGates",
    "plugins",
    "schedulingProfiles",
    "shadow",
    "requestHandler",
    "dataLayer",
    "flowControl",
    "saturationDetector",
    "parser",
)

_ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(HANDLERS, Role.HANDLER),
    **dict.fromkeys(PARSERS, Role.PARSER),
    "metrics-data-source": Role.SOURCE,
    "core-metrics-extractor": Role.EXTRACTOR,
    "model-server-protocol-metrics": Role.EXTRACTOR,
    "models-data-source": Role.SOURCE,
    MODELS_EXTRACTOR: Role.EXTRACTOR,
    "dcgm-data-source": Role.SOURCE,
    DCGM_EXTRACTOR: Role.EXTRACTOR,
    **dict.fromkeys(NOTIFICATION_SOURCES, Role.NOTIFIER),
    DestinationEndpointServedVerifier.type_name: Role.RESPONDER,
    PullSource.type_name: Role.REQUEST_MARKER,
    DataParallelRank.type_name: Role.REQUEST_MARKER,
}

_EXTRACTORS: Final[Mapping[str, str]] = {
    "metrics-data-source": "core-metrics-extractor",
    "models-data-source": MODELS_EXTRACTOR,
    "dcgm-data-source": DCGM_EXTRACTOR,
}
"""Type of the extractor that reads the pages of each type of data source."""
_LOAD_PRODUCER: Final = "inflight-load-producer"


class _Loader:
    """The state of loading one document, with the problems and warnings found so far."""

    def __init__(self, source: str, tables: PluginTables) -> None:
        self.source = source
        self.tables = tables
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.plugins: dict[str, ConfiguredPlugin] = {}
        self.broken: set[str] = set()
        """Names of plugins with a problem of their own; references to them are not reported as
        missing.
        """
        self.for_index: dict[str, Any] = {}
        """Parameters of the index that old configurations set on `prefix-cache-scorer`."""
        self.settled: dict[str, set[str]] = {}
        """Parameters of each index that the document has set so far, by name of the index."""

    def problem(self, sentence: str) -> None:
        self.problems.append(f"{self.source}: {sentence}")

    def warn(self, sentence: str) -> None:
        self.warnings.append(as_one_line(f"{self.source}: {sentence}"))

    def load(self, document: dict[str, Any]) -> PickerConfig:
        self._check_head(document)
        self._read_plugins(document.get("plugins"))
        profile = self._read_profile(document.get("schedulingProfiles"))
        shadow, shadow_share = self._read_shadow(document.get("shadow"))
        detector = self._read_saturation(document)
        parsers = self._read_parsers(document)
        metrics = self._read_metrics(document.get("dataLayer"))
        inflight = self._only(InflightLoadProducer)
        ejection = self._only(OutlierEjection)
        tokens = self._only(TokenProducer)
        self._check_load_producers()
        self._check_attributes(metrics)
        if self.problems or profile is None:
            raise ConfigError(self.problems)
        profiles = (profile,) if shadow is None else (profile, shadow)
        indexes, prefix = self._indexes(profiles)
        self._check_uncached_by(indexes, prefix)
        if self.problems:
            raise ConfigError(self.problems)
        self._warn_of_unused(profiles, detector)
        if tokens.backend is not Backend.ESTIMATE and not _reads_tokens(indexes, profiles):
            self._warn_of_unread_tokens()
        for one in profiles:
            self._try_out(one, indexes, prefix)
        return PickerConfig(
            source=self.source,
            profile=profile,
            indexes=indexes,
            prefix=prefix,
            saturation=detector.plugin if detector else UtilizationDetector(),
            staleness_given=bool(detector and "metricsStalenessThreshold" in detector.given),
            parsers=parsers,
            metrics=metrics,
            inflight=inflight,
            ejection=ejection,
            tokens=tokens,
            shadow=shadow,
            shadow_share=shadow_share,
            warnings=tuple(self.warnings),
        )

    def convert(self, value: Any, kind: type[T], where: str) -> T | None:
        """Convert `value` to a `kind`. Return None after a problem."""
        before = len(self.problems)
        if isinstance(value, dict) and issubclass(kind, Struct):
            value = self._without_unknown(value, kind, where)
        try:
            converted = msgspec.convert(value, kind, dec_hook=decode)
        except (msgspec.ValidationError, TypeError) as error:
            self.problem(sentence_of(where, error, kind))
            return None
        except BaseException as error:  # noqa: BLE001  a plugin checks its own parameters
            self.problem(_raised(where, "checking them", error, "expected ValueError"))
            return None
        return converted if len(self.problems) == before else None

    def _without_unknown(
        self, value: dict[str, Any], kind: type[Struct], where: str
    ) -> dict[str, Any]:
        """Report all unknown fields at once, because msgspec would report only the first."""
        known = kind.__struct_encode_fields__
        for name in value:
            member = f"{where}.{name}"
            if why := REFUSED_SECTIONS.get(member):
                self.problem(f"{member} is not supported, because {why}: remove it")
            elif why := IGNORED_SECTIONS.get(member):
                self.warn(f"{member} has no effect, because {why}")
            elif name not in known:
                self.problem(f"{where} has unknown field `{name}`{nearest(str(name), known)}")
        return {name: member for name, member in value.items() if name in known}

    def _check_head(self, document: dict[str, Any]) -> None:
        version, kind = document.get("apiVersion"), document.get("kind")
        if kind != "EndpointPickerConfig":
            self.problem(f"kind is {_shown(kind)}, expected 'EndpointPickerConfig'")
        if version == API_VERSION_DEPRECATED:
            self.warn(f"apiVersion {version} is deprecated, use {API_VERSION}")
        elif version not in API_VERSIONS:
            expected = " or ".join(map(repr, API_VERSIONS))
            self.problem(f"apiVersion is {_shown(version)}, expected {expected}")
        for name in document:
            if name in REFUSED_SECTIONS:
                self.problem(
                    f"{name} is not supported, because {REFUSED_SECTIONS[name]}: remove it"
                )
            elif name not in _SECTIONS:
                self.problem(f"has unknown field `{name}`{nearest(str(name), _SECTIONS)}")
        gates = document.get("featureGates")
        for index, gate in enumerate(self._items(gates, "featureGates")):
            self._check_gate(f"featureGates[{index}]", gate)

    def _check_gate(self, where: str, gate: Any) -> None:
        name, _, value = str(gate).partition("=")
        if value not in {"", "true", "false"}:
            self.problem(
                f"{where}: {gate!r} is not a feature gate; expected gate, gate=true or gate=false"
            )
        elif name == "flowControl":
            if value != "false":
                self.problem(
                    f"{where}: flowControl is not supported, because requests are not queued in "
                    "the picker: remove it. Requests of negative priority are shed when the pool "
                    "is saturated"
                )
        elif name in FEATURE_GATES:
            self.warn(f"{where}: {name} has no effect, because {FEATURE_GATES[name]}")
        else:
            known = ("flowControl", *FEATURE_GATES)
            self.problem(f"{where}: feature gate {name!r} is unknown{nearest(name, known)}")

    def _items(self, value: Any, where: str) -> Sequence[Any]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.problem(f"{where}: expected a list, got {type(value).__name__}")
            return ()
        return value

    # --- plugins ---

    def _read_plugins(self, value: Any) -> None:
        names: Counter[str] = Counter()
        for index, item in enumerate(self._items(value, "plugins")):
            where = f"plugins[{index}]"
            spec = self.convert(item, _PluginSpec, where)
            if spec is None:
                if isinstance(item, dict):
                    self.broken.add(str(item.get("name") or item.get("type")))
                continue
            name = spec.name or spec.type
            where = f"{where} ({name})"
            names[name] += 1
            if names[name] > 1:
                self.problem(f"{where}: the name {name} is taken by an earlier plugin")
                continue
            parameters = spec.parameters or {}
            type_name = spec.type
            if type_name == _PRECISE_SCORER:
                self._add_precise_index(where, parameters)
                type_name = "prefix-cache-scorer"
                parameters = {"prefixMatchInfoProducerName": PRECISE_INDEX}
            plugin = self._plugin(where, name, type_name, parameters)
            if plugin is None:
                self.broken.add(name)
            else:
                self.plugins[name] = plugin

    def _add_precise_index(self, where: str, parameters: dict[str, Any]) -> None:
        """Replace the deprecated scorer by a scorer and the index that it reads."""
        self.warn(
            f"{where}: type {_PRECISE_SCORER} is deprecated, use {PRECISE_INDEX} with these "
            f"parameters, and prefix-cache-scorer with prefixMatchInfoProducerName {PRECISE_INDEX}"
        )
        if PRECISE_INDEX in self.plugins:
            self.problem(f"{where}: a {PRECISE_INDEX} is declared too; declare only one of the two")
            return
        index = self._plugin(where, PRECISE_INDEX, PRECISE_INDEX, parameters)
        if index is not None:
            self.plugins[PRECISE_INDEX] = index

    def _find(self, type_name: str) -> tuple[Role, type[Any]] | None:
        tables: tuple[tuple[Role, Mapping[str, type[Any]]], ...] = (
            (Role.FILTER, self.tables.filters),
            (Role.SCORER, self.tables.scorers),
            (Role.PICKER, self.tables.pickers),
            (Role.INDEX, self.tables.indexes),
        )
        for role, table in tables:
            if type_name in table:
                return role, table[type_name]
        if type_name in ACCEPTED:
            return _ROLES.get(type_name, Role.PRODUCER), ACCEPTED[type_name]
        return None

    def _plugin(
        self, where: str, name: str, type_name: str, parameters: dict[str, Any]
    ) -> ConfiguredPlugin | None:
        found = self._find(type_name)
        if found is None:
            why = refusal_of(type_name)
            if why:
                self.problem(f"{where}: type {type_name} is not supported: {why}")
            else:
                hint = nearest(type_name, self._known_types())
                self.problem(f"{where}: type {type_name} is unknown{hint}")
            return None
        newer = self.tables.deprecated.get(type_name) or DEPRECATED.get(type_name)
        if newer:
            self.warn(f"{where}: type {type_name} is deprecated, use {newer}")
        if type_name == "prefix-cache-scorer":
            parameters = self._move_to_index(where, parameters)
        role, kind = found
        if fault := declaration_fault(kind):
            self.problem(f"{where}: {kind.__name__} {fault}")
            return None
        plugin = self.convert(parameters, kind, f"{where}: parameters")
        if plugin is None:
            return None
        if role is Role.INDEX and not self._has_blocks(where, plugin):
            return None
        self._warn_of_parameters(where, plugin, parameters)
        if kind.abilities.warns:
            self._warn_as_told(where, plugin)
        if kind.abilities.differs:
            self.warn(f"{where}: {kind.abilities.differs}")
        return ConfiguredPlugin(
            name=name,
            type_name=type_name,
            role=role,
            where=where,
            plugin=plugin,
            given=frozenset(parameters),
        )

    def _warn_as_told(self, where: str, plugin: Any) -> None:
        try:
            told: tuple[str, ...] = msgspec.convert(plugin.warnings(), tuple[str, ...])
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.problem(_raised(where, "warnings", error))
            return
        for warning in told:
            self.warn(f"{where}: {warning}")

    def _known_types(self) -> list[str]:
        tables = self.tables
        return [*tables.filters, *tables.scorers, *tables.pickers, *tables.indexes, *ACCEPTED]

    def _move_to_index(self, where: str, parameters: dict[str, Any]) -> dict[str, Any]:
        moved: dict[str, Any] = {
            name: parameters[name] for name in MOVED_TO_INDEX if name in parameters
        }
        if not moved:
            return parameters
        self.warn(
            f"{where}: {', '.join(moved)} of prefix-cache-scorer moved to {PREFIX_INDEX}: set "
            "them there"
        )
        characters = moved.pop("hashBlockSize", None)
        if isinstance(characters, int):
            moved.setdefault("blockSizeTokens", max(1, characters // 4))
        self.for_index.update(moved)
        return {name: value for name, value in parameters.items() if name not in MOVED_TO_INDEX}

    def _warn_of_parameters(self, where: str, plugin: Any, parameters: dict[str, Any]) -> None:
        """Warn of accepted parameters that have less effect than documented, or another one."""
        if plugin.abilities.counts_blocks:
            self._warn_of_blocks(where, plugin, parameters)
        match plugin:
            case DataParallelHandler():
                self.warn(
                    f"{where}: has no effect, because data-parallel ranks with a port each are "
                    "separate endpoints; for ranks behind one address use "
                    "data-parallel-rank-producer"
                )
            case InflightLoadProducer(
                add_estimated_output_tokens=adds,
                max_estimated_output_tokens=most,
                sync_cross_replica_state=shared,
            ):
                named = {"addEstimatedOutputTokens": adds, "maxEstimatedOutputTokens": most}
                for name in (name for name, value in named.items() if value):
                    self.warn(
                        f"{where}: {name} has no effect, because load in flight counts requests "
                        "and uncached prompt tokens"
                    )
                if not shared:
                    self.warn(
                        f"{where}: syncCrossReplicaState has no effect, because replicas that "
                        "share also share their load"
                    )
            case CoreMetricsExtractor(engine_configs=engines):
                for engine in engines:
                    if engine.tiered_offloading_specs:
                        self.warn(
                            f"{where}: tieredOffloadingSpecs of engine {engine.name} has no "
                            "effect, because no plugin uses them"
                        )

    def _warn_of_blocks(self, where: str, index: Any, parameters: dict[str, Any]) -> None:
        if "blockSize" in parameters:
            self.warn(f"{where}: blockSize is deprecated, use blockSizeTokens")
        for name in ("blockSizeTokens", "blockSize"):
            tokens = parameters.get(name)
            if tokens and tokens < _BLOCK_TOKENS_MIN and tokens != index.block_tokens:
                self.warn(
                    f"{where}: {name} {tokens} is below the minimum; {_BLOCK_TOKENS_MIN} is used"
                )
        limit_tokens = msgspec.structs.asdict(index).get("max_prefix_tokens_to_match", 0)
        if "maxPrefixBlocksToMatch" in parameters and limit_tokens:
            self.warn(
                f"{where}: maxPrefixBlocksToMatch has no effect, because maxPrefixTokensToMatch is "
                f"{limit_tokens} and not 0"
            )

    def _refer(self, where: str, name: str, *roles: Role) -> ConfiguredPlugin | None:
        """Return the plugin `name`, which must have one of `roles`, or None after a problem."""
        plugin = self.plugins.get(name)
        if plugin is None:
            if name not in self.broken:
                hint = nearest(name, self.plugins)
                self.problem(f"{where}: pluginRef {name} names no declared plugin{hint}")
            return None
        if plugin.role not in roles:
            expected = " or ".join(roles)
            self.problem(f"{where}: {name} is a {plugin.role}, expected a {expected}")
            return None
        return plugin

    def _built_in(self, type_name: str, table: Mapping[str, type[T]]) -> T:
        return msgspec.convert({}, table[type_name])

    # --- profile ---

    def _read_profile(self, value: Any) -> SchedulingProfile | None:
        items = self._items(value, "schedulingProfiles")
        if len(items) > 1:
            self.problem(
                f"schedulingProfiles has {len(items)} profiles, expected one: every request is "
                "scheduled once, because prefill and decode are not disaggregated"
            )
            return None
        if not items:
            return self._profile_of_all()
        where = "schedulingProfiles[0]"
        spec = self.convert(items[0], _ProfileSpec, where)
        if spec is None:
            return None
        entries = self._entries(where, spec.plugins)
        return self._profile(spec.name, where, entries, self._responders())

    def _responders(self) -> tuple[NamedResponder, ...]:
        """Return the plugins that take effect by being declared; profiles do not name them."""
        return tuple(
            NamedResponder(plugin.name, plugin.plugin)
            for plugin in self.plugins.values()
            if plugin.role in {Role.RESPONDER, Role.REQUEST_MARKER}
        )

    def _read_shadow(self, value: Any) -> tuple[SchedulingProfile | None, float]:
        """Return the shadow profile, and the share of the decisions that it judges."""
        spec = None if value is None else self.convert(value, _ShadowSpec, "shadow")
        if spec is None:
            return None, 1.0
        profile = self._profile(spec.name, "shadow", self._entries("shadow", spec.plugins))
        return profile, spec.share

    def _entries(
        self, where: str, plugins: Sequence[_ProfilePlugin]
    ) -> list[tuple[ConfiguredPlugin, float]]:
        """Return the plugins of a profile with their weights, without those that have a problem."""
        entries: list[tuple[ConfiguredPlugin, float]] = []
        seen: set[str] = set()
        for index, entry in enumerate(plugins):
            place = f"{where}.plugins[{index}]"
            if entry.plugin_ref in seen:
                self.problem(f"{place}: {entry.plugin_ref} is already in this profile")
                continue
            seen.add(entry.plugin_ref)
            plugin = self._refer(place, entry.plugin_ref, Role.FILTER, Role.SCORER, Role.PICKER)
            if plugin is None:
                continue
            if entry.weight is not None and plugin.role is not Role.SCORER:
                self.warn(f"{place}: the weight of {plugin.role} {plugin.name} has no effect")
            weight = _WEIGHT if entry.weight is None else entry.weight
            entries.append((plugin, weight))
        return entries

    def _profile_of_all(self) -> SchedulingProfile | None:
        """Return a profile of every declared filter, scorer and picker, for a document without
        profiles.
        """
        in_profile = {Role.FILTER, Role.SCORER, Role.PICKER}
        entries = [
            (plugin, _WEIGHT)
            for plugin in self.plugins.values()
            if plugin.role in in_profile and plugin.type_name != _DETECTOR
        ]
        return self._profile("default", "plugins", entries, self._responders())

    def _profile(
        self,
        name: str,
        where: str,
        entries: Sequence[tuple[ConfiguredPlugin, float]],
        responders: tuple[NamedResponder, ...] = (),
    ) -> SchedulingProfile | None:
        pickers = [plugin for plugin, _ in entries if plugin.role is Role.PICKER]
        if len(pickers) > 1:
            names = ", ".join(plugin.name for plugin in pickers)
            self.problem(f"{where} has {len(pickers)} pickers, expected at most one: {names}")
            return None
        scorers: list[WeightedScorer] = []
        for plugin, weight in entries:
            if plugin.role is Role.SCORER:
                try:
                    scorers.append(WeightedScorer(plugin.name, plugin.plugin, weight))
                except ValueError as error:
                    self.problem(f"{where}: {error}")
        if self.problems:
            return None
        picker_name, picker = self._picker(pickers)
        filters = [found for plugin, _ in entries if (found := self._filter_of(plugin))]
        if self.problems:
            return None
        try:
            return SchedulingProfile(
                name=name,
                filters=tuple(filters),
                scorers=tuple(scorers),
                picker_name=picker_name,
                picker=picker,
                responders=responders,
            )
        except ValueError as error:
            self.problem(f"{where}: {error}")
            return None

    def _filter_of(self, plugin: ConfiguredPlugin) -> NamedFilter | None:
        """Return the filter that `plugin` is or brings along; None if there is none, or after a
        problem.
        """
        if plugin.role is Role.FILTER:
            return NamedFilter(plugin.name, plugin.plugin)
        if plugin.role is not Role.SCORER or not plugin.plugin.abilities.brings_filter:
            return None
        try:
            brought = plugin.plugin.filter
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.problem(_raised(plugin.where, "filter", error))
            return None
        if brought is None:
            return None
        if fault := declaration_fault(type(brought)):
            self.problem(f"{plugin.where}: {type(brought).__name__} {fault}")
            return None
        return NamedFilter(plugin.name, brought)

    def _picker(self, pickers: Sequence[ConfiguredPlugin]) -> tuple[str, Picker]:
        for plugin in (*pickers, *self.plugins.values()):
            if plugin in pickers or plugin.type_name == _PICKER:
                return plugin.name, plugin.plugin
        return _PICKER, self._built_in(_PICKER, self.tables.pickers)

    # --- indexes ---

    def _indexes(
        self, profiles: Sequence[SchedulingProfile]
    ) -> tuple[dict[str, AffinityIndexSettings], str]:
        """Return the declared indexes and those that the profiles need, and the name of the default
        prefix index.
        """
        indexes: dict[str, AffinityIndexSettings] = {}
        named: dict[str, str] = {}
        wanted: list[tuple[str, _NeededIndex]] = []
        for member in (
            member for profile in profiles for member in (*profile.members, *profile.responders)
        ):
            where = self._where(member.name)
            needed = self._needed(where, member.plugin)
            if needed is not None:
                wanted.append((where, needed))
        asked = {needed.name for _, needed in wanted}
        for plugin in self.plugins.values():
            if plugin.role is Role.INDEX:
                # A plugin that names an index by its type means the first index of that type.
                lookup = plugin.name
                by_type = not _counts_blocks(plugin.plugin) and plugin.type_name not in named
                if by_type and plugin.name not in asked:
                    lookup = plugin.type_name
                named.setdefault(plugin.type_name, lookup)
                indexes[lookup] = plugin.plugin
                self.settled[lookup] = set(plugin.given)
        for where, needed in wanted:
            self._need_index(where, needed, indexes, named)
        if not self.problems and not any(is_prefix(index) for index in indexes.values()):
            reader = next(filter(None, map(_prefix_reader, profiles)), None)
            if reader is not None:
                default = _NeededIndex("", PREFIX_INDEX, {})
                self._need_index(self._where(reader), default, indexes, named)
        if self.for_index and PREFIX_INDEX in {p.type_name for p in self.plugins.values()}:
            self.warn(
                f"{', '.join(self.for_index)} of prefix-cache-scorer have no effect, because "
                f"{PREFIX_INDEX} is declared"
            )
        self._beside_told(indexes, named)
        # The matches of other indexes are converted to this index's blocks, because it counts
        # tokens, not bytes.
        prefix = next((name for name, index in indexes.items() if is_told(index)), "")
        prefix = prefix or next((name for name, index in indexes.items() if is_prefix(index)), "")
        return indexes, prefix

    def _beside_told(
        self, indexes: dict[str, AffinityIndexSettings], named: dict[str, str]
    ) -> None:
        """Add an index of decisions for endpoints without KV-cache events, if an index receives
        such events.
        """
        told = next((name for name, index in indexes.items() if is_told(index)), None)
        if told is None or self.problems:
            return
        if not any(_is_decided(index) for index in indexes.values()):
            needed = _NeededIndex("", PREFIX_INDEX, {})
            self._need_index(self._where(told), needed, indexes, named)
        producers = [p.plugin for p in self.plugins.values() if isinstance(p.plugin, TokenProducer)]
        if all(producer.backend is Backend.ESTIMATE for producer in producers):
            self.warn(
                f"{self._where(told)}: only prompts that arrive as token ids are looked up, "
                "because there is no token-producer with `vllm` or `local` for the others"
            )

    def _needed(self, where: str, reader: Plugin) -> _NeededIndex | None:
        """Return the index that `reader` needs; None if it needs none, or after a problem."""
        if not reader.abilities.reads_index:
            return None
        index: Any = reader
        try:
            if index.producer is None:
                return None
            given = index.producer_parameters if reader.abilities.configures_index else {}
            return msgspec.convert(
                {
                    "name": index.producer,
                    "type_name": index.producer_type,
                    "parameters": dict(given),
                },
                _NeededIndex,
            )
        except msgspec.ValidationError as error:
            self.problem(sentence_of(f"{where}: producer", error, _NeededIndex))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.problem(_raised(where, "producer", error))
        return None

    def _has_blocks(self, where: str, index: AffinityIndexSettings) -> bool:
        """Return whether the block size of `index` is valid, if it counts blocks; False after a
        problem.
        """
        if not _counts_blocks(index):
            return True
        counting: Any = index
        try:
            tokens = counting.block_tokens
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.problem(_raised(where, "block_tokens", error))
            return False
        if type(tokens) is int and tokens >= 1:
            return True
        self.problem(f"{where}: block_tokens is {tokens!r}; it must be an int of at least 1")
        return False

    def _need_index(
        self,
        where: str,
        needed: _NeededIndex,
        indexes: dict[str, AffinityIndexSettings],
        named: dict[str, str],
    ) -> None:
        wanted, type_name = needed.name, needed.type_name
        known = wanted if wanted in indexes else named.get(type_name) if not wanted else None
        if known is not None:
            self._adjust(where, known, needed.parameters, indexes)
            return
        if wanted and wanted != type_name:
            if why := refusal_of(wanted):
                self.problem(f"{where}: producer {wanted} is not supported: {why}")
            else:
                hint = nearest(wanted, indexes)
                self.problem(f"{where}: producer {wanted} names no declared plugin{hint}")
            return
        kind = self.tables.indexes.get(type_name)
        if kind is None:
            self.problem(f"{where}: it needs an index of type {type_name}, which does not exist")
            return
        parameters = needed.parameters
        if type_name == PREFIX_INDEX:
            parameters.update(self.for_index)
        settings = self.convert(parameters, kind, f"{where}: parameters")
        if settings is not None and self._has_blocks(where, settings):
            self._warn_of_parameters(where, settings, parameters)
            indexes[type_name] = settings
            named[type_name] = type_name
            self.settled[type_name] = set(parameters)

    def _adjust(
        self,
        where: str,
        lookup: str,
        parameters: Mapping[str, Any],
        indexes: dict[str, AffinityIndexSettings],
    ) -> None:
        """Apply a reader's parameters to an existing index; parameters that are already set stay."""
        index: Any = indexes[lookup]
        told = self.convert(dict(parameters), type(index), f"{where}: parameters of {lookup}")
        if told is None or not parameters:
            return
        fields = dict(zip(index.__struct_encode_fields__, index.__struct_fields__, strict=True))
        wanted = msgspec.structs.asdict(told)
        settled = self.settled.setdefault(lookup, set())
        for parameter, name in fields.items():
            if parameter not in parameters:
                continue
            if parameter not in settled:
                index = msgspec.structs.replace(index, **{name: wanted[name]})
            elif msgspec.structs.asdict(index)[name] != wanted[name]:
                self.warn(
                    f"{where}: its {parameter} has no effect, because {lookup} already has "
                    "another value"
                )
        settled |= parameters.keys()
        indexes[lookup] = index

    def _where(self, name: str) -> str:
        plugin = self.plugins.get(name)
        return plugin.where if plugin else name

    # --- the trial ---

    def _try_out(
        self,
        profile: SchedulingProfile,
        indexes: Mapping[str, AffinityIndexSettings],
        prefix: str,
    ) -> None:
        """Raise `ConfigError` with the plugins that fail on test endpoints, before any request is
        at stake.
        """
        settings = SchedulerSettings(
            profile=profile,
            indexes=indexes,
            prefix=prefix,
            block_tokens=block_tokens_of(indexes, prefix),
        )
        for failing in failing_plugins(settings):
            self.problem(
                f"{self._where(failing.name)}: {failing.what}, in a trial on test endpoints"
            )
        if self.problems:
            raise ConfigError(self.problems)

    # --- the rest ---

    def _read_saturation(self, document: dict[str, Any]) -> ConfiguredPlugin | None:
        flow, reference = document.get("flowControl"), None
        if flow is not None:
            spec = self.convert(flow, _FlowControl, "flowControl")
            if spec is not None:
                reference = spec.saturation_detector
                if spec.enable_eviction:
                    self.problem("flowControl.enableEviction is not supported: remove it")
        where = "flowControl.saturationDetector"
        old = document.get("saturationDetector")
        if old is not None:
            where = "saturationDetector"
            self.warn(f"{where} is deprecated, use flowControl.saturationDetector")
            if isinstance(old, dict) and "pluginRef" not in old:
                return self._plugin(where, _DETECTOR, _DETECTOR, old)
            reference = reference or self.convert(old, _Reference, where)
        if reference is not None:
            plugin = self._refer(where, reference.plugin_ref, Role.FILTER)
            if plugin is not None and plugin.type_name != _DETECTOR:
                self.problem(f"{where}: {plugin.name} is a filter, expected a {_DETECTOR}")
            return plugin
        detectors = (p for p in self.plugins.values() if p.type_name == _DETECTOR)
        return next(detectors, None)

    def _read_parsers(self, document: dict[str, Any]) -> tuple[str, ...]:
        references: list[tuple[str, str]] = []
        handler = document.get("requestHandler")
        if handler is not None:
            spec = self.convert(handler, _RequestHandler, "requestHandler")
            for index, entry in enumerate((spec and spec.parsers) or ()):
                references.append((f"requestHandler.parsers[{index}]", entry.plugin_ref))
        old = document.get("parser")
        if old is not None:
            self.warn("parser is deprecated, use requestHandler.parsers")
            reference = self.convert(old, _Reference, "parser")
            if reference is not None and not references:
                references.append(("parser", reference.plugin_ref))
        plugins = [self._refer(where, name, Role.PARSER) for where, name in references]
        types = tuple(dict.fromkeys(plugin.type_name for plugin in plugins if plugin))
        return types or PARSERS

    def _read_metrics(self, value: Any) -> MetricsSettings:
        layer = _DataLayer()
        if value is not None:
            layer = self.convert(value, _DataLayer, "dataLayer") or layer
        found: dict[str, ConfiguredPlugin] = {}
        for plugin in self.plugins.values():
            if plugin.role in {Role.SOURCE, Role.EXTRACTOR}:
                type_name = DEPRECATED.get(plugin.type_name, plugin.type_name)
                if type_name in found:
                    first = found[type_name].name
                    self.problem(
                        f"{plugin.where}: only one {type_name} is allowed, and {first} is "
                        "declared before it"
                    )
                found.setdefault(type_name, plugin)
        for index, source in enumerate(layer.sources):
            where = f"dataLayer.sources[{index}]"
            referred = self._refer(where, source.plugin_ref, Role.SOURCE, Role.NOTIFIER)
            for number, extractor in enumerate(source.extractors):
                self._check_extractor(f"{where}.extractors[{number}]", referred, extractor)
        if not layer.inject_defaults and not layer.sources:
            self.warn(
                "dataLayer.injectDefaults has no effect, because metrics are always collected"
            )
        for source_type, extractor_type in _EXTRACTORS.items():
            one, other = found.get(source_type), found.get(extractor_type)
            if source_type != "metrics-data-source" and (one is None) is not (other is None):
                there, missing = (one, extractor_type) if one else (other, source_type)
                assert there is not None
                self.warn(f"{there.where}: has no effect, because there is no {missing}")
                found.pop(source_type, None)
        members = {
            "source": "metrics-data-source",
            "extractor": "core-metrics-extractor",
            "models": "models-data-source",
            "gpus": "dcgm-data-source",
        }
        given = {name: found[kind].plugin for name, kind in members.items() if kind in found}
        return MetricsSettings(**given)

    def _check_extractor(
        self, where: str, source: ConfiguredPlugin | None, extractor: _Reference
    ) -> None:
        if source is not None and source.role is Role.NOTIFIER:
            self._refer(where, extractor.plugin_ref, Role.INDEX)
            return
        referred = self._refer(where, extractor.plugin_ref, Role.EXTRACTOR)
        if source is None or referred is None:
            return
        expected = _EXTRACTORS[source.type_name]
        if DEPRECATED.get(referred.type_name, referred.type_name) != expected:
            self.problem(
                f"{where}: {referred.name} is a {referred.type_name}, expected a {expected}, which "
                f"reads the pages of {source.type_name}"
            )

    def _check_load_producers(self) -> None:
        """Check that every named producer of load in flight exists."""
        for plugin in self.plugins.values():
            if not plugin.plugin.abilities.names_load_producer:
                continue
            name: object = plugin.plugin.in_flight_load_producer_name
            if name in {"", _LOAD_PRODUCER}:
                continue
            producer = self.plugins.get(str(name))
            if producer is None or not isinstance(producer.plugin, InflightLoadProducer):
                self.problem(
                    f"{plugin.where}: inFlightLoadProducerName {name} names no declared "
                    f"{_LOAD_PRODUCER}"
                )

    def _check_attributes(self, metrics: MetricsSettings) -> None:
        """Warn of plugins that read an attribute without a producer, because it stays unknown."""
        for plugin in self.plugins.values():
            if plugin.plugin.abilities.reads_attribute:
                key: object = plugin.plugin.attribute_key
                if key not in metrics.attributes:
                    self.warn(
                        f"{plugin.where}: no producer provides {key}; expected a customMetrics of "
                        f"core-metrics-extractor, or {GPU_UTILIZATION} of {DCGM_EXTRACTOR}"
                    )

    def _check_uncached_by(self, indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> None:
        for plugin in self.plugins.values():
            if isinstance(plugin.plugin, InflightLoadProducer):
                name = plugin.plugin.prefix_match_info_producer_name
                if name and name not in indexes and name != PREFIX_INDEX:
                    self.problem(
                        f"{plugin.where}: prefixMatchInfoProducerName {name} names no declared "
                        f"plugin{nearest(name, indexes)}"
                    )
                elif name in indexes and name != prefix:
                    self.warn(
                        f"{plugin.where}: prefixMatchInfoProducerName {name} has no effect, "
                        f"because uncached tokens are estimated by {prefix or 'no index'}"
                    )

    def _only(self, kind: type[P]) -> P:
        """Return the first declared plugin of `kind`, or one with defaults; warn of further ones."""
        declared = [p for p in self.plugins.values() if isinstance(p.plugin, kind)]
        for more in declared[1:]:
            self.warn(
                f"{more.where}: has no effect, because {declared[0].name} is declared before it"
            )
        return declared[0].plugin if declared else kind()

    def _warn_of_unused(
        self,
        profiles: Sequence[SchedulingProfile],
        detector: ConfiguredPlugin | None,
    ) -> None:
        used = {detector.name if detector else ""}
        for profile in profiles:
            used |= {profile.picker_name, *(member.name for member in profile.members)}
        in_profile = {Role.FILTER, Role.SCORER, Role.PICKER}
        for plugin in self.plugins.values():
            if plugin.role in in_profile and plugin.name not in used:
                self.warn(f"{plugin.where}: is in no profile and has no effect")

    def _warn_of_unread_tokens(self) -> None:
        producers = (p for p in self.plugins.values() if isinstance(p.plugin, TokenProducer))
        self.warn(
            f"{next(producers).where}: has no effect, because no plugin that takes part in "
            f"decisions reads token ids: add {PRECISE_INDEX}, which does, or remove it"
        )


def _reads_tokens(
    indexes: Mapping[str, AffinityIndexSettings], profiles: Sequence[SchedulingProfile]
) -> bool:
    """Return whether an index or a plugin of a profile may read the token ids of prompts."""
    if any(index.abilities.reads_token_ids for index in indexes.values()):
        return True
    return any(
        may_read_tokens(plugin.abilities)
        for profile in profiles
        for plugin in (*(member.plugin for member in profile.members), profile.picker)
    )


def _prefix_reader(profile: SchedulingProfile) -> str | None:
    """Return the name of the first plugin of `profile` that may read the default prefix index, or
    None.
    """
    readers = (
        *((member.name, member.plugin.abilities) for member in profile.members),
        (profile.picker_name, profile.picker.abilities),
    )
    return next((name for name, abilities in readers if may_read_prefix(abilities)), None)


def _shown(given: object) -> str:
    """Return the text of a document's value for a message."""
    return "missing" if given is None else repr(given)


def _counts_blocks(index: AffinityIndexSettings) -> bool:
    """Return whether the unit of an index is a block of tokens."""
    return index.abilities.counts_blocks


def is_prefix(index: AffinityIndexSettings) -> bool:
    """Return whether an index can fill `matched_blocks`: it counts blocks that endpoints have
    cached.
    """
    return index.abilities.origin is not None


def is_told(index: AffinityIndexSettings) -> bool:
    """Return whether an index receives KV-cache events from engines."""
    return index.abilities.hears_engines


def _is_decided(index: AffinityIndexSettings) -> bool:
    return index.abilities.origin is Origin.DECIDED


def joined_names(indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> tuple[str, ...]:
    """Return the index `prefix`, and the first one of each other origin with the same block length.

    If `prefix` receives KV-cache events, other block lengths are accepted too, because it counts
    tokens and the others are converted.
    """
    named: dict[Origin | None, str] = {}
    tokens = block_tokens_of(indexes, prefix)
    for name in (prefix, *indexes):
        if (
            name in indexes
            and is_prefix(indexes[name])
            and (block_tokens_of(indexes, name) == tokens or is_told(indexes[prefix]))
        ):
            named.setdefault(indexes[name].abilities.origin, name)
    return tuple(named.values())


def block_tokens_of(indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> int:
    """Return the tokens in a block of the default prefix index, or the default if there is none."""
    index: Any = indexes.get(prefix)
    return index.block_tokens if index else _BLOCK_TOKENS_MIN


def _raised(where: str, what: str, error: BaseException, *expected: str) -> str:
    """Return the problem that a plugin raised `error`. Raises `error` again if it is an
    `Interrupted`.
    """
    if isinstance(error, Interrupted):
        raise error
    return ", ".join((f"{where}: {what} raised {type(error).__name__}{place_of(error)}", *expected))
