"""Rules that prefer the endpoint with the least prefill work, including that of the request itself.

The two rules of this family are LPWL and LMetric. Both read the prefix index, LPWL also the
picker's count of uncached tokens in flight, and LMetric that of requests in flight. These counts
change at once with each request of this picker.
"""

from typing import ClassVar, Final

import numpy as np

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.lexicographic import scores_by_rank


class LeastPendingWork(Parameters, frozen=True):
    """LPWL: prefer the endpoint e with the least pending(e) + max(0, T - hit(e)), in tokens to
    prefill; the fewest requests among equals.

    T is the number of tokens of the prompt; hit(e) the number of them that e is estimated to have
    cached; pending(e) the number of uncached tokens that were sent to e and are not yet prefilled.

    Different from the original of LPWL: pending tokens drain at the endpoint's prefill speed with
    time, not only when a first token is seen. The scores of LPWL show only the order of the
    endpoints, not how much they differ.
    """

    type_name: ClassVar[str] = "least-pending-work-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    producer: ClassVar[str] = ""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        work = candidates.inflight_prefill_tokens + candidates.uncached_tokens
        return scores_by_rank(work, candidates.inflight_requests.astype(np.float64))


class WorkTimesBatch(Parameters, frozen=True):
    """LMetric (arXiv 2603.15202): prefer the endpoint e with the least (T - hit(e)) x batch(e):
    uncached prompt tokens times requests in flight, including this one.

    The product of LMetric needs no weight between its two factors, but a factor of 0 would hide the
    other one. The number of requests in flight therefore includes this request, as llm-d-router
    #2351 proposes. The number of uncached tokens is also increased by one here, so that among
    endpoints that have cached the whole prompt the one with the fewest requests wins.
    """

    type_name: ClassVar[str] = "work-times-batch-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    producer: ClassVar[str] = ""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        work = candidates.uncached_tokens + 1.0
        return contract.scores_of_cost(work * (candidates.inflight_requests + 1.0))


SCORERS: Final = (LeastPendingWork, WorkTimesBatch)

STRATEGIES: Final = (
    contract.Strategy(
        name="lpwl",
        idea=(
            "LPWL: the endpoint with the fewest tokens to prefill, including those of this request."
        ),
        omissions=(
            "tokens in flight until the first chunk: here metrics pages and time reduce them; "
            "its formula ignores adapters"
        ),
        config=contract.config_of(contract.step(LeastPendingWork.type_name)),
    ),
    contract.Strategy(
        name="lmetric",
        idea=(
            "LMetric: the endpoint with the least uncached tokens of this request, times its "
            "requests in flight."
        ),
        omissions="its formula ignores adapters",
        config=contract.config_of(contract.step(WorkTimesBatch.type_name)),
    ),
)
