"""Reading of the section `flowControl` of a configuration document: the queue of the picker."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from msgspec import field, structs

from epp.configuration.compatibility import FLOW_SECTION_MEMBERS
from epp.configuration.declared_plugins import ConfiguredPlugin, DeclaredPlugins, Role
from epp.configuration.flow_plugins import (
    MaxSaturationDetector,
    ProgramAwareFairness,
    TokenFairness,
)
from epp.core.duration import Duration
from epp.core.flow.agent_admission import AgentAdmission
from epp.core.flow.band_selection import StrictBandSelection
from epp.core.flow.ceilings import StaticCeiling
from epp.core.flow.detectors import (
    ConcurrencyDetector,
    MaxSaturation,
    NeverSaturated,
    RoomDetector,
    Utilization,
)
from epp.core.flow.settings import WAIT_S_MAX, BandSettings, Fairness, FlowSettings
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.parameters import Parameters
from epp.plugins.agents import ThunderAgent

GATE: Final = "flowControl"
"""Name of the feature gate that switches the queue on."""
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d*)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)
_FACTORS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
QUANTITY_MAX: Final = 2**53


class _Reference(Parameters, frozen=True):
    plugin_ref: str


class _Band(Parameters, frozen=True):
    """The settings of a band of the queue: a member of `priorityBands`, or a template of bands."""

    max_bytes: int | str | None = None
    max_requests: int | str | None = None
    default_request_ttl: Duration | None = field(default=None, name="defaultRequestTTL")
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class _PriorityBand(_Band, frozen=True, kw_only=True):
    priority: int


class _Template(_Band, frozen=True):
    """The settings of the bands that `priorityBands` does not name: of all of them, or of those
    with a negative priority.
    """

    priority: int | None = None
    """Priority of the template, which is accepted without effect: a template has no priority."""


class FlowControlSection(Parameters, frozen=True):
    """The section `flowControl` of a configuration document, which configures the picker's queue."""

    max_bytes: int | str = 0
    max_requests: int | str = 0
    default_request_ttl: Duration = field(default=Duration(WAIT_S_MAX), name="defaultRequestTTL")
    no_endpoint_request_ttl: Duration | None = field(default=None, name="noEndpointRequestTTL")
    default_priority_band: _Template | None = None
    default_negative_priority_band: _Template | None = None
    priority_bands: tuple[_PriorityBand, ...] = ()
    usage_limit_policy_plugin_ref: str = ""
    band_selection_policy_plugin_ref: str = ""
    saturation_detector: _Reference | None = None
    enable_eviction: bool = False


class FlowSections:
    """A reader of the section `flowControl`, which records the section's problems."""

    def __init__(self, declared: DeclaredPlugins) -> None:
        self._declared = declared
        self._findings = declared.findings

    def section(self, value: Any) -> FlowControlSection:
        """Return `value` as the section `flowControl`, or a section with default values if `value`
        is None or has a problem, which is recorded.
        """
        if value is None:
            return FlowControlSection()
        found = self._findings.convert(value, FlowControlSection, "flowControl")
        return found or FlowControlSection()

    def settings(
        self,
        value: Any,
        section: FlowControlSection,
        detector: ConfiguredPlugin | None,
        *,
        on: bool,
    ) -> FlowSettings | None:
        """Return the settings of the queue, or None if the feature gate is off, with a warning if
        the section has settings nevertheless.

        `value` is the section as written, and `detector` the plugin that it or an older section
        names. Problems are recorded.
        """
        if not on:
            self._warn_of_ignored(value)
            return None
        ttl_s = float(section.default_request_ttl)
        empty_ttl = section.no_endpoint_request_ttl
        template = self._band("defaultPriorityBand", section.default_priority_band, BandSettings())
        negative = None
        if section.default_negative_priority_band is not None:
            name = "defaultNegativePriorityBand"
            negative = self._band(name, section.default_negative_priority_band, template)
        bands = self._bands(section.priority_bands)
        settings = FlowSettings(
            agents=self._agents((*bands.values(), template, negative or template)),
            identity_headers=self._declared.identity_headers(),
            requests_max=self._quantity("maxRequests", section.max_requests),
            bytes_max=self._quantity("maxBytes", section.max_bytes),
            wait_s_max=ttl_s,
            empty_pool_wait_s_max=(ttl_s or WAIT_S_MAX) if empty_ttl is None else float(empty_ttl),
            bands=bands,
            default_band=template,
            default_negative_band=negative,
            selection=self._selection(section.band_selection_policy_plugin_ref),
            evicts=section.enable_eviction,
            policy=self._policy(section.usage_limit_policy_plugin_ref),
            detector=self._detector(detector),
        )
        of_bands = (*bands.values(), template, negative or template)
        limits_s = [band.wait_s_max or 0.0 for band in of_bands]
        if min(ttl_s, settings.empty_pool_wait_s_max, *limits_s) < 0:
            self._findings.problem("flowControl: a TTL is negative; it must be 0s or more")
        return settings

    def _warn_of_ignored(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        for name in FLOW_SECTION_MEMBERS:
            if name in value:
                self._findings.warn(
                    f"flowControl.{name} has no effect without `featureGates: [{GATE}]`"
                )

    def _bands(self, given: tuple[_PriorityBand, ...]) -> dict[int, BandSettings]:
        times = Counter(band.priority for band in given)
        for priority in (priority for priority, count in times.items() if count > 1):
            self._findings.problem(
                f"flowControl.priorityBands has priority {priority} {times[priority]} times"
            )
        return {
            band.priority: self._band(f"priorityBands[{index}]", band, BandSettings())
            for index, band in enumerate(given)
        }

    def _band(self, where: str, given: _Band | None, template: BandSettings) -> BandSettings:
        """Return the settings of a band by `given`. Those of `template` apply for members that are
        not set or invalid, and for a limit of 0 requests or bytes. Problems are recorded.
        """
        if given is None:
            return template
        if isinstance(given, _Template) and given.priority is not None:
            self._findings.warn(
                f"flowControl.{where}.priority has no effect, because it is the template of all "
                "bands that priorityBands does not name"
            )
        changes: dict[str, Any] = {}
        for name, value in (("requests_max", given.max_requests), ("bytes_max", given.max_bytes)):
            member = "maxRequests" if name == "requests_max" else "maxBytes"
            most = 0 if value is None else self._quantity(f"{where}.{member}", value)
            if most:
                changes[name] = most
        if given.default_request_ttl is not None:
            changes["wait_s_max"] = float(given.default_request_ttl)
        if given.fairness_policy_ref:
            changes |= self._fairness(f"{where}.fairnessPolicyRef", given.fairness_policy_ref)
        if given.ordering_policy_ref:
            ref = f"{where}.orderingPolicyRef"
            policy = self._plugin(ref, given.ordering_policy_ref, Role.ORDERING)
            changes |= {} if policy is None else {"ordering": policy.ordering}
        return structs.replace(template, **changes)

    def _fairness(self, where: str, name: str) -> dict[str, Any]:
        """Return those settings of a band that its fairness policy `name` determines, by field; {}
        if the policy is invalid, which is recorded.
        """
        if isinstance(self._declared.plugin_of(name), ThunderAgent):
            return {"fairness": Fairness.SESSIONS}
        policy = self._plugin(where, name, Role.FAIRNESS)
        return {} if policy is None else _fairness(policy)

    def _agents(self, bands: Sequence[BandSettings]) -> AgentAdmission | None:
        """Return the settings of the admission of agent sessions, or None if no band uses
        `thunder-agent`.
        """
        if not any(band.fairness is Fairness.SESSIONS for band in bands):
            return None
        plugins = (one.plugin for one in self._declared.plugins.values())
        agent = next(plugin for plugin in plugins if isinstance(plugin, ThunderAgent))
        return AgentAdmission(head_wait_s_max=agent.head_wait_starvation_ms / 1e3)

    def _selection(self, name: str) -> Any:
        where = "bandSelectionPolicyPluginRef"
        policy = self._plugin(where, name, Role.BAND_SELECTION) if name else None
        return policy or StrictBandSelection()

    def _policy(self, name: str) -> Any:
        if not name:
            return StaticCeiling()
        return self._plugin("usageLimitPolicyPluginRef", name, Role.CEILING) or StaticCeiling()

    def _plugin(self, where: str, name: str, role: Role) -> Any:
        """Return the plugin `name`, or None if it is missing, invalid or has another role; the
        document then has a problem. A plugin type of flow control need not be declared, if it has no parameters
        that must be given.
        """
        where = f"flowControl.{where}"
        if name not in self._declared.plugins:
            undeclared = self._declared.undeclared(name, role)
            if undeclared is not None:
                return undeclared
        declared = self._declared.refer(where, name, role)
        return None if declared is None else declared.plugin

    def _detector(self, declared: ConfiguredPlugin | None) -> Any:
        """Return the saturation detector of flow control. Return the one that learns the endpoints'
        room if none is named, or if the named plugin is invalid, which is recorded.
        """
        if declared is None:
            return RoomDetector()
        return self._measure(declared, ())

    def _measure(self, declared: ConfiguredPlugin, parents: tuple[str, ...]) -> Any:
        plugin = declared.plugin
        match plugin:
            case UtilizationDetector():
                return Utilization(
                    detector=plugin,
                    staleness_given="metricsStalenessThreshold" in declared.given,
                )
            case ConcurrencyDetector() | RoomDetector():
                return plugin
            case ThunderAgent():
                return NeverSaturated()
            case MaxSaturationDetector() if declared.name not in parents:
                return self._largest(declared, plugin, (*parents, declared.name))
            case MaxSaturationDetector():
                self._findings.problem(f"{declared.where}: {declared.name} contains itself")
            case _:
                self._findings.problem(
                    f"flowControl.saturationDetector: {declared.name} is a {declared.role}, "
                    "expected a saturation detector"
                )
        return RoomDetector()

    def _largest(
        self, declared: ConfiguredPlugin, plugin: MaxSaturationDetector, parents: tuple[str, ...]
    ) -> MaxSaturation:
        children: list[Any] = []
        for name in plugin.detectors:
            where = f"{declared.where}: detectors"
            child = self._declared.refer(where, name, Role.DETECTOR, Role.FILTER)
            if child is not None:
                children.append(self._measure(child, parents))
        for name in plugin.stages.keys() - set(plugin.detectors):
            self._findings.problem(f"{declared.where}: stages names {name}, which is no detector")
        stages = {
            plugin.detectors.index(name): frozenset(judged)
            for name, judged in plugin.stages.items()
            if name in plugin.detectors
        }
        return MaxSaturation(detectors=tuple(children) or (RoomDetector(),), stages=stages)

    def _quantity(self, where: str, value: int | str) -> int:
        """Return the number that a Kubernetes quantity such as 500, 1k or 10Gi stands for, or 0 for
        an invalid quantity, which is recorded as a problem.
        """
        found = _QUANTITY.fullmatch(str(value))
        number = int(float(found[1]) * _FACTORS[found[2] or ""]) if found else -1
        if not 0 <= number <= QUANTITY_MAX:
            self._findings.problem(
                f"flowControl.{where} is {value!r}; expected a quantity such as 500, 1k or 10Gi"
            )
            return 0
        return number


def _fairness(policy: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {"fairness": policy.fairness}
    if isinstance(policy, ProgramAwareFairness):
        changes["half_life_s"] = policy.las_half_life_seconds
    if isinstance(policy, TokenFairness):
        changes["weights"] = policy.weights
    return changes
