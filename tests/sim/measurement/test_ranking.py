"""The board's own arithmetic: small boards by hand, and what must hold of every board."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.experiments.leaderboard.standings import case_rows
from sim.measurement.ranking import (
    ALL,
    HELD_WITHOUT_ADAPTERS,
    JUDGED,
    MEASURES,
    SCOPES,
    WITHOUT_ADAPTERS,
    best_of,
    geometric_mean,
    in_the_running,
    is_behind,
    is_level,
    ranked,
    scopes_of,
    times_as_bad,
    totals,
)
from sim.measurement.summaries import Behind, CaseSummary, EstimateSummary, StandingSummary
from tests.sim.experiments.leaderboard.test_standings import runs, summary
from tests.sim.made import filled


def case(name, *, hold_out=False, adapters=False):
    return filled(CaseSummary, name=name, hold_out=hold_out, max_loras=4 if adapters else 0)


def row(strategy, where="a", times=1.0, *, running=True, best=False, within=False, **others):
    """The same in every figure, but in `others`."""
    told = dict.fromkeys(JUDGED, times) | others
    return filled(
        StandingSummary,
        case=where,
        strategy=strategy,
        in_the_running=running,
        behind={
            measure: Behind(times=value, best=best, within=within)
            for measure, value in told.items()
        },
    )


def over(rows, scope=ALL, cases=()):
    """Strategy -> its totals over `scope`; without `cases` all are plain."""
    cases = cases or [case(name) for name in dict.fromkeys(one.case for one in rows)]
    return {
        one.strategy: one.over[scope] for one in totals(rows, scopes_of(cases)) if scope in one.over
    }


def e2e_of(total):
    return total.figures["e2e_mean_s"]


def test_twice_as_bad_here_and_half_as_bad_there_is_as_good():
    """The mean is geometric; the worst case is named."""
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    rows = [row("one", "a", 1.0), row("one", "b", 4.0), row("one", "c", 2.0)]
    total = e2e_of(over(rows)["one"])
    assert (total.times_the_best, total.worst, total.worst_times) == (2.0, "b", 4.0)


def test_cases_with_adapters_and_hold_outs_are_summed_up_apart():
    """Who wins where adapters are loaded wins nothing elsewhere."""
    cases = [
        case("plain"),
        case("held", hold_out=True),
        case("lora", adapters=True),
        case("lora-held", hold_out=True, adapters=True),
    ]
    rows = [
        row("one", "plain", 2.0), row("one", "held", 8.0),
        row("one", "lora", 1.0), row("one", "lora-held", 1.0),
    ]  # fmt: skip
    assert scopes_of(cases) == {
        WITHOUT_ADAPTERS: {"plain", "held"},
        HELD_WITHOUT_ADAPTERS: {"held"},
        ALL: {"plain", "held", "lora", "lora-held"},
    }
    found = {scope: over(rows, scope, cases)["one"] for scope in SCOPES}
    assert {scope: one.cases for scope, one in found.items()} == {
        WITHOUT_ADAPTERS: 2,
        HELD_WITHOUT_ADAPTERS: 1,
        ALL: 4,
    }
    assert e2e_of(found[WITHOUT_ADAPTERS]).times_the_best == 4.0
    assert e2e_of(found[HELD_WITHOUT_ADAPTERS]).times_the_best == 8.0
    assert e2e_of(found[ALL]).times_the_best == 2.0
    assert list(scopes_of([case("lora", adapters=True)])) == [ALL], "there are no others"


def test_more_is_better_where_it_is():
    """Half the throughput is twice as bad, and so is twice the time."""
    assert times_as_bad(100.0, 200.0, "output_tokens_per_s") == 2.0
    assert times_as_bad(2.0, 1.0, "e2e_mean_s") == 2.0
    assert best_of({"a": 1.0, "b": 2.0}, "output_tokens_per_s") == ["b"]
    assert best_of({"a": 1.0, "b": 2.0}, "e2e_mean_s") == ["a"]
    assert set(JUDGED) <= set(MEASURES)


@pytest.mark.parametrize(
    ("value", "best"), [(math.nan, 1.0), (1.0, math.nan), (0.0, 1.0), (1.0, 0.0), (math.inf, 1.0)]
)
def test_what_cannot_be_compared_counts_for_nobody(value, best):
    """NaN is a figure that a run does not have."""
    for measure in ("e2e_mean_s", "output_tokens_per_s"):
        assert times_as_bad(value, best, measure) is None


def test_nobody_is_best_in_what_nobody_has():
    """And who lacks a figure is not the best of those who have it."""
    assert best_of({"a": math.nan, "b": math.nan}, "e2e_mean_s") == []
    assert best_of({"a": math.nan, "b": 3.0}, "e2e_mean_s") == ["b"]
    assert best_of({}, "e2e_mean_s") == []


def test_a_case_without_a_figure_is_not_counted_in_it():
    """It is in the others; where there is no case there is no mean."""
    rows = [row("one", "a", 2.0, itl_p99_s=None), row("one", "b", 8.0)]
    found = over(rows)["one"]
    assert found.cases == 2
    assert found.figures["e2e_mean_s"].times_the_best == 4.0
    assert (found.figures["itl_p99_s"].times_the_best, found.figures["itl_p99_s"].cases) == (8.0, 1)
    nothing = over([row("one", "a", 2.0, itl_p99_s=None)])["one"].figures["itl_p99_s"]
    assert (nothing.times_the_best, nothing.cases, nothing.level, nothing.worst) == (
        None, 0, 0, None,
    )  # fmt: skip


def test_of_equals_all_are_the_best():
    """Whoever stands first in the list."""
    assert best_of({"b": 1.0, "c": 2.0, "a": 1.0}, "e2e_mean_s") == ["b", "a"]
    assert is_level(row("one", best=True, within=None), "e2e_mean_s")
    assert is_level(row("one", within=True), "e2e_mean_s")
    assert not is_level(row("one", within=None), "e2e_mean_s"), "nobody knows"
    assert not is_level(row("one", within=True, running=False), "e2e_mean_s")


def test_behind_is_who_is_beyond_the_interval_and_by_more_than_a_twentieth():
    """Either alone is not."""
    assert is_behind(row("one", times=1.06), "ttft_p99_s")
    assert not is_behind(row("one", times=1.06, within=True), "ttft_p99_s")
    assert not is_behind(row("one", times=1.04), "ttft_p99_s")
    assert not is_behind(row("one", times=None), "ttft_p99_s")
    assert not is_behind(row("one"), "hit_rate"), "it is not told"
    assert is_behind(row("one", times=1.06, within=True, running=False), "ttft_p99_s")


def test_who_loses_requests_gains_nothing_by_it():
    """Its answers are quick because they are few: it is counted as no better than the best."""
    assert in_the_running({"all": 0.0, "hardly": 0.01, "many": 0.02}) == ["all", "hardly"]
    assert in_the_running({"one": 0.5, "other": 0.505}) == ["one", "other"]
    assert in_the_running({}) == []
    rows = [row("loses", "a", 0.25, running=False, within=True), row("loses", "b", 4.0)]
    found = over(rows)["loses"]
    assert (found.cases, found.out) == (2, 1)
    assert e2e_of(found).times_the_best == 2.0
    assert e2e_of(found).level == 0
    slow = over([row("loses", "a", 4.0, running=False)])["loses"]
    assert e2e_of(slow).times_the_best == 4.0, "that it is slow is told"


def test_who_was_not_everywhere_comes_after_those_who_were():
    """A strategy that cannot be run on a hard case did not do all of it."""
    rows = [row("partly", "a", 1.0), row("slow", "a", 3.0), row("slow", "b", 3.0)]
    cases = [case("a"), case("b")]
    assert [one.strategy for one in totals(rows, scopes_of(cases))] == ["slow", "partly"]


def test_each_scope_has_an_order_of_its_own():
    """The first of a table is the best of that table."""
    cases = [case("plain"), case("lora", adapters=True)]
    rows = [
        row("plain-best", "plain", 1.0), row("plain-best", "lora", 9.0),
        row("lora-best", "plain", 2.0), row("lora-best", "lora", 1.0),
    ]  # fmt: skip
    told = totals(rows, scopes_of(cases))
    assert [one.strategy for one in told] == ["plain-best", "lora-best"]
    assert [one.strategy for one in ranked(told, ALL)] == ["lora-best", "plain-best"]
    assert ranked(told, HELD_WITHOUT_ADAPTERS) == []


USUAL = summary()
figures = st.floats(0.01, 1000.0)
boards = st.integers(2, 4).flatmap(
    lambda strategies: st.lists(
        st.lists(
            st.tuples(st.tuples(figures, figures, figures), st.sampled_from([0, 0, 0, 40])),
            min_size=strategies,
            max_size=strategies,
        ),
        min_size=1,
        max_size=3,
    )
)
"""Cases of strategies of (figure by seed, requests lost)."""


def drawn(value, lost):
    """A run whose times are so long, and whose throughput is as much smaller."""
    return replace(
        USUAL,
        requests=replace(USUAL.requests, complete=100 - lost, failed=lost),
        e2e_s=replace(USUAL.e2e_s, mean=value),
        ttft_s=replace(USUAL.ttft_s, mean=value, p50=value, p90=2 * value, p99=4 * value),
        itl_s=replace(USUAL.itl_s, mean=value, p99=2 * value),
        output_tokens_per_s=1024 / value,
    )


def told(board):
    """Rows of a board whose strategies are s0, s1, ..."""
    rows = []
    for number, strategies in enumerate(board):
        given_runs = [
            runs(f"s{at}", *(drawn(value, lost) for value in by_seed))
            for at, (by_seed, lost) in enumerate(strategies)
        ]
        rows += case_rows(f"case-{number}", given_runs, 1)
    return rows


@settings(max_examples=25, deadline=None)
@given(boards)
def test_the_best_of_every_case_is_one(board):
    """And nobody in the running is better."""
    rows = told(board)
    for measure in JUDGED:
        for name in {one.case for one in rows}:
            of_case = [one for one in rows if one.case == name]
            best = [one for one in of_case if one.behind[measure].best]
            assert best
            assert {one.behind[measure].times for one in best} == {1.0}
            assert all(one.in_the_running for one in best)
            others = [one for one in of_case if one.in_the_running]
            assert min(one.behind[measure].times for one in others) >= 1.0
    for total in over(rows).values():
        assert all(one.times_the_best >= 1.0 for one in total.figures.values())
        assert all(0 <= one.level <= one.cases - total.out for one in total.figures.values())


@settings(max_examples=25, deadline=None)
@given(boards, st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_a_case_that_takes_longer_for_everybody_changes_nothing(board, factor):
    """Distances have no unit. A power of two is no matter of rounding."""
    first, *others = board
    slower = [[(tuple(factor * value for value in of), lost) for of, lost in first], *others]
    assert over(told(slower)) == over(told(board))


@settings(max_examples=25, deadline=None)
@given(boards)
def test_a_strategy_that_is_there_twice_has_the_same_row_twice(board):
    """And takes nothing from the others."""
    twice = [[*strategies, strategies[0]] for strategies in board]
    alone, found = over(told(board)), over(told(twice))
    copy = found.pop(f"s{len(board[0])}")
    assert copy == found["s0"]
    assert found == alone


@settings(max_examples=25, deadline=None)
@given(boards)
def test_a_case_with_adapters_moves_nothing_without_them(board):
    """Whatever happens in it."""
    cases = [case(f"case-{number}", adapters=number == 0) for number in range(len(board))]
    rows = told(board)
    plain = [one for one in rows if one.case != "case-0"]
    with_it = over(rows, WITHOUT_ADAPTERS, cases)
    assert with_it == (over(plain, WITHOUT_ADAPTERS, cases[1:]) if plain else {})


def test_goodput_is_a_mean_share_because_it_may_be_nothing():
    """A share of nothing has no ratio to the best."""
    rows = [
        replace(
            row("one", where),
            figures={"goodput": EstimateSummary(value=share, low=None, high=None)},
        )
        for where, share in (("a", 0.0), ("b", 0.5), ("c", None))
    ]
    assert over(rows)["one"].goodput == 0.25
    assert over([replace(row("one"), figures={})])["one"].goodput is None
