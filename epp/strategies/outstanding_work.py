"""production-stack's estimate of the time to the first token: attention work that is outstanding."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.plugins.contract import (
    Affinity,
    AffinityIndex,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
    Seconds,
)
from epp.strategies.narrowing import least_of, only
from epp.strategies.radix_tree import RadixTree, RadixTreeSettings
from epp.strategies.strategy import Strategy, config_of, producer, step

_ATTENDED: Final = "attended_tokens"
"""Column: tokens that an uncached token of what was lately sent there attends to; 0: unknown."""
_UNCACHED: Final = "uncached_tokens"
"""Column: uncached tokens of a request that was lately sent there, in the mean; 0: unknown."""
_DECAY: Final = 0.9
"""Of what was sent before, with every request: the last ten or so count."""


def work(tokens: float, cached_tokens: Floats) -> Floats:
    """(c + 1 + n) * (n - c) / 2: attended tokens, summed over the uncached ones of a prompt of n."""
    return (cached_tokens + 1.0 + tokens) * (tokens - cached_tokens) / 2.0


class AttentionWorkSettings(RadixTreeSettings, frozen=True):
    """`attention-work-producer`: the tree of prompts, and how long the contexts are lately."""

    type_name: ClassVar[str] = "attention-work-producer"

    block_size_tokens: Annotated[int, Meta(ge=1)] = 64

    def open(self) -> AffinityIndex:
        """A new, empty tree."""
        return AttentionWork(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running tree all but the block size; False if that differs."""
        return isinstance(index, AttentionWork) and index.configure(self)


class AttentionWork(RadixTree):
    """The tree, and by endpoint the mean context of the uncached tokens that it was sent."""

    def __init__(self, settings: PrefixIndexSettings) -> None:
        super().__init__(settings)
        self._recent: dict[int, tuple[float, float, float]] = {}
        """Slot -> (work, uncached tokens, requests), all decayed."""

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """As the tree does, and two more columns."""
        known = super().match(request, slots, now)
        attended, uncached = np.zeros(slots), np.zeros(slots)
        for slot, (done, tokens, requests) in self._recent.items():
            if slot < slots:
                attended[slot] = done / tokens
                uncached[slot] = tokens / requests
        columns = {**known.columns, _ATTENDED: attended, _UNCACHED: uncached}
        return Affinity(known.matched, known.total, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """As the tree does, and averages. An average is not taken back when the request moves."""
        recorded = super().record(request, slot, now)
        held = sum(recorded[2]) * self.block_tokens
        tokens = float(request.prompt_tokens)
        uncached = tokens - min(held, tokens)
        if not uncached:
            return recorded
        done, before, requests = self._recent.get(slot, (0.0, 0.0, 0.0))
        added = work(tokens, np.array([tokens - uncached])).item()
        self._recent[slot] = (
            _DECAY * done + added,
            _DECAY * before + uncached,
            _DECAY * requests + 1.0,
        )
        return recorded

    def forget(self, slot: int) -> None:
        """As the tree does."""
        super().forget(slot)
        self._recent.pop(slot, None)


class Ties(StrEnum):
    """Who gets a request that costs the same at several endpoints."""

    LAST = "last"
    """The last in the list that holds nothing of it, else the last."""
    TURNS = "turns"


class OutstandingWork(Parameters, frozen=True):
    """argmin of the work of requests without a first token at e + work(n, c(e)).

    work(n, c) = (c + 1 + n) * (n - c) / 2 for a prompt of n tokens of which c are cached. Of equals
    the last that holds nothing, else the last. Source: production-stack #670 in its final form,
    never merged.

    Differs: work ahead is tokens ahead times the mean context of what was lately sent there. Tokens
    ahead are this picker's count of uncached ones, which drains at the endpoint's prefill speed
    until a first token is seen, or what its waiting requests are likely to have, if that is more:
    the original sees every first token. What is cached is believed by the tree, where LMCache tells
    it; no match anywhere else counts, as where nothing is shared.
    Kept: ties go to the last in the list, so with little traffic one endpoint gets all cold prompts.
    With `ties: turns` they take turns.
    """

    type_name: ClassVar[str] = "outstanding-work-scorer"
    producer_type: ClassVar[str] = AttentionWorkSettings.type_name

    ties: Ties = Ties.LAST

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.producer_type)
        tokens = float(request.prompt_tokens)
        cached = np.minimum(known.matched * float(candidates.block_tokens), tokens)
        unknown = np.zeros(len(candidates))
        attended = known.columns.get(_ATTENDED, unknown)
        # Of whom nothing is known, somebody else told: as long as this prompt.
        attended = np.where(attended > 0, attended, (tokens + 1.0) / 2.0)
        waiting = np.nan_to_num(candidates.waiting_requests)
        waiting *= known.columns.get(_UNCACHED, unknown)
        ahead = np.maximum(candidates.inflight_prefill_tokens, waiting)
        cost = ahead * attended + work(tokens, cached)
        least = least_of(cost)
        if self.ties is Ties.TURNS:
            return only(least)
        # Those that hold nothing are compared last there, and a later one wins a tie.
        unmatched = least & (cached == 0)
        last = np.zeros(len(cost), dtype=np.bool_)
        last[np.flatnonzero(unmatched if unmatched.any() else least)[-1]] = True
        return only(last)


INDEXES: Final = (AttentionWorkSettings,)

SCORERS: Final = (OutstandingWork,)

STRATEGIES: Final = (
    Strategy(
        name="production-stack-ttft",
        idea="production-stack #670: the least attention work before the first token.",
        config=config_of(
            producer(AttentionWorkSettings.type_name, blockSizeTokens=64),
            step(OutstandingWork.type_name),
        ),
    ),
    Strategy(
        name="production-stack-ttft-fixed",
        idea="production-stack #670, but endpoints that would take as long take turns.",
        config=config_of(
            producer(AttentionWorkSettings.type_name, blockSizeTokens=64),
            step(OutstandingWork.type_name, ties="turns"),
        ),
    ),
)
