"""Rules that keep some of the endpoints' room for requests of higher priority.

A ceiling is the load, as a share of an endpoint's room, up to which requests of one priority may use
it. The types, parameters and formulas are those of llm-d-router.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Protocol

from msgspec import Meta

from epp.core.parameters import Parameters


class CeilingPolicy(Protocol):
    """A rule that gives each priority a ceiling: the load of an endpoint, as a share of its room,
    up to which requests of this priority may use it.
    """

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float]:
        """Return the ceiling of each of `priorities`, which are those of all bands, highest first.

        `saturation` is the mean load of the endpoints.
        """
        ...


class StaticCeiling(Parameters, frozen=True):
    """Give every priority the same ceiling.

    Requests wait while each endpoint that may serve them is loaded to `threshold` or more.
    """

    type_name: ClassVar[str] = "static-usage-limit-policy"

    threshold: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Ceiling of every priority, as a share of an endpoint's room."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float]:
        return dict.fromkeys(priorities, self.threshold)


class HoldbackShape(StrEnum):
    """The course of the ceilings between the highest and the lowest priority."""

    LINEAR = "linear"


class HoldbackDomain(StrEnum):
    """The property of a priority on which the ceilings depend."""

    RANK = "rank"
    VALUE = "value"


class PriorityHoldback(Parameters, frozen=True):
    """Give the highest priority the ceiling `max_ceiling`, the lowest one `min_ceiling`, and others
    ceilings between them.

    The ceilings fall by rank, ceiling = max - rank * (max - min) / (N - 1), or by the value of the
    priority. One band alone has `max_ceiling`.
    """

    type_name: ClassVar[str] = "priority-holdback-policy"

    min_ceiling: Annotated[float, Meta(ge=0, lt=1)]
    max_ceiling: Annotated[float, Meta(gt=0, le=1)] = 1.0
    shape: HoldbackShape = HoldbackShape.LINEAR
    """Course of the ceilings between the highest and the lowest priority."""
    domain: HoldbackDomain = HoldbackDomain.RANK
    """The property of a priority that determines its ceiling: its rank or its value."""

    def __post_init__(self) -> None:
        if self.min_ceiling > self.max_ceiling:
            raise ValueError(
                f"minCeiling is {self.min_ceiling:g}; it must be at most maxCeiling "
                f"{self.max_ceiling:g}"
            )

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float]:
        least, most = self.min_ceiling, self.max_ceiling
        if len(priorities) == 1:
            return {priorities[0]: most}
        if self.domain is HoldbackDomain.RANK:
            step = (most - least) / (len(priorities) - 1)
            return {priority: most - rank * step for rank, priority in enumerate(priorities)}
        highest, lowest = priorities[0], priorities[-1]
        return {
            priority: least + (priority - lowest) / (highest - lowest) * (most - least)
            for priority in priorities
        }


class SoftReflectiveCeiling(Parameters, frozen=True):
    """Lower the ceilings of lower priorities as the load of the pool rises.

    The ceiling of the band with rank i of N is 1 - i * saturation / (N - 1). The mean load of the
    pool counts, at most 1. llm-d-router opens a closed band in some of its cycles; here it stays
    closed until the load falls.
    """

    type_name: ClassVar[str] = "soft-reflective-ceiling-policy"

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float]:
        last = max(1, len(priorities) - 1)
        step = min(saturation, 1.0) / last
        return {priority: 1.0 - rank * step for rank, priority in enumerate(priorities)}
