"""Optional features of a simulated engine by name, as `--engine` and scenario files specify them.
`sim/measurement/evidence.py` lists the evidence for each.
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
    """The name or a parameter of an engine feature is unknown or invalid. The message is one
    sentence.
    """


class WholePrompts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine feature of vLLM's `--no-enable-chunked-prefill`: each prompt is computed in one
    pass, or waits for a pass with room for it.
    """

    type_name: ClassVar[str] = "whole-prompts"


class Speculative(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine feature of vLLM's `--speculative-config`. The number of draft tokens per pass is
    the number of values in `acceptance`.
    """

    type_name: ClassVar[str] = "speculative"

    acceptance: Annotated[str, Meta(pattern=ACCEPTANCE_TEXT, max_length=1_000)]
    """Acceptance of each draft token, such as `0.7/0.45/0.3`: the share of the passes that accept
    it and all before it, as vLLM counts by position. For acceptance by context length, use
    `1024:0.7/0.45/0.3+32768:0.5/0.25/0.1`."""
    draft_s: Annotated[float, Meta(ge=0.0, le=10.0)] = DRAFT_S
    """Time in seconds to draft one token in a pass, for any number of decoding requests."""

    def __post_init__(self) -> None:
        self.speculation()

    def speculation(self) -> Speculation:
        """Return the speculative decoding that the parameters `acceptance` and `draft_s` describe,
        in the form that the engine uses.
        """
        return speculation_of(self.acceptance, self.draft_s)


class Ranks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine feature of vLLM's `--data-parallel-size`: several engines behind one address, each
    with its own KV cache.
    """

    type_name: ClassVar[str] = "ranks"

    count: Annotated[int, Meta(ge=2, le=RANKS_MAX)]
    """Number of data-parallel ranks. The pod's profile describes one rank."""


Feature: TypeAlias = WholePrompts | Speculative | Ranks

FEATURES: Final[Mapping[str, type[Feature]]] = {
    feature.type_name: feature for feature in (WholePrompts, Speculative, Ranks)
}


def feature_named(text: str) -> Feature:
    """Return the engine feature that a text NAME or NAME:PARAMETER=VALUE,... describes. Raises
    `FeatureError` if it describes none.
    """
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
    """Return the engine features that the texts describe, in the order of `FEATURES`. Raises
    `FeatureError` if a text is invalid or a feature is named twice.
    """
    found: dict[str, Feature] = {}
    for text in texts:
        feature = feature_named(text)
        if feature.type_name in found:
            raise FeatureError(f"The feature {feature.type_name} is given twice; expected once.")
        found[feature.type_name] = feature
    return tuple(found[name] for name in FEATURES if name in found)


def feature_spelt(feature: Feature) -> str:
    """Return the text of an engine feature as `--engine` accepts it. Parameters with default values
    are left out.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(feature)}
    told = [
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(feature).items()
        if value != defaults[name]
    ]
    return feature.type_name + (f":{','.join(told)}" if told else "")


def batched_tokens(features: Iterable[Feature], profile: Profile) -> int:
    """Return `max_num_batched_tokens` of an engine with these features if no flag sets it: that of
    the profile, but without chunked prefill at least the model's maximum length.
    """
    if WholePrompts() in features:
        # As in vLLM, a prompt of the model's maximum length must fit into one pass.
        return max(profile.max_num_batched_tokens, profile.max_model_len_tokens)
    return profile.max_num_batched_tokens


def open_engine(
    features: Iterable[Feature],
    settings: EngineSettings,
    profile: Profile,
    cache: PromptCache | None = None,
) -> Engine:
    """Return a new engine with these features, without requests. If the features include
    data-parallel ranks, it is the engine of one rank.
    """
    for feature in features:
        if isinstance(feature, Speculative):
            return SpeculativeEngine(settings, profile, feature.speculation(), cache)
    return Engine(settings, profile, cache)


def ranks_of(features: Iterable[Feature]) -> int:
    """Return the number of data-parallel ranks of a pod with these features; 1 if none of them is
    `Ranks`.
    """
    return next((feature.count for feature in features if isinstance(feature, Ranks)), 1)


def add_feature_flag(parser: "argparse._ActionsContainer") -> None:
    """Add the flag `--engine`, whose texts `features_named` converts to features."""
    parser.add_argument(
        "--engine",
        type=_spelt_right,
        action="append",
        default=[],
        metavar="FEATURE[:PARAMETER=VALUE,...]",
        help=f"optional engine feature: {', '.join(FEATURES)}; may be repeated",
    )


def _spelt_right(text: str) -> str:
    try:
        feature_named(text)
    except FeatureError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return text
