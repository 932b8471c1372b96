"""Our own: send the request where it adds the least time to everybody.

What a request costs at an endpoint is what it waits there, what it computes there, and what all
others lose by it: those that decode while it is prefilled, those that decode beside its context, those
that wait for memory which it takes, and those whose cached prefixes it evicts. All of that is in
tokens of prefill, so that of the speed of an endpoint nothing must be known but how fast it prefills.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.agreement import agreement_key
from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Duration,
    EngineLoad,
    Floats,
    InferenceRequest,
    Parameters,
    scores_of_cost,
)

ATTENTION_TOKENS: Final = 40_000.0
"""Mean context at which attention costs a prefilled token as much as all the rest. Of the built-in
profiles of the simulator, which are fitted to measured kernels: 31k (8B), 40k (32B), 97k (70B)."""
DECODE_SHARE: Final = 1e-3
"""Prefill tokens that fit into what one context token adds to each decode step: 1.8e-3 (8B), 0.8e-3
(32B), 0.4e-3 (70B) of the same profiles."""
STEP_TOKENS: Final = 200.0
"""Prefill tokens that fit into an empty decode step: 220 (8B), 230 (32B), 180 (70B)."""
HELD_UP_MAX: Final = 10.0
"""Of who waits at an endpoint, so many lose by what a request takes. In deep overload everybody waits for
somebody anyhow; to count them all would hold prompts at an endpoint whose queue never ends."""
HALF_WEIGHT_S: Final = 0.5
"""A first token that takes so long has half of `firstTokenWeight`. A wait of some milliseconds is noticed by
nobody, and to weigh it fully keeps short prompts away from pods that are idle and hold nothing yet."""
REPORTED_S_MAX: Final = 2.0
"""What is older tells of requests that have ended since: to go by it sends everybody to whoever was idle
then. Own counts stay."""

# In arrays, as all numbers beside arrays below: numpy takes a Python float twice as long as to add a hundred.
_NOTHING: Final = np.zeros(())
_ONE: Final = np.ones(())
_HELD_UP_MAX: Final = np.array(HELD_UP_MAX)
_HALF_WEIGHT_S: Final = np.array(HALF_WEIGHT_S)
_ATTENTION: Final = np.array(-0.5 / ATTENTION_TOKENS)

_Share = Annotated[float, Meta(ge=0, le=1)]


class AddedTime(Parameters, frozen=True, dict=True):
    """Prefer where the request adds the fewest seconds to everybody.

    The least over endpoints e of the sum below. With x the tokens of the prompt that e would have to compute, T all of them, p = x (1 + (T - x/2)
    / `ATTENTION_TOKENS`) its prefill, n requests and C context tokens in flight at e, W waiting there,
    D tokens of its answer, `decodeTokens` at most, s(e) prefill tokens a second:

        (1 + w(e)) first(e)                           what it waits for its first token
        + ( a n p                                     n others, delayed while it is prefilled
          + r p                                       what its blocks evict, computed again
          + D d (C + n T)                             decoding: its own in their context, theirs in its
          + m(e) (over(e) + W' x) ) / s(e)            memory: its wait for it, theirs for what it takes

    with first(e) = (pending(e) + p) / s(e) + adapter(e), a = `prefillDelay`, r = `evictionCost`,
    w(e) = `firstTokenWeight` first(e) / (first(e) + `HALF_WEIGHT_S`), so that a long wait weighs more than a
    short one; d = `DECODE_SHARE`; over(e): tokens by which it and who
    waits exceed the KV cache; m(e) = D (`STEP_TOKENS` + d C) / capacity: how long a token of memory
    takes to come free; W' = min(W, `HELD_UP_MAX`). Where scrapes show more requests than were counted here, others send them.
    What an endpoint does not tell, or told too long ago, is the median of those that do, for who is
    silent is not idle; nothing, if nobody tells. Own counts are never unknown.
    """

    type_name: ClassVar[str] = "added-time-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *("matched_blocks", "total_blocks", "inflight_prefill_tokens", "inflight_requests"),
            *("inflight_context_tokens", "prefill_tokens_per_s", "waiting_requests"),
            *("running_requests", "kv_cache_usage", "kv_capacity_tokens", "adapter_state"),
            *("metrics_age_s", "model", "prompts", "prompt_tokens", "output_tokens_max"),
            *("session_id", "headers", "rendezvous", "replicas_unheard", "sessions_return"),
            "answer_tokens",
        ),
        reads_index=True,
        goes_by_sessions=True,
        tells_cost=True,
    )
    cost_unit: ClassVar[str] = "s"
    first_token_parts: ClassVar[tuple[str, ...]] = ("queue", "prefill", "adapter")
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    prefix_match_info_producer_name: str = ""
    prefill_delay: _Share = 0.3
    """Share of a prefill that everybody who decodes there loses. 1 if prefill stops all decoding; chunks
    go along with decode steps."""
    eviction_cost: Annotated[float, Meta(ge=0, le=100)] = 2.0
    """Tokens that are computed again for each that is computed here: caches are full, so that its blocks
    evict others', and the next turn of this prompt goes where it went."""
    first_token_weight: Annotated[float, Meta(ge=0, le=10)] = 3.0
    """How much more a second weighs that the request itself waits for its first token (the queue, its own
    prefill, its adapter) than a second that it takes from others, if the wait is long; half of it counts
    where the first token takes 0.5 s. 0: as much."""
    decode_tokens: Annotated[int, Meta(ge=1)] = 256
    """Of an answer, at most; fewer where the request has a lower limit, or where engines count that answers
    of the pool have fewer on average."""
    adapter_load: Duration = Duration(1.0)
    """For an adapter in a free slot: to load it, and what it costs others that the slot is taken."""
    adapter_wait: Duration = Duration(1.5)
    """Until a slot comes free where others use all of them, and the adapter is loaded."""
    peer_belief: _Share = 0.8
    """While there are pickers that are not heard: how sure it is that they sent a prompt, of which little
    is known here, where all would send it."""
    agreement_below: _Share = 0.8
    """Share of the prompt's full blocks; of who knows as much, nothing is believed."""
    agreement_key_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Of `prefix-cache-scorer`: so much of a prompt's head decides where that is."""

    def __post_init__(self) -> None:
        for name in ("adapter_load", "adapter_wait"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be a duration of 0s or more")

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    @cached_property
    def _delay(self) -> Floats:
        """The parameter `prefill_delay`, as an array."""
        return np.array(self.prefill_delay)

    @cached_property
    def _weight(self) -> Floats:
        """The parameter `first_token_weight`, as an array."""
        return np.array(self.first_token_weight)

    @cached_property
    def _own_prefill(self) -> Floats:
        """The factor for the request's own prefill and for the blocks that it evicts, as an array."""
        return np.array(1.0 + self.eviction_cost)

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        prompt_tokens = float(request.prompt_tokens)
        decode_tokens = self._decode_tokens(request)
        prompt = np.array(prompt_tokens)
        to_compute = self._to_compute(request, candidates)
        load = _believed_load(candidates)
        waiting = load.waiting_requests
        inflight = candidates.inflight_requests.astype(np.float64)
        requests = np.fmax(load.requests, inflight)
        # Of what others sent nothing is known but the number: each is like this one where it fits.
        unseen = np.subtract(requests, inflight, out=inflight)
        context = unseen * prompt
        context += candidates.inflight_context_tokens

        cost = candidates.inflight_prefill_tokens
        # What share of its requests waits at each; None: nobody waits anywhere.
        held_up = None
        if waiting.item(waiting.argmax()):
            held_up = waiting / np.fmax(requests, _ONE)
            unseen *= held_up
            unseen *= np.array(to_compute.item(to_compute.argmin()))
            cost += unseen
        prefill = to_compute * _ATTENTION
        prefill += np.array(1.0 + prompt_tokens / ATTENTION_TOKENS)
        prefill *= to_compute
        adapter_s = None
        if candidates.adapters_reported:
            adapter_s = self._adapter_s(request, candidates)
        in_seconds = adapter_s is not None or not candidates.prefill_alike
        if in_seconds or self.first_token_weight:
            speed = candidates.prefill_tokens_per_s
        if self.first_token_weight:
            first = cost + prefill
            if adapter_s is not None:
                first += adapter_s * speed
            half_weight = speed * _HALF_WEIGHT_S
            half_weight += first
            first *= first
            first /= half_weight
            first *= self._weight
            cost += first
        factor = requests * self._delay
        factor += self._own_prefill
        prefill *= factor
        cost += prefill
        context *= np.array(decode_tokens * DECODE_SHARE)
        cost += context
        requests *= np.array(decode_tokens * DECODE_SHARE * prompt_tokens)
        cost += requests
        self._add_memory(cost, load, to_compute, held_up, context, decode_tokens)
        if in_seconds:
            cost /= speed
        if adapter_s is not None:
            cost += adapter_s
        return scores_of_cost(cost)

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """The terms of the formula, of which `score` adds up the same in place."""
        prompt_tokens = float(request.prompt_tokens)
        decode_tokens = self._decode_tokens(request)
        to_compute = self._to_compute(request, candidates)
        load = _believed_load(candidates)
        waiting = load.waiting_requests
        inflight = candidates.inflight_requests.astype(np.float64)
        requests = np.fmax(load.requests, inflight)
        unseen = requests - inflight
        context = unseen * prompt_tokens + candidates.inflight_context_tokens
        prefill = to_compute * (1.0 + (prompt_tokens - to_compute / 2) / ATTENTION_TOKENS)
        held_up = waiting / np.maximum(requests, 1.0)
        queued = unseen * held_up * to_compute.min()
        memory, adapter = np.zeros(len(to_compute)), np.zeros(len(to_compute))
        self._add_memory(
            memory, load, to_compute, held_up if waiting.any() else None,
            context * (decode_tokens * DECODE_SHARE), decode_tokens,
        )  # fmt: skip
        if candidates.adapters_reported:
            adapter = self._adapter_s(request, candidates)
        queue = candidates.inflight_prefill_tokens + queued
        speed = candidates.prefill_tokens_per_s
        first_token = (queue + prefill) / speed + adapter
        tokens = {
            "queue": queue,
            "prefill": prefill,
            "delay of others": self.prefill_delay * requests * prefill,
            "evictions": self.eviction_cost * prefill,
            "decoding": decode_tokens * DECODE_SHARE * (context + requests * prompt_tokens),
            "memory": memory,
        }
        return {
            **{name: cost / speed for name, cost in tokens.items()},
            "adapter": adapter,
            "first token weight": (
                self.first_token_weight * first_token**2 / (first_token + HALF_WEIGHT_S)
            ),
        }

    def _add_memory(
        self,
        cost: Floats,
        load: EngineLoad,
        to_compute: Floats,
        held_up: Floats | None,
        decoding: Floats,
        decode_tokens: float,
    ) -> None:
        """Add what it waits for memory, and others for what it takes; all in prefill tokens.

        `decoding` is what the answer takes longer for the context that is there. It is changed.
        """
        used, capacity = load.kv_used_tokens, load.kv_capacity_tokens
        over = used + to_compute
        over -= capacity
        if held_up is not None:
            over += used * held_up
            np.maximum(over, _NOTHING, out=over)
            held = np.fmin(load.waiting_requests, _HELD_UP_MAX)
            held *= to_compute
            over += held
        elif over.item(over.argmax()) <= 0.0:
            return
        else:
            np.maximum(over, _NOTHING, out=over)
        decoding += np.array(decode_tokens * STEP_TOKENS)
        decoding /= capacity
        over *= decoding
        cost += np.fmax(over, _NOTHING, out=over)

    def _decode_tokens(self, request: InferenceRequest) -> float:
        limit, usual = request.output_tokens_max, request.moment.answer_tokens
        most = float(limit if limit and limit < self.decode_tokens else self.decode_tokens)
        return most if usual is None or usual > most else usual

    def _to_compute(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        """Tokens of the prompt that each holds not, as far as is known or to be believed."""
        affinity = candidates.affinity(self.prefix_match_info_producer_name)
        missing: Floats = affinity.matched * np.array(-float(candidates.block_tokens))
        missing += np.array(float(request.prompt_tokens))
        if affinity.total * candidates.block_tokens > request.prompt_tokens:
            np.fmax(missing, _NOTHING, out=missing)
        if not request.moment.replicas_unheard or not self.peer_belief or not affinity.total:
            return missing
        if affinity.matched.max() >= self.agreement_below * affinity.total:
            return missing
        key = agreement_key(
            request,
            candidates,
            affinity.matched,
            key_tokens=self.agreement_key_tokens,
            session=self.session_of(request),
        )
        if key is not None:
            missing[candidates.rendezvous(key).argmax()] *= 1.0 - self.peer_belief
        return missing

    def session_of(self, request: InferenceRequest, /) -> str:
        """What `request` names, as long as there are pickers that are not heard."""
        # Without such pickers, which is usual, it costs one comparison.
        if not request.moment.replicas_unheard or not self.peer_belief:
            return ""
        return request.session_id or request.headers.get("x-session-id", "")

    def _adapter_s(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        """float64[n]: seconds until each has the adapter of `request`, and what its slot costs others.

        A candidate that reports no adapters is taken for the median of those that do.
        """
        adapters = candidates.adapter_state
        generation = adapters.generation
        wait = np.full(len(generation), float(self.adapter_wait), dtype=np.float64)
        room = np.where(
            generation > 1,
            (adapters.resident_count < adapters.slots_max) | (adapters.idle_count > 0),
            adapters.active_count < adapters.slots_max,
        )
        wait[room] = float(self.adapter_load)
        wait[adapters.active(request.model) | adapters.on_gpu(request.model)] = 0.0
        silent = generation == 0
        if silent.any():
            wait[silent] = 0.0 if silent.all() else np.median(wait[~silent])
        return wait


def _told(column: Floats, old: Bools | None, nobody: float = 0.0) -> Floats:
    """`column` in place, what is `old` or unknown in it being the median of the rest.

    `nobody`: what all are if nobody tells.
    """
    if old is not None:
        column[old] = np.nan
    unknown = np.isnan(column)
    if not unknown.any():
        return column
    column[unknown] = nobody if unknown.all() else np.median(column[~unknown])
    return column


def _believed_load(candidates: Candidates) -> EngineLoad:
    """The load that engines tell; what is unknown or too old is the median of the rest."""
    recent = candidates.all_observed_within(REPORTED_S_MAX)
    load = candidates.engine_load()
    if recent and load.complete:
        return load
    old = None if recent else candidates.metrics_age_s > REPORTED_S_MAX
    waiting = _told(candidates.waiting_requests, old)
    # If nobody tells of memory, it is unknown, and nothing is short of it.
    capacity = _told(candidates.kv_capacity_tokens, old, np.nan)
    return EngineLoad(
        waiting_requests=waiting,
        requests=_told(candidates.running_requests, old) + waiting,
        kv_used_tokens=_told(candidates.kv_cache_usage, old, np.nan) * capacity,
        kv_capacity_tokens=capacity,
        complete=False,
    )
