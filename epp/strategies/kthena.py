"""kthena's router as it is without a configuration: three scorers of weight 1 and a filter.

Source: `pkg/kthena-router/scheduler` of volcano-sh/kthena (2026-08).

Its third scorer, least latency, goes by histograms of engines that are not scraped here. Where it
knows nothing it gives all endpoints the same, so it is left out.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.duration import Duration
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.plugins.contract import Bools, Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.strategy import Strategy, config_of, step


class KthenaIndexSettings(PrefixIndexSettings, frozen=True, kw_only=True):
    """The prefix index with kthena's blocks of 64 bytes and 50,000 of them for each endpoint.

    Like kthena's it evicts tails before heads. It is bounded by `memoryMaxBytes` besides, and what
    was not routed for a day goes: kthena has no age.
    """

    type_name: ClassVar[str] = "kthena-prefix-producer"

    auto_tune: bool = False
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 50_000
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 2_048
    """128 blocks."""
    ttl: Duration = Duration(86_400.0)

    @property
    def block_tokens(self) -> int:
        """64 bytes, which is less than the reference picker allows."""
        return 16


class FewWaiting(Parameters, frozen=True):
    """Keep who has fewer than `max_waiting_requests` in its queue, or does not say.

    If that is nobody the request is refused, as it is there.
    """

    type_name: ClassVar[str] = "few-waiting-filter"
    sheds_load: ClassVar[bool] = True

    max_waiting_requests: Annotated[int, Meta(ge=1)] = 10

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        busy: Bools = candidates.waiting_requests >= self.max_waiting_requests
        return ~busy


class KthenaLeastRequest(Parameters, frozen=True):
    """floor(100 x (max - b) / max) / 100 with b = R + 100 x max(R - U, 0); all idle: 1.

    R is what is in flight, U what the engine says that it runs: what is sent and does not run waits.
    Where U is unknown nothing is taken to wait.
    """

    type_name: ClassVar[str] = "kthena-least-request-scorer"

    waiting_weight: Annotated[float, Meta(ge=0)] = 100.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests.astype(np.float64)
        waiting = np.maximum(inflight - candidates.running_requests, 0.0)
        base = inflight + self.waiting_weight * np.nan_to_num(waiting)
        most = float(base.max())
        if most <= 0.0:
            return np.ones(len(base))
        scores: Floats = np.floor(100.0 * (most - base) / most) / 100.0
        return scores


class KthenaPrefix(Parameters, frozen=True):
    """floor(100 x matched / total) / 100 for the `top` that match most, 0 for the others.

    kthena stops at the fifth that it finds from the end of the prompt on; of those that tie for
    the last place it takes any, here the first in order.
    """

    type_name: ClassVar[str] = "kthena-prefix-scorer"
    producer_type: ClassVar[str] = KthenaIndexSettings.type_name

    top: Annotated[int, Meta(ge=1)] = 5

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.producer_type)
        scores: Floats = np.floor(known.matched * 100 / (known.total or 1)) / 100.0
        scores[np.argsort(-known.matched, kind="stable")[self.top :]] = 0.0
        return scores


FILTERS: Final = (FewWaiting,)
SCORERS: Final = (KthenaLeastRequest, KthenaPrefix)
INDEXES: Final = (KthenaIndexSettings,)

STRATEGIES: Final = (
    Strategy(
        name="kthena-default",
        idea="kthena: prefix and least request at equal weights, nobody with ten waiting.",
        config=config_of(
            step(FewWaiting.type_name),
            step(KthenaLeastRequest.type_name),
            step(KthenaPrefix.type_name),
        ),
    ),
)
