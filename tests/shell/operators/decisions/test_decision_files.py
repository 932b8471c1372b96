"""What was kept is read: the stretch that is asked for, and nothing that is no such file."""

import gzip
from datetime import datetime

import msgspec
import pytest
from epp.shell.operators.decisions.history_format import HEAD, Head

from epp.core.knowledge.inflight import Outcome
from epp.journal.decisions import moment_of, read_past
from epp.journal.frames import frame_of, framed, packed_frames
from epp.journal.problem import JournalError
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_decision_history import Keeping, decisions
from tests.shell.operators.decisions.test_recent_decisions import exchange_of


def test_a_stretch_of_time_is_read_alone(tmp_path):
    """An end that comes later is found."""
    keeping = Keeping(tmp_path)
    start_s = keeping.clock.now_s
    keeping.decide(5)
    early = keeping.told.scheduler.schedule(make_request(request_id="long"), 0.25)
    keeping.recent.decided(early)
    keeping.clock.now_s += 100.0
    keeping.decide(7)
    keeping.recent.completed(exchange_of(early), Outcome(status=504), 102.0)
    keeping.end()
    before = decisions(keeping.read(until_s=start_s + 50.0))
    assert len(before) == 6
    assert [one.end.status for one in before if one.told.request_id == "long"] == [504]
    assert len(decisions(keeping.read(since_s=start_s + 50.0))) == 7


def test_files_of_another_version_or_none_are_told(tmp_path):
    """In a sentence, with what was expected."""
    with pytest.raises(JournalError, match="cannot be read: No such file"):
        list(read_past(tmp_path / "none", 0.0, 1.0))
    with pytest.raises(JournalError, match="expected files of `epp serve --decisions-dir`"):
        list(read_past(tmp_path, 0.0, 1.0))
    path = tmp_path / "decisions-20260101T000000-0000000a-000000.bin.gz"
    head = Head(origin="a", picker="", began_s=0.0)
    for frame, told in (
        (frame_of(HEAD, msgspec.structs.replace(head, version=2)), "another version, expected"),
        (b"?" * 10, "another version, expected"),
        (frame_of(HEAD, head) + b"", None),
    ):
        path.write_bytes(packed_frames(framed(frame)))
        if told is None:
            assert list(read_past(tmp_path, 0.0, 4e9)) == []
        else:
            with pytest.raises(JournalError, match=told):
                list(read_past(tmp_path, 0.0, 4e9))
    broken = framed(frame_of(HEAD, head)) + (2**31).to_bytes(4, "little")
    path.write_bytes(gzip.compress(broken))
    with pytest.raises(JournalError, match="is broken"):
        list(read_past(tmp_path, 0.0, 4e9))
    path.write_bytes(gzip.compress(framed(frame_of(HEAD, head)) + framed(b"d\x00")))
    with pytest.raises(JournalError, match="does not understand"):
        list(read_past(tmp_path, 0.0, 4e9))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("02:10", "2026-03-02T02:10:00+00:00"),
        ("14:10:05", "2026-03-01T14:10:05+00:00"),
        ("30m", "2026-03-02T09:30:00+00:00"),
        ("0s", "2026-03-02T10:00:00+00:00"),
        ("2026-03-01T02:10", "2026-03-01T02:10:00+00:00"),
        ("2026-03-01T02:10:00+01:00", "2026-03-01T01:10:00+00:00"),
    ],
)
def test_a_moment_is_read_as_operators_write_it(text, moment):
    """A time of the day is the last such: at ten in the morning 14:10 was yesterday."""
    now_s = datetime.fromisoformat("2026-03-02T10:00:00+00:00").timestamp()
    assert moment_of(text, now_s) == datetime.fromisoformat(moment).timestamp()


@pytest.mark.parametrize("text", ["", "yesterday", "25:00", "2026-13-01", "5"])
def test_what_is_no_moment_is_refused(text):
    """In a sentence."""
    with pytest.raises(JournalError, match="is not a time such as 02:10"):
        moment_of(text, 1.7e9)
