"""How fast endpoints prefill, where pods of one pool differ."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta

from epp.core.parameters import Parameters

PREFILL_TOKENS_PER_S: Final = 15_928.0
"""Where nothing better is known: the default of llm-d-router's `peakPrefillThroughput`, measured of
Qwen3-32B on two H100s."""


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
