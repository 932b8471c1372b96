"""Past decisions: those of a period, and times as operators write them."""

from datetime import datetime

import pytest

from epp.core.journal.events import Level, Opened
from epp.core.knowledge.inflight import Outcome
from epp.journal.decisions import moment_of, read_past
from epp.journal.frames import frame_of, framed, packed_frames, segment_file
from epp.journal.problem import JournalError
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_decision_history import SLOW, Keeping, decisions
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


def test_records_of_another_version_are_named(tmp_path):
    """A packed record that cannot be read is no crash."""
    head = Opened(level=Level.DECISIONS, origin="a", segment=0, picker="homing-0")
    frames = framed(frame_of(head)) + framed(b"d\x00")
    path = tmp_path / segment_file(Level.DECISIONS, "20260101T000000-0000000a", 0)
    path.write_bytes(packed_frames(frames, 2))
    with pytest.raises(JournalError, match="homing-0 contains records that this version does not"):
        list(read_past(tmp_path, 0.0, 4e9))


def test_a_period_after_a_missing_segment_knows_its_configuration(tmp_path):
    """Each segment repeats the settings and states that its decisions refer to."""
    keeping = Keeping(tmp_path)
    keeping.recent.know_states({"pod-1": SLOW})
    keeping.decide(3)
    keeping.end()
    keeping.decide(4)
    keeping.end()
    min(tmp_path.iterdir()).unlink()
    found = decisions(keeping.read())
    assert len(found) == 4
    assert all(one.setting.scorers for one in found)
    assert all(dict(one.states) == {"pod-1": SLOW} for one in found)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("02:10", "2026-03-02T02:10:00+00:00"),
        ("14:10:05", "2026-03-01T14:10:05+00:00"),
        ("09:10+01:00", "2026-03-02T08:10:00+00:00"),
        ("02:10-05:00", "2026-03-02T07:10:00+00:00"),
        ("23:30-05:00", "2026-03-02T04:30:00+00:00"),
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
