"""Prediction of the time to first token (TTFT) and the time per output token (TPOT) at each
endpoint.

An estimator computes both from formulas and configured speeds. The model corrects its estimate by
an online regression for each endpoint: least squares with forgetting, and with coefficients that
are not negative. The features are the parts of the estimate and the load of the endpoint. The
coefficients start so that the prediction is the estimate, and return there if nothing else is
observed. What is learned is therefore the difference. An observation y is weighted by 1/m², where m
is the larger of y and its prediction, so that relative errors count.

The median error of the estimate and of the regression are tracked for each endpoint. The one with
the smaller median error is used. If both exceed `ERROR_MAX`, there is no prediction, and nothing
acts on one. Everything is bounded, and there is no clock and no randomness.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final, Protocol

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import (
    PREDICTED_TPOT,
    PREDICTED_TPOT_ERROR,
    PREDICTED_TTFT,
    PREDICTED_TTFT_ERROR,
    Affinity,
    Bools,
    Candidates,
    Floats,
    Ints,
)
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

ERROR_MAX: Final = 0.5
"""Median relative error above which a prediction is not used."""
OBSERVED_MIN: Final = 16
"""Number of observations of an endpoint from which on its errors are judged. Until then its
estimate is used, and its error is unknown.
"""
ERRORS_KEPT: Final = 200
"""Number of the last prediction errors at an endpoint of which the median is computed."""
_JUDGED_EVERY: Final = 8
"""Number of observed latencies of an endpoint after which its median errors are computed again."""
FORGETTING: Final = 0.99
"""Factor by which the weight of an observation falls with each later one of the same endpoint."""
CORRECTION_MAX: Final = 10.0
"""Factor by which one observation may differ from the prediction. A larger difference is learned in
several steps, so that a single wrong observation has a bounded effect.
"""
COEFFICIENT_MAX: Final = 100.0
SECONDS_MIN: Final = 1e-5
SECONDS_MAX: Final = 3600.0
"""Bounds of observations and predictions in seconds. Observations outside are ignored."""
_FEATURE_MAX: Final = 1e6
_PRIOR_WEIGHT: Final = 0.01
"""Weight with which each coefficient of a regression is drawn to its first value, relative to one
observation: a coefficient may be wrong by 1, and an observation deviates by 0.1 of itself.
"""
_RELATIVE_MAX: Final = 1.0
"""Bound of the length of an observation's features divided by m. A longer one gets less weight, so
that each observation has a bounded influence.
"""
_SWEEPS: Final = 4
"""Number of passes of coordinate descent after each observation. The next one continues there."""
_REQUEST_S: Final = 1e-3
"""Unit in seconds of the features that count requests."""
_PROMPT_TOKEN_S: Final = 1e-5
"""Unit in seconds of the feature that counts prompt tokens, cached or not: the time in which a
server's front end tokenizes one.
"""
_CONSTANT_S: Final = 1e-2
"""Value in seconds of the feature that is the same for every request."""
_PARTS: Final = 3
"""Number of features of each regression that are parts of the estimate. Their coefficients begin at
1, those of the other features at 0.
"""
_FEATURES: Final = 7

TTFT_HEADERS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Request headers with the maximum time to first token in ms, the newer spelling first."""
TPOT_HEADERS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""Request headers with the maximum time per output token in ms, the newer spelling first."""


_MS_DIGITS: Final = 6
"""Number of decimals of the milliseconds that `Slo.headers` writes."""


class ExpectedLatency(Struct, frozen=True, eq=False):
    """The estimated latency of a request at each of n candidates, in parts: float64[n] in seconds
    each.
    """

    queue_s: Floats
    """Time until the prompts that were sent to the candidate before are prefilled."""
    prefill_s: Floats
    """Time to prefill the request's own prompt, and to load its adapter."""
    step_s: Floats
    """Time of a decode step if its requests had no context."""
    context_s: Floats
    """Time that the context in flight adds to a decode step, the request's own included."""


class LatencyEstimator(Protocol):
    """The source of the estimates with which predictions of latency begin, such as
    `added-time-scorer`.
    """

    def expected_latency(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> ExpectedLatency: ...


class LatencyPrediction(Struct, frozen=True, kw_only=True):
    """The settings of latency prediction."""

    estimator: LatencyEstimator
    refuses: bool = False
    """True if requests of priority below 0 are refused whose SLO no endpoint is predicted to meet."""


class Slo(Struct, frozen=True):
    """The maximum time to first token and the maximum time per output token in seconds that a
    client asks for; None for no limit.
    """

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None

    @classmethod
    def of(cls, request: InferenceRequest) -> "Slo":
        """Return the SLO in the headers of `request`. The newer spelling of a header takes
        precedence; a value that is no positive finite number of milliseconds means no limit.
        """
        return cls.in_headers(request.headers)

    @classmethod
    def in_headers(cls, headers: Mapping[str, str]) -> "Slo":
        """Return the SLO in request headers, as `of` does."""
        return cls(_limit_s(headers, TTFT_HEADERS), _limit_s(headers, TPOT_HEADERS))

    def headers(self) -> dict[str, str]:
        """Return the request headers from which `of` reads this SLO."""
        limits_s = {TTFT_HEADERS[0]: self.ttft_s, TPOT_HEADERS[0]: self.tpot_s}
        return {
            name: f"{round(1000.0 * limit_s, _MS_DIGITS)!r}"
            for name, limit_s in limits_s.items()
            if limit_s is not None
        }


def _limit_s(headers: Mapping[str, str], names: tuple[str, ...]) -> Seconds | None:
    for name in names:
        text = headers.get(name)
        if text is not None:
            try:
                limit_s = float(text) / 1000.0
            except ValueError:
                return None
            return limit_s if 0.0 < limit_s < math.inf else None
    return None


class PlacedPrediction(Struct, frozen=True, eq=False, gc=False):
    """The predicted latency of a request at the endpoint that serves it, to compare with the
    latency that is observed there.
    """

    ttft_features: Floats
    tpot_features: Floats
    ttft_s: Seconds
    tpot_s: Seconds
    """`ttft_s` and `tpot_s` are the predictions by the regression, whether or not they were used.
    """


class LatencyErrors(Struct, frozen=True):
    """The median relative errors of one kind of prediction at one endpoint; NaN if unknown."""

    observed: int
    """Number of observed times with which predictions of this kind were compared at the endpoint.
    """
    estimate: float
    learned: float
    used: str
    """The source of the predictions: "estimate", "learned" or "none"."""
    predicted_s: Seconds = math.nan
    """Median in seconds of the last predictions from the source `used`, or from the better source if
    it is "none".
    """
    observed_s: Seconds = math.nan
    """Median of the latencies that were observed of the requests of `predicted_s`, in seconds."""

    @property
    def error(self) -> float:
        """Return the smaller of the two errors, that of the better source; NaN if unknown."""
        return min(self.estimate, self.learned)

    def told(self) -> dict[str, float]:
        """Return the known median errors of predictions by their source, "estimate" or "learned"."""
        errors = {"estimate": self.estimate, "learned": self.learned}
        return {name: error for name, error in errors.items() if not math.isnan(error)}


class _Regression:
    """The regression of one kind (TTFT or TPOT), for all slots."""

    def __init__(self) -> None:
        prior = np.zeros(_FEATURES)
        prior[:_PARTS] = 1.0
        self.prior: Floats = prior
        self.coefficients: Floats = np.empty((0, _FEATURES))
        """Coefficients by slot, float64[slots, features]."""
        self.used_error: Floats = np.empty(0)
        """Median error of the prediction in use, which is that of the estimate or of the regression,
        whichever is smaller, by slot; NaN if unknown.
        """
        self.uses_learned: Bools = np.empty(0, dtype=np.bool_)
        self.unusable: Bools = np.empty(0, dtype=np.bool_)
        self._sums: dict[int, tuple[Floats, Floats]] = {}
        """Weighted sums of the products of the features, float64[features, features], and of the
        features, float64[features], by slot: the normal equations.
        """
        self._errors: dict[int, tuple[deque[float], deque[float]]] = {}
        """The last relative errors of the estimated and of the learned latencies, by slot."""
        self._seen: dict[int, deque[tuple[Seconds, Seconds, Seconds]]] = {}
        """Estimates, predictions of the regression and observations in seconds, by slot, one of each
        for each error in `_errors`.
        """
        self._observed: dict[int, int] = {}

    def grow(self, slots: int) -> None:
        more = slots - len(self.coefficients)
        if more <= 0:
            return
        more = max(more, len(self.coefficients), 8)
        self.coefficients = np.vstack([self.coefficients, np.tile(self.prior, (more, 1))])
        self.used_error = np.append(self.used_error, np.full(more, math.nan))
        self.uses_learned = np.append(self.uses_learned, np.zeros(more, dtype=np.bool_))
        self.unusable = np.append(self.unusable, np.zeros(more, dtype=np.bool_))

    def learned(self, features: Floats, slot: Ints) -> Floats:
        """Return float64[n]: the predictions in seconds by the regression, within the bounds, for
        endpoints in `slot` with these features.
        """
        found: Floats = (features * self.coefficients[slot]).sum(axis=1)
        return np.clip(found, SECONDS_MIN, SECONDS_MAX)

    def used(self, features: Floats, learned: Floats, slot: Ints) -> Floats:
        """Return float64[n]: the predictions in seconds to act on, each from the source with the
        smaller error; NaN where both errors are too large.
        """
        estimate = np.clip(features @ self.prior, SECONDS_MIN, SECONDS_MAX)
        found: Floats = np.where(self.uses_learned[slot], learned, estimate)
        found[self.unusable[slot]] = math.nan
        return found

    def observe(self, slot: int, features: Floats, predicted_s: Seconds, seen_s: Seconds) -> None:
        """Learn that a request at the endpoint in `slot` had the TTFT or TPOT `seen_s`, for which
        the regression predicted `predicted_s`. Ignore a time outside the bounds.
        """
        if not SECONDS_MIN <= seen_s <= SECONDS_MAX:
            return
        estimate = estimate_of(features)
        errors = self._errors.get(slot)
        if errors is None:
            errors = self._errors[slot] = (deque(maxlen=ERRORS_KEPT), deque(maxlen=ERRORS_KEPT))
            self._seen[slot] = deque(maxlen=ERRORS_KEPT)
        self._seen[slot].append((estimate, predicted_s, seen_s))
        errors[0].append(abs(estimate - seen_s) / seen_s)
        errors[1].append(abs(predicted_s - seen_s) / seen_s)
        observed = self._observed[slot] = self._observed.get(slot, 0) + 1
        if observed >= OBSERVED_MIN and observed % _JUDGED_EVERY == 0:
            self._judge(slot, errors)
        self._learn(slot, features, seen_s)

    def _judge(self, slot: int, errors: tuple[deque[float], deque[float]]) -> None:
        of_estimate, of_learned = median(errors[0]), median(errors[1])
        least = min(of_estimate, of_learned)
        self.uses_learned[slot] = of_learned <= of_estimate
        self.unusable[slot] = least > ERROR_MAX
        self.used_error[slot] = least

    def _learn(self, slot: int, features: Floats, seen_s: Seconds) -> None:
        coefficients = self.coefficients[slot]
        now_s = min(max(float(features @ coefficients), SECONDS_MIN), SECONDS_MAX)
        target_s = min(max(seen_s, now_s / CORRECTION_MAX), now_s * CORRECTION_MAX)
        # Neither a tiny nor a huge observation outweighs the others.
        scale_s = max(target_s, now_s)
        relative = features / scale_s
        weight = min(1.0, _RELATIVE_MAX / max(math.sqrt(float(relative @ relative)), SECONDS_MIN))
        relative *= weight
        sums = self._sums.get(slot)
        if sums is None:
            sums = self._sums[slot] = _prior_sums(self.prior)
        # The prior replaces the forgotten part, so that directions without observations return to it.
        products, means = sums
        prior_products, prior_means = _prior_sums(self.prior)
        for known, first, seen in (
            (products, prior_products, np.outer(relative, relative)),
            (means, prior_means, weight * target_s / scale_s * relative),
        ):
            known[...] = FORGETTING * known + (1.0 - FORGETTING) * first + seen
        _descend(coefficients, products, means)

    def errors_of(self, slot: int) -> LatencyErrors:
        errors = self._errors.get(slot)
        observed = self._observed.get(slot, 0)
        if errors is None or observed < OBSERVED_MIN:
            return LatencyErrors(observed, math.nan, math.nan, "estimate")
        used = "learned" if self.uses_learned[slot] else "estimate"
        if self.unusable[slot]:
            used = "none"
        estimates, learned, seen = map(median, zip(*self._seen[slot], strict=True))
        predicted_s = learned if self.uses_learned[slot] else estimates
        return LatencyErrors(
            observed, median(errors[0]), median(errors[1]), used, predicted_s, seen
        )

    def forget(self, slot: int) -> None:
        if slot >= len(self.coefficients):
            return
        self.coefficients[slot] = self.prior
        self.used_error[slot] = math.nan
        self.uses_learned[slot] = self.unusable[slot] = False
        for known in (self._sums, self._errors, self._seen, self._observed):
            known.pop(slot, None)


def estimate_of(features: Floats) -> Seconds:
    """Return the estimate alone, without what is learned, for the features of a prediction."""
    return min(max(float(features[:_PARTS].sum()), SECONDS_MIN), SECONDS_MAX)


def _prior_sums(prior: Floats) -> tuple[Floats, Floats]:
    """Return the normal equations whose solution is `prior`."""
    return _PRIOR_WEIGHT * np.eye(_FEATURES), _PRIOR_WEIGHT * prior


def _descend(coefficients: Floats, products: Floats, sums: Floats) -> None:
    """Change `coefficients` in place towards the solution of the normal equations within the
    bounds, by coordinate descent.
    """
    for _ in range(_SWEEPS):
        for at in range(_FEATURES):
            own = products.item(at, at)
            rest = float(products[at] @ coefficients) - own * coefficients.item(at)
            best = (sums.item(at) - rest) / own
            coefficients[at] = min(max(best, 0.0), COEFFICIENT_MAX)


class Predicted(Struct, frozen=True, eq=False):
    """The predicted latencies of one request at each of its candidates."""

    slot: Ints
    ttft_features: Floats
    tpot_features: Floats
    ttft_learned_s: Floats
    tpot_learned_s: Floats
    affinity: Affinity
    """The predicted latencies as columns by slot, which plugins read."""

    def at(self, slot: int) -> PlacedPrediction | None:
        """Return the predicted latency at the endpoint in `slot`, or None if it was no candidate."""
        position = int(np.searchsorted(self.slot, slot))
        if position == len(self.slot) or self.slot.item(position) != slot:
            return None
        return PlacedPrediction(
            self.ttft_features[position],
            self.tpot_features[position],
            self.ttft_learned_s.item(position),
            self.tpot_learned_s.item(position),
        )


class LatencyModel:
    """A model that predicts the latency at each endpoint of a pool. It learns from the first
    outputs and the ends of requests.
    """

    def __init__(self, settings: LatencyPrediction) -> None:
        self.settings = settings
        self._ttft = _Regression()
        self._tpot = _Regression()

    def predict(self, request: InferenceRequest, candidates: Candidates, slots: int) -> Predicted:
        """Return the predicted latencies of `request` at each of `candidates`; `slots` is the
        number of slots of the pool.
        """
        expected = self.settings.estimator.expected_latency(request, candidates)
        slot, none = candidates.slot, np.zeros(len(candidates))
        requests = candidates.inflight_requests.astype(np.float64) * _REQUEST_S
        waiting: Floats = candidates.waiting_requests * _REQUEST_S
        constant = np.full(len(slot), _CONSTANT_S)
        prompt = np.full(len(slot), request.prompt_tokens * _PROMPT_TOKEN_S)
        with np.errstate(invalid="ignore"):
            # An estimator may return infinite values of both signs, whose sum is NaN.
            steps = expected.step_s + expected.context_s
        load = (requests, waiting, prompt, constant)
        ttft = _features(expected.queue_s, expected.prefill_s, steps, *load)
        tpot = _features(expected.step_s, expected.context_s, none, *load)
        for regression in (self._ttft, self._tpot):
            regression.grow(slots)
        ttft_s, tpot_s = self._ttft.learned(ttft, slot), self._tpot.learned(tpot, slot)
        columns = {
            PREDICTED_TTFT: self._ttft.used(ttft, ttft_s, slot),
            PREDICTED_TPOT: self._tpot.used(tpot, tpot_s, slot),
            PREDICTED_TTFT_ERROR: self._ttft.used_error[slot],
            PREDICTED_TPOT_ERROR: self._tpot.used_error[slot],
        }
        matched = np.zeros(slots, dtype=np.int64)
        affinity = Affinity(
            matched, 0, {name: _by_slot(slot, slots, of) for name, of in columns.items()}
        )
        return Predicted(slot, ttft, tpot, ttft_s, tpot_s, affinity)

    def first_output(self, slot: int, placed: PlacedPrediction, ttft_s: Seconds) -> None:
        """Record that the first output of a request at the endpoint in `slot` came `ttft_s` seconds
        after the decision.
        """
        self._ttft.observe(slot, placed.ttft_features, placed.ttft_s, ttft_s)

    def ended(self, slot: int, placed: PlacedPrediction, tpot_s: Seconds) -> None:
        """Record that the output tokens after the first of a request at the endpoint in `slot` took
        `tpot_s` seconds each on average.
        """
        self._tpot.observe(slot, placed.tpot_features, placed.tpot_s, tpot_s)

    def is_hopeless(self, request: InferenceRequest, candidates: Candidates) -> bool:
        """Return whether `request` may be refused because no candidate is predicted to meet its SLO.

        An endpoint counts as able if it is idle, if its KV cache is almost empty, or if the error
        of its prediction is unknown or above `ERROR_MAX`. The rule is that of llm-d-router's
        `latency-slo-admitter`.
        """
        if not self.settings.refuses or not len(candidates):
            return False
        slo = Slo.of(request)
        late = np.zeros(len(candidates), dtype=np.bool_)
        if slo.ttft_s is not None:
            late |= _late(candidates.predicted_ttft_s, candidates.predicted_ttft_error, slo.ttft_s)
        if slo.tpot_s is not None:
            late |= _late(candidates.predicted_tpot_s, candidates.predicted_tpot_error, slo.tpot_s)
        late &= candidates.inflight_requests > 0
        late &= ~(candidates.kv_cache_usage < _COLD_USAGE)
        return bool(late.all())

    def errors_of(self, slot: int) -> dict[str, LatencyErrors]:
        """Return the errors of the predictions for the endpoint in `slot`, by "ttft" and "tpot"."""
        return {"ttft": self._ttft.errors_of(slot), "tpot": self._tpot.errors_of(slot)}

    def forget(self, slot: int) -> None:
        """Drop what is learned of `slot`, because its endpoint left or restarted."""
        self._ttft.forget(slot)
        self._tpot.forget(slot)


_COLD_USAGE: Final = 0.02
"""KV-cache usage of an endpoint below which it counts as able to meet any SLO."""


def _late(predicted: Floats, error: Floats, limit_s: Seconds) -> Bools:
    late: Bools = (predicted > limit_s) & (error <= ERROR_MAX)
    return late


def _features(*columns: Floats) -> Floats:
    """Return the features of the regressions, float64[n, features], each from 0 to `_FEATURE_MAX`.
    An unknown value is 0.
    """
    found = np.stack(columns, axis=1)
    np.nan_to_num(found, copy=False, nan=0.0, posinf=_FEATURE_MAX, neginf=0.0)
    return np.clip(found, 0.0, _FEATURE_MAX)


def _by_slot(slot: Ints, slots: int, values: Floats) -> Floats:
    column = np.full(slots, math.nan)
    column[slot] = values
    return column
