"""Scorer plugins, which return float64[n] in [0, 1] for n candidates, with NaN where a needed value
is unknown.

Formulas and parameters are those of llm-d-router v0.10, except where a docstring says otherwise.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from epp.plugins.agreement import Agreement, agreed_scores, agreement_key
from epp.plugins.contract import (
    Abilities,
    AdapterColumns,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
)


class PrefixCache(Parameters, frozen=True):
    """Prefer endpoints with the longest leading part of the prompt in their cache.

    The score is (1 - w) * matched / total + w * min(1, matched tokens / S)^2, with w =
    `match_length_weight` and S = `match_length_scale_tokens`. The score is 0 for a prompt without a
    full block.

    Several pickers that do not share decisions would warm different caches for the same prompt. If
    the index of such a picker finds less than the share `agreement_below` of a prompt at every
    endpoint, `prefix-cache-scorer` gives 1 to one endpoint and 0 to the others. This one endpoint
    is computed by a hash of the session, the conversation or the head of the prompt, so that all
    pickers choose the same, unless it has many more requests in flight than the mean.
    """

    type_name: ClassVar[str] = "prefix-cache-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *("matched_blocks", "total_blocks", "inflight_requests", "rendezvous"),
            *("prompts", "session_id", "headers", "replicas_unheard", "sessions_return"),
        ),
        reads_index=True,
        goes_by_sessions=True,
    )
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    prefix_match_info_producer_name: str = ""
    match_length_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[float, Meta(gt=0)] = 8192.0
    agreement: Agreement = Agreement.AUTO
    """Condition under which pickers agree on an endpoint for a little-known prompt.

    `auto`: while there are pickers from which this one receives no decisions; `rendezvous`: always;
    `none`: never.
    """
    agreement_below: Annotated[float, Meta(ge=0, le=1)] = 0.8
    """Share of the prompt's full blocks from which the cached prefix decides, not the agreement of
    pickers, if at least one endpoint has so many of them cached.
    """
    agreement_key_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Number of prompt tokens beyond what most endpoints have cached by which pickers agree on an
    endpoint. Prompts that share these tokens go to the same endpoint, unless a session or
    conversation decides.
    """
    agreement_session_header: Annotated[str, Meta(min_length=1)] = "x-session-id"
    """Request header whose value identifies the session, if the request has no session id of its
    own.
    """

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        affinity = candidates.affinity(self.prefix_match_info_producer_name)
        share: Floats = affinity.matched / (affinity.total or 1)
        if self._agrees(request) and share[share.argmax()] < self.agreement_below:
            key = agreement_key(
                request,
                candidates,
                affinity.matched,
                key_tokens=self.agreement_key_tokens,
                session=self.session_of(request),
            )
            if key is not None:
                return agreed_scores(candidates, key)
        if not self.match_length_weight:
            return share
        tokens_per_scale = candidates.block_tokens / self.match_length_scale_tokens
        length = np.minimum(affinity.matched * tokens_per_scale, 1.0)
        weight = self.match_length_weight
        scores: Floats = (1.0 - weight) * share + weight * length * length
        return scores

    def session_of(self, request: InferenceRequest, /) -> str:
        """Return the session that `request` names, or "" while pickers need not agree on an
        endpoint.
        """
        if not self._agrees(request):
            return ""
        return request.session_id or request.headers.get(self.agreement_session_header.lower(), "")

    def _agrees(self, request: InferenceRequest) -> bool:
        if self.agreement is Agreement.AUTO:
            return request.moment.replicas_unheard > 0
        return self.agreement is Agreement.RENDEZVOUS


def _least_first(load: Floats) -> Floats:
    """Return a score for each value of `load`: 1 for the lowest, 0 for the highest, and linear
    between. All scores are 1 if the values are equal.

    NaN stays NaN. `load` is changed in place.
    """
    # argmin and argmax take a third of the time of min and max. If there is a NaN, they return its
    # position.
    least = float(load[load.argmin()])
    most = float(load[load.argmax()])
    if math.isnan(most):
        least = float(np.fmin.reduce(load))
        most = float(np.fmax.reduce(load))
    if not most > least:
        return load - least + 1.0
    np.subtract(most, load, out=load)
    load /= most - least
    return load


class Queue(Parameters, frozen=True):
    """Prefer endpoints with short waiting queues: 1 for the shortest, 0 for the longest, linear
    between; 1 for all if they are equal.
    """

    type_name: ClassVar[str] = "queue-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("waiting_requests",))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return _least_first(candidates.waiting_requests)


class KVCacheUtilization(Parameters, frozen=True):
    """Prefer endpoints with a free KV cache: the score is 1 - usage."""

    type_name: ClassVar[str] = "kv-cache-utilization-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("kv_cache_usage",))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        usage = candidates.kv_cache_usage
        return np.subtract(1.0, usage, out=usage)


class RunningRequests(Parameters, frozen=True):
    """Prefer endpoints with few running requests: 1 for the fewest, 0 for the most, linear between;
    1 for all if they are equal.
    """

    type_name: ClassVar[str] = "running-requests-size-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("running_requests",))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return _least_first(candidates.running_requests)


class ActiveRequests(Parameters, frozen=True):
    """Prefer endpoints with few requests in flight from this picker and its peers, as the pickers
    count them.

    The score of an endpoint is 1 up to `idle_threshold` requests in flight, else (most - own) /
    most * `max_busy_score`, where own is its number of requests in flight and most the largest
    number at any candidate.
    """

    type_name: ClassVar[str] = "active-request-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("inflight_requests",), names_load_producer=True
    )

    idle_threshold: Annotated[int, Meta(ge=0)] = 0
    max_busy_score: Annotated[float, Meta(ge=0, le=1)] = 1.0
    in_flight_load_producer_name: str = ""
    """Name of the `inflight-load-producer` that counts requests in flight; there is at most one."""
    request_timeout: str = ""
    """No effect, as in llm-d-router, because requests in flight are counted until they end."""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        most = int(inflight[inflight.argmax()])
        if most <= self.idle_threshold:
            return np.ones(len(inflight))
        scale = self.max_busy_score / most
        scores: Floats = np.multiply(most - inflight, scale, dtype=np.float64)
        if self.idle_threshold or self.max_busy_score < 1.0:
            scores[inflight <= self.idle_threshold] = 1.0
        return scores


class TokenLoad(Parameters, frozen=True):
    """Prefer endpoints with the fewest prompt tokens to compute, including this request's own.

    The score is 1 - min(1, (in flight + own) / `queue_threshold_tokens`), where in flight is the
    number of uncached prompt tokens in flight at the endpoint. The prefix index estimates own, the
    number of the request's own uncached tokens there.
    """

    type_name: ClassVar[str] = "token-load-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("inflight_prefill_tokens", "uncached_tokens"),
        reads_index=True,
        names_load_producer=True,
    )
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    queue_threshold_tokens: Annotated[float, Meta(gt=0)] = 4_194_304.0
    in_flight_load_producer_name: str = ""
    """Name of the `inflight-load-producer` that counts tokens in flight; there is at most one."""

    @property
    def producer(self) -> str | None:
        return ""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        load = candidates.inflight_prefill_tokens
        load += candidates.uncached_tokens
        load /= -self.queue_threshold_tokens
        load += 1.0
        return np.maximum(load, 0.0, out=load)


class LoadAware(Parameters, frozen=True):
    """Prefer endpoints with short waiting queues, compared with a threshold and not with other
    endpoints.

    The score is 0.5 * (1 - min(waiting, threshold) / threshold), so 0.5 for an empty queue.
    """

    type_name: ClassVar[str] = "load-aware-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("waiting_requests",))

    threshold: Annotated[float, Meta(gt=0)] = 128.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        waiting = candidates.waiting_requests
        np.minimum(waiting, self.threshold, out=waiting)
        waiting *= -0.5 / self.threshold
        waiting += 0.5
        return waiting


class LoraAffinity(Parameters, frozen=True):
    """Prefer endpoints that can serve this adapter at the lowest cost; unknown if no endpoint
    reports adapters.

    If an engine reports residency, the score depends on the adapter's place (llm-d-router #2792):
    1.0 on the GPU, 0.7 in CPU memory. If the adapter is in neither place, the score is 0.6 for a
    free GPU slot, 0.3 for a slot with an idle adapter, else 0.0. If an engine reports only
    `lora_requests_info`, the score is 1.0 for an adapter with a running or waiting request, 0.8 for
    a free slot, else 0.0. The reference picker's score of 0.6 for an adapter with only waiting
    requests is left out, because vLLM's lists of running and waiting adapters are one set
    (llm-d-router #2605).
    """

    type_name: ClassVar[str] = "lora-affinity-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("adapter_state", "model"))

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        adapters = candidates.adapter_state
        generation = adapters.generation
        newest = int(generation[generation.argmax()])
        if newest == 0:
            return None
        scores = (_by_activity if newest == 1 else _by_residency)(adapters, request.model)
        if int(np.minimum.reduce(generation)) < newest:
            scores[generation == 0] = np.nan
            if newest > 1:
                by_activity = generation == 1
                scores[by_activity] = _by_activity(adapters, request.model)[by_activity]
        return scores


def _by_activity(adapters: AdapterColumns, adapter: str) -> Floats:
    scores: Floats = np.where(adapters.active_count < adapters.slots_max, 0.8, 0.0)
    scores[adapters.active(adapter)] = 1.0
    return scores


def _by_residency(adapters: AdapterColumns, adapter: str) -> Floats:
    scores: Floats = np.where(adapters.idle_count > 0, 0.3, 0.0)
    scores[adapters.resident_count < adapters.slots_max] = 0.6
    scores[adapters.on_cpu(adapter)] = 0.7
    scores[adapters.on_gpu(adapter)] = 1.0
    return scores


class NoHitLru(Parameters, frozen=True):
    """Spread unknown prompts: prefer the endpoint that received such a prompt the longest ago.

    The score is 0.5 for all endpoints if any of them has a part of the prompt cached. Otherwise it
    is `1 - rank/(n-1)`, where rank is the position among the n candidates, from 0. Endpoints that
    never received an unknown prompt rank first, in their order, then the others, least recent
    first. The reference picker ranks an endpoint among all endpoints and not only among the
    candidates, which gives the same score if no endpoint was filtered out.
    """

    type_name: ClassVar[str] = "no-hit-lru-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("cold",), reads_index=True, configures_index=True
    )
    producer_type: ClassVar[str] = "no-hit-lru-producer"

    lru_size: Annotated[int, Meta(ge=1)] = 1024
    prefix_match_info_producer_name: str = ""
    prefix_plugin_type: str = ""
    """No effect. The parameter is accepted, like `prefix_plugin_name`, so that old configurations
    load.
    """
    prefix_plugin_name: str = ""

    @property
    def producer(self) -> str | None:
        return self.producer_type

    @property
    def producer_parameters(self) -> Mapping[str, int]:
        """Return the parameters of the `no-hit-lru-producer` that is created if none is
        declared.
        """
        return {"lruSize": self.lru_size}

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        n = len(candidates)
        if not self._cold(request, candidates):
            return np.full(n, 0.5)
        recency = candidates.affinity(self.producer_type).matched
        scores = np.ones(n)
        scores[recency.argsort(kind="stable")] -= np.arange(n) / max(n - 1, 1)
        return scores

    def _cold(self, request: InferenceRequest, candidates: Candidates) -> bool:
        if not self.prefix_match_info_producer_name:
            return request.moment.cold
        return not candidates.affinity(self.prefix_match_info_producer_name).matched.any()
