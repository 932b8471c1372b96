"""smg's least_load, by hand."""

import math

import pytest

from epp.strategies.expected_wait import ExpectedWait
from tests.builders import candidates
from tests.strategies.driven import Driven, text

WAIT = ExpectedWait()


def waits(**columns):
    return WAIT.wait_s(candidates(**columns)).tolist()


def test_tokens_over_throughput_and_a_barrier_of_kv_usage():
    """4,000 / 2,000 + 0.15 * 1; what waits counts only where nothing of our own does."""
    assert waits(
        inflight_prefill_tokens=[4_000.0, 0.0, 0.0],
        waiting_requests=[3.0, 3.0, math.nan],
        kv_cache_usage=[0.5, 0.0, 0.9],
    ) == pytest.approx([2.15, 3 * 1_024 / 2_000, 1.35])


def test_a_full_cache_is_bad_but_finite():
    """Usage counts as 0.999 at most."""
    assert waits(kv_cache_usage=[1.0]) == pytest.approx([0.15 * 999])


def test_without_reports_requests_are_counted():
    """As work where others report, alone where nobody does."""
    assert waits(inflight_requests=[2, 2], kv_cache_usage=[math.nan, 0.0]) == [1.024, 0.0]
    assert waits(inflight_requests=[2, 3]) == [2.0, 3.0]


def test_a_burst_spreads_by_tokens_and_not_by_requests():
    """One long prompt weighs more than three short ones between two scrapes."""
    pods = Driven("smg-least-load")
    long = pods.send(text("long", 8_000))
    assert {pods.send(text(f"short{at}", 128)) for at in range(3)} == {1 - long}
