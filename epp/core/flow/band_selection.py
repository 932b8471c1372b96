"""Rules by which the bands of the queue take turns.

llm-d-router has the reference `bandSelectionPolicyPluginRef` and the strict rule. The weighted rule
follows its proposal of weights by priority (llm-d-router#1995), but counts tokens.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Protocol

from msgspec import Meta

from epp.core.parameters import Parameters

SATURATION_THRESHOLD: Final = 0.8


class BandSelection(Protocol):
    """A rule by which the bands, one for each priority, take turns in the queue."""

    @property
    def shares(self) -> bool:
        """Return whether a lower band may be served while a higher one has waiting requests for
        which there is room.
        """
        ...

    def weights(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float] | None:
        """Return the weight above 0 of each of `priorities`, by which their bands share the room, or
        None if a higher band is always served first.

        `priorities` are those with waiting requests, highest first. `saturation` is the mean load of
        the endpoints.
        """
        ...


class StrictBandSelection(Parameters, frozen=True):
    """Always serve the highest band whose requests have room."""

    type_name: ClassVar[str] = "strict-band-selection-policy"

    @property
    def shares(self) -> bool:
        return False

    def weights(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float] | None:
        return None


class WeightDistribution(StrEnum):
    """The property of a band that determines its weight."""

    PROPORTIONAL = "proportional"
    LINEAR = "linear"


class WeightedBandSelection(Parameters, frozen=True):
    """Share the room between the waiting bands by weights while the pool is saturated.

    A band gets its share of the tokens that are charged, as a flow does. The highest band is
    always served first while the saturation is below `saturation_threshold`. `proportional` gives
    the band of priority p the weight
    p - lowest + 1, and `linear` gives the waiting bands the weights N, N - 1, ... 1.
    """

    type_name: ClassVar[str] = "weighted-band-selection-policy"

    distribution: WeightDistribution = WeightDistribution.PROPORTIONAL
    """Property of a band from which its weight is computed: the value of its priority or the rank.
    """
    saturation_threshold: Annotated[float, Meta(ge=0)] = SATURATION_THRESHOLD
    """Mean load of the endpoints from which bands share the room by weights; below it, the highest
    band is always served first. 1.0 means that the endpoints are full.
    """

    @property
    def shares(self) -> bool:
        return True

    def weights(self, saturation: float, priorities: Sequence[int]) -> Mapping[int, float] | None:
        if saturation < self.saturation_threshold:
            return None
        if self.distribution is WeightDistribution.LINEAR:
            count = len(priorities)
            return {priority: float(count - rank) for rank, priority in enumerate(priorities)}
        lowest = min(priorities)
        return {priority: priority - lowest + 1.0 for priority in priorities}
