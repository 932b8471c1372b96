"""Predicted latencies: what is learned, what is used, and what hostile observations cannot do."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.core.knowledge.latency import (
    COEFFICIENT_MAX,
    ERROR_MAX,
    ERRORS_KEPT,
    OBSERVED_MIN,
    SECONDS_MAX,
    SECONDS_MIN,
    ExpectedLatency,
    LatencyModel,
    LatencyPrediction,
    Slo,
)
from tests.builders import candidates, request


class Estimator:
    """Returns the parts that the test sets, the same at each candidate."""

    def __init__(self, queue_s=0.2, prefill_s=0.1, step_s=0.01, context_s=0.005):
        self.parts = (queue_s, prefill_s, step_s, context_s)

    def expected_latency(self, request, candidates):
        return ExpectedLatency(*(np.full(len(candidates), part) for part in self.parts))


def model_of(estimator=None, **fields):
    return LatencyModel(LatencyPrediction(estimator=estimator or Estimator(), **fields))


def predicted(model, n=1):
    return model.predict(request(), candidates(n=n), n)


def columns(model, n=1):
    return {name: column.tolist() for name, column in predicted(model, n).affinity.columns.items()}


def see(model, times, factor, slot=0, random=None, n=1):
    """Let `times` requests take `factor` times what the estimator says."""
    for _ in range(times):
        if random is not None:
            model.settings.estimator.parts = [random.uniform(0.01, 1.0) for _ in range(4)]
        placed = predicted(model, n).at(slot)
        queue_s, prefill_s, step_s, context_s = model.settings.estimator.parts
        model.first_output(slot, placed, factor * (queue_s + prefill_s + step_s + context_s))
        model.ended(slot, placed, factor * (step_s + context_s))


def test_the_first_prediction_is_the_estimate_and_its_error_is_unknown():
    found = columns(model_of())
    assert found["ttft_s"] == [pytest.approx(0.315)]
    assert found["tpot_s"] == [pytest.approx(0.015)]
    assert math.isnan(found["ttft_error"][0])
    assert math.isnan(found["tpot_error"][0])


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0, 9.0])
def test_an_endpoint_that_is_slower_by_a_factor_is_learned(factor):
    """Within 10 % after 200 requests of different sizes, at this endpoint and no other."""
    model, random = model_of(), Random(1)
    see(model, 200, factor, slot=1, random=random, n=2)
    model.settings.estimator.parts = (0.2, 0.1, 0.01, 0.005)
    found = columns(model, 2)
    assert found["ttft_s"] == [pytest.approx(0.315), pytest.approx(0.315 * factor, rel=0.1)]
    assert found["tpot_s"] == [pytest.approx(0.015), pytest.approx(0.015 * factor, rel=0.1)]
    ttft, tpot = model.errors_of(1).values()
    assert ttft.learned < 0.1
    assert tpot.learned < 0.1
    assert ttft.estimate == pytest.approx(abs(1 - factor) / factor, abs=1e-9)
    # Where the estimate is right, either may be a trifle better.
    assert factor == 1.0 or (ttft.used, tpot.used) == ("learned", "learned")
    assert ttft.observed == 200


def test_the_estimate_is_used_where_its_error_is_smaller():
    """The regression follows noise here, the estimate is its mean."""
    model, random = model_of(), Random(3)
    for _ in range(100):
        placed = predicted(model).at(0)
        model.first_output(0, placed, 0.315 * random.choice([0.75, 1.0, 1.0, 1.0, 1.35]))
    ttft = model.errors_of(0)["ttft"]
    assert ttft.estimate < 1e-9
    assert ttft.used == ("learned" if ttft.learned <= ttft.estimate else "estimate")
    assert columns(model)["ttft_error"] == [min(ttft.learned, ttft.estimate)]


def test_nothing_is_predicted_where_both_errors_are_above_the_limit():
    """Latencies that differ by a factor of a hundred without any reason cannot be predicted."""
    model, random = model_of(), Random(2)
    for _ in range(200):
        model.first_output(0, predicted(model).at(0), random.choice([0.02, 0.3, 4.0]))
    ttft = model.errors_of(0)["ttft"]
    assert min(ttft.estimate, ttft.learned) > ERROR_MAX
    assert ttft.used == "none"
    found = columns(model)
    assert math.isnan(found["ttft_s"][0])
    assert found["ttft_error"][0] > ERROR_MAX
    # The other kind is judged by itself.
    assert found["tpot_s"] == [pytest.approx(0.015)]


def test_a_prediction_becomes_usable_again():
    """The old errors do not count once the last ones are small."""
    model, random = model_of(), Random(2)
    for _ in range(100):
        model.first_output(0, predicted(model).at(0), random.choice([0.02, 0.3, 4.0]))
    see(model, 3 * ERRORS_KEPT, 2.5)
    assert model.errors_of(0)["ttft"].used == "learned"
    assert columns(model)["ttft_s"] == [pytest.approx(0.7875, rel=0.1)]


def test_an_endpoint_that_restarts_begins_with_the_estimate():
    model = model_of()
    see(model, 50, 3.0)
    model.forget(0)
    assert columns(model)["ttft_s"] == [pytest.approx(0.315)]
    assert model.errors_of(0)["ttft"].observed == 0
    model.forget(99)


HOSTILE = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(min_value=SECONDS_MIN, max_value=SECONDS_MAX),
)


@given(
    st.lists(st.tuples(st.tuples(*[HOSTILE] * 4), HOSTILE, HOSTILE), min_size=1, max_size=60),
)
@example(seen=[((0.0, 0.0, math.inf, -math.inf), 0.0, 0.0)])
def test_predictions_stay_finite_and_bounded_whatever_is_observed(seen):
    """Estimates and observations that are not a number, huge, negative or tiny."""
    model = model_of()
    for parts, ttft_s, tpot_s in seen:
        model.settings.estimator.parts = parts
        placed = predicted(model).at(0)
        assert SECONDS_MIN <= placed.ttft_s <= SECONDS_MAX
        assert SECONDS_MIN <= placed.tpot_s <= SECONDS_MAX
        model.first_output(0, placed, ttft_s)
        model.ended(0, placed, tpot_s)
        for regression in (model._ttft, model._tpot):
            assert np.isfinite(regression.coefficients).all()
            assert (regression.coefficients >= 0).all()
            assert (regression.coefficients <= COEFFICIENT_MAX).all()
            for sums in regression._sums.values():
                # At most 1 from each of 100 observations, as many as are remembered.
                assert all((np.abs(one) <= 101.0).all() for one in sums)
            assert all(
                len(kept) <= ERRORS_KEPT for one in regression._errors.values() for kept in one
            )


@settings(max_examples=10)
@given(st.lists(HOSTILE, max_size=30))
def test_it_recovers_from_hostile_observations(seen):
    """After as many sound observations as it remembers, the prediction is right."""
    model = model_of()
    for ttft_s in seen:
        model.first_output(0, predicted(model).at(0), ttft_s)
    see(model, 500, 2.0)
    assert columns(model)["ttft_s"] == [pytest.approx(0.63, rel=0.1)]


@given(st.lists(st.floats(min_value=0.001, max_value=10.0), min_size=OBSERVED_MIN, max_size=60))
def test_the_same_observations_give_the_same_predictions(seen):
    found = []
    for _ in range(2):
        model = model_of()
        for ttft_s in seen:
            model.first_output(0, predicted(model).at(0), ttft_s)
        found.append(repr((columns(model), model.errors_of(0))))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (None, None)),
        ({"x-slo-ttft-ms": "200"}, (0.2, None)),
        ({"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": "300"}, (0.3, None)),
        ({"x-llm-d-slo-tpot-ms": "12.5"}, (None, 0.0125)),
        *(
            ({"x-slo-ttft-ms": text}, (None, None))
            for text in ("", "nan", "inf", "-1", "0", "1e999", "x")
        ),
    ],
)
def test_an_slo_is_a_positive_number_of_milliseconds(headers, expected):
    slo = Slo.of(request(headers=headers))
    assert (slo.ttft_s, slo.tpot_s) == expected


def hopeless(model, headers, **fields):
    """Return whether a request is hopeless at one endpoint with two requests in flight."""
    asked = request(headers=headers)
    pool = candidates(**({"inflight_requests": [2], "kv_cache_usage": [0.5]} | fields))
    known = {"predicted latency": model.predict(asked, pool, 1).affinity}
    pool = candidates(
        **({"inflight_requests": [2], "kv_cache_usage": [0.5]} | fields), affinities=known
    )
    return model.is_hopeless(asked, pool)


LATE, IN_TIME = {"x-slo-ttft-ms": "100"}, {"x-slo-ttft-ms": "1000"}


def test_a_request_is_hopeless_if_every_endpoint_is_known_to_be_too_late():
    model = model_of(refuses=True)
    # The error of the estimate is not known yet.
    assert not hopeless(model, LATE)
    see(model, 50, 1.0)
    assert hopeless(model, LATE)
    assert not hopeless(model, IN_TIME)
    assert hopeless(model, IN_TIME | {"x-slo-tpot-ms": "1"})
    assert not hopeless(model, {})
    assert not hopeless(model, LATE, inflight_requests=[0])
    assert not hopeless(model, LATE, kv_cache_usage=[0.01])
    assert not hopeless(model_of(), LATE)


def test_a_request_is_not_hopeless_by_a_prediction_with_a_large_error():
    model, random = model_of(refuses=True), Random(2)
    for _ in range(200):
        model.first_output(0, predicted(model).at(0), random.choice([0.2, 3.0, 40.0]))
    assert model.errors_of(0)["ttft"].used == "none"
    assert not hopeless(model, LATE)


@given(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9))
def test_an_slo_is_read_from_the_headers_that_it_writes(ttft_ms, tpot_ms):
    """With milliseconds of at most six decimals, as clients send."""
    given = {
        "x-llm-d-slo-ttft-ms": str(round(ttft_ms, 3)),
        "x-slo-tpot-ms": str(round(tpot_ms, 3)),
    }
    slo = Slo.in_headers(given)
    assert Slo.in_headers(slo.headers()) == slo
    assert Slo().headers() == {}
