"""A held trace gives what its file gave, and does not read the file again."""

import pytest

from sim.traces.arrival import TraceError
from sim.traces.capture import CaptureWriter
from sim.traces.formats import open_trace
from sim.traces.held import HeldTrace
from sim.traces.plausibility import warnings_of
from sim.traces.reading import ReadOptions
from tests.sim.made import arrivals


@pytest.fixture
def capture(tmp_path):
    path = tmp_path / "mine.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(30):
            writer.write_arrival(one)
    return path


def test_it_gives_the_same_arrivals_when_the_file_is_gone(capture):
    """Each iteration begins anew."""
    trace = open_trace(capture)
    expected = list(trace)
    warnings = warnings_of(trace)
    held = HeldTrace(trace)
    capture.unlink()
    assert len(expected) == 30
    assert list(held) == list(held) == expected
    assert list(held.warnings) == warnings


def test_bad_lines_are_counted_once(capture):
    """The counters are those of the reading, however often it is iterated."""
    with capture.open("ab") as file:
        file.write(b"no request\n")
    held = HeldTrace(open_trace(capture, ReadOptions(skip_bad=True)))
    assert len(list(held)) == len(list(held)) == 30
    assert (held.bad_lines, len(held.problems)) == (1, 1)


def test_a_bad_line_is_told_as_by_the_file(capture):
    """Holding reads all of it."""
    with capture.open("ab") as file:
        file.write(b"no request\n")
    with pytest.raises(TraceError, match=r"mine\.jsonl:32"):
        HeldTrace(open_trace(capture))
