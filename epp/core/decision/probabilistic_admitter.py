"""The refusal of requests that may be shed, at random, before they are placed (`probabilistic-admitter`).

Type, parameters and formula are those of llm-d-router. There, a request waits in the queue first and
is judged afterwards, and its refusal reaches the client as status 500. Here the status is 429.
"""

import math
from random import Random
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from epp.core.decision.choice import saturated
from epp.core.knowledge.candidates import Candidates
from epp.core.parameters import Parameters
from epp.core.types import Refusal


class ProbabilisticAdmitter(Parameters, frozen=True):
    """`probabilistic-admitter`: refuse a share of the requests of priority below 0 with status 429.

    The share is `k` times the load of the pool to the power of `power`, at most 1. The load is the
    mean over the endpoints of max(waiting / `queue_depth_threshold`, KV usage /
    `kv_cache_util_threshold`). An endpoint that was never scraped, or whose engine answered 503
    without `retry-after` since its last page, counts as loaded to 1.0 at least.
    """

    type_name: ClassVar[str] = "probabilistic-admitter"

    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    power: Annotated[float, Meta(gt=0)] = 5.0
    """Exponent of the load in the refused share; with a higher one, fewer requests are refused at
    low load.
    """
    k: Annotated[float, Meta(gt=0)] = 300.0
    """Factor of the refused share. All requests of priority below 0 are refused from a load of
    (1 / k) ^ (1 / power) on.
    """

    def load(self, candidates: Candidates) -> float:
        """Return the mean load of `candidates`, of which there is at least one."""
        queue = candidates.waiting_requests / self.queue_depth_threshold
        cache = candidates.kv_cache_usage / self.kv_cache_util_threshold
        load = np.nan_to_num(np.fmax(queue, cache))
        full = candidates.saturated | np.isinf(candidates.metrics_age_s)
        return float(np.where(full, np.fmax(load, 1.0), load).mean())

    def refused_share(self, load: float) -> float:
        """Return the share of the requests that is refused at `load`, from 0 to 1."""
        if load <= 0.0:
            return 0.0
        # Logarithms, because a power may exceed the range of floats.
        return math.exp(min(0.0, math.log(self.k) + self.power * math.log(load)))

    def refusal(self, candidates: Candidates, random: Random) -> Refusal | None:
        """Return the refusal of a request that may be shed, or None if it is admitted.

        Every call draws one random number, so that later draws do not depend on the load.
        """
        drawn = random.random()
        if not len(candidates):
            return None
        load = self.load(candidates)
        share = self.refused_share(load)
        if drawn >= share:
            return None
        return saturated(
            f"the pool is loaded to {load:.2f}, at which {share:.0%} of the requests of negative "
            "priority are refused"
        )
