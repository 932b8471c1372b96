"""What a tuning comes to, in words: every way in which it can end."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from sim.measurement.summaries import (
    DifferenceSummary,
    DimensionSummary,
    JudgedSummary,
    KeptRun,
    NamedRun,
    PowerSummary,
    TrialSummary,
    TuneSummary,
)
from sim.reports.tune_report import (
    comment,
    conclusion,
    power_sentence,
    tune_page,
    tune_report,
    tune_table,
)
from tests.sim.made import filled

TTFT, TOKENS, E2E = "ttft_p90_s", "output_tokens_per_s", "e2e_mean_s"


def difference(verdict, relative, reference=1.0, *, low=-0.1, high=0.1):
    return DifferenceSummary(
        reference=reference, value=relative * reference, relative=relative,
        low=low, high=high, significant=verdict in ("better", "worse"), verdict=verdict,
    )  # fmt: skip


SAME = difference("no significant difference", 0.001, low=-0.01, high=0.012)
BETTER = difference("better", -0.4, low=-0.5, high=-0.3)
WORSE = difference("worse", -0.05, 1000.0, low=-60.0, high=-40.0)


def judged(load, ttft=SAME, tokens=SAME, e2e=SAME, **fields):
    fields |= {"differences": {TTFT: ttft, TOKENS: tokens}, "guards": {E2E: e2e}}
    return filled(JudgedSummary, load=load, **fields)


def trial(number, *costs, refused=""):
    return TrialSummary(
        trial=number,
        hash=f"hash-{number}",
        refused=refused,
        values={"weight of queue-scorer": number, "type of max-score-picker": "random-picker"},
        costs=[list(cost) for cost in costs],
        cost=sum(costs[-1]) if costs else None,
    )


def told(**changes):
    """A summary; a tuning that has won unless something is changed."""
    hold_out = [judged(1.0, BETTER), judged(0.7), judged(1.3, BETTER)]
    given = {
        "complete": True, "version": "0.0", "first_seed": 1, "seeds": 5, "generated": True,
        "varied": "5 random draws of the traffic", "config": "mine", "config_hash": "abc",
        "tuned_name": "tuned", "tolerance": 0.02, "guards": {E2E: 0.0}, "objective": [TTFT, TOKENS],
        "higher_is_better": [TOKENS], "rungs": [0.25, 1.0], "assumptions": [],
        "trace": {"name": "day.jsonl", "sha256": "f" * 64, "requests": 100, "tuning": 50, "hold_out": 50},
        "conditions": {"profiles": {"fast": 8}, "replicas": 2},
        "space": [
            DimensionSummary(name="weight of queue-scorer", span="0.1 to 10 or off", present=2.0),
            DimensionSummary(name="type of max-score-picker", span="a, b", present=None),
        ],
        "trials": [
            trial(0, (0.0, 0.0), (0.0, 0.0)), trial(1, (0.5, 0.0)), trial(2, refused="no weights"),
            trial(3, (-0.6, 0.0), (-0.5, 0.1)),
        ],
        "front": [3, 0], "finalists": [replace(judged(UNSET, BETTER, WORSE), trial=3)],
        "chosen": trial(3, (-0.6, 0.0), (-0.5, 0.1)), "best_so_far": None,
        "hold_out": hold_out, "beats": True,
        "runs": [NamedRun(config="mine", seed=1, run=filled(KeptRun, warnings=["look out"], window={"drain_s": 1.0}))],
    }  # fmt: skip
    return filled(TuneSummary, **(given | changes))


def ending(*hold_out):
    return told(hold_out=list(hold_out), beats=False)


SLOWER = difference("worse", 0.05, 2.0, low=0.06, high=0.14)
STOPPED = replace(judged(UNSET, BETTER, e2e=SLOWER, stopped_by=[E2E]), trial=3)
LACKING = difference("not enough data: the trace has 3 sessions", -0.4, low=None, high=None)


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (told(), ("Trial 3 beats mine on the hold-out half, which was not used for tuning: TTFT p90 -40.0% (95 % "
         "interval -500 ms to -300 ms of 1.00 s). It is not worse in either objective at 1, 0.7, 1.3 "
         "times the load, nor in its guards (E2E mean).")),
        (told(guards={}, hold_out=[judged(1.0, BETTER)]), "either objective at 1 times the load."),
        (told(hold_out=[judged(1.0, BETTER, e2e=SLOWER)], guards={E2E: 0.1}), ("It loses E2E mean "
         "+5.0% (95 % interval +60.0 ms to +140 ms of 2.00 s) at 1 times the load.")),
        (ending(judged(1.0, BETTER), judged(1.3, BETTER, e2e=SLOWER, stopped_by=[E2E])), ("the best of "
         "4 configurations was stopped by a guard at 1.3 times the load: E2E mean +5.0% (95 % interval "
         "+60.0 ms to +140 ms of 2.00 s)")),
        (told(chosen=None, hold_out=[], beats=False, finalists=[STOPPED]), ("Trial 3, TTFT p90 -40.0%, "
         "was stopped by a guard: E2E mean +5.0% (95 % interval +60.0 ms to +140 ms of 2.00 s). No "
         "configuration is written.")),
        (told(hold_out=[judged(1.0, BETTER, WORSE)]), ("It loses output tokens/s -5.0% (95 % "
         "interval -60 to -40 of 1,000) at 1 times the load.")),
        (ending(judged(1.0)), ("Nothing beats mine: the best of 4 configurations does not differ "
         "significantly on the hold-out half (TTFT p90 +0.1%, 95 % interval -10.0 ms to "
         "+12.0 ms; output tokens/s +0.1%")),
        (ending(judged(1.0, LACKING, LACKING)), ("there is not enough data about the best of 4 "
         "configurations: the trace has 3 sessions. No configuration is written.")),
        (ending(judged(1.0, BETTER), judged(1.3, SAME, WORSE, worse=[TOKENS])), ("the best of 4 "
         "configurations is worse at 1.3 times the load: output tokens/s -5.0%")),
        (ending(judged(1.0, BETTER), judged(0.7, loses_more=True)), ("the best of 4 configurations "
         "loses more requests at 0.7 times the load")),
        (told(chosen=None, hold_out=[], beats=False), ("Nothing beats mine: of 4 configurations, none "
         "was better over all seeds without losing more than 0.02 of an objective, or losing requests")),
        (told(complete=False, chosen=None, hold_out=[], beats=False), ("Not finished: 4 configurations "
         "tried so far, without a complete judgement on the hold-out half.")),
    ],
)  # fmt: skip
def test_every_end_has_its_sentence(summary, says):
    """On the terminal, on both reports and in the comment alike."""
    assert says in conclusion(summary)
    for whole in (tune_table(summary), tune_report(summary)):
        assert says in whole
    assert any(says in paragraph for paragraph in comment(summary))
    assert "look out" in tune_page(summary)


def test_a_report_has_what_was_tried_and_what_came_of_it():
    """Those that got furthest first; ratios are those of the figures, not of costs."""
    report = tune_report(told(config="tuned", tuned_name="tuned anew"))
    assert "| at times the load | tuned | tuned anew |" in report
    assert "| weight of queue-scorer | 0.1 to 10 or off | 2 | 3 |" in report
    assert "| type of max-score-picker | a, b | other | random-picker |" in report
    # exp(-0.5) of TTFT; a cost of 0.1 is a tenth less of the throughput.
    assert "| trial 3 | 100% | -39.3% | -9.5% | 3 | random-picker |" in report
    assert report.index("| trial 3 | 100%") < report.index("| trial 0 | 100%")
    assert report.index("| trial 0 | 100%") < report.index("| trial 1 | 25%")
    assert "1 of the trials are invalid configurations and were not run" in report
    assert "TTFT p90 better; output tokens/s worse" in report
    assert "| guards | E2E mean |" in report
    assert "| 1: E2E mean (guard) | 1.00 s |" in report


def test_a_guard_that_stops_is_marked_where_it_stands():
    """In the row of its load, and in that of the trial."""
    report = tune_report(
        told(
            finalists=[STOPPED], beats=False,
            hold_out=[judged(1.0, BETTER, e2e=SLOWER, stopped_by=[E2E])],
        )
    )  # fmt: skip
    assert "| 1: E2E mean (guard) | 2.00 s | 2.10 s | +100 ms | +60.0 ms to +140 ms | +5.0% | worse, stopped by this guard |" in report  # fmt: skip
    assert "stopped by the guard of E2E mean +5.0%" in report
    assert "Guards: none." in comment(told(guards={}))[-1]
    assert "Guards: E2E mean (up to 0.1 of it)." in comment(told(guards={E2E: 0.1}))[-1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gains": {TTFT: 0.2134, TOKENS: 0.031}, "requests_needed": {TTFT: 18_213},
          "seeds_needed": {TTFT: 17}},
         ("With 4,000 requests and 5 seeds, a tuning may fail to confirm these gains: TTFT p90 "
         "below 21%, output tokens/s below 3.1%. To confirm 10% of TTFT p90, use about 18,000 "
         "requests, or --seeds 17.")),
        ({"gains": {TTFT: 1.5}, "requests_needed": {TTFT: 900_000}},
         "to confirm these gains: TTFT p90 of any size. To confirm 10% of TTFT p90, use about 900,000 requests."),
        ({"lacking": "the trace has 2 blocks of 120 s, confidence intervals need at least 5"},
         ("With this traffic no gain can be confirmed: the trace has 2 blocks of 120 s, confidence "
          "intervals need at least 5.")),
        ({}, "A few random draws show no effect of the varied parameters on this traffic."),
    ],
)  # fmt: skip
def test_what_can_be_confirmed_is_told(fields, says):
    """The same words before the search and in its reports."""
    power = filled(PowerSummary, **({"requests": 4_000, "seeds": 5, "wanted": 0.1} | fields))
    assert says in power_sentence(power)
    assert says in tune_report(told(power=power))


def test_of_nothing_there_is_a_report_too():
    """Stopped before the first run had ended."""
    summary = told(
        complete=False, trials=[trial(0)], front=[], finalists=[], chosen=None, hold_out=[],
        beats=False, runs=[], varied="",
    )  # fmt: skip
    for whole in (tune_table(summary), tune_report(summary), tune_page(summary)):
        assert "Not finished: 1 configuration tried so far" in whole
    assert "<svg" not in tune_page(summary)
