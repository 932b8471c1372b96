"""The default scorer, designed for Homing: route each request where it adds the least time to all
requests.

The cost of a request at an endpoint has three parts. The request waits there, for earlier prompts
and for its LoRA adapter; this wait has an additional weight. Its prompt is computed there. It
delays other requests: those that decode during its prefill, those that decode beside its context,
those that wait for the memory that it takes, and those whose cached prefixes it evicts. All parts
except the adapter's are in prefill tokens, so the prefill speed is the only speed of an endpoint
that must be known.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Final, NamedTuple

import numpy as np
from msgspec import Meta

from epp.plugins.agreement import agreement_key
from epp.plugins.contract import (
    ATTENTION_TOKENS,
    REPORTED_S_MAX,
    STEP_TOKENS,
    Abilities,
    Bools,
    Candidates,
    Duration,
    EngineLoad,
    ExpectedLatency,
    Floats,
    InferenceRequest,
    Parameters,
    RequestLoad,
    prefill_work,
    scores_of_cost,
)

DECODE_SHARE: Final = 1e-3
"""Number of prefill tokens computed in the time that one context token adds to each decode step.

The simulator's built-in profiles of H100 GPUs have about 1.8e-3 (8B), 0.8e-3 (32B) and 0.4e-3
(70B).
"""
HALF_WEIGHT_S: Final = 0.5
"""Time to first token in seconds at which half of `firstTokenWeight` applies.

Users do not notice a wait of some milliseconds. Full weight for it would keep short prompts away
from idle pods with an empty cache.
"""

# The constants are arrays, like all numbers beside arrays below. numpy needs twice as long to add a
# Python float as to add a hundred numbers.
_NOTHING: Final = np.zeros(())
_HALF_WEIGHT_S: Final = np.array(HALF_WEIGHT_S)
_ATTENTION: Final = np.array(-0.5 / ATTENTION_TOKENS)

_Share = Annotated[float, Meta(ge=0, le=1)]


class AddedWork(NamedTuple):
    """The parts of the cost of a request at each of n candidates, float64[n] each."""

    queue: Floats
    """Prefill tokens of earlier requests that the endpoint computes before this prompt."""
    prefill: Floats
    """Work of computing this request's prompt, in prefill tokens."""
    requests: Floats
    """Number of requests at the endpoint that the prefill of this request delays."""
    decoding: Floats
    """Time that the request's decoding takes beside the contexts of other requests, and theirs
    beside its own context, in prefill tokens.
    """
    memory: Floats
    """The request's wait for KV-cache memory, and others' wait for the memory that it takes, in
    prefill tokens.
    """


class AddedTime(Parameters, frozen=True, dict=True):
    """Prefer the endpoint where the request adds the least time to all requests.

    `added-time-scorer` prefers the endpoint e with the smallest sum of the times below. Let x be
    the prompt tokens that e would have to compute, T all prompt tokens, p = x (1 + (T - x/2) /
    `ATTENTION_TOKENS`) the prefill, n the requests and C the context tokens in flight at e, W the
    requests waiting there, D the tokens of the answer, at most `decodeTokens`, and s(e) the prefill
    tokens a second:

        (1 + w(e)) first(e)                           wait for the request's first token
        + ( a n p                                     delay of n others during its prefill
          + r p                                       computing again what its blocks evict
          + D d (C + n T)                             decoding: it in others' context, others in its own
          + m(e) (over(e) + W' x) ) / s(e)            memory: its wait, and others' wait for what it takes

    with first(e) = (pending(e) + p) / s(e) + adapter(e), a = `prefillDelay`, r = `evictionCost`,
    w(e) = `firstTokenWeight` first(e) / (first(e) + `HALF_WEIGHT_S`), so that a long wait weighs more than a
    short one; d = `DECODE_SHARE`; over(e): tokens by which this request and the waiting ones exceed
    the KV cache; m(e) = D (`STEP_TOKENS` + d C) / capacity: how long a token of memory takes to
    become free; W' = min(W, `HELD_UP_MAX`). If an endpoint reports more requests than this picker
    has in flight there, the scorer assumes that others sent the rest. A load value that an endpoint
    does not report, or reported too long ago, is replaced by the median of the endpoints that
    report it, because an endpoint that reports nothing is not idle. If no endpoint reports a load
    value, it counts as 0, and no cache counts as full. The picker's own counts of requests and
    tokens in flight are never replaced.
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
    """Share of a prefill by which it delays every request that decodes at the endpoint.

    1 if prefill stops all decoding; less with chunked prefill, because chunks run together with
    decode steps.
    """
    eviction_cost: Annotated[float, Meta(ge=0, le=100)] = 2.0
    """Number of prompt tokens that are computed again later, for each prompt token that is computed
    now.

    Caches are full, so new blocks evict others, and the next turn of the evicted prompt is routed
    to the same endpoint.
    """
    first_token_weight: Annotated[float, Meta(ge=0, le=10)] = 3.0
    """Additional weight of the request's own wait for its first token (queue, prefill, adapter),
    relative to the time that it takes from other requests.

    It applies fully to a long wait and by half at 0.5 s. At 0, both times count alike.
    """
    decode_tokens: Annotated[int, Meta(ge=1)] = 256
    """Maximum length of the answer in tokens that the formula assumes.

    A lower limit of the request, or a lower average answer length that the pool's engines report,
    replaces it.
    """
    adapter_load: Duration = Duration(1.0)
    """Time to load a LoRA adapter into a free slot of the endpoint, including the cost to others of
    the occupied slot.
    """
    adapter_wait: Duration = Duration(1.5)
    """Time to wait for a LoRA adapter slot of the endpoint if all are in use, including the loading
    of the adapter.
    """
    peer_belief: _Share = 0.8
    """Probability that other pickers sent a little-known prompt to the endpoint that all pickers
    prefer.

    It applies while there are pickers whose decisions this one does not receive.
    """
    agreement_below: _Share = 0.8
    """Share of the prompt's full blocks from which `peerBelief` does not apply, if at least one
    endpoint has so many of them cached.
    """
    agreement_key_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Number of prompt tokens beyond what most endpoints have cached that determine the endpoint
    that all pickers prefer, as in `prefix-cache-scorer`.
    """

    def __post_init__(self) -> None:
        for name, span in (("adapterLoad", self.adapter_load), ("adapterWait", self.adapter_wait)):
            if not (math.isfinite(span) and span >= 0):
                raise ValueError(f"{name} is {span:g}s; it must be finite and at least 0s")

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    @cached_property
    def _delay(self) -> Floats:
        return np.array(self.prefill_delay)

    @cached_property
    def _weight(self) -> Floats:
        return np.array(self.first_token_weight)

    @cached_property
    def _own_prefill(self) -> Floats:
        """Return the factor by which the prefill of the request itself counts: 1 for its own time,
        plus `eviction_cost` for the blocks that it evicts.
        """
        return np.array(1.0 + self.eviction_cost)

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        prompt_tokens = float(request.prompt_tokens)
        decode_tokens = self._decode_tokens(request)
        prompt = np.array(prompt_tokens)
        to_compute = self._to_compute(request, candidates, prompt)
        load = _believed_load(candidates)
        requests = candidates.request_load(load)
        # Only the number of requests that others sent is known. Each is assumed to be like this
        # one.
        context = requests.unseen * prompt
        context += requests.context_tokens

        cost = candidates.inflight_prefill_tokens
        if requests.unseen_waiting is not None:
            cost += requests.unseen_waiting * np.array(to_compute.item(to_compute.argmin()))
        prefill = to_compute * _ATTENTION
        prefill += np.array(1.0 + prompt_tokens / ATTENTION_TOKENS)
        prefill *= to_compute
        adapter_s = None
        if candidates.adapters_reported:
            adapter_s = self.adapter_s(request, candidates)
        # If all speeds are equal and no adapter is loaded, tokens are compared instead of seconds, and
        # one number replaces an array.
        common_speed = candidates.common_prefill_tokens_per_s if adapter_s is None else None
        if common_speed is None:
            speed = candidates.prefill_tokens_per_s
        if self.first_token_weight:
            first = cost + prefill
            if adapter_s is not None:
                first += adapter_s * speed
            if common_speed is None:
                half_weight = first + speed * _HALF_WEIGHT_S
            else:
                half_weight = first + np.array(common_speed * HALF_WEIGHT_S)
            first *= first
            first /= half_weight
            first *= self._weight
            cost += first
        prefill *= requests.scaled(self._delay, self._own_prefill)
        cost += prefill
        context *= np.array(decode_tokens * DECODE_SHARE)
        cost += context
        cost += requests.requests * np.array(decode_tokens * DECODE_SHARE * prompt_tokens)
        # Usually no request waits, and every endpoint has memory for the whole prompt. An unknown
        # amount of memory (NaN) fails the comparison.
        if load.waits or not prompt_tokens <= load.kv_free_least_tokens:
            self._add_memory(cost, load, to_compute, requests, context, decode_tokens)
        if common_speed is None:
            cost /= speed
        if adapter_s is not None:
            cost += adapter_s
        return scores_of_cost(cost)

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """Return each part of the request's cost at each candidate in seconds, float64[n] by name.

        `score` rates the candidates by the sum of the parts.
        """
        work = self.work(request, candidates)
        speed = candidates.prefill_tokens_per_s
        adapter = np.zeros(len(speed))
        if candidates.adapters_reported:
            adapter = self.adapter_s(request, candidates)
        tokens = {
            "queue": work.queue,
            "prefill": work.prefill,
            "delay of others": self.prefill_delay * work.requests * work.prefill,
            "evictions": self.eviction_cost * work.prefill,
            "decoding": work.decoding,
            "memory": work.memory,
        }
        first_token_s = (work.queue + work.prefill) / speed + adapter
        return {
            **{name: cost / speed for name, cost in tokens.items()},
            "adapter": adapter,
            "first token weight": self.weight_s(first_token_s),
        }

    def weight_s(self, first_token_s: Floats) -> Floats:
        """Return float64[n]: the additional cost in seconds of waits for the first token."""
        weighted: Floats = first_token_s * first_token_s
        weighted *= self.first_token_weight
        weighted /= first_token_s + HALF_WEIGHT_S
        return weighted

    def work(self, request: InferenceRequest, candidates: Candidates) -> "AddedWork":
        """Return the parts of the cost at each candidate in prefill tokens, without weights, and
        without the time for adapters.
        """
        prompt_tokens = float(request.prompt_tokens)
        decode_tokens = self._decode_tokens(request)
        to_compute = self._to_compute(request, candidates, np.array(prompt_tokens))
        load = _believed_load(candidates)
        requests = candidates.request_load(load)
        context = requests.unseen * prompt_tokens + requests.context_tokens
        queue = candidates.inflight_prefill_tokens
        if requests.unseen_waiting is not None:
            queue += requests.unseen_waiting * to_compute.min()
        share = decode_tokens * DECODE_SHARE
        memory = np.zeros(len(to_compute))
        self._add_memory(memory, load, to_compute, requests, context * share, decode_tokens)
        return AddedWork(
            queue=queue,
            prefill=prefill_work(prompt_tokens, to_compute),
            requests=requests.requests,
            decoding=share * (context + requests.requests * prompt_tokens),
            memory=memory,
        )

    def expected_latency(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> ExpectedLatency:
        """Return the expected time to first token and per output token at each candidate, in
        parts, by the same formula as the cost.
        """
        parts = self.cost_parts(request, candidates)
        speed = candidates.prefill_tokens_per_s
        context = candidates.inflight_context_tokens + float(request.prompt_tokens)
        return ExpectedLatency(
            queue_s=parts["queue"],
            prefill_s=parts["prefill"] + parts["adapter"],
            step_s=STEP_TOKENS / speed,
            context_s=DECODE_SHARE * context / speed,
        )

    def _add_memory(
        self,
        cost: Floats,
        load: EngineLoad,
        to_compute: Floats,
        requests: RequestLoad,
        decoding: Floats,
        decode_tokens: float,
    ) -> None:
        """Add to `cost` the request's wait for KV-cache memory, and others' wait for the memory
        that it takes, in prefill tokens.

        `decoding` is the time by which existing context prolongs the answer, in prefill tokens. It
        is changed in place.
        """
        used, capacity = load.kv_used_tokens, load.kv_capacity_tokens
        over = used + to_compute
        over -= capacity
        if requests.waiting_kv_tokens is not None and requests.held_up is not None:
            over += requests.waiting_kv_tokens
            np.maximum(over, _NOTHING, out=over)
            over += requests.held_up * to_compute
        elif over.item(over.argmax()) <= 0.0:
            return
        else:
            np.maximum(over, _NOTHING, out=over)
        decoding += np.array(decode_tokens * STEP_TOKENS)
        decoding /= capacity
        over *= decoding
        if not load.complete:
            # A cache of unknown size is not full.
            np.fmax(over, _NOTHING, out=over)
        cost += over

    def _decode_tokens(self, request: InferenceRequest) -> float:
        limit, usual = request.output_tokens_max, request.moment.answer_tokens
        most = float(limit if limit and limit < self.decode_tokens else self.decode_tokens)
        return most if usual is None or usual > most else usual

    def _to_compute(
        self, request: InferenceRequest, candidates: Candidates, prompt: Floats
    ) -> Floats:
        """Return float64[n]: the prompt tokens that each candidate has to compute, given its known
        or assumed cached prefix. `prompt` is the number of prompt tokens as an array.
        """
        affinity = candidates.affinity(self.prefix_match_info_producer_name)
        # A product of integers and floats takes as long as the conversion and both operations.
        missing: Floats = affinity.matched.astype(np.float64)
        missing *= np.array(-float(candidates.block_tokens))
        missing += prompt
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
        """Return the session that `request` names, or "" if it names none or if sessions do not
        matter, because this picker receives the decisions of all others or `peer_belief` is 0.
        """
        # Usually there are no pickers that are not heard from. Then this costs one comparison.
        if not request.moment.replicas_unheard or not self.peer_belief:
            return ""
        return request.session_id or request.headers.get("x-session-id", "")

    def adapter_s(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        """Return float64[n]: the seconds until each candidate has loaded the adapter of `request`,
        including the cost of the adapter's slot; 0 where it is on the GPU or in use.

        A model that no candidate reports counts as an adapter that must be loaded, even if it is
        the base model. A candidate that reports no adapters gets the median of those that do.
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
    """Replace the values of `column` that are unknown, or marked in `old`, by the median of its
    other values. Return `column`.

    If no value remains, all become `nobody`.
    """
    if old is not None:
        column[old] = np.nan
    unknown = np.isnan(column)
    if not unknown.any():
        return column
    column[unknown] = nobody if unknown.all() else np.median(column[~unknown])
    return column


def _believed_load(candidates: Candidates) -> EngineLoad:
    """Return the load that engines report, with the median of the others in place of values that
    are unknown or too old.
    """
    recent = candidates.all_observed_within(REPORTED_S_MAX)
    load = candidates.engine_load()
    if recent and load.complete:
        return load
    old = None if recent else candidates.metrics_age_s > REPORTED_S_MAX
    waiting = _told(candidates.waiting_requests, old)
    # If no endpoint reports memory, it stays unknown, and no endpoint is short of it.
    capacity = _told(candidates.kv_capacity_tokens, old, np.nan)
    return EngineLoad(
        waiting_requests=waiting,
        requests=_told(candidates.running_requests, old) + waiting,
        kv_used_tokens=_told(candidates.kv_cache_usage, old, np.nan) * capacity,
        kv_capacity_tokens=capacity,
        waits=bool(waiting.any()),
        complete=False,
    )
