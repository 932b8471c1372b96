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
            "5 pods of a-card under default keep ttft-p90=2 with 95 % confidence, for 12.5 an hour "
            "and 0.25 a million tokens."
        ) in told(SUMMARY)


def test_a_smaller_number_that_might_do_is_named():
    """The figures keep the bounds there, the intervals do not."""
    told = size_table(replace(SUMMARY, options=[replace(OPTION, pods_perhaps=4)]))
    assert "4 might do: the figures keep the bounds there" in told


def test_what_was_left_out_of_a_long_trace_is_told():
    """How much busier the stretch is that was sized for."""
    whole = replace(STRETCH, end_s=36_000.0, requests=500)
    told = size_report(replace(SUMMARY, trace=whole))
    assert "100 of its 500 requests, at 2 times its mean rate" in told


def test_where_nothing_is_enough_it_says_why():
    """And tells no number."""
    none = replace(
        SUMMARY,
        chosen=None,
        why_none="No option keeps all bounds with up to 64 pods.",
        options=[replace(OPTION, pods=None, on_front=False, counts=[count(64, 1.05)])],
        headroom=[],
        runs=[],
    )
    for told in (size_table, size_report, size_page):
        assert "No option keeps all bounds with up to 64 pods." in told(none)
        assert "more than 64" in told(none)


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
    assert "cannot be told of one run" in report


def test_of_nothing_there_is_a_report_too():
    """Stopped before the first run had ended."""
    nothing = replace(
        SUMMARY, complete=False, chosen=None, headroom=[], runs=[],
        options=[replace(OPTION, pods=None, counts=[])],
    )  # fmt: skip
    for told in (size_table, size_report, size_page):
        assert "No option has been searched to its end yet." in told(nothing)


def test_a_search_that_every_number_contradicts_shows_it():
    """What was found, and what every number finds, beside each other."""
    every = EveryCountSummary(pods=6, runs=320, counts=[count(6, 0.5)])
    told = size_report(replace(SUMMARY, options=[replace(OPTION, every_count=every)]))
    assert "| a-card, default (chosen) | 5 | 12.5 | 0.25 | - | 80.0% | yes | 15 | 6 | 320 |" in told


def test_of_what_was_not_decided_no_verdict_is_told():
    """Stopped in the middle of a number."""
    told = size_report(replace(SUMMARY, options=[replace(OPTION, counts=[undecided(4)])]))
    assert "| a-card, default | 4 | 1 | 10 | 60.0% | - |" in told
