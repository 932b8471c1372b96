"""Cache-aware routing of SGLang's router and its successor smg, in four generations.

All keep a tree of the prompts that they sent (`radix_tree`) and part where the load does not allow
to follow it. R(e): requests in flight at endpoint e; K(e): its KV cache usage. Prompts are known to
the tree by blocks of 16 tokens where the originals compare characters or tokens.
"""

import math
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Affinity,
    Bools,
    Candidates,
    Floats,
    InferenceRequest,
    Ints,
    Parameters,
)
from epp.strategies.expected_wait import ExpectedWait
from epp.strategies.narrowing import first_of, least_of, most_of, only
from epp.strategies.radix_tree import (
    DEEPEST_BLOCKS,
    FIRST_HOLDER,
    HELD_BLOCKS,
    REQUESTS,
    RadixTreeSettings,
)
from epp.strategies.strategy import Strategy, config_of, producer, step

_TENANTS_MAX: Final = 8
"""Holders of a node that generations 3 and 4 look at."""
_SWING_MIN: Final = 4.0
_SWING_DEVIATIONS: Final = 2.0
_WAIT: Final = ExpectedWait()


def imbalanced(inflight: Ints, *, balance_abs: float, balance_rel: float) -> bool:
    """Whether max R - min R > `balance_abs` and max R > `balance_rel` * min R; both strictly."""
    least, most = float(inflight.min()), float(inflight.max())
    return most - least > balance_abs and most > balance_rel * least


def first_holder(tree: Affinity, cache_threshold: float) -> Bools | None:
    """bool[n]: the endpoint that was first sent the deepest known block; None: too little is known.

    Known must be more than `cache_threshold` of the prompt. If the endpoint is no candidate, the
    first in the list is taken. Who was sent it later does not matter: a node of the original trees
    is given a `last_tenant` when it is made, and another only when that one lost it.
    """
    if not _share(tree) > cache_threshold:
        return None
    first: Bools = tree.columns[FIRST_HOLDER] > 0
    return first if first.any() else first_of(~first)


def _share(tree: Affinity) -> float:
    """Of the prompt's blocks what anybody is known to hold, candidates or not."""
    deepest = tree.columns.get(DEEPEST_BLOCKS)
    return 0.0 if deepest is None else float(deepest[0]) / (tree.total or 1)


class Miss(StrEnum):
    """Who gets a prompt of which the tree knows too little."""

    LEAST_LOAD = "least-load"
    """The first in the list of those with the fewest requests in flight."""
    LEAST_LOAD_TURNS = "least-load-turns"
    """One of those with the fewest requests in flight, in turn."""
    SMALLEST_TREE = "smallest-tree"
    """Of whom the tree has the fewest blocks."""


class CacheAware1(Parameters, frozen=True):
    """Generation 1 (SGLang router, sgl-project/sglang #2114, to sglang-router 0.3.2).

    max R - min R > abs and max R > rel * min R: the fewest requests. Else, matched / total >
    threshold: who was first sent the deepest matched block, wherever it went since. Else a miss.

    What a miss does changed. `smallest-tree`, until #14650: who has the smallest tree, whatever its
    load; a stuck endpoint keeps a small tree and gets everything (#14532, "death spiral").
    `least-load`, since then: the first of the list among the fewest requests, so that with little
    traffic one endpoint gets every cold prompt (#32983). `least-load-turns`: ties do not go to the
    first (#33138, which draws).

    vllm-router 0.1.17 decides so too, over the tokens that an engine renders the prompt to; without
    an answer of the engine load alone decides there.

    Differs: blocks of 16 tokens instead of characters, so prompts below 16 tokens always miss; where
    the imbalance is met, the first of the fewest, as there.
    """

    type_name: ClassVar[str] = "smg-cache-aware-1-scorer"
    producer_type: ClassVar[str] = RadixTreeSettings.type_name

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5
    miss: Miss = Miss.LEAST_LOAD

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        tree = candidates.affinity(self.producer_type)
        if imbalanced(inflight, balance_abs=self.balance_abs, balance_rel=self.balance_rel):
            return only(self._least(inflight))
        held = first_holder(tree, self.cache_threshold)
        if held is not None:
            return only(held)
        if self.miss is Miss.SMALLEST_TREE:
            return only(first_of(least_of(tree.columns.get(HELD_BLOCKS, inflight))))
        return only(self._least(inflight))

    def _least(self, inflight: Ints) -> Bools:
        least = least_of(inflight)
        return least if self.miss is Miss.LEAST_LOAD_TURNS else first_of(least)


class CacheAware2(Parameters, frozen=True):
    """Generation 2 (lightseekorg/smg): as generation 1, and the least loaded on a miss.

    Least loaded is argmin of (R, requests ever sent there, place in the list): cold prompts spread.
    It also gets what comes while max K > `kv_overload` or max K - min K > `kv_balance`; both are off
    at 1. A match whose endpoint is no candidate goes to the first of the list.

    Differs: as generation 1; such a match is recorded at the endpoint that gets it.
    """

    type_name: ClassVar[str] = "smg-cache-aware-2-scorer"
    producer_type: ClassVar[str] = RadixTreeSettings.type_name

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5
    kv_overload: Annotated[float, Meta(ge=0, le=1)] = 1.0
    kv_balance: Annotated[float, Meta(ge=0, le=1)] = 1.0

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        tree = candidates.affinity(self.producer_type)
        held = None
        if not (
            imbalanced(inflight, balance_abs=self.balance_abs, balance_rel=self.balance_rel)
            or kv_pressure(candidates, overload=self.kv_overload, balance=self.kv_balance)
        ):
            held = first_holder(tree, self.cache_threshold)
        if held is None:
            sent = tree.columns.get(REQUESTS, inflight)
            held = first_of(least_of(sent, least_of(inflight)))
        return only(held)


class CacheAware3(Parameters, frozen=True):
    """Generation 3 (smg-project/smg #2161): load is asked of the endpoint, not of the fleet.

    Of up to 8 holders of the deepest matched block (matched / total > threshold) the best by
    1 / (1 + decay * (pending(e) - least pending) / B / blocks of the prompt), then the fewest
    requests, then any. If R(e) > rel * mean R and R(e) > mean R + abs there, or on a miss, or under
    the KV pressure of generation 2: the fewest requests of all. The prompt is recorded where it
    goes, so that a hot prefix gains holders. `overlap_decay` 0 is off.

    Differs: pending(e) is this picker's count of uncached tokens; which 8 of more holders is the
    list's order; scores are not sampled (`temperature` is 0 there too unless it is set).
    Kept: `balance_abs` 64 keeps a small pool from ever spilling, up to 64 requests above its mean.
    """

    type_name: ClassVar[str] = "smg-cache-aware-3-scorer"
    producer_type: ClassVar[str] = RadixTreeSettings.type_name

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5
    kv_overload: Annotated[float, Meta(ge=0, le=1)] = 1.0
    kv_balance: Annotated[float, Meta(ge=0, le=1)] = 1.0
    overlap_decay: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        if kv_pressure(candidates, overload=self.kv_overload, balance=self.kv_balance):
            return only(least_of(inflight))
        tree = candidates.affinity(self.producer_type)
        picked = least_of(
            inflight, best_holders(tree, candidates, self.cache_threshold, self.overlap_decay)
        )
        hot = overfull(inflight, balance_abs=self.balance_abs, balance_rel=self.balance_rel)
        # All that are picked have as many requests: all are too full, or none is.
        if not picked.any() or bool((picked & hot).any()):
            return only(least_of(inflight))
        return only(picked)


class CacheAware4(Parameters, frozen=True):
    """Generation 4 (smg-project/smg #2341, smg 1.13.0): expected wait decides among the holders.

    Holders as in generation 3. Without those for whom R(e) > rel * mean R and R(e) > mean R + margin
    the shortest expected wait (`expected_wait`) of them; if nobody is left, the shortest of all who
    are not so full; on a miss and under KV pressure, the shortest of all.
    margin = min(abs, max(4, 2 * sqrt(mean R))): the swing of a mean by chance, so that small pools
    spill too.

    Differs: as generation 3 and `expected_wait`; ties take turns. smg's veto of overloaded workers,
    which refuses requests when there are no others, is a limit on admission and not part of this.
    """

    type_name: ClassVar[str] = "smg-cache-aware-4-scorer"
    producer_type: ClassVar[str] = RadixTreeSettings.type_name

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5
    kv_overload: Annotated[float, Meta(ge=0, le=1)] = 1.0
    kv_balance: Annotated[float, Meta(ge=0, le=1)] = 1.0
    overlap_decay: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        holders = np.zeros(len(candidates), dtype=np.bool_)
        if not kv_pressure(candidates, overload=self.kv_overload, balance=self.kv_balance):
            tree = candidates.affinity(self.producer_type)
            holders = best_holders(tree, candidates, self.cache_threshold, self.overlap_decay)
        return shortest_wait(
            candidates, holders, balance_abs=self.balance_abs, balance_rel=self.balance_rel
        )


def kv_pressure(candidates: Candidates, *, overload: float, balance: float) -> bool:
    """Whether some known K > `overload`, or the known K are more than `balance` apart."""
    usage = candidates.kv_cache_usage
    known = usage[np.isfinite(usage)]
    if not len(known):
        return False
    most = float(known.max())
    return most > overload or most - float(known.min()) > balance


def best_holders(
    tree: Affinity, candidates: Candidates, cache_threshold: float, overlap_decay: float
) -> Bools:
    """bool[n]: who holds the deepest known block and is least behind; nobody on a miss.

    Where holders are known but none is a candidate: the first in the list.
    """
    n = len(candidates)
    if not _share(tree) > cache_threshold:
        return np.zeros(n, dtype=np.bool_)
    holders: Bools = tree.matched == int(tree.columns[DEEPEST_BLOCKS][0])
    if not holders.any():
        return first_of(~holders)
    holders &= np.cumsum(holders) <= _TENANTS_MAX
    if not overlap_decay:
        return holders
    pending = candidates.inflight_prefill_tokens
    behind = (pending - pending[holders].min()) / candidates.block_tokens / tree.total
    return most_of(1.0 / (1.0 + overlap_decay * np.maximum(behind, 0.0)), holders)


def overfull(inflight: Ints, *, balance_abs: float, balance_rel: float) -> Bools:
    """bool[n]: R > `balance_rel` * mean R and R > mean R + `balance_abs`; both strictly."""
    mean = float(inflight.mean())
    full: Bools = (inflight > balance_rel * mean) & (inflight > mean + balance_abs)
    return full


def shortest_wait(
    candidates: Candidates, holders: Bools, *, balance_abs: float, balance_rel: float
) -> Floats:
    """float64[n]: 1 for the shortest expected wait of those whom generation 4 leaves, else 0."""
    inflight = candidates.inflight_requests
    swing = max(_SWING_MIN, _SWING_DEVIATIONS * math.sqrt(float(inflight.mean())))
    full = overfull(inflight, balance_abs=min(balance_abs, swing), balance_rel=balance_rel)
    among = np.ones(len(inflight), dtype=np.bool_)
    if holders.any():
        among = holders & ~full
        if not among.any():
            among = ~full
    # By its definition not everybody is above the mean, so that somebody is left.
    return only(least_of(_WAIT.wait_s(candidates), among))


SCORERS: Final = (CacheAware1, CacheAware2, CacheAware3, CacheAware4)

_TREE: Final = producer(RadixTreeSettings.type_name, blockSizeTokens=16)
_ANY: Final = step("weighted-random-picker")
"""Of equal scores any, and never one with 0."""

STRATEGIES: Final = (
    Strategy(
        name="smg-cache-aware-1",
        idea="SGLang router 0.3.2: who was first sent the prefix; the first of the least loaded.",
        config=config_of(_TREE, step(CacheAware1.type_name, miss="least-load")),
    ),
    Strategy(
        name="smg-cache-aware-1-fixed",
        idea="SGLang router after #33138: as 0.3.2, but cold prompts of a tie do not pile up.",
        config=config_of(_TREE, step(CacheAware1.type_name, miss="least-load-turns")),
    ),
    Strategy(
        name="smg-cache-aware-1-smallest-tree",
        idea="SGLang router until #14650: as 0.3.2, but cold prompts go to the smallest tree.",
        config=config_of(_TREE, step(CacheAware1.type_name, miss="smallest-tree")),
    ),
    Strategy(
        name="smg-cache-aware-2",
        idea="smg, second generation: cold prompts to the fewest requests, then the fewest ever.",
        config=config_of(_TREE, step(CacheAware2.type_name)),
    ),
    Strategy(
        name="smg-cache-aware-3",
        idea="smg, third generation: the least loaded holder, unless it is far above the mean.",
        config=config_of(_TREE, step(CacheAware3.type_name), picker=_ANY),
    ),
    Strategy(
        name="smg-cache-aware-4",
        idea="smg 1.13.0: the holder with the shortest expected wait that is not too full.",
        config=config_of(_TREE, step(CacheAware4.type_name)),
    ),
)
