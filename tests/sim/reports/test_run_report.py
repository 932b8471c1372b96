"""The page of a run; that it is written and opened is tested with the command, in test_replay.py."""

from hypothesis import given
from hypothesis import strategies as st

from sim.reports.charts import SMALL, Axis, figure, line_chart, page
from sim.reports.run_report import thinned

BUDGET_BYTES = 260_000
"""Of the 300,000 of a page without its decisions: the rest is for its other figures."""


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=700))
def test_what_is_thinned_keeps_its_order_and_its_peaks(values):
    """At most 72 points, each of them one of the line's, the highest and the lowest among them."""
    points = list(enumerate(values))
    kept = list(thinned(points))
    assert len(kept) <= 72
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    if values:
        assert {max(values), min(values)} <= {value for _, value in kept}


def test_the_timelines_of_all_pods_that_are_shown_are_within_the_budget():
    """32 pods, four lines each, as long as timelines get and as jagged as lines can be."""
    x, y = Axis.over([600.0], unit="s", title="time"), Axis(low=0, high=1000, title="requests")
    line = thinned((float(at), float(at * 617 % 997)) for at in range(600))
    lines = {"running": line, "waiting": line}
    one = line_chart(lines, x=x, y=y, label="pod-1 over time", size=SMALL)
    whole = page("Run", "", figure("Every pod over time", 64 * one, ["running", "waiting"]))
    assert len(whole.encode()) <= BUDGET_BYTES
