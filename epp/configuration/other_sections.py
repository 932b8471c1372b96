"""Reading of the sections of a configuration document other than plugins and profiles: saturation,
parsers and metrics.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, field

from epp.configuration.compatibility import (
    DCGM_EXTRACTOR,
    DEPRECATED,
    GPU_UTILIZATION,
    MODELS_EXTRACTOR,
    PARSERS,
    POD_EXTRACTOR,
    TOPOLOGY_EXTRACTOR,
    CoreMetricsExtractor,
    DcgmDataSource,
    InflightLoadProducer,
    MetricsDataSource,
    ModelsDataSource,
)
from epp.configuration.declared_plugins import ConfiguredPlugin, DeclaredPlugins, Role
from epp.core.knowledge.topology import TopologyLabels
from epp.core.parameters import Parameters
from epp.core.types import attribute_key
from epp.plugins.agents import ThunderAgent
from epp.plugins.topology import TopologyAffinityFilter, TopologyAffinityScorer

DETECTOR: Final = "utilization-detector"
_EXTRACTORS: Final[Mapping[str, str]] = {
    "metrics-data-source": "core-metrics-extractor",
    "models-data-source": MODELS_EXTRACTOR,
    "dcgm-data-source": DCGM_EXTRACTOR,
}
"""Type of the extractor that reads the pages of a data source, by type of the data source."""
_OF_PODS: Final = (TOPOLOGY_EXTRACTOR, POD_EXTRACTOR)
"""Types of the extractors that read pods instead of pages."""
_LOAD_PRODUCER: Final = "inflight-load-producer"


class MetricsSettings(Struct, frozen=True, kw_only=True):
    """The settings for requesting metrics and other pages from endpoints."""

    source: MetricsDataSource = field(default_factory=MetricsDataSource)
    extractor: CoreMetricsExtractor = field(default_factory=CoreMetricsExtractor)
    models: ModelsDataSource | None = None
    """Settings for requesting each endpoint's list of models, or None if it is not requested."""
    gpus: DcgmDataSource | None = None
    """Settings for requesting the GPU metrics of each endpoint, or None if they are not
    requested.
    """

    @property
    def pages(self) -> dict[str, ModelsDataSource | DcgmDataSource]:
        """Return the settings of the pages that are requested from each endpoint besides its metrics,
        by name: `models` and `gpus`, as far as configured.
        """
        asked = {"models": self.models, "gpus": self.gpus}
        return {name: source for name, source in asked.items() if source is not None}

    @property
    def attributes(self) -> frozenset[str]:
        """Return the keys of the configured attributes, which plugins can read from endpoints."""
        keys = {
            attribute_key(metric.attribute_key)
            for engine in self.extractor.engine_configs
            for metric in engine.custom_metrics
        }
        if self.gpus is not None:
            keys.add(attribute_key(GPU_UTILIZATION, DCGM_EXTRACTOR))
        return frozenset(keys)


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


class OtherSections:
    """The reader of the sections of a configuration document other than plugins and profiles. It
    records their problems.
    """

    def __init__(self, declared: DeclaredPlugins) -> None:
        self.declared = declared
        self.findings = declared.findings

    def saturation(
        self, document: dict[str, Any], named: str | None, *, queue: bool
    ) -> ConfiguredPlugin | None:
        """Return the saturation detector that the document names. Return None if it names none, or
        an invalid one, which is recorded as a problem.
        `named` is the plugin that `flowControl.saturationDetector` refers to. Without the `queue`,
        a detector other than `utilization-detector` is returned and also recorded as a problem.
        """
        where = "flowControl.saturationDetector"
        old = document.get("saturationDetector")
        if old is not None:
            where = "saturationDetector"
            self.findings.warn(f"{where} is deprecated, use flowControl.saturationDetector")
            if isinstance(old, dict) and "pluginRef" not in old:
                return self.declared.plugin(where, DETECTOR, DETECTOR, old)
            reference = self.findings.convert(old, _Reference, where)
            named = named or (reference.plugin_ref if reference else None)
        if named is None:
            return None
        plugin = self.declared.plugins.get(named)
        if plugin is None or not isinstance(plugin.plugin, ThunderAgent):
            plugin = self.declared.refer(where, named, Role.FILTER, Role.DETECTOR)
        if plugin is not None and not queue and plugin.type_name != DETECTOR:
            what = f"{plugin.name} is a {plugin.role}, expected a {DETECTOR}"
            self.findings.problem(f"{where}: {what}, unless `featureGates: [flowControl]` is set")
        return plugin

    def utilization(self, named: ConfiguredPlugin | None) -> ConfiguredPlugin | None:
        """Return the `utilization-detector` by which requests are shed: `named` if it is one, else the
        first that is declared, or None if there is none.
        """
        if named is not None and named.type_name == DETECTOR:
            return named
        detectors = (p for p in self.declared.plugins.values() if p.type_name == DETECTOR)
        return next(detectors, None)

    def parsers(self, document: dict[str, Any]) -> tuple[str, ...]:
        references: list[tuple[str, str]] = []
        handler = document.get("requestHandler")
        if handler is not None:
            spec = self.findings.convert(handler, _RequestHandler, "requestHandler")
            for index, entry in enumerate((spec and spec.parsers) or ()):
                references.append((f"requestHandler.parsers[{index}]", entry.plugin_ref))
        old = document.get("parser")
        if old is not None:
            self.findings.warn("parser is deprecated, use requestHandler.parsers")
            reference = self.findings.convert(old, _Reference, "parser")
            if reference is not None and not references:
                references.append(("parser", reference.plugin_ref))
        plugins = [self.declared.refer(where, name, Role.PARSER) for where, name in references]
        types = tuple(dict.fromkeys(plugin.type_name for plugin in plugins if plugin))
        return types or PARSERS

    def metrics(self, value: Any) -> MetricsSettings:
        layer = _DataLayer()
        if value is not None:
            layer = self.findings.convert(value, _DataLayer, "dataLayer") or layer
        found: dict[str, ConfiguredPlugin] = {}
        for plugin in self.declared.plugins.values():
            if plugin.role in {Role.SOURCE, Role.EXTRACTOR}:
                type_name = DEPRECATED.get(plugin.type_name, plugin.type_name)
                if type_name in found:
                    first = found[type_name].name
                    self.findings.problem(
                        f"{plugin.where}: only one {type_name} is allowed, and {first} is "
                        "declared before it"
                    )
                found.setdefault(type_name, plugin)
        for index, source in enumerate(layer.sources):
            where = f"dataLayer.sources[{index}]"
            referred = self.declared.refer(where, source.plugin_ref, Role.SOURCE, Role.NOTIFIER)
            for number, extractor in enumerate(source.extractors):
                self._check_extractor(f"{where}.extractors[{number}]", referred, extractor)
        if not layer.inject_defaults and not layer.sources:
            self.findings.warn(
                "dataLayer.injectDefaults has no effect, because metrics are always collected"
            )
        for source_type, extractor_type in _EXTRACTORS.items():
            one, other = found.get(source_type), found.get(extractor_type)
            if source_type != "metrics-data-source" and (one is None) is not (other is None):
                there, missing = (one, extractor_type) if one else (other, source_type)
                assert there is not None
                self.findings.warn(f"{there.where}: has no effect, because there is no {missing}")
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
            plugin = self.declared.refer(
                where, extractor.plugin_ref, Role.INDEX, Role.EXTRACTOR, Role.SCREENER
            )
            if (
                plugin is not None
                and plugin.role is Role.EXTRACTOR
                and plugin.type_name not in _OF_PODS
            ):
                self.findings.problem(
                    f"{where}: {plugin.name} is a {plugin.type_name}, expected one of "
                    f"{', '.join(_OF_PODS)}, which read the pods of {source.type_name}"
                )
            return
        referred = self.declared.refer(where, extractor.plugin_ref, Role.EXTRACTOR)
        if source is None or referred is None:
            return
        expected = _EXTRACTORS[source.type_name]
        if DEPRECATED.get(referred.type_name, referred.type_name) != expected:
            self.findings.problem(
                f"{where}: {referred.name} is a {referred.type_name}, expected a {expected}, which "
                f"reads the pages of {source.type_name}"
            )

    def check_load_producers(self) -> None:
        """Record a problem for each plugin that names an undeclared `inflight-load-producer`, or a
        plugin of another type as one.
        """
        for plugin in self.declared.plugins.values():
            if not plugin.plugin.abilities.names_load_producer:
                continue
            name: object = plugin.plugin.in_flight_load_producer_name
            if name in {"", _LOAD_PRODUCER}:
                continue
            producer = self.declared.plugins.get(str(name))
            if producer is None or not isinstance(producer.plugin, InflightLoadProducer):
                self.findings.problem(
                    f"{plugin.where}: inFlightLoadProducerName {name} names no declared "
                    f"{_LOAD_PRODUCER}"
                )

    def check_topology(self) -> None:
        """Record a problem for each plugin that names a `topology-extractor` that is not declared.
        Warn of each `topology-extractor` if no plugin uses the topology.
        """
        used = False
        for plugin in self.declared.plugins.values():
            if not isinstance(plugin.plugin, TopologyAffinityFilter | TopologyAffinityScorer):
                continue
            used = True
            name = plugin.plugin.topology_producer_name
            extractor = self.declared.plugins.get(name)
            if name in {"", TOPOLOGY_EXTRACTOR} or (
                extractor is not None and isinstance(extractor.plugin, TopologyLabels)
            ):
                continue
            self.findings.problem(
                f"{plugin.where}: topologyProducerName {name} names no declared {TOPOLOGY_EXTRACTOR}"
            )
        for plugin in self.declared.plugins.values():
            if isinstance(plugin.plugin, TopologyLabels) and not used:
                self.findings.warn(
                    f"{plugin.where}: has no effect, because no plugin uses the topology"
                )

    def check_attributes(self, metrics: MetricsSettings) -> None:
        """Warn of each plugin that reads an endpoint attribute that no producer provides. The
        attribute's value is then always unknown.
        """
        for plugin in self.declared.plugins.values():
            if plugin.plugin.abilities.reads_attribute:
                key: object = plugin.plugin.attribute_key
                if key not in metrics.attributes:
                    self.findings.warn(
                        f"{plugin.where}: no producer provides {key}; expected a customMetrics of "
                        f"core-metrics-extractor, or {GPU_UTILIZATION} of {DCGM_EXTRACTOR}"
                    )
