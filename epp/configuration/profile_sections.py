"""Reading of the scheduling profiles of a configuration document: those that route requests, and
the shadow.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from epp.configuration.declared_plugins import ConfiguredPlugin, DeclaredPlugins, Role
from epp.configuration.findings import raised
from epp.core.decision.plugin import Picker, declaration_fault
from epp.core.decision.profile import (
    NamedFilter,
    NamedResponder,
    SchedulingProfile,
    WeightedScorer,
)
from epp.core.parameters import Parameters

_WEIGHT: Final = 1.0
"""Weight of a scorer for which the profile sets none, as in the reference picker."""
_PICKER: Final = "max-score-picker"
DETECTOR: Final = "utilization-detector"


class _ProfilePlugin(Parameters, frozen=True):
    plugin_ref: str
    weight: float | None = None


class ProfileSpec(Parameters, frozen=True):
    """An item of the section `schedulingProfiles`."""

    name: str
    plugins: tuple[_ProfilePlugin, ...] = ()


class _ShadowSpec(Parameters, frozen=True):
    plugins: Annotated[tuple[_ProfilePlugin, ...], Meta(min_length=1)]
    name: str = "shadow"
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class ProfileSections:
    """The reader of the sections `schedulingProfiles` and `shadow` of a configuration document. It
    records their problems.
    """

    def __init__(self, declared: DeclaredPlugins) -> None:
        self.declared = declared
        self.findings = declared.findings

    def by_name(self, value: Any) -> dict[str, tuple[str, ProfileSpec]]:
        """Return the place in the document and the content of each item of `schedulingProfiles`, by
        the name of the profile. Invalid items and repeated names are left out and recorded as
        problems.
        """
        found: dict[str, tuple[str, ProfileSpec]] = {}
        for index, item in enumerate(self.findings.items(value, "schedulingProfiles")):
            where = f"schedulingProfiles[{index}]"
            spec = self.findings.convert(item, ProfileSpec, where)
            if spec is None:
                continue
            if spec.name in found:
                self.findings.problem(
                    f"{where}: the name {spec.name} is taken by an earlier profile"
                )
            found.setdefault(spec.name, (where, spec))
        return found

    def acting(self, value: Any) -> SchedulingProfile | None:
        """Return the only profile of a document without a handler of stages, which routes all
        requests. Without profiles in the document, it has the declared filters, scorers and picker.
        Return None if it is invalid; a problem is recorded then.
        """
        items = self.findings.items(value, "schedulingProfiles")
        if len(items) > 1:
            self.findings.problem(
                f"schedulingProfiles has {len(items)} profiles, expected one: declare a "
                "disagg-profile-handler, which names the profile of each stage"
            )
            return None
        if not items:
            return self._profile_of_all()
        where = "schedulingProfiles[0]"
        spec = self.findings.convert(items[0], ProfileSpec, where)
        return None if spec is None else self.profile_of(where, spec, responds=True)

    def profile_of(
        self, where: str, spec: ProfileSpec, *, responds: bool
    ) -> SchedulingProfile | None:
        """Return the profile that `spec`, the item at the place `where` in the document, describes.
        Return None if the item is invalid, and record the problem. If `responds` is true, the
        profile contains the plugins that set headers.
        """
        entries = self._entries(where, spec.plugins)
        return self._profile(spec.name, where, entries, self._responders() if responds else ())

    def _responders(self) -> tuple[NamedResponder, ...]:
        """Return the plugins that take effect by being declared, without a reference in a profile:
        those that set headers.
        """
        return tuple(
            NamedResponder(plugin.name, plugin.plugin)
            for plugin in self.declared.plugins.values()
            if plugin.role in {Role.RESPONDER, Role.REQUEST_MARKER, Role.SCREENER}
        )

    def screen(self) -> SchedulingProfile | None:
        """Return the profile of the declared filters that apply before every stage, or None if
        there are none.
        """
        screeners = [one for one in self.declared.plugins.values() if one.role is Role.SCREENER]
        if not screeners:
            return None
        filters = tuple(NamedFilter(one.name, one.plugin) for one in screeners)
        picker_name, picker = self._picker([])
        return SchedulingProfile(
            name="screen", filters=filters, scorers=(), picker_name=picker_name, picker=picker
        )

    def shadow(self, value: Any) -> tuple[SchedulingProfile | None, float]:
        """Return the shadow profile, and the share of the decisions (0 to 1) to which it is
        applied.

        The profile is None if there is none or it is invalid.
        """
        spec = None if value is None else self.findings.convert(value, _ShadowSpec, "shadow")
        if spec is None:
            return None, 1.0
        profile = self._profile(spec.name, "shadow", self._entries("shadow", spec.plugins))
        return profile, spec.share

    def _entries(
        self, where: str, plugins: Sequence[_ProfilePlugin]
    ) -> list[tuple[ConfiguredPlugin, float]]:
        """Return the plugins that a profile refers to, with their weights.

        An invalid reference is left out and recorded as a problem.
        """
        entries: list[tuple[ConfiguredPlugin, float]] = []
        seen: set[str] = set()
        for index, entry in enumerate(plugins):
            place = f"{where}.plugins[{index}]"
            if entry.plugin_ref in seen:
                self.findings.problem(f"{place}: {entry.plugin_ref} is already in this profile")
                continue
            seen.add(entry.plugin_ref)
            plugin = self.declared.refer(
                place, entry.plugin_ref, Role.FILTER, Role.SCORER, Role.PICKER
            )
            if plugin is None:
                continue
            if entry.weight is not None and plugin.role is not Role.SCORER:
                self.findings.warn(
                    f"{place}: the weight of {plugin.role} {plugin.name} has no effect"
                )
            weight = _WEIGHT if entry.weight is None else entry.weight
            entries.append((plugin, weight))
        return entries

    def _profile_of_all(self) -> SchedulingProfile | None:
        """Return a profile of every declared filter, scorer and picker except the
        `utilization-detector`, or None if it is invalid.

        It applies if the document has no profiles.
        """
        in_profile = {Role.FILTER, Role.SCORER, Role.PICKER}
        entries = [
            (plugin, _WEIGHT)
            for plugin in self.declared.plugins.values()
            if plugin.role in in_profile and plugin.type_name != DETECTOR
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
            self.findings.problem(
                f"{where} has {len(pickers)} pickers, expected at most one: {names}"
            )
            return None
        scorers: list[WeightedScorer] = []
        for plugin, weight in entries:
            if plugin.role is Role.SCORER:
                try:
                    scorers.append(WeightedScorer(plugin.name, plugin.plugin, weight))
                except ValueError as error:
                    self.findings.problem(f"{where}: {error}")
        if self.findings.problems:
            return None
        picker_name, picker = self._picker(pickers)
        filters = [found for plugin, _ in entries if (found := self._filter_of(plugin))]
        if self.findings.problems:
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
            self.findings.problem(f"{where}: {error}")
            return None

    def _filter_of(self, plugin: ConfiguredPlugin) -> NamedFilter | None:
        """Return the filter that `plugin` is, or that it contributes as a scorer.

        Return None if there is no filter, or if the plugin fails or its filter is invalid, which is
        recorded as a problem.
        """
        if plugin.role is Role.FILTER:
            return NamedFilter(plugin.name, plugin.plugin)
        if plugin.role is not Role.SCORER or not plugin.plugin.abilities.brings_filter:
            return None
        try:
            brought = plugin.plugin.filter
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.findings.problem(raised(plugin.where, "filter", error))
            return None
        if brought is None:
            return None
        if fault := declaration_fault(type(brought)):
            self.findings.problem(f"{plugin.where}: {type(brought).__name__} {fault}")
            return None
        return NamedFilter(plugin.name, brought)

    def _picker(self, pickers: Sequence[ConfiguredPlugin]) -> tuple[str, Picker]:
        for plugin in (*pickers, *self.declared.plugins.values()):
            if plugin in pickers or plugin.type_name == _PICKER:
                return plugin.name, plugin.plugin
        return _PICKER, msgspec.convert({}, self.declared.tables.pickers[_PICKER])
