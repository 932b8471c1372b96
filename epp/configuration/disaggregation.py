"""The plugins that split a request into stages: profile handlers and deciders.

Names, defaults and edge cases are those of llm-d/llm-d-router,
`scheduling/profilehandler/disagg`. `profiles.fallback` follows its pull request 2638. `prefillEnd`
and `time-based-pd-decider` are additions.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from epp.core.abilities import Abilities
from epp.core.decision.stages import Always, Multimodal, Order, PrefillEnd, Rule, Uncached
from epp.core.duration import Duration, check_above_zero
from epp.core.parameters import Parameters
from epp.core.types import Seconds, Stage
from epp.plugins.stage_time import RemotePrefillTimes

_Name = Annotated[str, Meta(min_length=1)]

_ORDERS: Final[Mapping[str, Order]] = {
    "decodefirst": Order.DECODE_FIRST,
    "decode": Order.DECODE_FIRST,
    "prefillfirst": Order.PREFILL_FIRST,
    "prefill": Order.PREFILL_FIRST,
}
_FALLBACK: Final = "fallback"
STAGE_HANDLER: Final = "disagg-profile-handler"
PD_DECIDER: Final = "prefix-based-pd-decider"
"""Name of the decider that a `pd-profile-handler` has if the document names none."""
TIME_DECIDER: Final = "time-based-pd-decider"
STAGE_PARAMETERS: Final[Mapping[str, tuple[str, str]]] = {
    "decodeProfile": ("profiles", "decode"),
    "prefillProfile": ("profiles", "prefill"),
    "encodeProfile": ("profiles", "encode"),
    "prefillDeciderPluginName": ("deciders", "prefill"),
    "encodeDeciderPluginName": ("deciders", "encode"),
    "deciderPluginName": ("deciders", "prefill"),
}
"""Name of each deprecated parameter of a handler of stages, with the two names under which the
present form has it. The first one that a document gives takes precedence.
"""


class StageNames(Struct, frozen=True, kw_only=True):
    """The names of the profiles and deciders that a handler of stages uses, with its other
    settings.
    """

    profiles: Mapping[str, str]
    """Name of the profile of each stage and of `fallback`, by stage or "fallback"."""
    given: frozenset[str]
    """Stages whose profile the document names, so that a profile of that name must exist."""
    deciders: Mapping[Stage, str]
    """Name of the decider of each stage that has one, by stage."""
    order: Order = Order.DECODE_FIRST
    prefill_end: PrefillEnd = PrefillEnd.HEADERS
    prefill_deadline_s: Seconds = 60.0


class StageProfiles(Parameters, frozen=True):
    """The names of the profiles of the stages."""

    decode: _Name | None = None
    """Name of the profile of the decode stage; `decode` if not given."""
    prefill: _Name | None = None
    """Name of the profile of the prefill stage; `prefill` if not given. The stage does not exist if
    no such profile is declared.
    """
    encode: _Name | None = None
    """Name of the profile of the encode stage; `encode` if not given. The stage does not exist if
    no such profile is declared.
    """
    fallback: _Name | None = None
    """Name of the profile that chooses one endpoint for the whole request if the prefill or encode
    stage must run and has no endpoint. If not given, such a request is refused.
    """


class StageDeciders(Parameters, frozen=True):
    """The names of the deciders of the stages. A decider says for which requests a stage runs."""

    prefill: _Name | None = None
    """Name of the plugin that decides whether the prefill stage runs. The stage never runs without
    one, unless prefill is chosen first.
    """
    encode: _Name | None = None
    """Name of the plugin that decides whether the encode stage runs. The stage never runs without
    one.
    """


class DisaggHandler(Parameters, frozen=True):
    """`disagg-profile-handler`: choose an endpoint for each of the stages decode, prefill and encode.

    The gateway sends the request to the decode endpoint. The headers `x-prefiller-host-port` and
    `x-encoder-hosts-ports` name the others to its sidecar.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)

    stage_order: str = Order.DECODE_FIRST.value
    """Stage whose endpoint is chosen first: `decode-first` or `prefill-first`. With
    `prefill-first`, prefill runs for every request that may be prefilled elsewhere, unless its decider
    is `time-based-pd-decider`, and the decode endpoint is chosen near the prefill endpoint.
    """
    profiles: StageProfiles | None = None
    """Names of the profiles, one for each stage of a request. Cannot be combined with the deprecated
    parameters.
    """
    deciders: StageDeciders | None = None
    """Names of the plugins that decide whether the prefill and the encode stage run, one for each.
    Cannot be combined with the deprecated parameters.
    """
    prefill_end: PrefillEnd = PrefillEnd.HEADERS
    """Sign that prefill has ended: `headers` of the response, or `output`, its first bytes. Set
    `output` for sidecars that start prefill and decode at once (SGLang, Mooncake).
    """
    prefill_deadline: Duration = Duration(60.0)
    """Time after which a prefill that neither answered nor failed is counted as overdue, and
    `epp explain` names its pair of endpoints. The request continues.
    """
    decode_profile: _Name | None = None
    """Deprecated; use `profiles.decode`."""
    prefill_profile: _Name | None = None
    """Deprecated; use `profiles.prefill`."""
    encode_profile: _Name | None = None
    """Deprecated; use `profiles.encode`."""
    prefill_decider_plugin_name: _Name | None = None
    """Deprecated; use `deciders.prefill`."""
    encode_decider_plugin_name: _Name | None = None
    """Deprecated; use `deciders.encode`."""
    decider_plugin_name: _Name | None = None
    """Deprecated; use `deciders.prefill`. Ignored if `prefillDeciderPluginName` is set."""

    def __post_init__(self) -> None:
        if _spelt(self.stage_order) not in _ORDERS:
            raise ValueError(
                f"stageOrder is {self.stage_order!r}; it must be decode-first or prefill-first"
            )
        check_above_zero("prefillDeadline", self.prefill_deadline)
        nested = self._nested
        if nested and self.flat:
            raise ValueError(
                f"{' and '.join(nested)} cannot be combined with the deprecated "
                f"{', '.join(self.flat)}; use profiles and deciders only"
            )

    @property
    def flat(self) -> Mapping[str, str]:
        """Return the replacement of each deprecated parameter that the document sets, by the name
        of the parameter.
        """
        told = {
            "decodeProfile": self.decode_profile,
            "prefillProfile": self.prefill_profile,
            "encodeProfile": self.encode_profile,
            "prefillDeciderPluginName": self.prefill_decider_plugin_name,
            "encodeDeciderPluginName": self.encode_decider_plugin_name,
            "deciderPluginName": self.decider_plugin_name,
        }
        return {
            name: ".".join(STAGE_PARAMETERS[name])
            for name, value in told.items()
            if value is not None
        }

    @property
    def _nested(self) -> list[str]:
        told = {"profiles": self.profiles, "deciders": self.deciders}
        return [name for name, value in told.items() if value is not None]

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{name} is deprecated, use {newer}" for name, newer in self.flat.items())

    @property
    def stages(self) -> StageNames:
        """Return the names of the profiles and deciders that these parameters select, with the
        defaults filled in.
        """
        profiles, deciders = self.profiles or StageProfiles(), self.deciders or StageDeciders()
        named = {
            Stage.DECODE.value: profiles.decode or self.decode_profile,
            Stage.PREFILL.value: profiles.prefill or self.prefill_profile,
            Stage.ENCODE.value: profiles.encode or self.encode_profile,
            _FALLBACK: profiles.fallback,
        }
        prefill_decider = self.prefill_decider_plugin_name or self.decider_plugin_name
        return _stage_names(
            named,
            deciders.prefill or prefill_decider,
            deciders.encode or self.encode_decider_plugin_name,
            order=_ORDERS[_spelt(self.stage_order)],
            prefill_end=self.prefill_end,
            prefill_deadline_s=float(self.prefill_deadline),
        )


class PdHandler(Parameters, frozen=True):
    """`pd-profile-handler`: the older form of `disagg-profile-handler`, for the stages decode and
    prefill only.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)

    decode_profile: _Name | None = None
    """Name of the profile of the decode stage; `decode` if not given."""
    prefill_profile: _Name | None = None
    """Name of the profile of the prefill stage; `prefill` if not given."""
    decider_plugin_name: _Name = PD_DECIDER
    """Name of the plugin that decides whether the prefill stage runs."""
    primary_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Accepted without effect; set `primaryPort` of `data-parallel-profile-handler` instead."""
    prefix_plugin_type: str = ""
    """No effect, because the decider reads the index that fills the matched blocks of scorers."""
    prefix_plugin_name: str = ""
    """No effect, because the decider reads the index that fills the matched blocks of scorers."""
    prefix_match_info_producer_name: str = ""
    """No effect, because the decider reads the index that fills the matched blocks of scorers."""

    def warnings(self) -> tuple[str, ...]:
        told = {
            "primaryPort": self.primary_port,
            "prefixPluginType": self.prefix_plugin_type,
            "prefixPluginName": self.prefix_plugin_name,
            "prefixMatchInfoProducerName": self.prefix_match_info_producer_name,
        }
        return (
            "type pd-profile-handler is deprecated, use disagg-profile-handler",
            *(f"{name} has no effect" for name, value in told.items() if value),
        )

    @property
    def stages(self) -> StageNames:
        """Return the names of the profiles and deciders that these parameters select, with the
        defaults filled in.
        """
        named = {
            Stage.DECODE.value: self.decode_profile,
            Stage.PREFILL.value: self.prefill_profile,
        }
        return _stage_names(named, self.decider_plugin_name, None)


class HeaderHandler(Parameters, frozen=True):
    """`header-profile-handler`: a request header names the profile that chooses the endpoint.

    A coordinator sends one request for each of the stages encode, prefill and decode. A profile with
    the name of a stage does the work of that stage: load, prefixes and media are recorded for it. A
    request with an unknown name is refused with 400. A single profile serves all requests, whatever
    the header says.

    A request with the header `Prefer: if-available` is refused with 412, and counted at no endpoint,
    if the chosen endpoint has too little of the prompt cached. If `prefix-based-pd-decider`
    decides on prefill, that is so if at least `nonCachedTokens` prompt tokens are uncached, but never
    if `nonCachedTokens` is 0 or the prompt has fewer than `promptTokens` tokens. If another plugin or
    none decides, the endpoint must have at least one block of the prompt cached.
    """

    header_name: _Name = "EPP-Profile"
    """Name of the request header whose value is the name of the profile that chooses the endpoint.
    """
    default_profile: _Name = Stage.DECODE.value
    """Name of the profile for requests without the header."""


class StageHeaders(Parameters, frozen=True):
    """`disagg-headers-handler` and `prefill-header-handler`: no effect, because the picker always
    sets the headers that name the endpoints of stages.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)

    prefill_profile: str = ""
    """No effect, because the whole plugin has no effect."""
    encode_profile: str = ""
    """No effect, because the whole plugin has no effect."""

    def warnings(self) -> tuple[str, ...]:
        return ("has no effect, because the headers of stages are always set: remove it",)


class PrefixDecider(Parameters, frozen=True):
    """`prefix-based-pd-decider`: run prefill at another endpoint than decode if enough of the
    prompt is not cached at the decode endpoint.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)

    non_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Smallest number of uncached prompt tokens for which prefill runs elsewhere; 0 for never."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Smallest length of a prompt in tokens for which prefill may run elsewhere, in addition to the
    condition `nonCachedTokens`.
    """

    def warnings(self) -> tuple[str, ...]:
        if self.non_cached_tokens:
            return ()
        return ("nonCachedTokens is 0, which means never: prefill does not run elsewhere",)

    @property
    def rule(self) -> Rule:
        """Return the rule of this decider, by which a stage runs if enough prompt tokens are
        uncached.
        """
        return Uncached(self.non_cached_tokens, self.prompt_tokens)


class AlwaysDecider(Parameters, frozen=True):
    """`always-disagg-pd-decider`: run the stage that names this decider (prefill or encode) at
    another endpoint than decode, for every request for which this is possible.
    """

    @property
    def rule(self) -> Rule:
        """Return the rule of this decider, by which a stage runs for every request."""
        return Always()


class TimeDecider(RemotePrefillTimes, frozen=True, dict=True):
    """`time-based-pd-decider`: run prefill at another endpoint than decode if this saves time. The
    decider compares the times until the decode endpoint has the KV cache of the prompt.

    The stage is never required: if no prefill endpoint is ready, the decode endpoint prefills.
    """


class MultimodalDecider(Parameters, frozen=True):
    """`always-disagg-multimodal-decider`: run the stage that names this decider (prefill or encode)
    at another endpoint than decode, for prompts with an image, audio or video.
    """

    @property
    def rule(self) -> Rule:
        """Return the rule of this decider, by which a stage runs for prompts with media."""
        return Multimodal()


STAGE_HANDLERS: Final[Mapping[str, type[Parameters]]] = {
    STAGE_HANDLER: DisaggHandler,
    "pd-profile-handler": PdHandler,
}
HEADER_HANDLER: Final = "header-profile-handler"
_KEPT: Final = ("stageOrder", "prefillEnd", "prefillDeadline")
STAGE_HEADERS: Final = ("disagg-headers-handler", "prefill-header-handler")
DECIDERS: Final[Mapping[str, type[Parameters]]] = {
    PD_DECIDER: PrefixDecider,
    "always-disagg-pd-decider": AlwaysDecider,
    "always-disagg-multimodal-decider": MultimodalDecider,
    TIME_DECIDER: TimeDecider,
}


def nested_stages(told: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of a handler of stages in the present form, with `profiles` and
    `deciders`. `told` has them by the names in a document, deprecated ones included.
    """
    kept = {name: value for name, value in told.items() if name in _KEPT}
    nested: dict[str, dict[str, object]] = {}
    for name, (member, stage) in STAGE_PARAMETERS.items():
        if name in told:
            nested.setdefault(member, {}).setdefault(stage, told[name])
    return {**kept, **nested}


def _stage_names(
    named: Mapping[str, str | None],
    prefill_decider: str | None,
    encode_decider: str | None,
    *,
    order: Order = Order.DECODE_FIRST,
    prefill_end: PrefillEnd = PrefillEnd.HEADERS,
    prefill_deadline_s: Seconds = 60.0,
) -> StageNames:
    profiles = {
        stage: name or stage
        for stage, name in named.items()
        if name is not None or stage != _FALLBACK
    }
    deciders = {Stage.PREFILL: prefill_decider, Stage.ENCODE: encode_decider}
    return StageNames(
        profiles=profiles,
        given=frozenset(stage for stage, name in named.items() if name is not None),
        deciders={stage: name for stage, name in deciders.items() if name is not None},
        order=order,
        prefill_end=prefill_end,
        prefill_deadline_s=prefill_deadline_s,
    )


def _spelt(order: str) -> str:
    return order.lower().replace("-", "").replace("_", "")
