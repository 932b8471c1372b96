"""Cache-aware routing of SGLang's router, which vllm-router copies, and of its successor smg.

Both keep a tree of the prompts that they sent (`radix_tree`) and part where the load does not allow
to follow it: the first of four generations, and the last. R(e): requests in flight at endpoint e; K(e): its KV cache usage. Prompts are known to
the tree by blocks of 16 tokens where the originals compare characters or tokens.
"""

import math
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Abilities,
    Affinity,
    Bools,
    Candidates,
    Floats,
    InferenceRequest,
    Ints,
    Parameters,
    Strategy,
    config_of,
    producer,
    step,
)
from homing_rivals.narrowing import first_of, least_of, most_of, only
from homing_rivals.radix_tree import DEEPEST_BLOCKS, FIRST_HOLDER, RadixTreeSettings

_TENANTS_MAX: Final = 8
"""Holders of a node that generation 4 looks at."""
_SWING_MIN: Final = 4.0
_SWING_DEVIATIONS: Final = 2.0
_TOKENS_PER_S: Final = 2_000.0
_KV_PRESSURE_WEIGHT_S: Final = 0.15
_MEAN_PREFILL_TOKENS: Final = 1_024.0
_KV_USAGE_MAX: Final = 0.999


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


class CacheAware1(Parameters, frozen=True):
    """Generation 1 (SGLang router, sgl-project/sglang #2114, to sglang-router 0.3.2).

    max R - min R > abs and max R > rel * min R: the fewest requests. Else, matched / total >
    threshold: who was first sent the deepest matched block, wherever it went since. Else a miss.

    A miss goes to the first of the list among the fewest requests, so that with little traffic one
    endpoint gets every cold prompt (#32983); #33138 draws.

    vllm-router 0.1.17 decides so too, over the tokens that an engine renders the prompt to; without
    an answer of the engine load alone decides there.

    Differs: blocks of 16 tokens instead of characters, so prompts below 16 tokens always miss; where
    the imbalance is met, the first of the fewest, as there.
    """

    type_name: ClassVar[str] = "smg-cache-aware-1-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = RadixTreeSettings.type_name

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        tree = candidates.affinity(self.producer_type)
        if imbalanced(inflight, balance_abs=self.balance_abs, balance_rel=self.balance_rel):
            return only(first_of(least_of(inflight)))
        held = first_holder(tree, self.cache_threshold)
        return only(first_of(least_of(inflight)) if held is None else held)


class CacheAware4(Parameters, frozen=True):
    """Generation 4 (smg-project/smg #2341, smg 1.13.0): expected wait decides among the holders.

    Holders are up to 8 of the deepest matched block (matched / total > threshold), the best by
    1 / (1 + decay * (pending(e) - least pending) / B / blocks of the prompt); `overlap_decay` 0 is
    off. Without those for whom R(e) > rel * mean R and R(e) > mean R + margin the shortest expected
    wait of them; if nobody is left, the shortest of all who are not so full; on a miss and while
    max K > `kv_overload` or max K - min K > `kv_balance`, both off at 1, the shortest of all.
    margin = min(abs, max(4, 2 * sqrt(mean R))): the swing of a mean by chance, so that small pools
    spill too. Expected wait in seconds: queued(e) / 2,000 + 0.15 * K / (1 - K), with queued(e) the
    uncached tokens that were sent to e and are not prefilled, or 1,024 for each that waits there;
    where K is not known 1,024 / 2,000 for each in flight. smg routes by it alone as `least_load`.

    Differs: tokens are this picker's own count, where smg has reports every 10 s; which 8 of more
    holders is the list's order; scores are not sampled; ties take turns. smg's veto of overloaded
    workers, which refuses requests when there are no others, is a limit on admission and not part
    of this.
    """

    type_name: ClassVar[str] = "smg-cache-aware-4-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
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
    return only(least_of(expected_wait_s(candidates), among))


def expected_wait_s(candidates: Candidates) -> Floats:
    """float64[n], finite: seconds; or requests in flight, where no KV usage is known at all."""
    inflight = candidates.inflight_requests.astype(np.float64)
    usage = candidates.kv_cache_usage
    reported = np.isfinite(usage)
    if not reported.any():
        return inflight
    waiting = np.nan_to_num(candidates.waiting_requests) * _MEAN_PREFILL_TOKENS
    queued = candidates.inflight_prefill_tokens
    queued = np.where(queued > 0, queued, waiting)
    usage = np.clip(np.nan_to_num(usage), 0.0, _KV_USAGE_MAX)
    known = queued / _TOKENS_PER_S + _KV_PRESSURE_WEIGHT_S * usage / (1.0 - usage)
    wait_s: Floats = np.where(reported, known, inflight * _MEAN_PREFILL_TOKENS / _TOKENS_PER_S)
    return wait_s


SCORERS: Final = (CacheAware1, CacheAware4)

_TREE: Final = producer(RadixTreeSettings.type_name, blockSizeTokens=16)

STRATEGIES: Final = (
    Strategy(
        name="smg-cache-aware-1",
        idea="SGLang router 0.3.2: who was first sent the prefix; the first of the least loaded.",
        omissions="characters, here blocks of 16 tokens; its formula knows no adapters",
        config=config_of(_TREE, step(CacheAware1.type_name)),
    ),
    Strategy(
        name="smg-cache-aware-4",
        idea="smg 1.13.0: the holder with the shortest expected wait that is not too full.",
        omissions=(
            "tokens reported each 10 s: here this picker's own count; its veto of overloaded "
            "workers; its formula knows no adapters, its keys do"
        ),
        config=config_of(_TREE, step(CacheAware4.type_name)),
    ),
)
