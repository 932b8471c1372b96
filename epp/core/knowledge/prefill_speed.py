"""Prefill speeds of endpoints: configured ones, which may differ within a pool, and measured ones."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from epp.core.parameters import Parameters
from epp.core.types import Seconds

PREFILL_TOKENS_PER_S: Final = 15_928.0
"""Prefill speed in tokens per second that is assumed if none is configured: the default of
llm-d-router's `peakPrefillThroughput`, which was measured with Qwen3-32B on two H100s.
"""
ATTENTION_TOKENS: Final = 40_000.0
"""Mean context in tokens at which attention takes as much time per prefilled token as all other
computation.

The simulator's built-in profiles, which are fitted to measured kernels, have 31k (8B), 40k (32B)
and 97k (70B).
"""
STEP_TOKENS: Final = 200.0
"""Number of prefill tokens computed in the time of a decode step without any context: 220 (8B), 230
(32B), 180 (70B).
"""
BELIEVED_S: Final = 1.0
"""Weight of the configured prefill speed in the measured one, in seconds of prefill work."""
BUSY_REMEMBERED_S: Final = 20.0
"""Number of seconds of prefill work above which the weight of all work so far is halved, so that an
endpoint's measured speed follows its recent work.
"""
FACTOR_MAX: Final = 8.0
"""Largest factor by which the measured speed may be above or below the configured one, because a
page may report any value.
"""

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])
"""A number of prefill tokens, or float64[n] with one number for each of n endpoints."""


def prefill_work(prompt_tokens: float, uncached_tokens: Amount) -> Amount:
    """Return the work of computing the last `uncached_tokens` of `prompt_tokens`, in prefill tokens
    without context. Attention makes it larger by the mean context over `ATTENTION_TOKENS`.
    """
    return uncached_tokens * (1.0 + (prompt_tokens - uncached_tokens / 2) / ATTENTION_TOKENS)


class LabelledSpeed(Parameters, frozen=True):
    """A configured prefill speed, `peak_prefill_throughput` in tokens per second, for endpoints
    that have all labels in `match_labels`.
    """

    match_labels: Annotated[dict[str, str], Meta(min_length=1)]
    peak_prefill_throughput: Annotated[float, Meta(gt=0, le=1e9)]


def speed_by_labels(
    labels: Mapping[str, str], speeds: Sequence[LabelledSpeed], otherwise: float
) -> float:
    """Return the prefill speed in tokens per second of the first of `speeds` whose labels are all
    among `labels`, else `otherwise`.
    """
    for speed in speeds:
        if speed.match_labels.items() <= labels.items():
            return speed.peak_prefill_throughput
    return otherwise


class LearntSpeed:
    """The measured speed at which an endpoint computes its pending prefill tokens.

    Tokens are the picker's estimates. The speed therefore includes errors of token counts and of
    predicted cache hits, and the share of each step that decoding takes.
    """

    __slots__ = ("_believed", "_busy_s", "_tokens", "tokens_per_s")

    def __init__(self, believed: float) -> None:
        """Create the measured speed of an endpoint. It starts as `believed`, the configured speed
        in tokens per second.
        """
        self._believed = self.tokens_per_s = believed
        self._busy_s = 0.0
        self._tokens = 0.0

    def worked(self, tokens: float, busy_s: Seconds) -> None:
        """Update the measured speed: the endpoint computed `tokens` in `busy_s` seconds without
        being idle. The result is at most `FACTOR_MAX` times above or below the configured speed.
        """
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
