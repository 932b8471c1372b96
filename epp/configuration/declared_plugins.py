"""The plugins that a configuration document declares."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, field

from epp.configuration.compatibility import (
    ACCEPTED,
    DCGM_EXTRACTOR,
    DEPRECATED,
    HANDLERS,
    MODELS_EXTRACTOR,
    MOVED_TO_INDEX,
    NOTIFICATION_SOURCES,
    PARSERS,
    POD_EXTRACTOR,
    TOPOLOGY_EXTRACTOR,
    CoreMetricsExtractor,
    DataParallelHandler,
    InflightLoadProducer,
    refusal_of,
)
from epp.configuration.disaggregation import (
    DECIDERS,
    HEADER_HANDLER,
    STAGE_HANDLERS,
    STAGE_HEADERS,
)
from epp.configuration.document import nearest
from epp.configuration.findings import Findings, raised
from epp.configuration.flow_plugins import (
    BAND_SELECTIONS,
    CEILINGS,
    DETECTORS,
    FAIRNESS,
    FLOW_PLUGINS,
    ORDERINGS,
)
from epp.configuration.token_producer import TokenProducer
from epp.core.decision.plugin import Filter, Picker, Scorer, declaration_fault
from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.topology import TopologyLabels
from epp.core.parameters import Parameters
from epp.plugins.agents import AgentIdentity
from epp.plugins.conformance import DestinationEndpointServedVerifier
from epp.plugins.data_parallel_rank import DataParallelRank
from epp.plugins.latency import LatencySloAdmitter, PredictedLatency
from epp.plugins.pull_source import PullSource
from epp.plugins.rollout import RolloutScreener

PREFIX_INDEX: Final = "approx-prefix-cache-producer"
PRECISE_INDEX: Final = "precise-prefix-cache-producer"
_PRECISE_SCORER: Final = "precise-prefix-cache-scorer"
BLOCK_TOKENS_MIN: Final = 64

P = TypeVar(
    "P",
    InflightLoadProducer,
    OutlierEjection,
    TokenProducer,
    TopologyLabels,
    PredictedLatency,
    ProbabilisticAdmitter,
    AgentIdentity,
)


class PluginTables(Struct, frozen=True, kw_only=True):
    """The plugin classes for all types that a configuration can name, by type;
    `epp.configuration.build` collects them.
    """

    filters: Mapping[str, type[Filter]]
    scorers: Mapping[str, type[Scorer]]
    pickers: Mapping[str, type[Picker]]
    indexes: Mapping[str, type[AffinityIndexSettings]]
    deprecated: Mapping[str, str] = field(default_factory=dict)
    """Current name of each deprecated plugin type."""


class Role(StrEnum):
    """The purpose of a plugin, which determines where a configuration can refer to it."""

    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    INDEX = "index"
    HANDLER = "profile handler"
    PARSER = "parser"
    SOURCE = "data source"
    EXTRACTOR = "extractor"
    DECIDER = "decider"
    PRODUCER = "producer"
    ADMITTER = "admitter"
    IDENTITY = "identity plugin"
    RESPONDER = "response plugin"
    REQUEST_MARKER = "request plugin"
    NOTIFIER = "notification source"
    FAIRNESS = "fairness policy"
    ORDERING = "ordering policy"
    BAND_SELECTION = "band selection policy"
    CEILING = "usage limit policy"
    DETECTOR = "saturation detector"
    SCREENER = "screener"


class ConfiguredPlugin(Struct, frozen=True, kw_only=True):
    """A plugin declared in a configuration document."""

    name: str
    type_name: str
    role: Role
    where: str
    """Place of the plugin in the configuration document, such as `plugins[0] (name)`, for messages.
    """
    plugin: Any
    """Instance of a filter, scorer, picker, the settings of an index, or a struct of
    `epp.configuration.compatibility`.
    """
    given: frozenset[str] = frozenset()
    """Names of the plugin's parameters that the configuration document sets."""


class _PluginSpec(Parameters, frozen=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None


_ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(HANDLERS, Role.HANDLER),
    **dict.fromkeys(STAGE_HEADERS, Role.HANDLER),
    **dict.fromkeys(DECIDERS, Role.DECIDER),
    **dict.fromkeys(PARSERS, Role.PARSER),
    "metrics-data-source": Role.SOURCE,
    "core-metrics-extractor": Role.EXTRACTOR,
    "model-server-protocol-metrics": Role.EXTRACTOR,
    "models-data-source": Role.SOURCE,
    MODELS_EXTRACTOR: Role.EXTRACTOR,
    "dcgm-data-source": Role.SOURCE,
    DCGM_EXTRACTOR: Role.EXTRACTOR,
    TOPOLOGY_EXTRACTOR: Role.EXTRACTOR,
    POD_EXTRACTOR: Role.EXTRACTOR,
    RolloutScreener.type_name: Role.SCREENER,
    **dict.fromkeys(NOTIFICATION_SOURCES, Role.NOTIFIER),
    DestinationEndpointServedVerifier.type_name: Role.RESPONDER,
    PullSource.type_name: Role.REQUEST_MARKER,
    DataParallelRank.type_name: Role.REQUEST_MARKER,
    **dict.fromkeys(FAIRNESS, Role.FAIRNESS),
    **dict.fromkeys(ORDERINGS, Role.ORDERING),
    **dict.fromkeys(BAND_SELECTIONS, Role.BAND_SELECTION),
    **dict.fromkeys(CEILINGS, Role.CEILING),
    **dict.fromkeys(DETECTORS, Role.DETECTOR),
    LatencySloAdmitter.type_name: Role.ADMITTER,
    AgentIdentity.type_name: Role.IDENTITY,
    ProbabilisticAdmitter.type_name: Role.ADMITTER,
}


class DeclaredPlugins:
    """The valid plugins that a configuration document declares, by name."""

    def __init__(self, tables: PluginTables, findings: Findings) -> None:
        self.tables = tables
        self.findings = findings
        self.plugins: dict[str, ConfiguredPlugin] = {}
        self.for_index: dict[str, Any] = {}
        """Parameters of the prefix index that the document sets, as old configurations do, on
        `prefix-cache-scorer`.
        """
        self.stages_unknown = False
        """True if a plugin that splits requests into stages has a problem of its own."""
        self._broken: set[str] = set()
        """Names of declared plugins with a problem of their own.

        References to them are not reported as missing.
        """

    def read(self, value: Any) -> None:
        """Read the section `plugins` of the configuration document, and record its problems."""
        names: Counter[str] = Counter()
        for index, item in enumerate(self.findings.items(value, "plugins")):
            where = f"plugins[{index}]"
            spec = self.findings.convert(item, _PluginSpec, where)
            if spec is None:
                if isinstance(item, dict):
                    self._broken.add(str(item.get("name") or item.get("type")))
                continue
            name = spec.name or spec.type
            where = f"{where} ({name})"
            names[name] += 1
            if names[name] > 1:
                self.findings.problem(f"{where}: the name {name} is taken by an earlier plugin")
                continue
            parameters = spec.parameters or {}
            type_name = spec.type
            if type_name == _PRECISE_SCORER:
                self._add_precise_index(where, parameters)
                type_name = "prefix-cache-scorer"
                parameters = {"prefixMatchInfoProducerName": PRECISE_INDEX}
            plugin = self.plugin(where, name, type_name, parameters)
            if plugin is None:
                self._broken.add(name)
                self.stages_unknown |= type_name in {*STAGE_HANDLERS, HEADER_HANDLER}
            else:
                self.plugins[name] = plugin

    def _add_precise_index(self, where: str, parameters: dict[str, Any]) -> None:
        """Declare the prefix index that the deprecated `precise-prefix-cache-scorer` contained, and
        warn.
        """
        self.findings.warn(
            f"{where}: type {_PRECISE_SCORER} is deprecated, use {PRECISE_INDEX} with these "
            f"parameters, and prefix-cache-scorer with prefixMatchInfoProducerName {PRECISE_INDEX}"
        )
        if PRECISE_INDEX in self.plugins:
            self.findings.problem(
                f"{where}: a {PRECISE_INDEX} is declared too; declare only one of the two"
            )
            return
        index = self.plugin(where, PRECISE_INDEX, PRECISE_INDEX, parameters)
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

    def plugin(
        self, where: str, name: str, type_name: str, parameters: dict[str, Any]
    ) -> ConfiguredPlugin | None:
        """Return a plugin of type `type_name`, or None if it is invalid; a problem is recorded
        then. Warnings about its type and its parameters are recorded too.
        """
        found = self._find(type_name)
        if found is None:
            why = refusal_of(type_name)
            if why:
                self.findings.problem(f"{where}: type {type_name} is not supported: {why}")
            else:
                hint = nearest(type_name, self._known_types())
                self.findings.problem(f"{where}: type {type_name} is unknown{hint}")
            return None
        newer = self.tables.deprecated.get(type_name) or DEPRECATED.get(type_name)
        if newer:
            self.findings.warn(f"{where}: type {type_name} is deprecated, use {newer}")
        if type_name == "prefix-cache-scorer":
            parameters = self._move_to_index(where, parameters)
        role, kind = found
        if fault := declaration_fault(kind):
            self.findings.problem(f"{where}: {kind.__name__} {fault}")
            return None
        plugin = self.findings.convert(parameters, kind, f"{where}: parameters")
        if plugin is None:
            return None
        if role is Role.INDEX and not self.has_blocks(where, plugin):
            return None
        self.warn_of_parameters(where, plugin, parameters)
        if kind.abilities.warns:
            self._add_plugin_warnings(where, plugin)
        if kind.abilities.differs:
            self.findings.warn(f"{where}: {kind.abilities.differs}")
        return ConfiguredPlugin(
            name=name,
            type_name=type_name,
            role=role,
            where=where,
            plugin=plugin,
            given=frozenset(parameters),
        )

    def _add_plugin_warnings(self, where: str, plugin: Any) -> None:
        try:
            told: tuple[str, ...] = msgspec.convert(plugin.warnings(), tuple[str, ...])
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.findings.problem(raised(where, "warnings", error))
            return
        for warning in told:
            self.findings.warn(f"{where}: {warning}")

    def _known_types(self) -> list[str]:
        tables = self.tables
        return [*tables.filters, *tables.scorers, *tables.pickers, *tables.indexes, *ACCEPTED]

    def _move_to_index(self, where: str, parameters: dict[str, Any]) -> dict[str, Any]:
        moved: dict[str, Any] = {
            name: parameters[name] for name in MOVED_TO_INDEX if name in parameters
        }
        if not moved:
            return parameters
        self.findings.warn(
            f"{where}: {', '.join(moved)} of prefix-cache-scorer moved to {PREFIX_INDEX}: set "
            "them there"
        )
        characters = moved.pop("hashBlockSize", None)
        if isinstance(characters, int):
            moved.setdefault("blockSizeTokens", max(1, characters // 4))
        self.for_index.update(moved)
        return {name: value for name, value in parameters.items() if name not in MOVED_TO_INDEX}

    def has_blocks(self, where: str, index: AffinityIndexSettings) -> bool:
        """Return False if `index` counts blocks and its block size is invalid, which is recorded as
        a problem; else True.
        """
        if not counts_blocks(index):
            return True
        counting: Any = index
        try:
            tokens = counting.block_tokens
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.findings.problem(raised(where, "block_tokens", error))
            return False
        if type(tokens) is int and tokens >= 1:
            return True
        self.findings.problem(
            f"{where}: block_tokens is {tokens!r}; it must be an int of at least 1"
        )
        return False

    def warn_of_parameters(self, where: str, plugin: Any, parameters: dict[str, Any]) -> None:
        """Warn of each parameter that `plugin` accepts but that has no effect, or another effect
        than documented.
        """
        if plugin.abilities.counts_blocks:
            self._warn_of_blocks(where, plugin, parameters)
        match plugin:
            case DataParallelHandler(primary_port=None):
                self.findings.warn(
                    f"{where}: has no effect without primaryPort, because data-parallel ranks with "
                    "a port each are separate endpoints; for ranks behind one address use "
                    "data-parallel-rank-producer"
                )
            case InflightLoadProducer(
                add_estimated_output_tokens=adds,
                max_estimated_output_tokens=most,
                sync_cross_replica_state=shared,
            ):
                named = {"addEstimatedOutputTokens": adds, "maxEstimatedOutputTokens": most}
                for name in (name for name, value in named.items() if value):
                    self.findings.warn(
                        f"{where}: {name} has no effect, because load in flight counts requests "
                        "and uncached prompt tokens"
                    )
                if not shared:
                    self.findings.warn(
                        f"{where}: syncCrossReplicaState has no effect, because replicas that "
                        "share also share their load"
                    )
            case CoreMetricsExtractor(engine_configs=engines):
                for engine in engines:
                    if engine.tiered_offloading_specs:
                        self.findings.warn(
                            f"{where}: tieredOffloadingSpecs of engine {engine.name} has no "
                            "effect, because no plugin uses them"
                        )

    def _warn_of_blocks(self, where: str, index: Any, parameters: dict[str, Any]) -> None:
        if "blockSize" in parameters:
            self.findings.warn(f"{where}: blockSize is deprecated, use blockSizeTokens")
        for name in ("blockSizeTokens", "blockSize"):
            tokens = parameters.get(name)
            if tokens and tokens < BLOCK_TOKENS_MIN and tokens != index.block_tokens:
                self.findings.warn(
                    f"{where}: {name} {tokens} is below the minimum; {BLOCK_TOKENS_MIN} is used"
                )
        limit_tokens = msgspec.structs.asdict(index).get("max_prefix_tokens_to_match", 0)
        if "maxPrefixBlocksToMatch" in parameters and limit_tokens:
            self.findings.warn(
                f"{where}: maxPrefixBlocksToMatch has no effect, because maxPrefixTokensToMatch is "
                f"{limit_tokens} and not 0"
            )

    def refer(self, where: str, name: str, *roles: Role) -> ConfiguredPlugin | None:
        """Return the declared plugin `name`, or None if it is missing or has none of `roles`. A
        problem is recorded then, unless the declaration of `name` has a problem itself.
        """
        plugin = self.plugins.get(name)
        if plugin is None:
            if name not in self._broken:
                hint = nearest(name, self.plugins)
                self.findings.problem(f"{where}: pluginRef {name} names no declared plugin{hint}")
            return None
        if plugin.role not in roles:
            expected = " or ".join(roles)
            self.findings.problem(f"{where}: {name} is a {plugin.role}, expected a {expected}")
            return None
        return plugin

    def undeclared(self, name: str, role: Role) -> Any:
        """Return an instance of the flow-control type `name` with default parameters, or None if it
        is no such type, has another role, must be declared with parameters, or is declared with a
        problem.
        """
        if name in self._broken or _ROLES.get(name) is not role or name not in FLOW_PLUGINS:
            return None
        try:
            return FLOW_PLUGINS[name]()
        except TypeError:
            return None

    def admitter(self) -> ProbabilisticAdmitter | None:
        """Return the declared `probabilistic-admitter`, or None if there is none."""
        declared = any(isinstance(p.plugin, ProbabilisticAdmitter) for p in self.plugins.values())
        return self.only(ProbabilisticAdmitter) if declared else None

    def identity_headers(self) -> tuple[str, ...]:
        """Return the headers by which `agent-identity` names sessions, or () if it is not declared."""
        declared = any(isinstance(p.plugin, AgentIdentity) for p in self.plugins.values())
        return self.only(AgentIdentity).headers if declared else ()

    def plugin_of(self, name: str) -> Any:
        """Return the declared plugin `name`, or None if there is none."""
        declared = self.plugins.get(name)
        return None if declared is None else declared.plugin

    def primary_port(self) -> int:
        """Return the port to which the gateway sends the requests for all data-parallel ranks of a
        pod, or 0 if no `data-parallel-profile-handler` sets one.
        """
        plugins = [one.plugin for one in self.plugins.values()]
        ports = [one.primary_port for one in plugins if isinstance(one, DataParallelHandler)]
        return next((port for port in ports if port), 0)

    def where_of(self, name: str) -> str:
        """Return the place of the plugin `name` in the configuration document, for messages; `name`
        itself if no such plugin is declared.
        """
        plugin = self.plugins.get(name)
        return plugin.where if plugin else name

    def only(self, kind: type[P]) -> P:
        """Return the first declared plugin of class `kind`, or one with default parameters if there
        is none.

        Each further declared plugin of the class has no effect and causes a warning.
        """
        declared = [p for p in self.plugins.values() if isinstance(p.plugin, kind)]
        for more in declared[1:]:
            self.findings.warn(
                f"{more.where}: has no effect, because {declared[0].name} is declared before it"
            )
        return declared[0].plugin if declared else kind()


def counts_blocks(index: AffinityIndexSettings) -> bool:
    """Return True if the unit of the affinity index with these settings is a block of tokens."""
    return index.abilities.counts_blocks
