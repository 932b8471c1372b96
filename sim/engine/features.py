"""What an engine is started with beyond the model: features by name, as `--engine` and scenario files
tell them. What each was checked against is in `sim/measurement/evidence.py`.
"""

import argparse
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from epp.core.expectation import misfit
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import PromptCache
from sim.engine.speculation import ACCEPTANCE_TEXT, DRAFT_S, Speculation, speculation_of
from sim.engine.speculative_engine import SpeculativeEngine

RANKS_MAX: Final = 64


class FeatureError(ValueError):
    """A feature cannot be had: one sentence."""


class WholePrompts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--no-enable-chunked-prefill`: a prompt is computed in one pass or waits for one with room."""

    type_name: ClassVar[str] = "whole-prompts"


class Speculative(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--speculative-config`: as many tokens are drafted a pass as there are acceptances."""

    type_name: ClassVar[str] = "speculative"

    acceptance: Annotated[str, Meta(pattern=ACCEPTANCE_TEXT, max_length=1_000)]
    """Of each drafted token the share of the passes that accept it and all before it, as
    `0.7/0.45/0.3`: what vLLM counts by position. At lengths of context where it depends on them, as
    `1024:0.7/0.45/0.3+32768:0.5/0.25/0.1`."""
    draft_s: Annotated[float, Meta(ge=0.0, le=10.0)] = DRAFT_S
    """For each drafted token of a pass, whoever decodes."""

    def __post_init__(self) -> None:
        self.speculation()

    def speculation(self) -> Speculation:
        """The same for the engine."""
        return speculation_of(self.acceptance, self.draft_s)


class Ranks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--data-parallel-size`: engines behind one address, each with a cache of its own."""

    type_name: ClassVar[str] = "ranks"

    count: Annotated[int, Meta(ge=2, le=RANKS_MAX)]
    """The profile is that of one."""


Feature: TypeAlias = WholePrompts | Speculative | Ranks

FEATURES: Final[Mapping[str, type[Feature]]] = {
    feature.type_name: feature for feature in (WholePrompts, Speculative, Ranks)
}


def feature_named(text: str) -> Feature:
    """NAME or NAME:PARAMETER=VALUE,... Raises FeatureError."""
    name, _, told = text.partition(":")
    feature = FEATURES.get(name)
    if feature is None:
        raise FeatureError(
            f"No feature {text!r} of engines; expected one of {', '.join(FEATURES)}."
        )
    fields = feature.__struct_fields__
    parameters: dict[str, str] = {}
    for part in told.split(",") if told else ():
        parameter, equals, value = part.partition("=")
        if not equals or parameter not in fields:
            expected = f"PARAMETER=VALUE with one of {', '.join(fields)}" if fields else "none"
            raise FeatureError(f"No parameter {part!r} of the feature {name}; expected {expected}.")
        parameters[parameter] = value
    try:
        return msgspec.convert(parameters, feature, strict=False)
    except msgspec.ValidationError as problem:
        raise FeatureError(f"{misfit(f'The feature {text!r}', problem, feature)}.") from problem


def features_named(texts: Iterable[str]) -> tuple[Feature, ...]:
    """Each at most once, in the order of `FEATURES`. Raises FeatureError."""
    found: dict[str, Feature] = {}
    for text in texts:
        feature = feature_named(text)
        if feature.type_name in found:
            raise FeatureError(f"The feature {feature.type_name} is told twice; expected it once.")
        found[feature.type_name] = feature
    return tuple(found[name] for name in FEATURES if name in found)


def feature_spelt(feature: Feature) -> str:
    """What `feature_named` is told for it: what is not the default is told."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(feature)}
    told = [
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(feature).items()
        if value != defaults[name]
    ]
    return feature.type_name + (f":{','.join(told)}" if told else "")


def batched_tokens(features: Iterable[Feature], profile: Profile) -> int:
    """`--max-num-batched-tokens` of an engine that is told none."""
    if WholePrompts() in features:
        # As vLLM does, or a prompt as long as the model allows would never fit.
        return max(profile.max_num_batched_tokens, profile.max_model_len_tokens)
    return profile.max_num_batched_tokens


def open_engine(
    features: Iterable[Feature],
    settings: EngineSettings,
    profile: Profile,
    cache: PromptCache | None = None,
) -> Engine:
    """An engine with nothing in it, one rank where there are several."""
    for feature in features:
        if isinstance(feature, Speculative):
            return SpeculativeEngine(settings, profile, feature.speculation(), cache)
    return Engine(settings, profile, cache)


def ranks_of(features: Iterable[Feature]) -> int:
    """Engines behind one address."""
    return next((feature.count for feature in features if isinstance(feature, Ranks)), 1)


def add_feature_flag(parser: "argparse._ActionsContainer") -> None:
    """`--engine`: the texts, for `features_named` when all are there."""
    parser.add_argument(
        "--engine",
        type=_spelt_right,
        action="append",
        default=[],
        metavar="FEATURE[:PARAMETER=VALUE,...]",
        help=f"what engines are started with besides: {', '.join(FEATURES)}; may be repeated",
    )


def _spelt_right(text: str) -> str:
    try:
        feature_named(text)
    except FeatureError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return text
