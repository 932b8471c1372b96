"""The scorer by predicted latencies: groups by what is missed, then the distance to the SLO."""

import math

import numpy as np
import pytest

from epp.core.knowledge.candidates import PREDICTED_LATENCY, Affinity
from epp.plugins.latency import Latency, PredictedLatency
from tests.builders import candidates, request

NAN = math.nan


def scores(ttft_s, tpot_s=None, *, plugin=None, ttft_ms=None, tpot_ms=None, **columns):
    """Return the scores of endpoints with these predictions for a request with this SLO."""
    n = len(ttft_s)
    known = {
        "ttft_s": np.array(ttft_s),
        "tpot_s": np.array(tpot_s or [0.01] * n),
        "ttft_error": np.full(n, NAN),
        "tpot_error": np.full(n, NAN),
    }
    predicted = Affinity(np.zeros(n, dtype=np.int64), 0, known)
    columns = {"inflight_requests": [1] * n} | columns
    pool = candidates(affinities={PREDICTED_LATENCY: predicted}, **columns)
    limits = {"x-slo-ttft-ms": ttft_ms, "x-slo-tpot-ms": tpot_ms}
    headers = {name: f"{limit}" for name, limit in limits.items() if limit is not None}
    return (plugin or Latency()).score(request(headers=headers), pool).tolist()


def test_without_an_slo_the_fastest_is_best():
    assert scores([0.3, 0.1, 0.2]) == [pytest.approx(0.01), 1.0, pytest.approx(0.505)]


def test_without_an_slo_idle_endpoints_go_first():
    assert scores([0.1, 0.3, 0.2], inflight_requests=[1, 0, 0]) == [0.0, pytest.approx(0.01), 1.0]


def test_only_endpoints_that_meet_the_slo_count():
    """The endpoint closest to the SLO is chosen, so that the others stay free; or the fastest one."""
    found = scores([0.1, 0.4, 0.6], ttft_ms=500)
    assert found == [pytest.approx(0.01), 1.0, 0.0]
    most = Latency(headroom_selection_strategy="most")
    assert scores([0.1, 0.4, 0.6], ttft_ms=500, plugin=most) == [1.0, pytest.approx(0.01), 0.0]


def test_where_nothing_meets_the_slo_the_lesser_miss_goes_first():
    """TPOT alone before TTFT alone before both; the strategy does not matter."""
    ttft_s, tpot_s = [0.6, 0.1, 0.6], [0.01, 0.08, 0.08]
    for strategy in ("least", "most"):
        plugin = Latency(headroom_selection_strategy=strategy)
        both = {"ttft_ms": 500, "tpot_ms": 50, "plugin": plugin}
        assert scores(ttft_s, tpot_s, **both) == [0.0, 1.0, 0.0]
        assert scores(ttft_s[::2], tpot_s[::2], **both) == [1.0, 0.0]


def test_an_slo_that_is_not_set_is_not_missed():
    assert scores([0.1, 0.1], [0.04, 0.09], tpot_ms=50) == [1.0, 0.0]


def test_both_latencies_are_weighed():
    ttft_s, tpot_s = [0.1, 0.2], [0.02, 0.01]
    first, second = scores(ttft_s, tpot_s)
    assert (first, second) == (pytest.approx(0.01 + 0.99 * 0.8), pytest.approx(0.01 + 0.99 * 0.2))
    second_only = Latency(ttft_weight=0.0)
    assert scores(ttft_s, tpot_s, plugin=second_only) == [pytest.approx(0.01), 1.0]


def test_an_endpoint_without_a_prediction_has_no_score():
    assert repr(scores([NAN, 0.2, 0.1])) == repr([NAN, 0.01, 1.0])


def test_tpot_does_not_count_where_it_is_not_predicted_everywhere():
    assert scores([0.2, 0.1], [NAN, 0.09], ttft_ms=500, tpot_ms=50) == [1.0, 0.01]


def test_without_any_prediction_load_and_prefix_decide():
    """A third each of free memory, short queue and cached prefix."""
    load = {
        "kv_cache_usage": [0.5, 0.5, NAN],
        "waiting_requests": [0.0, 4.0, NAN],
        "matched_blocks": [0, 10, 5],
        "total_blocks": 10,
    }
    pool = candidates(**load)
    assert Latency().score(request(), pool).tolist() == pytest.approx([0.5, 0.5, 2.5 / 3])
    by_prefix = Latency(composite_kv_weight=0, composite_queue_weight=0)
    assert by_prefix.score(request(), pool).tolist() == [0.0, 1.0, 0.5]
    by_none = Latency(composite_kv_weight=0, composite_queue_weight=0, composite_prefix_weight=0)
    assert by_none.score(request(), pool).tolist() == [0.5, 0.5, 1.0]


def test_parameters_without_effect_are_named():
    assert PredictedLatency().warnings() == ()
    (said,) = PredictedLatency(slo_buffer_factor=1.2).warnings()
    assert said.startswith("sloBufferFactor has no effect")
