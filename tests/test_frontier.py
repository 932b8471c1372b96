"""Tests of the tables and the picture of `python -m docs.frontier`, and of the table of `python -m docs.live`."""

from xml.etree import ElementTree as ET

import msgspec
import pytest
from msgspec.structs import replace

from docs import frontier, live
from docs.frontier import (
    BEFORE,
    CHOSEN,
    CHOSEN_ON,
    CONFIRMED_ON,
    RIVALS,
    Comparison,
    Row,
    comparison_of,
    plan,
)
from docs.live import LiveRun
from epp.plugins.added_time import AddedTime
from sim.experiments.leaderboard.cases import CASES, FURTHER_CASES
from sim.experiments.leaderboard.standings import case_rows
from sim.measurement.ranking import scopes_of, totals
from sim.measurement.summaries import CaseSummary, LeaderboardSummary
from tests.sim.experiments.leaderboard.test_standings import e2e
from tests.sim.made import filled


def comparison(strategies):
    """Return a board on which strategy number n takes 1 + n / 100 times as long as the best."""
    rows = [
        Row(
            strategy=name,
            times=dict.fromkeys(frontier.FIGURES, 1.0 + number / 100.0),
            goodput=None,
            worst="bursts",
            worst_times=2.0,
        )
        for number, name in enumerate(strategies)
    ]
    return Comparison(cases=["bursts", "ladder"], requests=2_000, rows=rows)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Replace the stored figures by invented ones."""
    path = tmp_path / "frontier.json"
    boards = {name: comparison(strategies) for name, (strategies, _, _) in plan().items()}
    path.write_bytes(msgspec.json.encode(boards))
    monkeypatch.setattr(frontier, "RESULTS", path)


def test_the_halves_and_the_hold_outs_have_no_case_in_common():
    """The default is confirmed only on cases on which it was not chosen."""
    plain = {name for name, case in CASES.items() if not case.max_loras}
    assert set(CHOSEN_ON) | set(CONFIRMED_ON) == plain
    assert not set(CHOSEN_ON) & set(CONFIRMED_ON)
    assert not set(FURTHER_CASES) & set(CASES)
    assert abs(len(CHOSEN_ON) - len(CONFIRMED_ON)) <= 1


def test_every_board_has_the_default_and_the_best_rivals():
    for strategies, _, _ in plan().values():
        assert {BEFORE, CHOSEN, *RIVALS} <= set(strategies)
    default = AddedTime()
    assert f"w{default.first_token_weight:g}-d{default.decode_tokens:g}" == CHOSEN


def test_the_figures_are_those_of_the_cases_without_adapters():
    """The case with adapters, in which the order is the other way round, does not count."""
    cases = [
        filled(CaseSummary, name="plain", says="plain"),
        filled(CaseSummary, name="lora", says="lora", max_loras=4),
    ]
    runs = [e2e("homing", 1.0, 1.0, 1.0), e2e("smetric", 2.0, 2.0, 2.0)]
    rows = case_rows("plain", runs, 1) + case_rows("lora", runs[::-1], 1)
    summary = filled(
        LeaderboardSummary,
        complete=True,
        seeds=3,
        first_seed=101,
        requests=400,
        cases=cases,
        totals=totals(rows, scopes_of(cases)),
        rows=rows,
    )
    found = comparison_of(summary)
    assert [row.strategy for row in found.rows] == [CHOSEN, "smetric"]
    assert [row.times["e2e_mean_s"] for row in found.rows] == pytest.approx([1.0, 2.0])
    assert found.rows[1].worst == "plain"


def test_a_table_says_what_was_run_and_marks_the_default(results):
    table = frontier.table("chosen")
    assert (
        "2 cases with 2,000 requests each and seeds 101 to 103. The cases are `bursts`, `ladder`."
        in table
    )
    assert f"| **{CHOSEN}** | 1.030 |" in table
    assert "2.000 in bursts" in table


def test_the_picture_has_a_dot_for_each_variant_and_a_large_one_for_the_default(results):
    root = ET.fromstring(frontier.picture())
    dots = [float(dot.get("r")) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    variants = sum(map(len, frontier.VARIANTS.values()))
    assert len(dots) == 2 * variants
    assert sum(radius > 5 for radius in dots) == 2


def test_live_runs_are_compared_pair_by_pair(tmp_path, monkeypatch):
    """Each ratio is of two runs with one seed, in whichever order the two ran."""
    run = LiveRun(
        workload="demo",
        weight=0.0,
        seed=1,
        requests=10,
        errors=0,
        ttft_p90_s=0.4,
        ttft_p99_s=1.0,
        e2e_mean_s=2.0,
    )
    runs = [
        run,
        replace(run, weight=3.0, ttft_p90_s=0.2),
        replace(run, weight=3.0, seed=2, ttft_p90_s=0.6),
        replace(run, seed=2, ttft_p90_s=0.8),
    ]
    path = tmp_path / "live.json"
    path.write_bytes(msgspec.json.encode(runs))
    monkeypatch.setattr(live, "RESULTS", path)
    assert "| demo | 2 | 40 | TTFT p90 | 0.600 s | 0.400 s | 0.667 | 0.50, 0.75 |" in live.table()
