"""Saturation of the pool: whether requests must be refused, and which endpoints are too full for
more.
"""

from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct

from epp.core.abilities import Abilities
from epp.core.duration import Duration
from epp.core.knowledge.candidates import Bools, Candidates, Floats
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds


class UtilizationDetector(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Drop endpoints whose utilization is above 1 + `headroom`; keep all if that would leave none.

    The utilization of an endpoint is the larger one of its queue and its KV cache, 1.0 at the
    thresholds: max(waiting / `queue_depth_threshold`, KV usage / `kv_cache_util_threshold`).
    Formula and defaults are the reference picker's. An endpoint counts as full (at least 1.0) if
    its metrics are stale or missing, or if its engine refused a request since its last good scrape.
    """

    type_name: ClassVar[str] = "utilization-detector"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("waiting_requests", "kv_cache_usage", "metrics_age_s", "saturated"),
        sheds_load=True,
        limits_metrics_age=True,
    )

    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: Duration = Duration(1.0)
    headroom: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if not self.metrics_staleness_threshold > 0:
            raise ValueError(
                "metricsStalenessThreshold is "
                f"{self.metrics_staleness_threshold:g}s; it must be more than 0s"
            )

    @property
    def metrics_age_max_s(self) -> Seconds:
        return float(self.metrics_staleness_threshold)

    def utilization(self, candidates: Candidates) -> Floats:
        """Return float64[n]: the utilization of each candidate, 1.0 if its queue or its KV cache is
        at the threshold, more above it. It is at least 1.0 for stale metrics and for a saturated
        engine, and otherwise 0.0 if both values are unknown.
        """
        queue = candidates.waiting_requests / self.queue_depth_threshold
        cache = candidates.kv_cache_usage / self.kv_cache_util_threshold
        worse: Floats = np.fmax(queue, cache)
        # An engine that was scraped but reports neither signal does not count as full.
        worse[np.isnan(worse)] = 0.0
        stale = candidates.metrics_age_s > self.metrics_staleness_threshold
        worse[stale] = np.fmax(worse[stale], 1.0)
        full = candidates.saturated
        worse[full] = np.fmax(worse[full], 1.0)
        return worse

    def saturation(self, candidates: Candidates) -> float:
        """Return the mean utilization of the candidates; 1.0 if there are none."""
        return float(self.utilization(candidates).mean()) if len(candidates) else 1.0

    def keep(self, request: InferenceRequest, candidates: Candidates) -> Bools:
        keep: Bools = self.utilization(candidates) <= 1.0 + self.headroom
        return keep if keep.any() else np.ones(len(candidates), dtype=np.bool_)
