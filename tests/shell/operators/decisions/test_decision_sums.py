"""Sums of decisions: what is not known is not a zero."""

from array import array

import pytest

from epp.core.decision.inputs import RequestEnded
from epp.core.knowledge.inflight import Outcome
from epp.shell.operators.decisions.decision_sums import Stretch, in_words, percentile
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_decision_history import Keeping
from tests.shell.operators.pages.test_debug_pages import REFUSAL


@pytest.mark.parametrize(
    ("samples", "share", "value"),
    [([], 0.5, None), ([3.0], 0.9, 3.0), ([4.0, 1.0, 2.0, 3.0], 0.5, 3.0), ([1.0, 2.0], 1.0, 2.0)],
)
def test_a_percentile_is_one_of_the_samples(samples, share, value):
    """Whatever their order; of none there is none."""
    assert percentile(array("f", samples), share) == value


def test_a_stretch_counts_its_own_alone(tmp_path):
    """By endpoint and in all, with what was refused and who decided."""
    keeping = Keeping(tmp_path)
    start_s = keeping.clock.now_s
    keeping.decide(3, prompt_tokens=100)
    keeping.decide(1, prompt_tokens=100, status=502)
    keeping.recent.refused(REFUSAL, make_request())
    keeping.end()
    stretch, later = Stretch(start_s, start_s + 60.0), Stretch(start_s + 60.0, start_s + 120.0)
    for past in keeping.read():
        if hasattr(past, "told"):
            stretch.add(past)
            later.add(past)
    row = stretch.row()
    assert (row["decided"], row["failed"], row["prompt_tokens"]) == (4, 0.25, 100)
    assert row["refused"] == {"rejected-no-endpoints": 1}
    assert sum(one["decided"] for one in row["endpoints"].values()) == 4
    assert (row["hits_predicted"], row["hits_found"]) == (0.0, 0.03)
    assert (row["ttft_p50_s"], row["duration_p50_s"]) == (None, 2.0)
    empty = later.row()
    assert (empty["decided"], empty["failed"], empty["hits_found"]) == (0, None, None)
    assert in_words(empty)["failed"] == "-"
    assert in_words(row)["failed"] == "25.0%"


def test_what_has_not_ended_counts_as_decided(tmp_path):
    """And as nothing else."""
    keeping = Keeping(tmp_path)
    decision = keeping.decide(1, status=0)
    keeping.told.scheduler.take(RequestEnded(decision.lease, Outcome()), 1.0)
    keeping.end()
    stretch = Stretch(0.0, 4e9)
    for past in keeping.read():
        if hasattr(past, "told"):
            stretch.add(past)
    assert stretch.row()["decided"] == 1
    assert stretch.row()["duration_p50_s"] is None
