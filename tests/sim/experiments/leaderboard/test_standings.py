"""Who is best, who is level with them, and who is not in the running."""

import math

import pytest

from sim.experiments.leaderboard.cell import CellResult
from sim.experiments.leaderboard.standings import Runs, case_rows
from sim.measurement.ranking import MEASURES
from sim.measurement.summaries import RunSummary
from tests.sim.made import filled


def summary(e2e_s=1.0, ttft_s=0.1, tokens_per_s=100.0, lost=0, generated=True, **fields):
    spread = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft_s)
    told = {
        "requests": {"sent": 100, "complete": 100 - lost, "failed": lost},
        "ttft_s": spread,
        "tpot_s": {"mean": 0.01},
        "itl_s": {"mean": 0.01, "p99": 0.02, "stall_share": 0.0},
        "e2e_s": {"mean": e2e_s},
        "hit_rate": 0.5,
        "output_tokens_per_s": tokens_per_s,
        "goodput": {"share": 1.0},
        "imbalance": {"requests": {"max_over_mean": 1.1}},
        "traffic": {"generated": generated},
    }
    return filled(RunSummary, **(told | fields))


def runs(strategy, *summaries, failed=False):
    by_seed = {
        seed: CellResult(inputs="", summary=one)
        for seed, one in enumerate(summaries, start=1)
        if one is not None
    }
    return Runs(strategy=strategy, by_seed=by_seed, failed=failed)


def rows_of(*of, first_seed=1):
    return {row.strategy: row for row in case_rows("case", of, first_seed)}


def e2e(strategy, *values, **fields):
    return runs(strategy, *(summary(e2e_s=value, **fields) for value in values))


def test_the_best_is_known_and_who_is_level_with_it():
    """By the differences on the same traffic: a spread that all share does not blur them."""
    rows = rows_of(
        e2e("slower", 1.10, 2.11, 3.10),
        e2e("best", 1.0, 2.0, 3.0),
        e2e("level", 1.02, 1.99, 3.01),
    )
    behind = {name: row.behind["e2e_mean_s"] for name, row in rows.items()}
    assert [name for name, one in behind.items() if one.best] == ["best"]
    assert behind["slower"].within is False
    assert behind["level"].within is True
    assert behind["slower"].times == pytest.approx(6.31 / 6, rel=1e-4)
    assert rows["best"].figures["e2e_mean_s"].value == 2.0


def test_more_is_better_where_it_is():
    """Throughput and hits."""
    rows = rows_of(
        runs("much", *[summary(tokens_per_s=200.0)] * 3),
        runs("little", *[summary(tokens_per_s=100.0)] * 3),
    )
    assert rows["much"].behind["output_tokens_per_s"].best
    assert rows["little"].behind["output_tokens_per_s"].times == 2.0


def test_who_loses_requests_is_not_in_the_running():
    """Its figures are of fewer answers; it is told all the same."""
    rows = rows_of(e2e("loses", 0.1, 0.1, 0.1, lost=2), e2e("serves", 1.0, 1.0, 1.0))
    assert not rows["loses"].in_the_running
    assert rows["serves"].behind["e2e_mean_s"].best
    assert not rows["loses"].behind["e2e_mean_s"].best
    assert rows["loses"].behind["e2e_mean_s"].times == 0.1
    equal = rows_of(e2e("one", 0.1, 0.1, 0.1, lost=5), e2e("other", 1.0, 1.0, 1.0, lost=5))
    assert equal["one"].behind["e2e_mean_s"].best, "all lose as many"


def test_a_strategy_that_failed_takes_no_seeds_from_the_others():
    """It has no row; the others have all of theirs."""
    rows = rows_of(runs("failed", summary(), None, None, failed=True), e2e("whole", 1.0, 2.0, 3.0))
    assert list(rows) == ["whole"]
    assert rows["whole"].seeds == 3


def test_only_seeds_that_all_have_are_compared():
    """And nothing before the first seed is there: of a trace it is the trace as it is."""
    rows = rows_of(e2e("three", 1.0, 2.0, 30.0), e2e("two", 1.0, 2.0))
    assert {row.seeds for row in rows.values()} == {2}
    assert rows["three"].figures["e2e_mean_s"].value == 1.5
    assert rows_of(runs("late", None, summary()), e2e("whole", 1.0, 2.0)) == {}
    assert rows_of(runs("nothing"), e2e("whole", 1.0, 2.0)) == {}, "the best may be missing"
    assert rows_of(runs("failed", failed=True)) == {}


def test_with_two_seeds_nobody_knows_who_is_level():
    """There is no interval: neither yes nor no."""
    rows = rows_of(e2e("one", 1.0, 2.0), e2e("other", 1.1, 2.1))
    assert rows["other"].behind["e2e_mean_s"].within is None
    assert "need at least 3" in rows["other"].lacking


def test_equals_are_all_the_best():
    """With two seeds too, of which there is no interval."""
    rows = rows_of(e2e("one", 1.0, 2.0), e2e("other", 1.0, 2.0))
    assert rows["one"].behind == rows["other"].behind
    assert rows["other"].behind["e2e_mean_s"].best


def test_a_figure_that_a_run_does_not_have_makes_nobody_the_best():
    """As the gap between tokens of answers of one token."""
    nothing = {"mean": None, "p99": None, "stall_share": None}
    rows = rows_of(runs("one", *[summary(itl_s=nothing)] * 3))
    assert "itl_mean_s" not in rows["one"].behind
    assert rows["one"].figures["itl_mean_s"].value is None


def test_every_measure_has_a_figure():
    """In every row."""
    (row,) = rows_of(e2e("one", 1.0, 1.0, 1.0)).values()
    assert list(row.figures) == list(MEASURES)
    assert all(math.isfinite(one.value) for one in row.figures.values())
