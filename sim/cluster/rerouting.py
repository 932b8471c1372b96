"""Failing connections from the gateway to the endpoint that a picker named first."""

from collections.abc import Sequence
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.cluster.windows import Instant, Numbers, check_window


class Reschedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period from `from_s` to `to_s` in which some of the gateway's connections to the endpoint
    that a picker named first fail.

    The gateway then tries the next endpoint that the picker named, and reports to the picker which
    endpoint served the request. If several periods overlap, the largest share applies.
    """

    from_s: Instant
    to_s: Instant
    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the connections to the endpoint that a picker named first that fail."""
    pods: Numbers = ()

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Connections:
    """The rule that decides which of the gateway's connections fail in a run: those whose random
    number is below the share of the period. The number depends only on the seed, the request and
    the attempt, so it is the same under every policy.
    """

    def __init__(self, reschedules: Sequence[Reschedule], *, seed: int) -> None:
        self._reschedules = reschedules
        self._seed = seed

    def fails(self, pod: int, request: int, attempt: int, now: Seconds) -> bool:
        """Return whether the gateway's connection to the first endpoint, pod number `pod`, fails at
        `now`. `attempt` is the number of earlier sends of the request.
        """
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
