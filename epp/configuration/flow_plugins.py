"""The plug-in types of flow control and their parameters, as llm-d-router spells them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, field

from epp.core.flow.band_selection import StrictBandSelection, WeightedBandSelection
from epp.core.flow.ceilings import PriorityHoldback, SoftReflectiveCeiling, StaticCeiling
from epp.core.flow.detectors import RoomDetector
from epp.core.flow.settings import HALF_LIFE_S, Fairness, Ordering
from epp.core.parameters import Parameters
from epp.core.types import Stage


class GlobalStrictFairness(Parameters, frozen=True):
    """`global-strict-fairness-policy`: the band is one queue, whatever flow a request belongs to."""

    fairness: ClassVar[Fairness] = Fairness.NONE


class RoundRobinFairness(Parameters, frozen=True):
    """`round-robin-fairness-policy`: the flow that was charged the fewest requests is next."""

    fairness: ClassVar[Fairness] = Fairness.REQUESTS


class TokenFairness(Parameters, frozen=True):
    """`token-fairness-policy`: the flow that was charged the fewest tokens is next.

    A request that waited is charged its uncached prompt tokens and twice its expected answer tokens.
    The charge is corrected at the end if the picker reads the usage. A flow with weight 2 gets twice the tokens.
    """

    fairness: ClassVar[Fairness] = Fairness.TOKENS

    weights: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """Weight of a flow by its id; 1 for others."""


class ServiceStrategy(StrEnum):
    """The order in which flows are served, which llm-d-router calls programs; it knows only the
    least attained service.
    """

    LAS = "las"


class ProgramAwareFairness(Parameters, frozen=True):
    """`program-aware-fairness`: the flow that was charged the fewest tokens lately is next.

    A charge loses half of its weight in each `las_half_life_seconds`. The flow is charged when a
    request that waited is placed, not when it ends, so that a burst is not free.
    """

    fairness: ClassVar[Fairness] = Fairness.DECAYING_TOKENS

    strategy: ServiceStrategy = ServiceStrategy.LAS
    """Order of the flows; `las` is the only value."""
    eviction_ttl_seconds: Annotated[float, Meta(gt=0)] = 3_600.0
    """No effect: flows are forgotten when too many are known."""
    eviction_sweep_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """No effect: flows are forgotten when too many are known."""
    las_weight_service: Annotated[float, Meta(ge=0)] = 0.8
    """No effect: the charged tokens alone decide."""
    las_weight_head_wait: Annotated[float, Meta(ge=0)] = 0.2
    """No effect: the charged tokens alone decide."""
    las_half_life_seconds: Annotated[float, Meta(gt=0)] = HALF_LIFE_S


class FcfsOrdering(Parameters, frozen=True):
    """`fcfs-ordering-policy`: requests of a flow are placed in the order of their arrival."""

    ordering: ClassVar[Ordering] = Ordering.ARRIVAL


class EdfOrdering(Parameters, frozen=True):
    """`edf-ordering-policy`: the request of a flow whose wait ends first is placed first.

    This order differs from the order of arrival only for requests with the header
    `x-llm-d-inference-ttl`.
    """

    ordering: ClassVar[Ordering] = Ordering.DEADLINE


class SloDeadlineOrdering(Parameters, frozen=True):
    """`slo-deadline-ordering-policy`: the request of a flow whose first token is due first is placed
    first.

    The header `x-llm-d-slo-ttft-ms` gives the time. A request without it is due when its wait ends.
    """

    ordering: ClassVar[Ordering] = Ordering.FIRST_OUTPUT


class MaxSaturationDetector(Parameters, frozen=True):
    """`max-saturation-detector`: the load of an endpoint is the largest that several detectors see.

    `stages` limits a detector to some stages of a configuration with several.
    """

    detectors: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names of the declared detectors, of which the largest load counts."""
    stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict)
    """Stages, `prefill` or `decode`, that a detector judges, by its name; all if it has none."""


FAIRNESS: Final[Mapping[str, type[Any]]] = {
    "global-strict-fairness-policy": GlobalStrictFairness,
    "round-robin-fairness-policy": RoundRobinFairness,
    "program-aware-fairness": ProgramAwareFairness,
    "token-fairness-policy": TokenFairness,
}
ORDERINGS: Final[Mapping[str, type[Any]]] = {
    "fcfs-ordering-policy": FcfsOrdering,
    "edf-ordering-policy": EdfOrdering,
    "slo-deadline-ordering-policy": SloDeadlineOrdering,
}
BAND_SELECTIONS: Final[Mapping[str, type[Any]]] = {
    kind.type_name: kind for kind in (StrictBandSelection, WeightedBandSelection)
}
CEILINGS: Final[Mapping[str, type[Any]]] = {
    kind.type_name: kind for kind in (StaticCeiling, PriorityHoldback, SoftReflectiveCeiling)
}
DETECTORS: Final[Mapping[str, type[Any]]] = {
    RoomDetector.type_name: RoomDetector,
    "max-saturation-detector": MaxSaturationDetector,
}
"""Detectors that are no filters. `utilization-detector` and `concurrency-detector` are both."""
FLOW_PLUGINS: Final[Mapping[str, type[Any]]] = {
    **FAIRNESS,
    **ORDERINGS,
    **BAND_SELECTIONS,
    **CEILINGS,
    **DETECTORS,
}
