"""What requests come to: whole answers in the figures, the others counted."""

import math
from array import array

from sim.drive import summary as module
from sim.drive.driver import Driven
from sim.drive.streaming import Streamed
from sim.drive.summary import DriveMeasures


def driven(index, *, pod="a", model="m", error="", ttft_s=0.1, gaps_s=(0.01, 0.03)):
    answer = Streamed(
        status=200,
        served_by=pod,
        ttft_s=ttft_s,
        gaps_s=array("d", gaps_s),
        duration_s=1.0,
        prompt_tokens=100,
        cached_tokens=25,
        output_tokens=3,
    )
    return Driven(index=index, model=model, due_s=0.0, late_s=0.001, answer=answer, error=error)


def summary(measures, **counts):
    return measures.summary(conditions={"trace": "t"}, took_s=2.0, complete=True, **counts)


def test_by_pod_and_by_model():
    """An error counts as a request and for nothing else."""
    measures = DriveMeasures()
    measures.add(driven(0))
    measures.add(driven(1, pod="b", ttft_s=0.3))
    measures.add(driven(2, pod="", model="n", error="status 503: no room", ttft_s=9.0))
    found = summary(measures, cut=4)
    assert found.requests.sent == 7
    assert (found.requests.whole, found.requests.errors) == (2, 1)
    assert found.errors == {"status 503": 1}
    assert math.isclose(found.ttft_s.mean, 0.2)
    assert math.isclose(found.itl_s.mean, 0.02)
    assert found.hit_rate == 0.25
    assert found.output_tokens_per_s == 3.0
    assert {name: one.requests for name, one in found.pods.items()} == {
        "a": 1,
        "b": 1,
        "not told": 1,
    }
    assert found.models["n"].ttft_s.mean is None


def test_nothing_is_no_division():
    found = summary(DriveMeasures())
    assert found.ttft_s.p50 is found.itl_s.p99 is found.hit_rate is None


def test_names_of_responses_are_bounded(monkeypatch):
    """A gateway may say another one each time."""
    monkeypatch.setattr(module, "GROUPS_MAX", 3)
    measures = DriveMeasures()
    for index in range(10):
        measures.add(driven(index, pod=f"pod-{index}", error=f"status {index}: x"))
    assert len(measures.pods) <= 4
    assert measures.pods["other"].requests == 7
    assert len(measures.errors) <= 4


def test_gaps_take_no_memory_each():
    measures = DriveMeasures()
    measures.add(driven(0, gaps_s=[0.01 + at % 7 / 1000 for at in range(5000)] + [0.0]))
    assert len(measures.all._gaps.bins) < 30
