"""Measurement of the times between consecutive tokens of an answer, over the time of a run.

All requests that decode on a pod get a token at the end of each pass. Therefore a pass is one gap
for each of them. For a preempted request the gap is longer. Gaps are counted in bins of half a per
cent, by periods of time, so that memory does not grow with the run. The passes of a step that has
several equal ones count as equally long. In reality each is longer than the one before, by the cost
of one token of context per request.

With speculative decoding, a pass gives a request several tokens at once and counts as one gap. This
is how vLLM counts `vllm:inter_token_latency_seconds`: the time between two outputs.
"""

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.engine import Step

STALL_MEDIANS: Final = 3
"""A gap between tokens counts as a stall if it is longer than this number of median gaps, because a
prompt was computed in the meantime.
"""
STRETCHES_MAX: Final = 512

_FIRST_STRETCH_S: Final = 0.125
_BINS_PER_E: Final = 200
_SAME_STEP: Final = 1.000001
"""Relative tolerance for rounding errors, within which a request's token gap equals the duration of
the step.
"""


class Gaps(Struct, frozen=True, kw_only=True):
    """Statistics of the gaps between tokens of all pods in a period of a run."""

    output_tokens: int
    """Number of output tokens of all pods in the period, first tokens of answers included."""
    duration_s: Seconds
    mean_s: float
    """Mean gap between tokens. This and the other statistics are NaN if there are no gaps."""
    p50_s: float
    p99_s: float
    stall_share: float
    """Share of the gaps that are stalls, longer than `STALL_MEDIANS` medians."""


class GapCounts(Struct):
    """A histogram of gaps between tokens, with bins of half a per cent.

    Its memory does not depend on the number of gaps.
    """

    gaps: int = 0
    gap_s_sum: float = 0.0
    bins: dict[int, int] = {}

    def count(self, gap_s: Seconds, gaps: int = 1) -> None:
        """Count `gaps` gaps of `gap_s` seconds each, which must be above 0."""
        self.gaps += gaps
        self.gap_s_sum += gap_s * gaps
        at = round(math.log(gap_s) * _BINS_PER_E)
        self.bins[at] = self.bins.get(at, 0) + gaps

    @property
    def mean_s(self) -> Seconds:
        """Mean gap in seconds, or NaN if no gap was counted."""
        return self.gap_s_sum / self.gaps if self.gaps else math.nan

    def percentile_s(self, share: float) -> Seconds:
        """Return the length in seconds that `share` of all gaps do not exceed, within a quarter of
        a per cent; NaN if no gap was counted.
        """
        return _percentile_s(self.bins, self.gaps, share)


class _Stretch(GapCounts):
    output_tokens: int = 0

    def join(self, other: "_Stretch") -> None:
        self.output_tokens += other.output_tokens
        self.gaps += other.gaps
        self.gap_s_sum += other.gap_s_sum
        for at, gaps in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + gaps


class TokenGaps:
    """A counter of the gaps between tokens of all pods. `add` is called with each engine step when
    it ends.
    """

    def __init__(self) -> None:
        self._stretch_s = _FIRST_STRETCH_S
        self._stretches: list[_Stretch] = []

    def add(self, step: Step) -> None:
        """Count the tokens that a step of an engine produced, and the gaps before them."""
        work, passes = step.work, step.passes
        decodes = work.decodes
        stretch = self._at(step.ends_at)
        stretch.output_tokens += (
            decodes * (passes - 1) + work.sequences + work.drafts_accepted - work.handed_over
        )
        gaps = decodes * passes - work.received
        if gaps and step.duration_s > 0:
            stretch.count(step.duration_s / passes, gaps)
        if passes == 1:
            for request in step.outputs:
                if request.token_gap_s > step.duration_s * _SAME_STEP:
                    stretch.count(request.token_gap_s, 1)

    def within(self, start_s: Seconds, end_s: Seconds) -> Gaps:
        """Return the gaps between tokens in all counting periods that lie completely between the
        two times.

        The covered time may be shorter than requested, by less than two counting periods.
        """
        return self._joined(
            math.ceil(start_s / self._stretch_s), math.floor(end_s / self._stretch_s)
        )

    def around(self, start_s: Seconds, end_s: Seconds) -> Gaps:
        """Return the gaps between tokens in all counting periods that overlap the time from
        `start_s` to `end_s`.

        The covered time may be longer than requested, by less than two counting periods.
        """
        return self._joined(
            math.floor(start_s / self._stretch_s), math.ceil(end_s / self._stretch_s)
        )

    def _joined(self, first: int, end: int) -> Gaps:
        last = min(len(self._stretches), end)
        told = _Stretch()
        for stretch in self._stretches[first:last]:
            told.join(stretch)
        median_s = _percentile_s(told.bins, told.gaps, 0.5)
        stalls = sum(
            gaps for at, gaps in told.bins.items() if _middle_s(at) > STALL_MEDIANS * median_s
        )
        return Gaps(
            output_tokens=told.output_tokens,
            duration_s=max(0, last - first) * self._stretch_s,
            mean_s=told.mean_s,
            p50_s=median_s,
            p99_s=_percentile_s(told.bins, told.gaps, 0.99),
            stall_share=stalls / told.gaps if told.gaps else math.nan,
        )

    def whole(self) -> Gaps:
        """Return the gaps between tokens of the whole run."""
        return self.within(0.0, len(self._stretches) * self._stretch_s)

    def _at(self, time_s: Seconds) -> _Stretch:
        number = int(time_s / self._stretch_s)
        while number >= STRETCHES_MAX:
            self._halve()
            number = int(time_s / self._stretch_s)
        while number >= len(self._stretches):
            self._stretches.append(_Stretch())
        return self._stretches[number]

    def _halve(self) -> None:
        """Double the length of the counting periods by joining each two neighbours."""
        self._stretch_s *= 2
        for even, odd in zip(self._stretches[::2], self._stretches[1::2], strict=False):
            even.join(odd)
        del self._stretches[1::2]


def _middle_s(at: int) -> Seconds:
    return math.exp(at / _BINS_PER_E)


def _percentile_s(bins: Mapping[int, int], gaps: int, share: float) -> Seconds:
    """Return the gap in seconds that `share` of the gaps in `bins` do not exceed, within a quarter
    of a per cent; NaN if there are none.
    """
    before = 0
    for at in sorted(bins):
        before += bins[at]
        if before >= share * gaps:
            return _middle_s(at)
    return math.nan
