"""How fast endpoints prefill: as they are said to, where pods of one pool differ, and as they do."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta

from epp.core.parameters import Parameters
from epp.core.types import Seconds

PREFILL_TOKENS_PER_S: Final = 15_928.0
"""Where nothing better is known: the default of llm-d-router's `peakPrefillThroughput`, measured of
Qwen3-32B on two H100s."""
BELIEVED_S: Final = 1.0
"""What is believed of a speed weighs as much as so long a time of work."""
BUSY_REMEMBERED_S: Final = 20.0
"""Of work, so much or half of it decides."""
FACTOR_MAX: Final = 8.0
"""Times as slow or as fast as believed, at most: what a page says has no end."""


class LabelledSpeed(Parameters, frozen=True):
    """Endpoints with all of `match_labels` prefill at `peak_prefill_throughput` (tokens/s)."""

    match_labels: Annotated[dict[str, str], Meta(min_length=1)]
    peak_prefill_throughput: Annotated[float, Meta(gt=0, le=1e9)]


def speed_by_labels(
    labels: Mapping[str, str], speeds: Sequence[LabelledSpeed], otherwise: float
) -> float:
    """Tokens/s of the first of `speeds` whose labels are all among `labels`, else `otherwise`."""
    for speed in speeds:
        if speed.match_labels.items() <= labels.items():
            return speed.peak_prefill_throughput
    return otherwise


class LearntSpeed:
    """How fast an endpoint works off what it is believed to have to compute, while it has such.

    In tokens as they are believed here, so that what is wrong with counts of tokens and with beliefs
    about caches is in it, and what decoding takes of each step.
    """

    __slots__ = ("_believed", "_busy_s", "_tokens", "tokens_per_s")

    def __init__(self, believed: float) -> None:
        """`believed`, in tokens a second: what it is until more is known."""
        self._believed = self.tokens_per_s = believed
        self._busy_s = 0.0
        self._tokens = 0.0

    def worked(self, tokens: float, busy_s: Seconds) -> None:
        """`tokens` were computed in `busy_s`, in which there was always something to compute."""
        if self._busy_s > BUSY_REMEMBERED_S:
            self._busy_s /= 2.0
            self._tokens /= 2.0
        self._busy_s += busy_s
        self._tokens += tokens
        believed = self._believed
        known = self._tokens + believed * BELIEVED_S
        self.tokens_per_s = min(
            max(known / (self._busy_s + BELIEVED_S), believed / FACTOR_MAX), believed * FACTOR_MAX
        )
