"""smg's `least_load`: how long a request would wait, in seconds, by tokens and by KV pressure."""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.cost import scores_of_cost
from epp.strategies.strategy import Strategy, config_of, step

_KV_USAGE_MAX: Final = 0.999


class ExpectedWait(Parameters, frozen=True):
    """argmin of queued(e) / throughput + w * K / (1 - K), in seconds.

    queued(e): uncached tokens that were sent to e and are not prefilled; if that is 0, the requests
    that wait there times `mean_prefill_tokens`. K: KV cache usage, at most 0.999. Of an endpoint
    whose KV usage is unknown, R * `mean_prefill_tokens` / throughput, R the requests in flight; if
    nobody's is known, R alone. Source: smg 1.13.0, `least_load`.

    Differs: queued tokens are this picker's own count, which drains at the endpoint's prefill speed,
    and not a report of the engine every 10 s plus what was sent since; what is sent is charged
    without the part that is cached; throughput is the default, because engines do not tell theirs;
    an endpoint without a report does not begin from the best known of its peers (a repair of smg
    after 1.13.0); there is no cap on waiting requests, which smg has off; ties take turns.
    Kept: K / (1 - K) weighs nothing until the cache is nearly full: at 0.9 it is 1.35 s.
    """

    type_name: ClassVar[str] = "expected-wait-scorer"
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    tokens_per_s: Annotated[float, Meta(gt=0)] = 2_000.0
    kv_pressure_weight_s: Annotated[float, Meta(ge=0)] = 0.15
    mean_prefill_tokens: Annotated[float, Meta(gt=0)] = 1_024.0

    @property
    def producer(self) -> str | None:
        return ""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return scores_of_cost(self.wait_s(candidates))

    def wait_s(self, candidates: Candidates) -> Floats:
        """float64[n], finite: seconds; or requests in flight, where no KV usage is known at all."""
        inflight = candidates.inflight_requests.astype(np.float64)
        usage = candidates.kv_cache_usage
        reported = np.isfinite(usage)
        if not reported.any():
            return inflight
        waiting = np.nan_to_num(candidates.waiting_requests) * self.mean_prefill_tokens
        queued = candidates.inflight_prefill_tokens
        queued = np.where(queued > 0, queued, waiting)
        usage = np.clip(np.nan_to_num(usage), 0.0, _KV_USAGE_MAX)
        known = queued / self.tokens_per_s + self.kv_pressure_weight_s * usage / (1.0 - usage)
        wait_s: Floats = np.where(
            reported, known, inflight * self.mean_prefill_tokens / self.tokens_per_s
        )
        return wait_s


SCORERS: Final = (ExpectedWait,)

STRATEGIES: Final = (
    Strategy(
        name="smg-least-load",
        idea="smg least_load: the shortest expected wait, by queued tokens and KV pressure.",
        config=config_of(step(ExpectedWait.type_name)),
    ),
)
