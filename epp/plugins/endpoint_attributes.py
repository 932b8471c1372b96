"""A filter and a scorer that use any attribute of endpoints, from any producer.

An attribute is a series of the metrics page that the configuration names (`customMetrics` of
`core-metrics-extractor`), or `GPUUtilization` of `dcgm-extractor`. Parameters and formulas are
those of llm-d-router v0.10.
"""

import operator
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta, field

from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
    attribute_key,
)


def _key_of(member: str, attribute: str, producer: str | None) -> str:
    """Return the key under which endpoints hold an attribute.

    Raises `ValueError` for a name with a slash and no separate `producer`.
    """
    if producer is not None:
        return attribute_key(attribute, producer)
    if "/" in attribute:
        name, _, teller = attribute.rpartition("/")
        raise ValueError(
            f"{member} {attribute!r} has a slash but no producer is given; expected {member} "
            f"{name!r} and producer {teller!r}"
        )
    return attribute_key(attribute)


class OnMissing(StrEnum):
    PASS = "Pass"  # noqa: S105  not a password
    FAIL = "Fail"


class Comparison(StrEnum):
    LESS_THAN = "LessThan"
    LESS_THAN_OR_EQUAL = "LessThanOrEqual"
    GREATER_THAN = "GreaterThan"
    GREATER_THAN_OR_EQUAL = "GreaterThanOrEqual"
    EQUAL = "Equal"
    NOT_EQUAL = "NotEqual"


_COMPARE: Final[Mapping[Comparison, Callable[[Floats, float], Any]]] = {
    Comparison.LESS_THAN: operator.lt,
    Comparison.LESS_THAN_OR_EQUAL: operator.le,
    Comparison.GREATER_THAN: operator.gt,
    Comparison.GREATER_THAN_OR_EQUAL: operator.ge,
    Comparison.EQUAL: operator.eq,
    Comparison.NOT_EQUAL: operator.ne,
}


class Threshold(Parameters, frozen=True):
    operator: Comparison
    value: float = 0.0


class FilterAlgorithm(Parameters, frozen=True):
    type: Literal["threshold"]
    threshold: Threshold


class EndpointAttributeFilter(Parameters, frozen=True):
    """Keep endpoints whose `attribute` fulfils a comparison with a value.

    Comparisons are LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual, Equal and NotEqual.
    An endpoint without the attribute stays, unless `on_missing` is `Fail`. If no endpoint
    would stay, `fallback_on_empty` keeps all of them.
    """

    type_name: ClassVar[str] = "endpoint-attribute-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("attribute",), reads_attribute=True)

    attribute: Annotated[str, Meta(min_length=1)]
    algorithm: FilterAlgorithm
    """Rule of the comparison: `type` must be `threshold`, and `threshold` has `operator` and
    `value`.
    """
    producer: str | None = None
    """Producer of the attribute, such as `dcgm-extractor`; None for `core-metrics-extractor`."""
    on_missing: OnMissing = OnMissing.PASS
    fallback_on_empty: bool = False

    def __post_init__(self) -> None:
        _key_of("attribute", self.attribute, self.producer)

    @property
    def attribute_key(self) -> str:
        return _key_of("attribute", self.attribute, self.producer)

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        values = candidates.attribute(self.attribute_key)
        threshold = self.algorithm.threshold
        keep: Bools = _COMPARE[threshold.operator](values, threshold.value)
        unknown = np.isnan(values)
        keep[unknown] = self.on_missing is OnMissing.PASS
        if self.fallback_on_empty and not keep.any():
            keep[:] = True
        return keep


class Direction(StrEnum):
    LOWER = "linear_lower_is_better"
    HIGHER = "linear_higher_is_better"


class FixedRange(Parameters, frozen=True):
    min: float = 0.0
    max: float = 0.0

    def __post_init__(self) -> None:
        if not self.min < self.max:
            raise ValueError(f"fixedRange needs min < max, has min {self.min:g}, max {self.max:g}")


class AdaptiveRange(Parameters, frozen=True):
    """A scoring range from the lowest to the highest attribute value of the candidates."""


class Normalization(Parameters, frozen=True):
    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("normalization has fixedRange and adaptiveRange, expected one")


class ScorerAlgorithm(Parameters, frozen=True):
    type: Direction
    normalization: Normalization = field(default_factory=Normalization)


class EndpointAttributeScorer(Parameters, frozen=True):
    """Prefer endpoints with a low or a high value of an attribute; the score is linear between the
    ends of a range.

    The range of values is `fixed_range`, to which other values are clamped, or else the range from
    the lowest to the highest value of the candidates. If there is no `fixed_range` and all
    values are equal, every endpoint with the attribute scores 1. An endpoint without the attribute scores 0.
    """

    type_name: ClassVar[str] = "endpoint-attribute-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("attribute",), reads_attribute=True)

    attribute_name: Annotated[str, Meta(min_length=1)] = field(name="attributeKey")
    """Name of the endpoints' attribute to score."""
    algorithm: ScorerAlgorithm
    """Scoring rule: `type` is `linear_lower_is_better` or `linear_higher_is_better`, and
    `normalization` has `fixedRange` {`min`, `max`} or `adaptiveRange`, which is the default.
    """
    producer: str | None = None
    """Producer of the attribute, such as `dcgm-extractor`; None for `core-metrics-extractor`."""

    def __post_init__(self) -> None:
        _key_of("attributeKey", self.attribute_name, self.producer)

    @property
    def attribute_key(self) -> str:
        return _key_of("attributeKey", self.attribute_name, self.producer)

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        values = candidates.attribute(self.attribute_key)
        unknown = np.isnan(values)
        if unknown.all():
            return np.zeros(len(values))
        fixed = self.algorithm.normalization.fixed_range
        if fixed is None:
            least, most = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
        else:
            least, most = fixed.min, fixed.max
        if least == most:
            scores = np.ones(len(values))
        else:
            # The terms are halved, because the difference of two floats may overflow.
            scores = (values / 2 - least / 2) / (most / 2 - least / 2)
            np.clip(scores, 0.0, 1.0, out=scores)
            if self.algorithm.type is Direction.LOWER:
                scores = 1.0 - scores
        scores[unknown] = 0.0
        return scores
