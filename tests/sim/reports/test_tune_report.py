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
    TrialSummary,
    TuneSummary,
)
from sim.reports.tune_report import comment, conclusion, tune_page, tune_report, tune_table
from tests.sim.made import filled

TTFT, TOKENS = "ttft_p90_s", "output_tokens_per_s"


def difference(verdict, relative, reference=1.0, *, low=-0.1, high=0.1):
    return DifferenceSummary(
        reference=reference, value=relative * reference, relative=relative,
        low=low, high=high, significant=verdict in ("better", "worse"), verdict=verdict,
    )  # fmt: skip


SAME = difference("no significant difference", 0.001, low=-0.01, high=0.012)
BETTER = difference("better", -0.4, low=-0.5, high=-0.3)
WORSE = difference("worse", -0.05, 1000.0, low=-60.0, high=-40.0)


def judged(load, ttft=SAME, tokens=SAME, **fields):
    return filled(JudgedSummary, load=load, differences={TTFT: ttft, TOKENS: tokens}, **fields)


def trial(number, *costs, refused=""):
    return TrialSummary(
        trial=number,
        hash=f"hash-{number}",
        refused=refused,
        values={"weight of queue-scorer": number, "type of max-score-picker": "random-picker"},
        costs=[list(cost) for cost in costs],
    )


def told(**changes):
    """A summary; a tuning that has won unless something is changed."""
    hold_out = [judged(1.0, BETTER), judged(0.7), judged(1.3, BETTER)]
    given = {
        "complete": True, "version": "0.0", "first_seed": 1, "seeds": 5, "generated": True,
        "varied": "5 draws of the traffic", "config": "mine", "config_hash": "abc",
        "tuned_name": "tuned", "tolerance": 0.02, "objective": [TTFT, TOKENS],
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


LACKING = difference("not enough to tell from: the trace has 3 sessions", -0.4, low=None, high=None)


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (told(), ("Trial 3 beats mine on the half that was not used for tuning: TTFT p90 -40.0% (95 % "
         "interval -500 ms to -300 ms of 1.00 s). In neither objective is it worse at 1, 0.7, 1.3 "
         "times the load.")),
        (told(hold_out=[judged(1.0, BETTER, WORSE)]), ("It gives up output tokens/s -5.0% (95 % "
         "interval -60 to -40 of 1,000) at 1 times the load.")),
        (ending(judged(1.0)), ("Nothing beats mine: on the half that was not used for tuning the best "
         "of 4 configurations does not differ for sure (TTFT p90 +0.1%, 95 % interval -10.0 ms to "
         "+12.0 ms; output tokens/s +0.1%")),
        (ending(judged(1.0, LACKING, LACKING)), ("of the best of 4 configurations there is not enough "
         "to tell from: the trace has 3 sessions. No configuration is written.")),
        (ending(judged(1.0, BETTER), judged(1.3, SAME, WORSE, worse=[TOKENS])), ("the best of 4 "
         "configurations is worse at 1.3 times the load: output tokens/s -5.0%")),
        (ending(judged(1.0, BETTER), judged(0.7, loses_more=True)), ("the best of 4 configurations "
         "loses more requests at 0.7 times the load")),
        (told(chosen=None, hold_out=[], beats=False), ("Nothing beats mine: of 4 configurations none "
         "was better over all seeds without giving up more than 0.02 of an objective, or requests")),
        (told(complete=False, chosen=None, hold_out=[], beats=False), ("Not finished: 4 configurations "
         "tried so far, and none judged on the half that is held out.")),
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
    assert "1 of the trials are no valid configuration and were not run" in report
    assert "TTFT p90 better; output tokens/s worse" in report


def test_of_nothing_there_is_a_report_too():
    """Stopped before the first run had ended."""
    summary = told(
        complete=False, trials=[trial(0)], front=[], finalists=[], chosen=None, hold_out=[],
        beats=False, runs=[], varied="",
    )  # fmt: skip
    for whole in (tune_table(summary), tune_report(summary), tune_page(summary)):
        assert "Not finished: 1 configuration tried so far" in whole
    assert "<svg" not in tune_page(summary)
