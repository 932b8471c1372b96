"""A gateway that does not get through to the endpoint that a picker has named first."""

from collections.abc import Sequence
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.cluster.windows import Instant, Numbers, check_window


class Reschedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From `from_s` to `to_s` connections to the endpoint named first fail for some requests.

    The gateway asks the next that the picker has named, and tells the picker who has served. Of
    several at once the greatest share is in effect.
    """

    from_s: Instant
    to_s: Instant
    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Of the requests for which it is named."""
    pods: Numbers = ()

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Connections:
    """Which connections fail; `seed` and the request decide, so that every policy meets the same."""

    def __init__(self, reschedules: Sequence[Reschedule], *, seed: int) -> None:
        self._reschedules = reschedules
        self._seed = seed

    def fails(self, pod: int, request: int, attempt: int, now: Seconds) -> bool:
        """Whether the gateway does not get through to `pod`; `attempt`: how often it was sent before."""
        share = max(
            (
                one.share
                for one in self._reschedules
                if one.from_s <= now < one.to_s and (not one.pods or pod in one.pods)
            ),
            default=0.0,
        )
        return share > 0.0 and self._draw(request, attempt) < share

    def _draw(self, request: int, attempt: int) -> float:
        return Random(f"{self._seed}:connection:{request}:{attempt}").random()
