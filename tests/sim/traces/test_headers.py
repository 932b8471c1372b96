"""Headers in traces: read, written, replayed; bounded, and never quoted."""

import io
import json

import pytest
from msgspec.structs import replace

from epp.core.journal.lines import Salt
from epp.core.prompt.request import InferenceRequest
from sim.traces.arrival import FieldError, TraceError
from sim.traces.capture import CaptureWriter
from sim.traces.formats import open_trace
from sim.traces.headers import HEADERS_MAX, VALUE_CHARACTERS_MAX, headers_of
from sim.traces.prompts import request_of, request_through_bytes
from sim.traces.reading import ReadOptions
from sim.traces.variation import resampled
from tests.sim.made import arrival, arrivals

SECRET = "Bearer-of-somebody"
GIVEN = (("x-zone", "a"), ("x-user", SECRET))


def captured(tmp_path, *given, salt=None):
    """Written and read again."""
    path = tmp_path / "capture.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for one in given:
            writer.write_arrival(one, salt)
    return list(open_trace(path, ReadOptions())), path


def test_headers_survive_a_capture_and_reach_the_picker(tmp_path):
    """By hashes and through bytes alike; who has none is written without."""
    (first, second), path = captured(tmp_path, arrival(headers=GIVEN), arrival(1))
    assert first.headers == GIVEN
    assert second.headers == ()
    assert "headers" not in json.loads(path.read_text().splitlines()[2])
    for made in (request_of(first), request_through_bytes(first)):
        assert isinstance(made, InferenceRequest)
        assert made.headers == dict(GIVEN)


def test_under_a_salt_values_are_hashed(tmp_path):
    """Equal ones stay equal, to sessions too; names stay."""
    one = arrival(session="s", headers=(("x-user", SECRET), ("x-session-id", "s")))
    (read,), path = captured(tmp_path, one, salt=Salt(b"key"))
    assert SECRET not in path.read_text()
    assert [name for name, _ in read.headers] == ["x-user", "x-session-id"]
    assert dict(read.headers)["x-session-id"] == read.session != "s"


def test_a_salt_keeps_the_latencies_that_a_client_asks_for(tmp_path):
    """The simulated picker reads these numbers. What is no number is hashed."""
    limits = (("x-llm-d-slo-ttft-ms", "250.0"), ("x-llm-d-slo-tpot-ms", SECRET))
    (read,), path = captured(tmp_path, arrival(headers=limits), salt=Salt(b"key"))
    assert dict(read.headers)["x-llm-d-slo-ttft-ms"] == "250.0"
    assert SECRET not in path.read_text()


def test_raw_requests_have_headers_and_priorities_beside_their_body(tmp_path):
    """As they were sent: names in any case."""
    path = tmp_path / "raw.jsonl"
    line = {
        "time_s": 0.5, "priority": -1, "session": "u1", "headers": {"X-Zone": "a"},
        "body": {"model": "m", "prompt": "Hello"},
    }  # fmt: skip
    path.write_text(json.dumps(line) + "\n")
    (read,) = open_trace(path, ReadOptions())
    assert read.headers == (("x-zone", "a"),)
    assert (read.priority, read.session) == (-1, "u1")
    asked = request_through_bytes(read)
    assert (asked.headers["x-zone"], asked.priority) == ("a", -1)


def test_other_people_of_a_resample_have_other_sessions_in_their_headers():
    """What is drawn twice is somebody else; a zone is the same zone."""
    given = [
        replace(one, session=f"s{one.index % 5}", headers=(("x-id", f"s{one.index % 5}"), *GIVEN))
        for one in arrivals(200)
    ]
    _, drawn = resampled(given, seed=1)
    copies = [one for one in drawn if "~" in one.session]
    assert copies
    assert all(dict(one.headers)["x-id"] == one.session for one in copies)
    assert {dict(one.headers)["x-zone"] for one in copies} == {"a"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({f"x-{number}": "" for number in range(HEADERS_MAX + 1)}, "at most 64, got 65"),
        ({"x user": SECRET}, "names of RFC 9110"),
        ({":path": SECRET}, "names of RFC 9110"),
        ({"x": "1", "X": SECRET}, "x once, got it twice"),
        ({"x": SECRET * VALUE_CHARACTERS_MAX}, "at most 4,096 characters in x"),
    ],
)
def test_too_many_and_odd_ones_are_refused(given, said):
    """In a sentence that quotes no value."""
    with pytest.raises(FieldError, match=said) as told:
        headers_of(given)
    assert SECRET not in str(told.value)


def test_a_bad_header_is_told_by_its_line(tmp_path):
    """Of the file."""
    path = tmp_path / "raw.jsonl"
    body = {"model": "m", "prompt": "Hello"}
    path.write_text(json.dumps({"headers": {"a b": "c"}, "body": body}) + "\n")
    with pytest.raises(TraceError, match=r"raw\.jsonl:1: headers: Expected header names"):
        list(open_trace(path, ReadOptions()))


def test_a_writer_needs_no_headers():
    """Format version 1 as it was."""
    file = io.BytesIO()
    CaptureWriter(file).write_arrival(arrival())
    assert b"headers" not in file.getvalue()
