"""Plugins that use predicted latencies: the scorer, and the settings of producer and admitter.

Names, parameters and defaults are those of llm-d-router v0.10. The prediction itself is an online
regression in the picker (`epp/core/knowledge/latency`), without a sidecar.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta, field

from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Duration,
    Floats,
    InferenceRequest,
    Parameters,
    Slo,
)

PRODUCER_TYPE: Final = "predicted-latency-producer"
PREDICTED_READS: Final = frozenset({"predicted_ttft_s", "predicted_tpot_s"})
"""Columns that are filled only if latencies are predicted."""
_SCORE_MIN: Final = 0.01
"""Score of the worst endpoint of the group that is preferred; endpoints outside it have 0."""

_Weight = Annotated[float, Meta(ge=0)]


class HeadroomStrategy(StrEnum):
    LEAST = "least"
    MOST = "most"


class Latency(Parameters, frozen=True):
    """Prefer endpoints that are predicted to meet the request's SLO.

    The headroom of an endpoint is the SLO minus the predicted latency, for TTFT and TPOT. If any
    endpoint meets every SLO of the request, only such endpoints have a score above 0. `least`
    prefers the smallest headroom among them, which leaves idle endpoints for later requests, and
    `most` the largest. If none meets every SLO, or if the request has none, endpoints without
    requests in flight are preferred, then those that miss only TPOT, then only TTFT, then both, and
    within the group those that miss by the least. The headroom of a latency without an SLO is minus
    its prediction. TPOT does not count while an endpoint with a predicted TTFT has no predicted
    TPOT. Both headrooms are normalised to [0, 1] within the group and added with
    `ttft_weight` and `tpot_weight`.

    An endpoint without a usable prediction of TTFT has an unknown score. If no endpoint has one,
    the score is the weighted mean of free KV cache, short queue and cached prefix, by the three
    `composite` weights.
    """

    type_name: ClassVar[str] = "latency-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *("predicted_ttft_s", "predicted_tpot_s", "inflight_requests", "headers"),
            *("kv_cache_usage", "waiting_requests", "matched_blocks", "total_blocks"),
        ),
        reads_index=True,
        differs=(
            "the SLO for TPOT is the request's own, not the tightest of those running at the "
            "endpoint; an SLO that a request does not set is not missed if it sets the other"
        ),
    )
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    ttft_weight: _Weight = 0.8
    tpot_weight: _Weight = 0.2
    headroom_selection_strategy: HeadroomStrategy = HeadroomStrategy.LEAST
    """Headroom that is best among the endpoints that meet the SLO."""
    composite_kv_weight: _Weight = field(default=1.0, name="compositeKVWeight")
    """Weight of the free share of the KV cache, if no endpoint has a prediction."""
    composite_queue_weight: _Weight = 1.0
    """Weight of a short queue, if no endpoint has a prediction."""
    composite_prefix_weight: _Weight = 1.0
    """Weight of the cached share of the prompt, if no endpoint has a prediction."""
    latency_prediction_info_producer_name: str = ""
    """Name of the `predicted-latency-producer`; there is at most one."""
    prefix_match_info_producer_name: str = ""

    @property
    def producer(self) -> str | None:
        return self.prefix_match_info_producer_name

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        ttft_s, tpot_s = candidates.predicted_ttft_s, candidates.predicted_tpot_s
        known = ~np.isnan(ttft_s)
        if not known.any():
            return self._composite(candidates)
        slo = Slo.of(request)
        tpot_known = not np.isnan(tpot_s[known]).any()
        ttft_room = (slo.ttft_s or 0.0) - ttft_s
        tpot_room = (slo.tpot_s or 0.0) - tpot_s
        # 1 if only TPOT is missed, 2 if only TTFT is, 3 if both are.
        missed = np.zeros(len(candidates), dtype=np.int64)
        if slo.ttft_s is None and slo.tpot_s is None:
            missed += 3
        if slo.ttft_s is not None:
            missed += 2 * (ttft_room < 0)
        if slo.tpot_s is not None and tpot_known:
            missed += tpot_room < 0
        group, least = self._preferred(missed, known, candidates)
        scores = np.zeros(len(candidates))
        scores[~known] = np.nan
        rooms = [(self.ttft_weight, ttft_room[group])]
        if tpot_known:
            rooms.append((self.tpot_weight, tpot_room[group]))
        blend = _blend(rooms)
        scores[group] = _SCORE_MIN + (1.0 - _SCORE_MIN) * (1.0 - blend if least else blend)
        return scores

    def _preferred(
        self, missed: np.ndarray, known: Bools, candidates: Candidates
    ) -> tuple[Bools, bool]:
        """Return bool[n]: the candidates that get a score above 0, and whether the smallest
        distance to the SLO is best among them.
        """
        best = int(missed[known].min())
        group: Bools = known & (missed == best)
        if not best:
            return group, self.headroom_selection_strategy is HeadroomStrategy.LEAST
        idle: Bools = known & (candidates.inflight_requests == 0)
        return (idle if idle.any() else group), True

    def _composite(self, candidates: Candidates) -> Floats:
        waiting = np.nan_to_num(candidates.waiting_requests)
        affinity = candidates.affinity(self.prefix_match_info_producer_name)
        parts = (
            (self.composite_kv_weight, 1.0 - np.nan_to_num(candidates.kv_cache_usage)),
            (self.composite_queue_weight, 1.0 - waiting / max(float(waiting.max()), 1.0)),
            (self.composite_prefix_weight, affinity.matched / (affinity.total or 1)),
        )
        total = sum(weight for weight, _ in parts)
        if not total:
            return parts[0][1]
        scores: Floats = np.sum([weight / total * part for weight, part in parts], axis=0)
        return scores


def _blend(rooms: list[tuple[float, Floats]]) -> Floats:
    """Return the weighted mean of the distances to the SLO, each normalised to [0, 1]. A distance
    that is the same at each endpoint does not count.
    """
    found = np.zeros(len(rooms[0][1]))
    weights = 0.0
    for weight, room in rooms:
        distance = np.abs(room)
        low, high = distance.min(), distance.max()
        if weight and high > low:
            found += weight * ((distance - low) / (high - low))
            weights += weight
    return found / weights if weights else found


class PredictedLatency(Parameters, frozen=True):
    """`predicted-latency-producer`: predict the TTFT and the TPOT of each endpoint.

    The prediction begins with the estimate of `added-time-scorer`, by the scorer of the profile or
    by its default parameters. The picker corrects it from observed first tokens and token usage,
    which the gateway must show (response bodies, and `--parse-response-usage` for TPOT).
    """

    type_name: ClassVar[str] = PRODUCER_TYPE
    abilities: ClassVar[Abilities] = Abilities(warns=True)

    prefix_match_info_producer_name: str = ""
    sampling_mean: float = 0.0
    """No effect. The parameter is accepted so that configurations of llm-d-router load."""
    max_decode_token_samples_for_prediction: int = 0
    """No effect. The parameter is accepted so that configurations of llm-d-router load."""
    slo_buffer_factor: Annotated[float, Meta(gt=0)] = 1.0
    """No effect, because the SLO always counts as it is."""
    context_ttl: Duration | None = field(default=None, name="contextTTL")
    """No effect, because the prediction of a request ends with the request."""
    streaming_mode: bool = True
    """No effect, because only streamed answers are learned from."""
    endpoint_role_label: str = ""
    """No effect, because each endpoint has a model of its own."""
    predict_in_produce: bool = True
    """No effect, because predictions are made in the decision."""
    in_flight_load_producer_name: str = ""
    """No effect, because there is one `inflight-load-producer`."""
    use_encoder_cache_features: bool = False
    """No effect. The parameter is accepted so that configurations of llm-d-router load."""
    encoder_cache_match_info_producer_name: str = ""
    """No effect. The parameter is accepted so that configurations of llm-d-router load."""

    def warnings(self) -> Sequence[str]:
        """Return one sentence for each of `sloBufferFactor`, `contextTTL`, `endpointRoleLabel`,
        `predictInProduce` and `useEncoderCacheFeatures` that is set, because it has no effect. The
        other parameters without effect cause no warning.
        """
        found = (
            ("sloBufferFactor", self.slo_buffer_factor != 1.0),
            ("contextTTL", self.context_ttl is not None),
            ("endpointRoleLabel", bool(self.endpoint_role_label)),
            ("predictInProduce", not self.predict_in_produce),
            ("useEncoderCacheFeatures", self.use_encoder_cache_features),
        )
        why = "because each endpoint has a regression of its own in the picker"
        return tuple(f"{name} has no effect, {why}" for name, given in found if given)


class LatencySloAdmitter(Parameters, frozen=True):
    """`latency-slo-admitter`: refuse requests of priority below 0 with 429 if every endpoint is
    predicted to miss their SLO. An endpoint without requests in flight, with an almost empty KV
    cache or with an unreliable prediction never counts as missing it.
    """

    type_name: ClassVar[str] = "latency-slo-admitter"
    abilities: ClassVar[Abilities] = Abilities()

    latency_prediction_info_producer_name: str = ""
    """Name of the `predicted-latency-producer`; there is at most one."""
