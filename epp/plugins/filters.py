"""Filters, which drop endpoints that must not serve a request.

Formulas and parameters are those of llm-d-router v0.10 where it has the filter. If a filter by
labels drops every endpoint, the client receives status 503, because that is no sign of load. If a
filter by utilization does, the client receives 429.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta, field

from epp.core.labels import Selector
from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Duration,
    Floats,
    InferenceRequest,
    Ints,
    Parameters,
    Seconds,
)

ROLE_LABEL: Final = "llm-d.ai/role"
_DRAWS: Final = 1 << 64


def _all(candidates: Candidates) -> Bools:
    return np.ones(len(candidates), dtype=np.bool_)


class LabelSelector(Selector, frozen=True):
    """Keep the endpoints that a Kubernetes label selector selects; an empty selector keeps all."""

    type_name: ClassVar[str] = "label-selector-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels",))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return np.array([self.matches(labels) for labels in candidates.labels], dtype=np.bool_)


class LabelValues(Parameters, frozen=True):
    """Keep endpoints whose `label` has one of `valid_values`, and those without it if
    `allows_no_label` is set.
    """

    type_name: ClassVar[str] = "by-label"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels",))

    label: Annotated[str, Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError(
                f"by-label: no value of label {self.label} is valid and the label is required, "
                "so no endpoint would be left; set validValues or allowsNoLabel"
            )

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        missing = (None,) if self.allows_no_label else ()
        return candidates.labelled(self.label, frozenset((*self.valid_values, *missing)))


class DecodeRole(Parameters, frozen=True):
    """Keep endpoints that decode, by label `llm-d.ai/role`; an endpoint without the label decodes."""

    type_name: ClassVar[str] = "decode-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels",))
    roles: ClassVar[frozenset[str | None]] = frozenset(
        {"decode", "prefill-decode", "both", "encode-prefill-decode", None}
    )

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return candidates.labelled(ROLE_LABEL, self.roles)


class PrefillRole(Parameters, frozen=True):
    """Keep endpoints that prefill, by label `llm-d.ai/role`, which must be present."""

    type_name: ClassVar[str] = "prefill-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels",))
    roles: ClassVar[frozenset[str | None]] = frozenset(
        {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}
    )

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return candidates.labelled(ROLE_LABEL, self.roles)


class EncodeRole(Parameters, frozen=True):
    """Keep endpoints that encode, by label `llm-d.ai/role`, which must be present."""

    type_name: ClassVar[str] = "encode-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels",))
    roles: ClassVar[frozenset[str | None]] = frozenset(
        {"encode", "encode-prefill", "encode-prefill-decode"}
    )

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        return candidates.labelled(ROLE_LABEL, self.roles)


class FreshMetrics(Parameters, frozen=True):
    """Keep endpoints whose metrics were scraped at most `max_age` ago; keep all if there is no such
    endpoint.
    """

    type_name: ClassVar[str] = "fresh-metrics-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("metrics_age_s",), limits_metrics_age=True)

    max_age: Duration = Duration(2.0)

    def __post_init__(self) -> None:
        if not self.max_age > 0:
            raise ValueError(f"maxAge is {self.max_age:g}s; it must be more than 0s")

    @property
    def metrics_age_max_s(self) -> Seconds:
        return float(self.max_age)

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        fresh: Bools = candidates.metrics_age_s <= self.max_age
        return fresh if fresh.any() else _all(candidates)


class LoraCapacity(Parameters, frozen=True):
    """Drop endpoints that would have to swap out a LoRA adapter in use to serve the requested
    adapter.

    `lora-capacity-filter` drops an endpoint if as many adapters have running or waiting requests
    there as it has adapter slots, and the requested adapter is not among them. All endpoints stay
    if the filter would drop every one, and endpoints that report no adapters always stay. If no
    candidate reports the requested model as an adapter, it may be the base model, which needs no
    slot: then all endpoints stay, and `lora-affinity-scorer` looks for a free slot.
    """

    type_name: ClassVar[str] = "lora-capacity-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("adapter_state", "model"))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        adapters = candidates.adapter_state
        slots_max = adapters.slots_max
        # A report of 0 adapter slots means that the number is unknown.
        full = (slots_max > 0) & (adapters.active_count >= slots_max)
        if not full.any():
            return _all(candidates)
        active = adapters.active(request.model)
        if not (
            active.any()
            or adapters.on_gpu(request.model).any()
            or adapters.on_cpu(request.model).any()
        ):
            return _all(candidates)
        keep: Bools = active | ~full
        return keep if keep.any() else _all(candidates)


class UtilizationMetric(StrEnum):
    ACTIVE_REQUESTS = "active-requests"
    RUNNING_REQUESTS = "running-requests"
    WAITING_QUEUE = "waiting-queue"
    KV_CACHE_UTILIZATION = "kv-cache-utilization"


class UtilizationCondition(Parameters, frozen=True):
    """An upper limit, `max_value`, of one metric of an endpoint."""

    metric: UtilizationMetric
    max_value: Annotated[float, Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.metric is UtilizationMetric.KV_CACHE_UTILIZATION and self.max_value > 1:
            raise ValueError(
                f"maxValue of {self.metric} is {self.max_value:g}; it is a share and must be at "
                "most 1"
            )


class Utilization(Parameters, frozen=True):
    """Keep endpoints that meet each of the `conditions` on their load.

    The load metrics in `conditions` are `active-requests`, the requests in flight from pickers, and
    `running-requests`, `waiting-queue` and `kv-cache-utilization` (0 to 1) from the engine. A value
    that an engine does not report meets every condition. If no endpoint meets the conditions,
    `fallback_on_empty` keeps all of them; without it the client receives status 429.
    """

    type_name: ClassVar[str] = "utilization-filter"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("inflight_requests", "running_requests", "waiting_requests", "kv_cache_usage"),
        sheds_load=True,
        names_load_producer=True,
    )

    conditions: Annotated[tuple[UtilizationCondition, ...], Meta(min_length=1, max_length=64)]
    """Conditions that an endpoint must meet, each with a `metric` and its `maxValue`."""
    fallback_on_empty: bool = False
    in_flight_load_producer_name: str = ""
    """Name of the `inflight-load-producer` that counts requests in flight; there is at most one."""

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        keep = _all(candidates)
        for condition in self.conditions:
            # Comparisons with NaN are false, so an endpoint with an unknown value stays.
            keep &= ~(_utilization(candidates, condition.metric) > condition.max_value)
        return _all(candidates) if self.fallback_on_empty and not keep.any() else keep


def _utilization(candidates: Candidates, metric: UtilizationMetric) -> Floats | Ints:
    match metric:
        case UtilizationMetric.ACTIVE_REQUESTS:
            return candidates.inflight_requests
        case UtilizationMetric.RUNNING_REQUESTS:
            return candidates.running_requests
        case UtilizationMetric.WAITING_QUEUE:
            return candidates.waiting_requests
        case UtilizationMetric.KV_CACHE_UTILIZATION:
            return candidates.kv_cache_usage


class TTFTSource(StrEnum):
    PREFILL_THROUGHPUT = "prefillThroughput"
    LATENCY_PREDICTOR = "latencyPredictor"


class PrefixCacheAffinity(Parameters, frozen=True):
    """Keep only endpoints that have the prompt cached, unless they are too busy.

    An endpoint is warm if the share of the prompt's blocks that it has cached is at least
    `affinity_threshold`; the other endpoints are cold. All endpoints stay if none is warm. All
    endpoints also stay if the estimated time to first token of the best warm endpoint exceeds that
    of the best cold one by more than `max_ttft_penalty_ms` (0: no such limit). This estimate is the
    number of uncached tokens in flight at the endpoint divided by `peak_prefill_throughput`
    (tokens/s). If `peak_prefill_throughput` is not given, the prefill speed of each endpoint
    applies (`inflight-load-producer`).

    All endpoints stay for a random share `exploration_probability` of the requests (exploration).
    Plugins have no random generator, so a hash of the request id selects these requests. A replayed
    request with the same id is therefore treated alike, and two such filters explore with the same
    requests.
    """

    type_name: ClassVar[str] = "prefix-cache-affinity-filter"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *("matched_blocks", "total_blocks", "inflight_prefill_tokens"),
            *("prefill_tokens_per_s", "request_id"),
        ),
        reads_index=True,
        tells_prefill_speed=True,
        names_load_producer=True,
        warns=True,
    )
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    affinity_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.8
    exploration_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_ttft_penalty_ms: Annotated[float, Meta(ge=0)] = field(
        default=18_000.0, name="maxTTFTPenaltyMs"
    )
    ttft_source: TTFTSource = TTFTSource.PREFILL_THROUGHPUT
    peak_prefill_throughput: Annotated[float, Meta(gt=0)] | None = None
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""
    """Name of the `inflight-load-producer` that counts tokens in flight; there is at most one."""
    latency_prediction_info_producer_name: str = ""
    """No effect, because this filter does not use predicted latencies."""

    def __post_init__(self) -> None:
        if self.ttft_source is not TTFTSource.PREFILL_THROUGHPUT:
            raise ValueError(
                f"ttftSource {self.ttft_source} is not supported, because this filter does not use "
                "predicted latencies; use prefillThroughput"
            )

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    def warnings(self) -> Sequence[str]:
        """Return one sentence for each parameter set without effect; the caller adds the plugin's
        place in the document.
        """
        if not self.latency_prediction_info_producer_name:
            return ()
        why = "this filter does not use predicted latencies"
        return (f"latencyPredictionInfoProducerName has no effect, because {why}",)

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        affinity = candidates.affinity(self.prefix_match_info_producer_name)
        if self.affinity_threshold == 0 or not affinity.total or self._explores(request):
            return _all(candidates)
        warm: Bools = affinity.matched / affinity.total >= self.affinity_threshold
        if not warm.any() or warm.all():
            return _all(candidates)
        if self.max_ttft_penalty_ms:
            ahead_s = candidates.inflight_prefill_tokens
            ahead_s /= self.peak_prefill_throughput or candidates.prefill_tokens_per_s
            penalty_ms = float(ahead_s[warm].min() - ahead_s[~warm].min()) * 1000.0
            if penalty_ms > self.max_ttft_penalty_ms:
                return _all(candidates)
        return warm

    def _explores(self, request: InferenceRequest) -> bool:
        draw = xxhash.xxh64_intdigest(request.request_id.encode("utf-8", "surrogatepass"))
        return draw < self.exploration_probability * _DRAWS
