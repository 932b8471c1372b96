"""What a leaderboard says: marks, distances, who is out, what failed."""

import re

import pytest
from msgspec.structs import replace

from sim.experiments.leaderboard.standings import case_rows
from sim.measurement.ranking import JUDGED, scopes_of, totals
from sim.measurement.summaries import (
    CaseSummary,
    FailedCell,
    LadderSummary,
    LeaderboardSummary,
    StrategySummary,
)
from sim.reports.leaderboard_report import (
    leaderboard_page,
    leaderboard_report,
    leaderboard_table,
)
from tests.sim.experiments.leaderboard.test_standings import e2e
from tests.sim.made import filled

HOSTILE = "<script>alert(1)</script>"


def case(name, *, hold_out=False, max_loras=0):
    return filled(
        CaseSummary,
        name=name,
        says=f"what {name} is",
        hold_out=hold_out,
        max_loras=max_loras,
        profile="a-gpu",
        pods=4,
        replicas=4,
        scrape_interval_s=0.2,
        prefill_tokens_per_s=[40_000.0, 8_000.0],
        believed_prefill_tokens_per_s=15_928.0,
        ttft_target_s=1.0,
        tpot_target_s=0.05,
    )


@pytest.fixture
def summary():
    rows = case_rows(
        "one",
        [
            e2e("slower", 1.5, 2.5, 3.5), e2e("best", 1.0, 2.0, 3.0),
            e2e("level", 1.02, 1.99, 3.01), e2e("loses", 0.5, 0.5, 0.5, lost=50),
        ],
        1,
    )  # fmt: skip
    rows += case_rows("held", [e2e("slower", 8.0, 8.1, 8.2), e2e("best", 1.0, 1.1, 1.2)], 1)
    rows += case_rows("lora", [e2e("slower", 1.0, 1.1, 1.2), e2e("best", 2.0, 2.1, 2.2)], 1)
    cases = [case("one"), case("held", hold_out=True), case("lora", max_loras=4)]
    names = ("slower", "best", "level", "loses")
    return filled(
        LeaderboardSummary,
        complete=True,
        first_seed=1,
        seeds=3,
        requests=100,
        cases=cases,
        strategies=[
            filled(StrategySummary, name=name, idea="An idea.", omissions=f"what {name} has")
            for name in names
        ],
        ladders=[LadderSummary(title="steps", unit="s", steps=[(1.0, "one"), (2.0, "held")])],
        totals=totals(rows, scopes_of(cases)),
        rows=rows,
    )


def line(report, start):
    return next(line for line in report.splitlines() if line.startswith(start))


def test_the_best_and_who_is_level_with_it_are_marked(summary):
    """Each figure with half of its interval; who is out of the running has no mark."""
    report = leaderboard_report(summary)
    assert re.search(r"\| best \|.*2\.00 s ± [\d.]+ s \* \|", report)
    assert re.search(r"\| level \|.*2\.01 s ± [\d.]+ s = \|", report)
    assert re.search(r"\| slower \|.*2\.50 s ± [\d.]+ s \|", report)
    loses = next(row for row in report.splitlines() if row.startswith("| loses | 100 ms"))
    assert loses.endswith("| 150 of 300, not eligible |")
    assert "*" not in loses


def under(report, title):
    """The lines below a heading."""
    return report.partition(f"## {title}\n")[2].partition("\n#")[0]


def test_all_in_all_the_distances_are_told_without_adapters_first(summary):
    """Over these cases, the worst of them, the hold-outs alone, and all cases."""
    report = leaderboard_report(summary)
    titles = [line for line in report.splitlines() if line.startswith("## ")]
    assert titles[:6] == [
        "## All cases without LoRA: ratio to the best",
        "## All cases without LoRA: level with the best",
        "## Hold-outs without LoRA: ratio to the best",
        "## All cases with LoRA: ratio to the best",
        "## All cases with LoRA: level with the best",
        "## Where slower is behind",
    ]
    plain = under(report, "All cases without LoRA: ratio to the best")
    assert "This ranking of the strategies covers 2 cases." in plain
    assert line(plain, "| best | 2 | 1.000 |").endswith("| 1.000 in one |")
    assert line(plain, "| slower | 2 | 3.034 |").endswith("| 7.364 in held |")
    assert "| slower | 1 | 7.364 |" in under(report, "Hold-outs without LoRA: ratio to the best")
    everything = under(report, "All cases with LoRA: ratio to the best")
    assert line(everything, "| best | 3 | 1.241 |").endswith("| 1.909 in lora |")
    assert "| best | 2 of 2 |" in under(report, "All cases without LoRA: level with the best")
    assert "| best | 2 of 3 |" in under(report, "All cases with LoRA: level with the best")
    assert "| one | what one is | best | 2.00 s | level | 1.250 |" in report
    assert (
        "4 pods of a-gpu, 4 pickers, scraped every 0.2 s, prefill at 40,000 or 8,000 tokens/s "
        "(pickers assume 15,928), goodput: a first token within 1 s, later ones within 50 ms each on average. "
        "This case is a hold-out." in report
    )


def test_what_a_strategy_leaves_out_stands_in_its_row(summary):
    """Beside its idea, on paper and on the page."""
    table = under(leaderboard_report(summary), "Strategies")
    assert line(table, "| slower |").startswith("| slower | An idea. | what slower has |")
    assert "<td>what slower has</td>" in leaderboard_page(summary)


def test_a_strategy_that_lost_requests_says_in_how_many_cases(summary):
    """Its figures are of fewer answers: of these no better than the best."""
    plain = under(leaderboard_report(summary), "All cases without LoRA: ratio to the best")
    assert line(plain, "| loses | 1 (1 out) | 1.000 |")


def test_every_judged_figure_has_a_column(summary):
    """Here and on the screen; where cases are the same no table comes twice."""
    plain = under(leaderboard_report(summary), "All cases without LoRA: ratio to the best")
    head = line(plain, "| strategy |")
    assert head.count("|") == len(JUDGED) + 5
    for label in ("E2E mean", "TTFT p90", "TTFT p99", "ITL p99", "throughput"):
        assert f"| {label} |" in head
        assert f"{label}: how many times as bad" in leaderboard_page(summary)
    told = leaderboard_table(summary)
    assert told.index("All cases without LoRA") < told.index("All cases with LoRA")
    alone = replace(summary, rows=[row for row in summary.rows if row.case == "one"])
    assert "This ranking of the strategies covers 1 cases." in leaderboard_report(alone), (
        "the others have not been run"
    )
    assert "with LoRA" not in leaderboard_table(alone)
    assert "Hold-outs without LoRA" not in leaderboard_table(alone)


def test_where_the_first_is_behind_is_told(summary):
    """By more than a twentieth and beyond the interval; the one that is the best is nowhere behind."""
    report = leaderboard_report(summary)
    assert "The table lists those of the 3 cases in which slower is not level with" in report
    assert (
        "Number of listed cases by figure: E2E mean 2, TTFT p90 0, TTFT p99 0, ITL p99 0, "
        "throughput 0." in report
    )
    assert "| E2E mean | held (hold-out) | 7.36 | best |" in report
    assert "| throughput |" not in under(report, "Where slower is behind")
    assert "Where slower is behind" in leaderboard_page(summary)
    summary.strategies.insert(0, summary.strategies.pop(1))
    assert "| E2E mean | lora (LoRA) | 1.91 | slower |" in leaderboard_report(summary)
    summary.rows[:] = [row for row in summary.rows if row.case != "lora"]
    assert "There is none among the 2 cases in which best is not level with" in leaderboard_report(
        summary
    )


def test_where_the_first_lost_requests_is_told(summary):
    """It would look quick by what it did not answer."""
    assert "lost too many requests" not in leaderboard_report(summary)
    summary.strategies.insert(0, summary.strategies.pop(3))
    behind = under(leaderboard_report(summary), "Where loses is behind")
    assert "There is none among the 3 cases" in behind
    assert "loses lost too many requests to be eligible in one." in behind


def test_the_page_draws_distances_and_ladders(summary):
    """The farther from the best the darker; charts over what cases differ by."""
    page = leaderboard_page(summary)
    assert '<td class="shaded s4">7.36</td>' in page
    assert '<td class="shaded s0">1.00 *</td>' in page
    assert "E2E mean over steps" in page
    assert page.count("<polyline") >= 4
    summary.ladders[0].steps[:] = [(1.0, "one")]
    assert "E2E mean over steps" not in leaderboard_page(summary)


def test_what_failed_and_what_is_missing_is_said(summary):
    """Everywhere; a name is text and never markup."""
    failed = FailedCell(case="one", strategy=HOSTILE, seed=2, problem="it died")
    summary = replace(summary, complete=False, failed=[failed])
    report, page = leaderboard_report(summary), leaderboard_page(summary)
    assert "**Not complete: some runs are missing or failed.**" in report
    assert f"| one | {HOSTILE} | 2 | it died |" in report
    assert "1 runs failed" in leaderboard_table(summary)
    assert HOSTILE not in page
    assert "it died" in page


def test_a_board_without_a_whole_row_says_so(summary):
    """As after a Ctrl-C in the first case, or if every strategy failed."""
    summary = replace(summary, rows=[], totals=[], complete=False)
    why = (
        "No case has figures, because in each case all strategies failed or one has not run with "
        "the first seed."
    )
    assert leaderboard_table(summary) == why
    assert "Not complete" in leaderboard_report(summary)
    assert why in leaderboard_page(summary)
    failed = [FailedCell(case="one", strategy="best", seed=1, problem="it died")]
    summary = replace(summary, failed=failed)
    assert leaderboard_table(summary) == f"{why} 1 runs failed."
    assert "it died" in leaderboard_page(summary)
