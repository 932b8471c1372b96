"""Loading of an `EndpointPickerConfig`: bytes to one typed configuration, or to all of its
problems.

`load_config` is a function of its arguments, without I/O. The server, `epp check-config`, hot
reload and the simulator call it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field, structs

from epp.configuration.compatibility import (
    API_VERSION,
    API_VERSION_DEPRECATED,
    API_VERSIONS,
    FEATURE_GATES,
    PARSERS,
    REFUSED_SECTIONS,
    InflightLoadProducer,
)
from epp.configuration.declared_plugins import (
    PRECISE_INDEX,
    ConfiguredPlugin,
    DeclaredPlugins,
    PluginTables,
    Role,
)
from epp.configuration.document import (
    CONFIG_MAX_BYTES,
    ConfigError,
    nearest,
    read_mapping,
)
from epp.configuration.findings import Findings, shown
from epp.configuration.flow_plugins import MaxSaturationDetector
from epp.configuration.flow_sections import GATE, FlowSections
from epp.configuration.latency_prediction import latency_prediction
from epp.configuration.needed_indexes import NeededIndexes, block_tokens_of
from epp.configuration.other_sections import MetricsSettings, OtherSections
from epp.configuration.profile_sections import ProfileSections
from epp.configuration.stage_sections import StageSections
from epp.configuration.token_producer import Backend, TokenProducer
from epp.configuration.trial import failing_plugins
from epp.core.decision.plugin import (
    may_read_tokens,
)
from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.decision.profile import (
    SchedulingProfile,
)
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.agent_sessions import AgentSessionSettings
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.latency import LatencyPrediction
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.knowledge.topology import DEFAULT_TOPOLOGY, TopologyLabels
from epp.plugins.agents import ThunderAgent

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
    "load_config",
]

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
"""Configuration document that applies if none is given: the strategy `homing`."""
DEFAULT_SOURCE: Final = "built-in default"

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


class PickerConfig(Struct, frozen=True, kw_only=True):
    """A complete, valid configuration document with all defaults filled in."""

    source: str
    stages: Stages
    indexes: Mapping[str, AffinityIndexSettings]
    """Index settings by the name under which filters and scorers request the index."""
    prefix: str = ""
    """Name of the default prefix index in `indexes`, or "" if there is none."""
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    flow: FlowSettings | None = None
    """Settings of the queue, or None if the feature gate `flowControl` is off."""
    staleness_given: bool = False
    """True if the document sets the age above which the saturation detector does not rely on metrics.
    """
    parsers: tuple[str, ...] = PARSERS
    """Types of the request parsers, in the order in which they are tried."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    inflight: InflightLoadProducer = field(default_factory=InflightLoadProducer)
    """Prefill speeds of endpoints, and other settings of `inflight-load-producer`."""
    ejection: OutlierEjection = field(default_factory=OutlierEjection)
    """Settings of outlier ejection, which apply to every profile."""
    admitter: ProbabilisticAdmitter | None = None
    """Rule by which requests that may be shed are refused at random, or None if there is none."""
    latency: LatencyPrediction | None = None
    """Settings of latency prediction, or None if no latency is predicted."""
    tokens: TokenProducer = field(default_factory=TokenProducer)
    """Settings of the source from which the picker gets the token ids of prompts: a renderer, an
    engine or a local tokenizer. By default there is none, and tokens are estimated by bytes.
    """
    topology: TopologyLabels = DEFAULT_TOPOLOGY
    """Keys of the endpoint labels whose values name the endpoint's host, rack, zone and region."""
    primary_port: int = 0
    """Port to which the gateway sends the requests for all data-parallel ranks of a pod, or 0 if it
    sends them to the port of the rank.
    """
    shadow: SchedulingProfile | None = None
    """Profile that is applied to requests only for comparison with the decisions of `profile`, or
    None.
    """
    shadow_share: float = 1.0
    """Share of the decisions of `profile`, from 0 to 1, to which the shadow profile is applied."""
    warnings: tuple[str, ...] = ()

    @property
    def profile(self) -> SchedulingProfile:
        """Return the profile of the decode stage, which chooses the endpoint to which the gateway
        sends a request. If a request header names profiles, it is the one for requests without the
        header.
        """
        return self.stages.decode

    @property
    def tokens_asked(self) -> TokenProducer:
        """Return the settings of the source of token ids, or settings without effect if no index or
        plugin reads token ids.
        """
        profiles = _profiles_of(self.stages, self.shadow)
        return self.tokens if _reads_tokens(self.indexes, profiles) else TokenProducer()


def load_config(text: bytes | str, source: str, plugins: PluginTables) -> PickerConfig:
    """Return the valid configuration in a document, after a trial of its plugins; `source` names
    the document in messages.

    Raises `ConfigError` with all problems that one step finds; later steps do not run then. The
    last steps, one for each profile, name the plugins that fail on test endpoints.
    """
    document = read_mapping(text, source)
    findings = Findings(source)
    _check_head(document, findings)
    declared = DeclaredPlugins(plugins, findings)
    declared.read(document.get("plugins"))

    profiles = ProfileSections(declared)
    staged = StageSections(profiles)
    stages = staged.acting(document.get("schedulingProfiles"))
    shadow, shadow_share = profiles.shadow(document.get("shadow"))
    sections = OtherSections(declared)
    flows = FlowSections(declared)
    queue = _gate_is_on(document.get("featureGates"))
    section = flows.section(document.get("flowControl"))
    reference = section.saturation_detector
    named = sections.saturation(document, reference.plugin_ref if reference else None, queue=queue)
    flow = flows.settings(document.get("flowControl"), section, named, on=queue)
    detector = sections.utilization(named)
    parsers = sections.parsers(document)
    metrics = sections.metrics(document.get("dataLayer"))
    inflight = declared.only(InflightLoadProducer)
    ejection = declared.only(OutlierEjection)
    tokens = declared.only(TokenProducer)
    topology = declared.only(TopologyLabels)
    primary_port = declared.primary_port()
    sections.check_load_producers()
    sections.check_attributes(metrics)
    sections.check_topology()
    findings.raise_problems()
    assert stages is not None, "a document without a profile has a problem"
    latency = latency_prediction(declared, stages)
    findings.raise_problems()

    used = _profiles_of(stages, shadow)
    needed = NeededIndexes(declared)
    indexes, prefix = needed.of(used, staged.counts_uncached)
    indexes = _with_agents(indexes, used, flow, declared)
    needed.check_uncached_by(indexes, prefix)
    findings.raise_problems()
    _warn_of_unused(used, (detector, named), declared)
    if tokens.backend is not Backend.ESTIMATE and not _reads_tokens(indexes, used):
        _warn_of_unread_tokens(declared)
    for one in used:
        _try_out(one, indexes, prefix, declared)
    return PickerConfig(
        source=source,
        stages=stages,
        indexes=indexes,
        prefix=prefix,
        saturation=detector.plugin if detector else UtilizationDetector(),
        flow=flow,
        staleness_given=bool(detector and "metricsStalenessThreshold" in detector.given),
        parsers=parsers,
        metrics=metrics,
        inflight=inflight,
        ejection=ejection,
        admitter=declared.admitter(),
        latency=latency,
        tokens=tokens,
        topology=topology,
        primary_port=primary_port,
        shadow=shadow,
        shadow_share=shadow_share,
        warnings=tuple(findings.warnings),
    )


def _with_agents(
    indexes: dict[str, AffinityIndexSettings],
    profiles: Sequence[SchedulingProfile],
    flow: FlowSettings | None,
    declared: DeclaredPlugins,
) -> dict[str, AffinityIndexSettings]:
    """Return `indexes` with the headers of `agent-identity` in the index of agent sessions. Problems
    and warnings about `thunder-agent` are recorded.
    """
    agents = [one for one in declared.plugins.values() if isinstance(one.plugin, ThunderAgent)]
    headers = declared.identity_headers()
    members = {member.name for profile in profiles for member in profile.members}
    for agent in agents:
        if agent.name not in members:
            declared.findings.problem(
                f"{agent.where}: it must be in a scheduling profile, where it follows the sessions"
            )
        elif flow is None or flow.agents is None:
            declared.findings.warn(
                f"{agent.where}: sessions are not admitted by their size, unless it is the "
                "fairnessPolicyRef of a priority band of flowControl"
            )
    return {
        name: structs.replace(index, headers=headers)
        if isinstance(index, AgentSessionSettings) and headers
        else index
        for name, index in indexes.items()
    }


def _check_head(document: dict[str, Any], findings: Findings) -> None:
    version, kind = document.get("apiVersion"), document.get("kind")
    if kind != "EndpointPickerConfig":
        findings.problem(f"kind is {shown(kind)}, expected 'EndpointPickerConfig'")
    if version == API_VERSION_DEPRECATED:
        findings.warn(f"apiVersion {version} is deprecated, use {API_VERSION}")
    elif version not in API_VERSIONS:
        expected = " or ".join(map(repr, API_VERSIONS))
        findings.problem(f"apiVersion is {shown(version)}, expected {expected}")
    for name in document:
        if name in REFUSED_SECTIONS:
            findings.problem(
                f"{name} is not supported, because {REFUSED_SECTIONS[name]}: remove it"
            )
        elif name not in _SECTIONS:
            findings.problem(f"has unknown field `{name}`{nearest(str(name), _SECTIONS)}")
    gates = document.get("featureGates")
    for index, gate in enumerate(findings.items(gates, "featureGates")):
        _check_gate(f"featureGates[{index}]", gate, findings)


def _check_gate(where: str, gate: Any, findings: Findings) -> None:
    name, _, value = str(gate).partition("=")
    if value not in {"", "true", "false"}:
        findings.problem(
            f"{where}: {gate!r} is not a feature gate; expected gate, gate=true or gate=false"
        )
    elif name in FEATURE_GATES:
        findings.warn(f"{where}: {name} has no effect, because {FEATURE_GATES[name]}")
    elif name != GATE:
        known = (GATE, *FEATURE_GATES)
        findings.problem(f"{where}: feature gate {name!r} is unknown{nearest(name, known)}")


def _gate_is_on(gates: Any) -> bool:
    """Return whether the feature gate of the queue is on; the last of several entries applies."""
    entries = [str(gate).partition("=") for gate in gates] if isinstance(gates, list) else []
    states = [value != "false" for name, _, value in entries if name == GATE]
    return states[-1] if states else False


def _warn_of_unused(
    profiles: Sequence[SchedulingProfile],
    detectors: Sequence[ConfiguredPlugin | None],
    declared: DeclaredPlugins,
) -> None:
    used = {detector.name for detector in detectors if detector is not None}
    for plugin in declared.plugins.values():
        if isinstance(plugin.plugin, MaxSaturationDetector):
            used |= set(plugin.plugin.detectors)
    for profile in profiles:
        used |= {profile.picker_name, *(member.name for member in profile.members)}
    in_profile = {Role.FILTER, Role.SCORER, Role.PICKER}
    for plugin in declared.plugins.values():
        if plugin.role in in_profile and plugin.name not in used:
            declared.findings.warn(f"{plugin.where}: is in no profile and has no effect")


def _warn_of_unread_tokens(declared: DeclaredPlugins) -> None:
    producers = (p for p in declared.plugins.values() if isinstance(p.plugin, TokenProducer))
    declared.findings.warn(
        f"{next(producers).where}: has no effect, because no plugin that takes part in "
        f"decisions reads token ids: add {PRECISE_INDEX}, which does, or remove it"
    )


def _try_out(
    profile: SchedulingProfile,
    indexes: Mapping[str, AffinityIndexSettings],
    prefix: str,
    declared: DeclaredPlugins,
) -> None:
    """Raise `ConfigError` with the plugins that fail in a trial on test endpoints, before they
    decide about requests.
    """
    settings = SchedulerSettings(
        stages=Stages(decode=profile),
        indexes=indexes,
        prefix=prefix,
        block_tokens=block_tokens_of(indexes, prefix),
    )
    for failing in failing_plugins(settings):
        declared.findings.problem(
            f"{declared.where_of(failing.name)}: {failing.what}, in a trial on test endpoints"
        )
    declared.findings.raise_problems()


def _profiles_of(stages: Stages, shadow: SchedulingProfile | None) -> tuple[SchedulingProfile, ...]:
    """Return every profile once, that of the decode stage first and the shadow last."""
    profiles = [profile for _, profile in stages.profiles()]
    found = {id(one): one for one in (*profiles, *(() if shadow is None else (shadow,)))}
    return tuple(found.values())


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
