"""How long clients wait for each token after the one before it, over the time of a run.

All requests that decode on a pod get a token at the end of each pass, so that a pass is one gap for
each of them; one that was preempted has waited longer. Gaps are counted in bins of half a per cent,
by stretches of time, so that memory does not grow with the run. In a step of many passes alike they
are told as equal: each is longer than the one before by what one token of context a request costs.

Where an engine speculates a pass gives a request several tokens at once and is one gap, as vLLM counts
`vllm:inter_token_latency_seconds`: the time between two outputs.
"""

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.engine import Step

STALL_MEDIANS: Final = 3
"""A gap of more than so many medians is a stall: somebody's prompt was computed meanwhile."""
STRETCHES_MAX: Final = 512

_FIRST_STRETCH_S: Final = 0.125
_BINS_PER_E: Final = 200
_SAME_STEP: Final = 1.000001
"""A request that was there in the pass before has waited for this pass, up to rounding."""


class Gaps(Struct, frozen=True, kw_only=True):
    """Of a stretch of time."""

    output_tokens: int
    """Those that pods gave out, first ones too."""
    duration_s: Seconds
    mean_s: float
    """NaN, as the others, if no token followed another."""
    p50_s: float
    p99_s: float
    stall_share: float
    """Of the gaps: how many are longer than `STALL_MEDIANS` medians."""


class GapCounts(Struct):
    """Gaps in bins of half a per cent: as much memory for a million as for a thousand."""

    gaps: int = 0
    gap_s_sum: float = 0.0
    bins: dict[int, int] = {}

    def count(self, gap_s: Seconds, gaps: int = 1) -> None:
        """So many `gaps` of this length, above 0."""
        self.gaps += gaps
        self.gap_s_sum += gap_s * gaps
        at = round(math.log(gap_s) * _BINS_PER_E)
        self.bins[at] = self.bins.get(at, 0) + gaps

    @property
    def mean_s(self) -> Seconds:
        """NaN, if there are none."""
        return self.gap_s_sum / self.gaps if self.gaps else math.nan

    def percentile_s(self, share: float) -> Seconds:
        """The gap that `share` of all do not exceed, within a quarter of a per cent."""
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
    """Takes each step of each pod when it ends."""

    def __init__(self) -> None:
        self._stretch_s = _FIRST_STRETCH_S
        self._stretches: list[_Stretch] = []

    def add(self, step: Step) -> None:
        """Count the tokens that came out of it."""
        work, passes = step.work, step.passes
        decodes = work.decodes
        stretch = self._at(step.ends_at)
        stretch.output_tokens += decodes * (passes - 1) + work.sequences + work.drafts_accepted
        if decodes and step.duration_s > 0:
            stretch.count(step.duration_s / passes, decodes * passes)
        if passes == 1:
            for request in step.outputs:
                if request.token_gap_s > step.duration_s * _SAME_STEP:
                    stretch.count(request.token_gap_s, 1)

    def within(self, start_s: Seconds, end_s: Seconds) -> Gaps:
        """Of the stretches that lie wholly between: a little less than was asked for."""
        return self._joined(
            math.ceil(start_s / self._stretch_s), math.floor(end_s / self._stretch_s)
        )

    def around(self, start_s: Seconds, end_s: Seconds) -> Gaps:
        """Return the gaps of all stretches that overlap this time: a little more than was asked for."""
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
        """Of the whole run."""
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
        """Two stretches become one."""
        self._stretch_s *= 2
        for even, odd in zip(self._stretches[::2], self._stretches[1::2], strict=False):
            even.join(odd)
        del self._stretches[1::2]


def _middle_s(at: int) -> Seconds:
    return math.exp(at / _BINS_PER_E)


def _percentile_s(bins: Mapping[int, int], gaps: int, share: float) -> Seconds:
    """The gap that `share` of all do not exceed, within a quarter of a per cent."""
    before = 0
    for at in sorted(bins):
        before += bins[at]
        if before >= share * gaps:
            return _middle_s(at)
    return math.nan
