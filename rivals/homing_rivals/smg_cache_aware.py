"""Cache-aware routing of SGLang's router, which vllm-router copies, and of its successor smg.

The two rules of this family are the first and the last of four generations of this routing. Both
have a tree of the prompts that they sent (`radix_tree`), and differ in the choice of an endpoint if
the load of the endpoint that the tree names is too high. R(e) is the number of requests in flight
at endpoint e, and K(e) its KV-cache usage from 0 to 1. The tree of the copies compares prompts by
blocks of 16 tokens, where the originals compare characters or tokens.
"""

import math
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Affinity, Bools, Candidates, Floats, InferenceRequest, Ints
from homing_rivals.narrowing import first_of, least_of, most_of, only
from homing_rivals.radix_tree import DEEPEST_BLOCKS, FIRST_HOLDER, RadixTreeSettings

_TENANTS_MAX: Final = 8
"""Maximum number of endpoints with the prompt's deepest known block that cache-aware routing of
generation 4 considers.
"""
_SWING_MIN: Final = 4.0
_SWING_DEVIATIONS: Final = 2.0
_TOKENS_PER_S: Final = 2_000.0
_KV_PRESSURE_WEIGHT_S: Final = 0.15
_MEAN_PREFILL_TOKENS: Final = 1_024.0
_KV_USAGE_MAX: Final = 0.999


def imbalanced(inflight: Ints, *, balance_abs: float, balance_rel: float) -> bool:
    """Return True if the numbers R of requests in flight are imbalanced: max R - min R >
    `balance_abs` and max R > `balance_rel` * min R.
    """
    least, most = float(inflight.min()), float(inflight.max())
    return most - least > balance_abs and most > balance_rel * least


def first_holder(tree: Affinity, cache_threshold: float) -> Bools | None:
    """Return bool[n]: True only for the endpoint to which the prompt's deepest known block was
    first sent; None if too little is known.

    The known part must exceed `cache_threshold` of the prompt. The first candidate in the list is
    taken if that endpoint is no candidate. Later endpoints do not matter: a node of the original
    trees gets a `last_tenant` when it is created, and another only when that one lost it.
    """
    if not _share(tree) > cache_threshold:
        return None
    first: Bools = tree.columns[FIRST_HOLDER] > 0
    return first if first.any() else first_of(~first)


def _share(tree: Affinity) -> float:
    """Return the share of the prompt's blocks that any endpoint is known to have,
    candidate or not.
    """
    deepest = tree.columns.get(DEEPEST_BLOCKS)
    return 0.0 if deepest is None else float(deepest[0]) / (tree.total or 1)


class _CacheAware(contract.Parameters, frozen=True):
    """Parameters that generation 1 and generation 4 of cache-aware routing have in common."""

    abilities: ClassVar[contract.Abilities] = contract.Abilities(reads_index=True)
    producer_type: ClassVar[str] = RadixTreeSettings.type_name
    producer: ClassVar[str] = producer_type

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.3
    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5


class CacheAware1(_CacheAware, frozen=True):
    """Cache-aware routing, generation 1: SGLang's router from sgl-project/sglang #2114 to
    sglang-router 0.3.2.

    If load is uneven (max R - min R > abs and max R > rel * min R), the endpoint with the fewest
    requests wins. If load is even and matched / total > threshold, the endpoint to which the
    deepest matched block was first sent wins, wherever the block was sent later. All other requests
    are misses.

    A miss goes to the first endpoint of the list among those with the fewest requests, so with
    little traffic one endpoint gets every unknown prompt (#32983); #33138 draws at random instead.

    vllm-router 0.1.17 decides in the same way, over the tokens to which an engine renders the
    prompt; if the engine does not answer, vllm-router decides by load alone.

    Different from SGLang: blocks have 16 tokens instead of characters, so prompts below 16 tokens
    always miss. Kept from SGLang: at uneven load, the first of the endpoints with the fewest
    requests wins.
    """

    type_name: ClassVar[str] = "smg-cache-aware-1-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        tree = candidates.affinity(self.producer_type)
        if imbalanced(inflight, balance_abs=self.balance_abs, balance_rel=self.balance_rel):
            return only(first_of(least_of(inflight)))
        held = first_holder(tree, self.cache_threshold)
        return only(first_of(least_of(inflight)) if held is None else held)


class CacheAware4(_CacheAware, frozen=True):
    """Cache-aware routing, generation 4 (smg-project/smg #2341, smg 1.13.0): prefer the shortest
    expected wait among the endpoints with a match.

    If matched / total > threshold for the prompt's deepest known block, the endpoints with a match
    are at most 8 that have this block. An `overlap_decay` above 0 leaves only the best of these by 1 /
    (1 + decay * (pending(e) - least pending) / B / blocks of the prompt); `overlap_decay` 0
    disables this selection. Endpoints with R(e) > rel * mean R and R(e) > mean R + margin are too
    full and are removed, and the shortest expected wait among the remaining endpoints with a match
    wins. If no endpoint with a match remains, the shortest wait of all endpoints that are not too
    full wins. The shortest wait of all endpoints wins on a miss, and while max K > `kv_overload` or
    max K - min K > `kv_balance`, both off at 1. margin = min(abs, max(4, 2 * sqrt(mean R))) is the
    random variation of a mean, so that small pools spill too. The expected wait of an endpoint in
    seconds is queued(e) / 2,000 + 0.15 * K / (1 - K). queued(e) is the number of uncached tokens
    that were sent to e and are not prefilled, or, if there are none, 1,024 for each request that
    waits there. If K is unknown, the wait is 1,024 / 2,000 s for each request in flight. smg's
    policy `least_load` routes by this wait alone.

    Different from smg: tokens are the pickers' own count, where smg has reports every 10 s; if
    more than 8 endpoints have the block, the first 8 of the list are taken; scores are not sampled;
    equal endpoints alternate. smg's veto of overloaded workers, which refuses requests if there are
    no others, is an admission limit and not part of this copy.
    """

    type_name: ClassVar[str] = "smg-cache-aware-4-scorer"

    kv_overload: Annotated[float, Meta(ge=0, le=1)] = 1.0
    kv_balance: Annotated[float, Meta(ge=0, le=1)] = 1.0
    overlap_decay: Annotated[float, Meta(ge=0)] = 0.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        holders = np.zeros(len(candidates), dtype=np.bool_)
        if not kv_pressure(candidates, overload=self.kv_overload, balance=self.kv_balance):
            tree = candidates.affinity(self.producer_type)
            holders = best_holders(tree, candidates, self.cache_threshold, self.overlap_decay)
        return shortest_wait(
            candidates, holders, balance_abs=self.balance_abs, balance_rel=self.balance_rel
        )


def kv_pressure(candidates: Candidates, *, overload: float, balance: float) -> bool:
    """Return True if the highest known KV-cache usage is above `overload`, or more than `balance`
    above the lowest.
    """
    usage = candidates.kv_cache_usage
    known = usage[np.isfinite(usage)]
    if not len(known):
        return False
    most = float(known.max())
    return most > overload or most - float(known.min()) > balance


def best_holders(
    tree: Affinity, candidates: Candidates, cache_threshold: float, overlap_decay: float
) -> Bools:
    """Return bool[n]: True for at most 8 candidates that have the prompt's deepest known block;
    with `overlap_decay`, only for those of them with the least prefill work. All are False on a
    miss.

    The first candidate in the list is taken if the block is known only at endpoints that are no
    candidates.
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
    """Return bool[n]: True for endpoints whose requests in flight exceed both `balance_rel` times
    the mean and the mean plus `balance_abs`.
    """
    mean = float(inflight.mean())
    full: Bools = (inflight > balance_rel * mean) & (inflight > mean + balance_abs)
    return full


def shortest_wait(
    candidates: Candidates, holders: Bools, *, balance_abs: float, balance_rel: float
) -> Floats:
    """Return float64[n]: 1 for the candidates with the shortest expected wait among those
    considered, 0 for the others.

    If any candidate is in `holders`, the considered ones are the `holders` that are not too full
    (`overfull`), or else all candidates that are not too full. If no candidate is in `holders`, all
    are considered.
    """
    inflight = candidates.inflight_requests
    swing = max(_SWING_MIN, _SWING_DEVIATIONS * math.sqrt(float(inflight.mean())))
    full = overfull(inflight, balance_abs=min(balance_abs, swing), balance_rel=balance_rel)
    among = np.ones(len(inflight), dtype=np.bool_)
    if holders.any():
        among = holders & ~full
        if not among.any():
            among = ~full
    # Not all endpoints are above the mean by definition, so one is left.
    return only(least_of(expected_wait_s(candidates), among))


def expected_wait_s(candidates: Candidates) -> Floats:
    """Return float64[n]: the expected wait at each candidate in seconds; the number of requests in
    flight if no endpoint reports its KV-cache usage.

    A candidate that does not report it, where others do, waits for 1,024 tokens of each request in
    flight. All values are finite.
    """
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

_TREE: Final = contract.producer(RadixTreeSettings.type_name, blockSizeTokens=16)

STRATEGIES: Final = (
    contract.Strategy(
        name="smg-cache-aware-1",
        idea=(
            "SGLang router 0.3.2: the endpoint to which the prefix was first sent, else the "
            "first of the least loaded."
        ),
        omissions="characters, here blocks of 16 tokens; its formula ignores adapters",
        config=contract.config_of(_TREE, contract.step(CacheAware1.type_name)),
    ),
    contract.Strategy(
        name="smg-cache-aware-4",
        idea=(
            "smg 1.13.0: among endpoints with the prefix that are not too full, the one with the "
            "shortest expected wait."
        ),
        omissions=(
            "tokens reported every 10 s: here the pickers' own count; its veto of overloaded "
            "workers; its formula ignores adapters, unlike its keys"
        ),
        config=contract.config_of(_TREE, contract.step(CacheAware4.type_name)),
    ),
)
