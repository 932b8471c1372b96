"""kthena's router as its chart configures it: whole points for prefix, requests and KV cache, once
each.

Source: `pkg/kthena-router/scheduler` of volcano-sh/kthena (2026-08), and the configuration in its
chart, whose weights are all 1; kthena's router without a configuration omits the KV cache. kthena's
filter of endpoints with ten or more waiting requests is Homing's own `utilization-filter`, which
keeps endpoints with nine or fewer.

The copy omits kthena's fourth scorer, because candidates have no column with its data. This fourth
scorer uses the mean times to a first token and between tokens in the interval between two metrics
pages of an engine, and gives an endpoint without data half of its points.
"""

from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import AffinityIndex, Candidates, Floats, InferenceRequest, Seconds
from homing_rivals.routed_blocks import RoutedBlocks, RoutedBlocksSettings


class AnsweredBlocksSettings(RoutedBlocksSettings, frozen=True):
    """`answered-blocks-producer`: an index of the blocks that were routed to each endpoint, as in
    `routed-blocks-producer`, but recorded only when the request has been answered.

    While a request is being answered, the index does not know its prompt, so a second request with
    the same beginning does not match it. The index never keeps records of failed requests. If the
    gateway does not show ends of requests, a request counts as answered when the picker no longer
    counts it in flight. The index with `contiguous`, `tailFirst` and `lastPartialBlock` counts
    matches as kthena's table does, which looks for the last block of a prompt that an endpoint has.

    Different from kthena: `blocksMax` limits the blocks of all endpoints together, where kthena
    limits those of each endpoint; a last partial block also counts if it is the 129th.
    """

    type_name: ClassVar[str] = "answered-blocks-producer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        origin=contract.Origin.DECIDED, counts_blocks=True, counts_inflight=True
    )

    def open(self) -> AffinityIndex:
        """Return a new, empty index of the blocks of answered requests, with these settings as its
        parameters.
        """
        return AnsweredBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to the running index `index`. Return False, and change nothing, if
        the block size differs, or if `index` has another type.
        """
        return isinstance(index, AnsweredBlocks) and index.configure(self)


class AnsweredBlocks(RoutedBlocks):
    """An `AffinityIndex` of the blocks of answered requests, which also `CountsInflight`."""

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record nothing yet: return an empty list, into which `release` puts the record when the
        request has been answered.
        """
        return []

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Record the blocks of `request` at `slot`, because its answer has ended. If the request
        failed, `retract` follows and undoes it.
        """
        recorded.append(super().record(request, slot, now))

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo the record of the blocks of `request` at `slot`, if `release` has made one."""
        for noted in recorded:
            super().retract(request, slot, noted, now)


class TopMatches(contract.Parameters, frozen=True):
    """Score the `top` endpoints with the longest matches in whole points of a hundred, trunc(100 m
    / N), and the others 0.

    m is the number of the prompt's leading blocks that the endpoint has, and N the number of blocks
    of the prompt. If endpoints with equal matches compete for the last of the `top` places, a hash
    of the request's id decides. A prompt without a block of this index gives no score to any
    endpoint.

    Kept from kthena: a prompt that all endpoints have cached gives points to `top` of them only.
    """

    type_name: ClassVar[str] = "top-matches-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads_index=True)
    producer_type: ClassVar[str] = AnsweredBlocksSettings.type_name

    top: Annotated[int, Meta(ge=1)] = 5
    index: str = AnsweredBlocksSettings.type_name
    """Name of the affinity index whose matches are the cached blocks."""

    @property
    def producer(self) -> str | None:
        return self.index

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        known = candidates.affinity(self.index)
        if not known.total:
            return None
        scores = _whole_points(known.matched / known.total * 100.0)
        if len(candidates) > self.top:
            drawn = xxhash.xxh64_intdigest(request.request_id.encode("utf-8", "surrogatepass"))
            order = np.lexsort((candidates.rendezvous(drawn), known.matched))
            scores[order[: -self.top]] = 0.0
        return scores


class UnstartedRequests(contract.Parameters, frozen=True):
    """Score endpoints by their load b = R + w max(R - U, 0) in whole points of a hundred, trunc(100
    (max b - b) / max b).

    R is the number of requests in flight at the endpoint; U the number that its engine last
    reported as running, 0 if it reported none; w is `unstarted_weight`. Requests that were sent to
    the endpoint but do not run are assumed to wait. All endpoints of an idle pool get all points.

    Kept from kthena: the most loaded endpoint has no points, and the points of the others are
    relative to its load, so an even load gives few points or none to all; requests that were sent
    since a metrics page was read weigh as much as waiting ones.
    """

    type_name: ClassVar[str] = "unstarted-requests-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        reads=("inflight_requests", "running_requests")
    )

    unstarted_weight: Annotated[float, Meta(ge=0)] = 100.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests.astype(np.float64)
        unstarted = np.maximum(inflight - np.nan_to_num(candidates.running_requests), 0.0)
        load = inflight + self.unstarted_weight * unstarted
        most = float(load.max())
        if most <= 0.0:
            return np.ones(len(load))
        return _whole_points((most - load) / most * 100.0)


class FreeKVCachePoints(contract.Parameters, frozen=True):
    """Score endpoints by their free KV cache in whole points of a hundred: trunc(100 (1 - K)).

    K is the used share of the endpoint's KV cache, 0 if the engine does not report it.
    """

    type_name: ClassVar[str] = "free-kv-cache-points-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads=("kv_cache_usage",))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return _whole_points((1.0 - np.nan_to_num(candidates.kv_cache_usage)) * 100.0)


def _whole_points(points: Floats) -> Floats:
    """Return float64[n]: `points` (0 to 100) truncated to whole numbers, divided by 100."""
    # Truncation follows this product, as in kthena: 29 of 50 blocks are 57.99... and so 57 points.
    scores: Floats = np.trunc(points) / 100.0
    return scores


SCORERS: Final = (TopMatches, UnstartedRequests, FreeKVCachePoints)
INDEXES: Final = (AnsweredBlocksSettings,)

STRATEGIES: Final = (
    contract.Strategy(
        name="kthena",
        idea=(
            "kthena: among endpoints with fewer than ten waiting requests, points for the prefix "
            "(the best five), for requests in flight or not yet running, and for the KV cache, 1 "
            "each."
        ),
        omissions=(
            "its fourth scorer, by recent token times of engines; four fallback endpoints; pages "
            "once a second: here as often as they are scraped; status 400 if ten requests wait "
            "at every endpoint: here 429; a filter by adapter, which is off by default"
        ),
        config=contract.config_of(
            contract.producer(
                AnsweredBlocksSettings.type_name,
                blockTokens=16,
                blocksPerRequestMax=128,
                blocksPerEndpointMax=50_000,
                lastPartialBlock=True,
                contiguous=True,
                tailFirst=True,
            ),
            contract.step(
                "utilization-filter", conditions=[{"metric": "waiting-queue", "maxValue": 9}]
            ),
            contract.step(UnstartedRequests.type_name),
            contract.step(FreeKVCachePoints.type_name),
            contract.step(TopMatches.type_name),
            picker=contract.step("random-tie-picker"),
        ),
    ),
)
