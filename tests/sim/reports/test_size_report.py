"""What a sizing says of its options."""

from msgspec.structs import replace

from sim.measurement.summaries import (
    AutoscalingSummary,
    BoundSummary,
    CountSummary,
    DemandSummary,
    EstimateSummary,
    EveryCountSummary,
    HeadroomSummary,
    KeptRun,
    NamedRun,
    SizedSummary,
    SizeSummary,
)
from sim.reports.size_report import size_page, size_report, size_table
from tests.sim.made import filled


def count(pods, used):
    bound = BoundSummary(
        name="ttft-p90", limit=2.0, sure=2 * used, used=used, kept=used <= 1,
        figure=EstimateSummary(value=1.8 * used, low=used, high=2.1 * used),
        kept_by_figure=used <= 1.1,
    )  # fmt: skip
    return CountSummary(
        pods=pods, runs=5, kept=used <= 1, cost_per_hour=2.5 * pods, used=used, bounds=[bound]
    )


def undecided(pods):
    return replace(count(pods, 0.6), runs=1, kept=None)


OPTION = filled(
    SizedSummary,
    profile="a-card",
    config="default",
    price_per_hour=2.5,
    pods=5,
    used=0.8,
    cost_per_hour=12.5,
    cost_per_million_tokens=0.25,
    cost_per_million_output_tokens=2.0,
    on_front=True,
    counts=[count(4, 1.05), count(5, 0.8), count(6, 0.5)],
    runs=15,
)
STRETCH = DemandSummary(
    start_s=0.0, end_s=3600.0, requests=100, prompt_tokens=1, output_tokens=1, of_busiest=1.0
)
SUMMARY = filled(
    SizeSummary,
    complete=True,
    first_seed=1,
    seeds=5,
    varied="4 resamples of 30 blocks of 120 s",
    conditions={"trace": "day.jsonl"},
    pods_max=64,
    bounds=["ttft-p90=2"],
    trace=STRETCH,
    sized_for=STRETCH,
    over_time=[STRETCH],
    options=[OPTION],
    chosen=0,
    headroom=[
        filled(HeadroomSummary, case="one pod lost", says="gone", pods=6, cost_per_hour=15.0)
    ],
    runs=[NamedRun(config="default", seed=1, run=filled(KeptRun))],
)


def test_the_answer_is_a_sentence():
    """With what it costs, wherever it is told."""
    for told in (size_table, size_report, size_page):
        assert (
            "5 pods of a-card under default keep ttft-p90 at most 2 s, with 95 % confidence, for 12.5 "
            "per hour and 0.25 per million tokens."
        ) in told(SUMMARY)


def test_a_smaller_number_that_might_do_is_named():
    """The figures keep the bounds there, the intervals do not."""
    told = size_table(replace(SUMMARY, options=[replace(OPTION, pods_perhaps=4)]))
    assert "4 might suffice: the figures keep the bounds there" in told


def test_what_was_left_out_of_a_long_trace_is_told():
    """How much busier the stretch is that was sized for."""
    part = replace(STRETCH, start_s=18_000.0, end_s=21_600.0)
    whole = replace(STRETCH, end_s=36_000.0, requests=500, prompt_tokens=3, output_tokens=2)
    steps = [
        replace(STRETCH, start_s=1_800.0 * at, end_s=1_800.0 * (at + 1), of_busiest=0.5)
        for at in range(20)
    ]
    cut = replace(SUMMARY, trace=whole, sized_for=part, over_time=steps)
    told = size_report(cut)
    assert "from 5.0 h on: 100 of its 500 requests, at 2 times its mean rate" in told
    # 2 tokens in an hour there, 5 in ten hours: of each four times as many pods are paid for.
    assert (
        "and 0.25 per million tokens in the period for which the pool was sized, 1 over the whole trace."
        in told
    )
    assert "costs of tokens cover the period for which the pool was sized." in told
    assert "the period for which the pool was sized" in size_page(cut).partition("<table")[0]
    assert "over the whole trace" not in size_report(SUMMARY)


NONE = replace(
    SUMMARY,
    chosen=None,
    why_none="No option keeps all bounds with up to 64 pods.",
    options=[
        replace(
            OPTION, pods=None, on_front=False, used=None, cost_per_hour=None,
            cost_per_million_tokens=None, counts=[count(32, 1.5), count(64, 1.05)],
        )
    ],
    headroom=[],
    runs=[],
)  # fmt: skip


def test_where_nothing_is_enough_it_says_why_and_how_far_the_best_is_from_it():
    """And tells no number; the bounds of the highest that was tried are there to be looked at."""
    for told in (size_table, size_report, size_page):
        assert (
            "No option keeps all bounds with up to 64 pods. The nearest result is 64 pods of a-card, default: "
            "ttft-p90 was 1.89 s (95 % limit 2.10 s), and must be at most 2 s."
        ) in told(NONE)
        assert "more than 64" in told(NONE)
    report = size_report(NONE)
    assert "| a-card, default | 64 | ttft-p90 | at most 2 s | 1.89 s | 2.10 s | 105.0% |" in report
    assert "## What was varied" not in report, "a title with nothing under it"


def test_an_answer_at_an_end_does_not_speak_of_what_is_beyond():
    """Nothing is tried below one pod (of each role, in a split pool) and above the highest."""
    lone = replace(SUMMARY, options=[replace(OPTION, pods=1, counts=[count(1, 0.8)])])
    assert (
        "the smallest number that keeps all bounds. The next higher number keeps them too."
        in size_report(lone)
    )
    pair = replace(
        OPTION, pods=2, prefill_share=0.5, prefill_pods=1, counts=[count(2, 0.8), count(3, 0.5)]
    )
    assert "next lower number" not in size_report(replace(SUMMARY, options=[pair]))
    most = replace(SUMMARY, pods_max=5)
    assert (
        "the smallest number that keeps all bounds. The next lower number does not."
        in size_report(most)
    )
    assert "keeps them too. The next lower number" in size_report(SUMMARY)


def test_without_prices_there_is_no_column_of_costs():
    """It would be empty; and nothing is in a currency."""
    bare = [
        replace(one, cost_per_hour=None) for one in OPTION.counts
    ]  # fmt: skip
    option = replace(
        OPTION, price_per_hour=None, cost_per_hour=None, cost_per_million_tokens=None, counts=bare
    )
    lost = replace(SUMMARY.headroom[0], cost_per_hour=None)
    told = size_report(replace(SUMMARY, options=[option], headroom=[lost]))
    assert "per hour" not in told
    assert "currency" not in told
    assert "| a-card, default (chosen) | 5 | 80.0% | 15 |" in told


def test_a_front_is_told_where_there_is_something_to_beat():
    """In a column, with what it means; of one option it would say nothing."""
    other = replace(OPTION, config="round-robin", used=0.9, on_front=False)
    told = size_report(replace(SUMMARY, options=[OPTION, other]))
    assert "| a-card, default (chosen) | 5 | 12.5 | 0.25 | 2 | 80.0% | yes | 15 |" in told
    assert "| a-card, round-robin | 5 | 12.5 | 0.25 | 2 | 90.0% | - | 15 |" in told
    assert (
        "is better than an option on the front in both cost and remaining room in the bounds."
        in told
    )
    assert "on the front" not in size_report(SUMMARY)
    bare = [replace(one, price_per_hour=None) for one in (OPTION, other)]
    told = size_report(replace(SUMMARY, options=bare))
    assert (
        "is better than an option on the front in both pods and remaining room in the bounds."
        in told
    )


def test_headroom_that_is_still_looked_for_is_not_called_too_much():
    """Stopped in its search: nothing says that the highest number is not enough."""
    sought = replace(SUMMARY.headroom[0], pods=None, cost_per_hour=None)
    stopped = replace(SUMMARY, complete=False, headroom=[sought])
    assert "| one pod lost | - | - |" in size_report(stopped)
    whole = replace(SUMMARY, headroom=[sought])
    assert "| one pod lost | more than 64 | - |" in size_report(whole)


def test_an_autoscaler_runs_over_the_whole_trace():
    """Also where the trace is so short that the pool was sized for all of it."""
    short = filled(AutoscalingSummary, bounds=[], runs=1)
    assert "| replayed | the whole trace |" in size_report(replace(SUMMARY, autoscaling=short))


def test_an_autoscaler_that_takes_more_does_not_save():
    """A negative saving is a riddle."""
    more = filled(
        AutoscalingSummary, metric="inflight-requests", target=12.0, kept=True, pods_mean=3.0,
        bounds=count(4, 0.9).bounds, runs=5, pod_hours=5.0, fixed_pod_hours=4.0,
    )  # fmt: skip
    report = size_report(replace(SUMMARY, autoscaling=more))
    assert "| used more | 25.0% |" in report
    report = size_report(replace(SUMMARY, autoscaling=replace(more, pod_hours=3.0)))
    assert "| saved | 25.0% |" in report


def test_an_autoscaler_that_broke_bounds_says_so():
    """Neither hidden nor called kept; of one run nothing is sure."""
    broken = filled(
        AutoscalingSummary, metric="inflight-requests", target=12.0, kept=False, pods_mean=3.0,
        bounds=count(4, 1.2).bounds, runs=5, pod_hours=2.0, fixed_pod_hours=4.0,
    )  # fmt: skip
    assert "broke bounds and used 2 pod-hours instead of 4" in size_table(
        replace(SUMMARY, autoscaling=broken)
    )
    once = replace(broken, kept=None, runs=1, bounds=count(4, 0.9).bounds)
    report = size_report(replace(SUMMARY, autoscaling=once))
    assert "unknown after one run" in report


def test_of_nothing_there_is_a_report_too():
    """Stopped before the first run had ended."""
    nothing = replace(
        SUMMARY, complete=False, chosen=None, headroom=[], runs=[],
        options=[replace(OPTION, pods=None, counts=[])],
    )  # fmt: skip
    for told in (size_table, size_report, size_page):
        assert "The search of all options is still incomplete." in told(nothing)
    for told in (size_report, size_page):
        assert "Not complete: run the same command again to continue." in told(nothing)


def test_a_search_that_every_number_contradicts_shows_it():
    """What was found, and what every number finds, beside each other."""
    every = EveryCountSummary(pods=6, runs=320, counts=[count(6, 0.5)])
    told = size_report(replace(SUMMARY, options=[replace(OPTION, every_count=every)]))
    assert "| a-card, default (chosen) | 5 | 12.5 | 0.25 | 2 | 80.0% | 15 | 6 | 320 |" in told


def test_of_what_was_not_decided_no_verdict_is_told():
    """Stopped in the middle of a number."""
    told = size_report(replace(SUMMARY, options=[replace(OPTION, counts=[undecided(4)])]))
    assert "| a-card, default | 4 | 1 | 10 | 60.0% | - |" in told
