"""Preble: if more than half of a prompt is cached, choose among the endpoints that have it (exploit);
else the endpoint with the least cost of load, evicted blocks and missing blocks (explore).

Sources: ICLR 2025, arXiv 2407.00023; WukLab/preble.
"""

import math
from collections import deque
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct

from epp.plugins import contract
from epp.plugins.contract import (
    Affinity,
    AffinityIndex,
    Bools,
    Candidates,
    Floats,
    InferenceRequest,
    Seconds,
)

_ENTRIES_MAX: Final = 65_536
"""Maximum number of requests in the window of one endpoint; beyond it, the oldest are dropped."""
_SWEEP_MAX: Final = 4_096


class PrebleHistorySettings(contract.PrefixIndexSettings, frozen=True, kw_only=True):
    """`preble-history-producer`: an `approx-prefix-cache-producer` that also reports each
    endpoint's recent requests.

    The additional columns of this index cover, for each endpoint, the last `window`:
    `missed_tokens` and `hit_tokens` of the prompts that were sent there, their number `requests`,
    and `pushed_out_tokens`, the number of tokens that this prompt would push out of a full cache.
    The columns may cover up to a second more than the window.
    """

    type_name: ClassVar[str] = "preble-history-producer"

    window: contract.Duration = contract.Duration(180.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        contract.check_above_zero("window", self.window)

    def open(self) -> AffinityIndex:
        """Return a new, empty index of cached blocks and recent requests, with these settings as
        its parameters.
        """
        return PrebleHistory(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply all parameters except the block size to the running index `index`.

        Return False if the block size differs, or if `index` has another type. A different `window`
        applies even if the block size differs.
        """
        return isinstance(index, PrebleHistory) and index.adopt(self)


class _Sent(Struct, gc=False):
    """The blocks of one request that was sent to an endpoint within the window."""

    at_s: Seconds
    missed_blocks: int
    hit_blocks: int
    requests: int = 1


class _Window:
    """The requests that were sent to one endpoint within the window, and the sums of
    their blocks.
    """

    __slots__ = ("hit_blocks", "missed_blocks", "requests", "sent")

    def __init__(self) -> None:
        self.sent: deque[_Sent] = deque()
        self.missed_blocks = 0
        self.hit_blocks = 0
        self.requests = 0

    def add(self, one: _Sent) -> None:
        self.sent.append(one)
        self.missed_blocks += one.missed_blocks
        self.hit_blocks += one.hit_blocks
        self.requests += one.requests
        if len(self.sent) > _ENTRIES_MAX:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        self.take_back(self.sent.popleft())

    def take_back(self, one: _Sent) -> None:
        """Subtract the request `one` from the window's sums; do nothing if it was subtracted
        before.
        """
        self.missed_blocks -= one.missed_blocks
        self.hit_blocks -= one.hit_blocks
        self.requests -= one.requests
        one.missed_blocks = one.hit_blocks = one.requests = 0


class PrebleHistory(contract.PrefixIndex):
    """An `AffinityIndex` of cached blocks and of the recent requests of each endpoint, counted in
    full blocks.
    """

    def __init__(self, settings: PrebleHistorySettings) -> None:
        super().__init__(settings)
        self._window_s = float(settings.window)
        self._windows: dict[int, _Window] = {}

    def adopt(self, settings: PrebleHistorySettings) -> bool:
        """Apply settings as `PrefixIndex.configure` does, and return its result. Another `window`
        applies from the next call of `expire` on, even if the result is False.
        """
        self._window_s = float(settings.window)
        return self.configure(settings)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the estimated cached prefix at each slot, and the columns of the slots' recent
        requests.
        """
        known = super().match(request, slots, now)
        missed, hits, requests = np.zeros(slots), np.zeros(slots), np.zeros(slots)
        for slot, window in self._windows.items():
            if slot < slots:
                missed[slot] = window.missed_blocks
                hits[slot] = window.hit_blocks
                requests[slot] = window.requests
        room = np.array(
            [self.capacity_blocks(slot) - self.blocks_held(slot) for slot in range(slots)],
            dtype=np.float64,
        )
        columns = {
            "missed_tokens": missed * self.block_tokens,
            "hit_tokens": hits * self.block_tokens,
            "requests": requests,
            "pushed_out_tokens": np.maximum(known.total - known.matched - room, 0.0)
            * self.block_tokens,
        }
        return Affinity(known.matched, known.total, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record that `request` was sent to `slot`, which computed the part that it had not cached
        and now caches all of it.
        """
        recorded = super().record(request, slot, now)
        hit = sum(recorded.held)
        total = sum(len(chain) for chain in self.share(request)) // contract.HASH_BYTES
        one = _Sent(now, total - hit, hit)
        self._windows.setdefault(slot, _Window()).add(one)
        return recorded, one

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo `record` of `request` at `slot`: its cached blocks and its place in the window."""
        held, one = recorded
        super().retract(request, slot, held, now)
        window = self._windows.get(slot)
        if window is not None:
            window.take_back(one)

    def forget(self, slot: int) -> None:
        """Drop the cached blocks and the recent requests of `slot`."""
        super().forget(slot)
        window = self._windows.pop(slot, _Window())
        while window.sent:
            window.drop_oldest()

    def expire(self, now: Seconds) -> None:
        """Drop cached blocks and requests that are too old, a limited number of each per call."""
        super().expire(now)
        left = _SWEEP_MAX
        for window in self._windows.values():
            while left and window.sent and window.sent[0].at_s < now - self._window_s:
                window.drop_oldest()
                left -= 1


class ExploreExploit(contract.Parameters, frozen=True):
    """Preble E2: prefer an endpoint that has more than half of the prompt cached (exploit), else
    the one with the least cost (explore).

    If hit > T - hit for the endpoints with the longest match, the one of them with the lowest L(e)
    wins (exploit). Otherwise the endpoint with the lowest L(e) + M(e) + P(e) wins (explore).

    L(e) is the work that e got in the window, in seconds: missed tokens / v + R(e) * o * d. P(e) =
    (T - hit(e)) / v is the time to prefill the uncached tokens of this prompt. M(e) is the time to
    compute again what the prompt pushes out of the cache, times the share of tokens that hit in the
    window. T is the number of tokens of the prompt; hit(e) the number of them that e is estimated
    to have cached; v the prefill speed of e; R(e) the number of requests in flight at e; o is
    `output_tokens` and d is `decode_s`.

    If the endpoint to exploit has L > `rebalance_ratio` * min L, and each endpoint got at least
    `rebalance_requests` requests in the window on average, the endpoint with the lowest L(e) gets
    the prompt instead, and has it cached from then on.

    Different from Preble: prefill speeds are those of the configuration, where Preble has lines
    fitted for two GPUs; the time of a decoded token is a constant, where Preble takes the median of
    200; subtrees are not moved, and hot subtrees are split only with requests, not ahead of them;
    blocks have 64 tokens, where the nodes of Preble's radix tree have single tokens.
    """

    type_name: ClassVar[str] = "explore-exploit-scorer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(
        reads=("inflight_requests", "prefill_tokens_per_s", "prompt_tokens", "uncached_tokens"),
        reads_index=True,
    )
    producer_type: ClassVar[str] = PrebleHistorySettings.type_name
    producer: ClassVar[str] = producer_type

    output_tokens: Annotated[float, Meta(ge=0)] = 45.0
    """Number of output tokens of an answer, as Preble's code assumes."""
    decode_s: Annotated[float, Meta(ge=0)] = 0.15
    """Seconds per output token, the initial value of Preble's median."""
    rebalance_ratio: Annotated[float, Meta(ge=1)] = 1.5
    rebalance_requests: Annotated[float, Meta(ge=0)] = 50.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        known = candidates.affinity(self.producer_type)
        if not known.columns:
            return None
        speed = candidates.prefill_tokens_per_s
        missed, hits = known.columns["missed_tokens"], known.columns["hit_tokens"]
        load = missed / speed
        load += candidates.inflight_requests * (self.output_tokens * self.decode_s)
        uncached = candidates.uncached_tokens
        fewest = float(uncached.min())
        if candidates.prompt_tokens - fewest > fewest:
            holds = uncached == fewest
            if not self._rebalances(load, holds, float(known.columns["requests"].mean())):
                return contract.scores_of_cost(np.where(holds, load, math.inf))
            return contract.scores_of_cost(load)
        reused = hits / np.maximum(missed + hits, 1.0)
        pushed_out = known.columns["pushed_out_tokens"] * reused
        return contract.scores_of_cost(load + (pushed_out + uncached) / speed)

    def _rebalances(self, load: Floats, holds: Bools, requests: float) -> bool:
        lightest = float(load[holds].min())
        return requests >= self.rebalance_requests and lightest > self.rebalance_ratio * float(
            load.min()
        )


INDEXES: Final = (PrebleHistorySettings,)
SCORERS: Final = (ExploreExploit,)

STRATEGIES: Final = (
    contract.Strategy(
        name="preble",
        idea=(
            "Preble E2: if more than half of the prompt is cached, the least loaded of those "
            "endpoints; else the least cost of load, evicted and missing blocks, over three "
            "minutes."
        ),
        omissions=(
            "moving or splitting hot subtrees ahead of requests; speeds fitted for two GPUs; the "
            "measured time per token; its formula ignores adapters"
        ),
        config=contract.config_of(
            # Preble assumes 198,516 tokens for a GPU if an engine reports nothing.
            contract.producer(PrebleHistorySettings.type_name, lruCapacityPerServer=3_101),
            contract.step(ExploreExploit.type_name),
        ),
    ),
)
