"""kthena's router as its chart ships it: whole points for prefix, requests and KV cache, each once.

Source: `pkg/kthena-router/scheduler` of volcano-sh/kthena (2026-08), and the configuration in its
chart, whose weights are all 1; without one the router leaves out the KV cache. A filter passes over
who has ten waiting: Homing's own `utilization-filter`, which keeps who has nine or fewer.

Its fourth scorer goes by the mean times to a first token and between tokens from one page of an
engine to the next. Candidates have no such column, so it is left out; an endpoint of which it knows
nothing has half of its points there.
"""

from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import (
    Abilities,
    AffinityIndex,
    Candidates,
    Floats,
    InferenceRequest,
    Origin,
    Parameters,
    Seconds,
    Strategy,
    config_of,
    producer,
    step,
)
from homing_rivals.routed_blocks import RoutedBlocks, RoutedBlocksSettings


class AnsweredBlocksSettings(RoutedBlocksSettings, frozen=True):
    """`answered-blocks-producer`: as `routed-blocks-producer`, of requests that have been answered.

    While an answer runs, its prompt is not known to be anywhere: what comes meanwhile and begins alike
    is as new as the first. What failed is never known. Where the gateway does not show how requests
    end, one is answered when it is no longer counted. With `contiguous`, `tailFirst` and
    `lastPartialBlock` it counts as kthena's table does, which looks for the last block of a prompt
    that an endpoint has.

    Differs: of all endpoints together `blocksMax` are kept, where kthena bounds each alone; a last
    partial block counts also where it is the 129th.
    """

    type_name: ClassVar[str] = "answered-blocks-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=Origin.DECIDED, counts_blocks=True, counts_inflight=True
    )

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return AnsweredBlocks(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """As `RoutedBlocksSettings`, of an index that waits for answers."""
        return isinstance(index, AnsweredBlocks) and index.configure(self)


class AnsweredBlocks(RoutedBlocks):
    """`AffinityIndex` and `CountsInflight`; the unit is a block."""

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Note nothing yet; the list is for what `release` notes."""
        return []

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` has the blocks of `request` from now on; a failure is taken back after it."""
        recorded.append(super().record(request, slot, now))

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Take back what was noted, if anything was."""
        for noted in recorded:
            super().retract(request, slot, noted, now)


class TopMatches(Parameters, frozen=True):
    """Whole points, trunc(100 m / N) of a hundred, for the `top` who match most, none for others.

    m: leading blocks that e has; N: blocks of the prompt. Of those who tie for the last place a hash
    of the request's id draws. A prompt without a block says nothing of anybody.

    Kept: a prompt that everybody has is worth its points at `top` of them only.
    """

    type_name: ClassVar[str] = "top-matches-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = AnsweredBlocksSettings.type_name

    top: Annotated[int, Meta(ge=1)] = 5
    index: str = AnsweredBlocksSettings.type_name
    """Name of what knows who holds what."""

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


class UnstartedRequests(Parameters, frozen=True):
    """Whole points, trunc(100 (max b - b) / max b) of a hundred, with b = R + w max(R - U, 0).

    R: requests in flight; U: those that the engine last said it runs, 0 if it did not say; w:
    `unstarted_weight`. What was sent and does not run is taken to wait. An idle pool has all points.

    Kept: the most loaded has no points and the others have a share of its load, so that an even load
    is worth little to anybody; what was sent since a page was read weighs as much as what waits.
    """

    type_name: ClassVar[str] = "unstarted-requests-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("inflight_requests", "running_requests"))

    unstarted_weight: Annotated[float, Meta(ge=0)] = 100.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests.astype(np.float64)
        unstarted = np.maximum(inflight - np.nan_to_num(candidates.running_requests), 0.0)
        load = inflight + self.unstarted_weight * unstarted
        most = float(load.max())
        if most <= 0.0:
            return np.ones(len(load))
        return _whole_points((most - load) / most * 100.0)


class FreeKVCachePoints(Parameters, frozen=True):
    """Whole points, trunc(100 (1 - K)) of a hundred. K: share of the KV cache in use; not told: 0."""

    type_name: ClassVar[str] = "free-kv-cache-points-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("kv_cache_usage",))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return _whole_points((1.0 - np.nan_to_num(candidates.kv_cache_usage)) * 100.0)


def _whole_points(points: Floats) -> Floats:
    """float64[n]: hundredths, as many as there are whole `points`."""
    # Cut off after this very product, as there: 29 of 50 blocks are 57.99... and so 57 points.
    scores: Floats = np.trunc(points) / 100.0
    return scores


SCORERS: Final = (TopMatches, UnstartedRequests, FreeKVCachePoints)
INDEXES: Final = (AnsweredBlocksSettings,)

STRATEGIES: Final = (
    Strategy(
        name="kthena",
        idea=(
            "kthena: of who has fewer than ten waiting, points for the prefix (the best five), for "
            "requests in flight or sent and not running, and for KV cache, 1 each."
        ),
        omissions=(
            "its fourth scorer, by times of tokens that engines tell of late; four more to try where "
            "one fails; pages once a second: here as often as they are scraped; 400 where ten wait "
            "everywhere: here 429; a filter by adapter, which it ships turned off"
        ),
        config=config_of(
            producer(
                AnsweredBlocksSettings.type_name,
                blockTokens=16,
                blocksPerRequestMax=128,
                blocksPerEndpointMax=50_000,
                lastPartialBlock=True,
                contiguous=True,
                tailFirst=True,
            ),
            step("utilization-filter", conditions=[{"metric": "waiting-queue", "maxValue": 9}]),
            step(UnstartedRequests.type_name),
            step(FreeKVCachePoints.type_name),
            step(TopMatches.type_name),
            picker=step("random-tie-picker"),
        ),
    ),
)
