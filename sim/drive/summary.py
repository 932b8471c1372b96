"""The measurements of `sim drive` as figures: over all requests, by pod and by model."""

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from epp.core.types import Seconds
from sim.measurement.measures import distribution, rounded
from sim.measurement.summaries import (
    AnswerGaps,
    Conditions,
    DrivenRequests,
    DriveSummary,
    GroupSummary,
)
from sim.measurement.token_gaps import GapCounts

if TYPE_CHECKING:
    from sim.drive.driver import Driven

UNTOLD: Final = "not told"
"""Name under which requests are counted if no response header names their pod."""
GROUPS_MAX: Final = 1_000
OTHER: Final = "other"
"""Name of the group for requests of further pods, models or kinds of errors, once there are
`GROUPS_MAX` groups. Names come from responses and traces, so their number must be bounded.
"""
ERRORS_SHOWN_MAX: Final = 10
_GAP_S_MIN: Final = 1e-6
"""Smallest time in seconds between two chunks; shorter times count as this one. Two chunks from one
read have no time between them.
"""


class Group:
    """Measurements of one group of driven requests: those of one pod, of one model, or all."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._ttft_s = array("d")
        self._e2e_s = array("d")
        self._gaps = GapCounts(bins={})

    def add(self, driven: "Driven") -> None:
        """Add a request that has ended to the group. A request without a complete answer counts
        only as a request and as an error.
        """
        self.requests += 1
        if driven.error:
            self.errors += 1
            return
        answer = driven.answer
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens
        self._ttft_s.append(answer.ttft_s or math.nan)
        self._e2e_s.append(answer.duration_s)
        for gap_s in answer.gaps_s:
            self._gaps.count(max(gap_s, _GAP_S_MIN))

    @property
    def ttft_s(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Time to first token in seconds of each complete answer, or NaN if the answer had no
        text.
        """
        return np.array(self._ttft_s)

    @property
    def e2e_s(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.array(self._e2e_s)

    def summary(self) -> GroupSummary:
        """Return the figures of the group in the form of summary.json."""
        hit_rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan
        gaps = self._gaps
        p50, p90, p99 = (rounded(gaps.percentile_s(share)) for share in (0.5, 0.9, 0.99))
        return GroupSummary(
            requests=self.requests,
            errors=self.errors,
            ttft_s=distribution(self.ttft_s),
            itl_s=AnswerGaps(mean=rounded(gaps.mean_s), p50=p50, p90=p90, p99=p99),
            e2e_s=distribution(self.e2e_s),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            hit_rate=rounded(hit_rate),
        )


class DriveMeasures:
    """Collector of the measurements of a drive; each request is added when it ends. Memory grows by
    about 56 bytes for each request.
    """

    def __init__(self) -> None:
        self.all = Group()
        self.pods: dict[str, Group] = {}
        self.models: dict[str, Group] = {}
        self.errors: Counter[str] = Counter()
        self._late_s = array("d")

    def add(self, driven: "Driven") -> None:
        self.all.add(driven)
        self._late_s.append(driven.late_s)
        _group(self.pods, driven.answer.served_by or UNTOLD).add(driven)
        _group(self.models, driven.model).add(driven)
        if driven.error:
            kind = driven.error.partition(":")[0]
            self.errors[
                kind if kind in self.errors or len(self.errors) < GROUPS_MAX else OTHER
            ] += 1

    def summary(
        self,
        *,
        conditions: Conditions,
        took_s: Seconds,
        not_sent: int = 0,
        unfit: int = 0,
        cut: int = 0,
        complete: bool,
    ) -> DriveSummary:
        """Return the content of summary.json. `not_sent`, `unfit` and `cut` are the numbers of
        requests that were not measured, by reason.
        """
        told = self.all.summary()
        return DriveSummary(
            complete=complete,
            conditions=conditions,
            took_s=rounded(took_s),
            requests=DrivenRequests(
                sent=told.requests + cut,
                whole=told.requests - told.errors,
                errors=told.errors,
                not_sent=not_sent,
                unfit=unfit,
                cut=cut,
            ),
            errors=dict(self.errors.most_common(ERRORS_SHOWN_MAX)),
            late_s=distribution(np.array(self._late_s)),
            output_tokens_per_s=rounded(told.output_tokens / took_s if took_s else math.nan),
            ttft_s=told.ttft_s,
            itl_s=told.itl_s,
            e2e_s=told.e2e_s,
            hit_rate=told.hit_rate,
            pods={name: group.summary() for name, group in sorted(self.pods.items())},
            models={name: group.summary() for name, group in sorted(self.models.items())},
        )


def _group(groups: dict[str, Group], name: str) -> Group:
    if name not in groups and len(groups) >= GROUPS_MAX:
        name = OTHER
    return groups.setdefault(name, Group())
