"""The stages of a configuration document: the profile of each stage, and the rule by which it runs."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from epp.configuration.declared_plugins import ConfiguredPlugin, Role
from epp.configuration.disaggregation import (
    HEADER_HANDLER,
    STAGE_HANDLERS,
    TIME_DECIDER,
    HeaderHandler,
    StageNames,
)
from epp.configuration.document import nearest
from epp.configuration.profile_sections import ProfileSections
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.stages import ByTime, Never, Order, PrefillRule, Rule, Stages, Uncached
from epp.core.types import Stage


class StageSections:
    """The reader of the section `schedulingProfiles` and of the plugins that split requests into
    stages.
    """

    def __init__(self, profiles: ProfileSections) -> None:
        self.profiles = profiles
        self.declared = profiles.declared
        self.findings = profiles.findings
        self.counts_uncached: ConfiguredPlugin | None = None
        """Decider that counts uncached prompt tokens, which needs a prefix index; None if there is
        no such decider.
        """

    def acting(self, value: Any) -> Stages | None:
        """Return the stages that place requests, or None if the document has a problem there, which
        is recorded in `findings`.

        `value` is the section `schedulingProfiles`.
        """
        stages = self._acting(value)
        screen = self.profiles.screen()
        return stages if stages is None or screen is None else replace(stages, screen=screen)

    def _acting(self, value: Any) -> Stages | None:
        """Return the stages, still without the filters that apply before them; None if the document
        has a problem there, which is recorded.
        """
        declared = self.declared.plugins.values()
        of_stages = (*STAGE_HANDLERS, HEADER_HANDLER)
        handlers = [plugin for plugin in declared if plugin.type_name in of_stages]
        for more in handlers[1:]:
            self.findings.problem(
                f"{more.where}: only one handler of stages is allowed, and {handlers[0].name} is "
                "declared before it"
            )
        if handlers and handlers[0].type_name == HEADER_HANDLER:
            return self._named_by(handlers[0], value)
        if handlers:
            return self._stages_by(handlers[0], value)
        if self.declared.stages_unknown:
            return None
        for plugin in declared:
            if plugin.role is Role.DECIDER:
                self.findings.warn(
                    f"{plugin.where}: no disagg-profile-handler names it, so it has no effect"
                )
        profile = self.profiles.acting(value)
        return None if profile is None else Stages(decode=profile)

    def _named_by(self, handler: ConfiguredPlugin, value: Any) -> Stages | None:
        """Return the profiles among which a request header chooses. Return None if one of them is
        invalid or the default profile is missing, which is recorded.
        """
        settings: HeaderHandler = handler.plugin
        places = self.profiles.by_name(value)
        named = {
            name: profile
            for name, (where, spec) in places.items()
            if (profile := self.profiles.profile_of(where, spec, responds=True)) is not None
        }
        if not places and not self.findings.problems:
            alone = self.profiles.acting(value)
            named = {} if alone is None else {alone.name: alone}
        rules = [one for one in self.declared.plugins.values() if one.role is Role.DECIDER]
        counting = [one for one in rules if isinstance(one.plugin.rule, Uncached)]
        for decider in (one for one in rules if one not in counting[:1]):
            self.findings.warn(
                f"{decider.where}: has no effect, because the header of {handler.name} says which "
                "stage runs"
            )
        default = settings.default_profile if len(named) > 1 else next(iter(named), "")
        if default not in named and not self.findings.problems:
            self.findings.problem(
                f"{handler.where}: defaultProfile {default} is not in schedulingProfiles"
                f"{nearest(default, places)}"
            )
        if self.findings.problems:
            return None
        rule: Rule = counting[0].plugin.rule if counting else Never()
        if isinstance(rule, Uncached) and rule.tokens:
            self.counts_uncached = counting[0]
        return Stages(
            decode=named[default],
            prefill_if=rule,
            named=named,
            header=settings.header_name.lower(),
        )

    def _stages_by(self, handler: ConfiguredPlugin, value: Any) -> Stages | None:
        """Return the stages whose profiles and deciders `handler` names, or None if one of them is
        invalid, which is recorded.
        """
        names: StageNames = handler.plugin.stages
        places = self.profiles.by_name(value)
        by_stage = self._profiles(handler, names, places)
        prefill_if, encode_if = self._rules(handler, names, places)
        for name, (where, _) in places.items():
            if name not in names.profiles.values():
                self.findings.warn(f"{where}: no stage uses profile {name}, so it has no effect")
        if self.findings.problems:
            return None
        return Stages(
            decode=by_stage[Stage.DECODE],
            prefill=by_stage.get(Stage.PREFILL),
            encode=by_stage.get(Stage.ENCODE),
            prefill_if=prefill_if,
            encode_if=encode_if,
            order=names.order,
            fallback=by_stage.get("fallback"),
            prefill_end=names.prefill_end,
            prefill_deadline_s=names.prefill_deadline_s,
        )

    def _profiles(
        self, handler: ConfiguredPlugin, names: StageNames, places: Mapping[str, tuple[str, Any]]
    ) -> dict[str, SchedulingProfile]:
        """Return the profile of each stage by its name, and that of `fallback`. Two stages can
        share a profile. A missing profile is recorded as a problem if it is that of the decode
        stage or if the document names it.
        """
        found: dict[str, SchedulingProfile] = {}
        for stage, name in names.profiles.items():
            if name not in places:
                if stage in names.given or stage == Stage.DECODE:
                    self.findings.problem(
                        f"{handler.where}: profile {name} of stage {stage} is not in "
                        f"schedulingProfiles{nearest(name, places)}"
                    )
                continue
            if name not in found:
                where, spec = places[name]
                profile = self.profiles.profile_of(where, spec, responds=stage == Stage.DECODE)
                if profile is not None:
                    found[name] = profile
        return {stage: found[name] for stage, name in names.profiles.items() if name in found}

    def _rules(
        self, handler: ConfiguredPlugin, names: StageNames, places: Mapping[str, object]
    ) -> tuple[PrefillRule, Rule]:
        """Return the rules of the stages prefill and encode. The rule of a stage without a decider
        or without a profile is `Never`, which the order `PREFILL_FIRST` ignores for prefill. Warn
        of deciders that `handler` does not name.
        """
        prefill_if: PrefillRule = Never()
        encode_if: Rule = Never()
        decider = self._decider(Stage.PREFILL, handler, names, places)
        if decider is not None:
            prefill_if = decider.plugin.rule
            if isinstance(prefill_if, ByTime) or (
                isinstance(prefill_if, Uncached) and prefill_if.tokens
            ):
                self.counts_uncached = decider
        decider = self._decider(Stage.ENCODE, handler, names, places)
        if decider is not None:
            encode_if = decider.plugin.rule
        for plugin in self.declared.plugins.values():
            if plugin.role is Role.DECIDER and plugin.name not in names.deciders.values():
                self.findings.warn(
                    f"{plugin.where}: {handler.name} does not name it, so it has no effect"
                )
        return prefill_if, encode_if

    def _decider(
        self,
        stage: Stage,
        handler: ConfiguredPlugin,
        names: StageNames,
        places: Mapping[str, object],
    ) -> ConfiguredPlugin | None:
        """Return the decider of `stage`, or None if it has none, if the stage has no profile, or if
        the decider does not fit. `findings` then gets a warning or a problem, except if no decider
        is named for a stage that has no profile or always runs.
        """
        there = names.profiles.get(stage) in places
        always = names.order is Order.PREFILL_FIRST and stage is Stage.PREFILL
        name = names.deciders.get(stage)
        if name is None:
            if there and not always:
                self.findings.warn(
                    f"{handler.where}: stage {stage} never runs, because deciders.{stage} names no "
                    "decider"
                )
            return None
        decider = self.declared.refer(f"{handler.where}: deciders.{stage}", name, Role.DECIDER)
        by_time = decider is not None and decider.type_name == TIME_DECIDER
        if always and decider is not None and not by_time:
            self.findings.problem(
                f"{handler.where}: deciders.prefill {name} contradicts stageOrder prefill-first, "
                "which prefills every request elsewhere: remove one of the two"
            )
            return None
        if by_time and stage is Stage.ENCODE:
            self.findings.problem(
                f"{handler.where}: deciders.encode {name} is a rule of the prefill stage; expected "
                "always-disagg-multimodal-decider"
            )
            return None
        if decider is not None and not there:
            self.findings.warn(
                f"{decider.where}: has no effect, because there is no profile of {stage}"
            )
            return None
        return decider
