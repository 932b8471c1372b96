"""What a sweep says of its points."""

from msgspec.structs import replace

from sim.measurement.summaries import (
    EstimateSummary,
    NamedRun,
    RunSummary,
    SweepPoint,
    SweepSummary,
)
from sim.reports.compare_report import LABELS
from sim.reports.sweep_report import sweep_report, sweep_table
from tests.sim.made import filled

FIGURES = dict.fromkeys(LABELS, EstimateSummary(value=0.5, low=None, high=None))
POINT = filled(SweepPoint, rate=4.0, config="mine", requests_per_s=4.0, figures=FIGURES)
SUMMARY = filled(
    SweepSummary,
    complete=True,
    first_seed=1,
    seeds=1,
    waits=True,
    conditions={"trace": "day.jsonl"},
    points=[POINT],
    runs=[NamedRun(rate=4.0, config="mine", seed=1, run=filled(RunSummary))],
)


def test_a_rate_that_was_not_reached_is_told():
    """Where requests wait for answers, the trace cannot be sent as fast as was asked."""
    assert "not reached" not in sweep_table(SUMMARY)
    slower = replace(SUMMARY, points=[replace(POINT, requests_per_s=3.0)])
    assert (
        "The rates 4 requests/s were not reached, because requests of the trace wait"
        in sweep_table(slower)
    )
    assert "not reached" not in sweep_table(replace(slower, waits=False))


def test_intervals_have_a_table_of_their_own_where_there_are_some():
    """A share is never told to be more than all."""
    assert "95 % confidence intervals" not in sweep_report(SUMMARY)
    known = FIGURES | {"goodput": EstimateSummary(value=0.95, low=0.85, high=1.05)}
    report = sweep_report(replace(SUMMARY, points=[replace(POINT, figures=known)]))
    assert "| mine | 4 | - | - | - | 85.0% to 100.0% |" in report


def test_of_nothing_there_is_a_report_too():
    """Stopped before the first run had ended."""
    for told in (sweep_table, sweep_report):
        assert "No point has run yet." in told(replace(SUMMARY, points=[], runs=[]))
