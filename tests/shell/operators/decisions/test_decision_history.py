"""Decisions in files: whole, bounded, readable after a restart, at nobody's expense."""

import asyncio
import errno
import gzip
import threading

import msgspec
import pytest
from structlog.testing import capture_logs

from epp.core.knowledge.inflight import Outcome
from epp.core.protocol.usage import Usage
from epp.journal.decisions import changes_in, read_past
from epp.journal.frames import frame_of
from epp.journal.past import PastChange, PastDecision, PastLoss, PastRefusal, PastStates
from epp.journal.records import EndpointState, told_change
from epp.shell.files.segment_folder import SegmentFolder
from epp.shell.operators import journal as module
from epp.shell.operators.decisions.configuration_changes import ConfigurationChanges
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.journal import DecisionsFolder, Journal, decisions_limits
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_explanation import Told
from tests.shell.operators.decisions.test_recent_decisions import Clock, exchange_of
from tests.shell.operators.pages.test_debug_pages import REFUSAL

SLOW = EndpointState("slow", "3 times the median", 5.0)


class Keeping:
    """A picker that keeps its decisions in a folder, and a disk that is as slow as the test."""

    def __init__(self, folder, clock=None, *, told=None, total_bytes_max=2**24, age_max_s=3_600.0):
        self.folder = folder
        self.clock = clock or Clock()
        self.journal = Journal("homing-0", clock=self.clock, monotonic=self.clock)
        limits = decisions_limits(total_bytes_max, age_max_s)
        self.history = DecisionsFolder(self.journal, str(folder), limits)
        self.told = told or Told()
        self.recent = RecentDecisions(
            self.told.scheduler.pool, clock=self.clock, history=self.history
        )
        self.recent.configured(3, self.told.settings)
        self.changes = ConfigurationChanges(
            self.clock, lambda change: self.history.tell(frame_of(told_change(change)))
        )

    def limit(self, **limits):
        self.history._limits = msgspec.structs.replace(self.history._limits, **limits)

    def decide(self, count=1, status=200, **fields):
        for _ in range(count):
            self.clock.now_s += 0.01
            decision = self.told.scheduler.schedule(make_request(**fields), 0.25)
            self.recent.decided(decision)
            if status:
                usage = Usage(cached_tokens=3)
                self.recent.completed(
                    exchange_of(decision, usage=usage), Outcome(status=status), 102.0
                )
        return decision

    def write(self, *, after_s=0.0):
        self.recent.fold()
        self.clock.now_s += after_s
        self.journal.write_queued()

    def end(self):
        self.recent.fold()
        self.journal.end()

    def read(self, since_s=0.0, until_s=4e9):
        return list(read_past(self.folder, since_s, until_s))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "SLICE_PAUSE_S", 0.0)


def decisions(found):
    return [one for one in found if isinstance(one, PastDecision)]


def test_what_is_kept_can_be_read(tmp_path):
    """The decision as memory has it, its end, its configuration, and who was slow then."""
    keeping = Keeping(tmp_path)
    keeping.recent.know_states({"pod-1": SLOW})
    made = keeping.decide(request_id="r-7", model="llama")
    keeping.decide(status=0, request_id="open")
    keeping.recent.refused(REFUSAL, make_request(request_id="no"))
    keeping.end()
    first, still_open = decisions(keeping.read())
    assert (first.told.request_id, first.told.model) == ("r-7", "llama")
    assert (first.told.endpoint, first.picker) == (made.endpoint.name, "homing-0")
    assert first.setting.scorers == made.leg.scorers
    assert first.setting.generation == 3
    assert dict(first.states) == {"pod-1": SLOW}
    assert (first.end.status, first.end.cached_tokens, first.end.ending) == (200, 3, "complete")
    assert (still_open.told.request_id, still_open.end) == ("open", None)
    (refused,) = [one for one in keeping.read() if isinstance(one, PastRefusal)]
    assert refused.told.request_id == "no"
    (states,) = [one for one in keeping.read() if isinstance(one, PastStates)]
    assert dict(states.states) == {"pod-1": SLOW}


def test_a_restart_loses_nothing_and_a_kill_little(tmp_path):
    """A file that ends in the middle is read up to there, and the next process writes its own."""
    keeping = Keeping(tmp_path)
    keeping.decide(10)
    keeping.write(after_s=10.0)
    keeping.decide(10)
    keeping.write(after_s=10.0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    again = Keeping(tmp_path, keeping.clock)
    again.decide(4)
    again.end()
    assert len(list(tmp_path.iterdir())) == 2
    found = decisions(again.read())
    assert 14 <= len(found) < 24
    assert all(one.setting.scorers for one in found)


def test_files_are_bounded_and_each_stands_alone(tmp_path):
    """The oldest go, by bytes and by age; what is left still knows its configuration."""
    keeping = Keeping(tmp_path, total_bytes_max=2**16)
    keeping.limit(flush_bytes=20_000)
    keeping.recent.know_states({"pod-2": SLOW})
    keeping.changes.apply(2, "abc", "config.yaml", ["weight: 1 > 2"], {})
    for at in range(60):
        keeping.decide(50, request_id=f"{at}" * 30)
        keeping.write()
    keeping.end()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 3
    assert sum(sizes) <= 2**16 + max(sizes)
    assert keeping.history.snapshot().bytes <= 2**16 + max(sizes)
    found = decisions(keeping.read())
    assert 0 < len(found) < 3_000
    assert {one.setting.generation for one in found} == {3}
    assert all("pod-2" in one.states for one in found)
    assert [one.change.generation for one in changes_in(tmp_path)] == [2]


def test_what_a_file_begins_with_is_bounded(tmp_path, monkeypatch):
    """A pool of which half comes and goes does not fill each file with that."""
    monkeypatch.setattr(module, "_REPEATED_BYTES_MAX", 10_000)
    keeping = Keeping(tmp_path)
    for at in range(100):
        keeping.recent.know_states({f"pod-{at}-{one}": SLOW for one in range(20)})
    keeping.write(after_s=10.0)
    keeping.journal.end()
    keeping.decide(1)
    keeping.end()
    first, second = sorted(tmp_path.iterdir())
    assert (
        len(gzip.decompress(second.read_bytes()))
        < 12_000
        < len(gzip.decompress(first.read_bytes()))
    )
    (told,) = decisions(list(read_past(tmp_path, 0.0, 4e9)))
    assert len(told.states) == 20, "the newest is known"


@pytest.mark.parametrize("what", ["begin", "append"])
def test_a_full_disk_costs_its_decisions_alone(tmp_path, monkeypatch, what):
    """One line in the log, none with a path; counted, and the next file says how many are missing."""
    keeping = Keeping(tmp_path)
    if what == "append":
        keeping.decide(3)
        keeping.write(after_s=10.0)
    works = getattr(SegmentFolder, what)

    def full(folder, *given):
        folder.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentFolder, what, full)
    with capture_logs() as lines:
        for _ in range(5):
            keeping.decide(4)
            keeping.write(after_s=20.0)
        assert [line["event"] for line in lines] == [
            "decision history cannot be written, requests continue"
        ]
        assert str(tmp_path) not in str(lines)
        monkeypatch.setattr(SegmentFolder, what, works)
        keeping.decide(4)
        keeping.write(after_s=20.0)
        assert lines[-1]["event"] == "decision history is written again"
    told = keeping.history.snapshot()
    assert told.write_errors == 5
    assert told.dropped == {"queue": 0, "disk": 41 if what == "begin" else 40}
    keeping.end()
    (loss,) = [one for one in keeping.read() if isinstance(one, PastLoss)]
    assert loss.records == told.dropped["disk"]
    assert len(decisions(keeping.read())) == 4 + 3 * (what == "append")


def test_what_the_queue_cannot_hold_is_dropped_and_counted(tmp_path):
    """A disk that is slow takes no memory beyond that."""
    keeping = Keeping(tmp_path)
    keeping.limit(queue_bytes_max=5_000)
    keeping.decide(100)
    keeping.recent.fold()
    dropped = keeping.history.snapshot().dropped["queue"]
    assert 0 < dropped < 200
    keeping.journal.write_queued()
    keeping.decide(1, request_id="after")
    keeping.end()
    found = keeping.read()
    # Between two losses a record may be small enough for the room that was left.
    assert sum(one.records for one in found if isinstance(one, PastLoss)) == dropped
    assert "after" in {one.told.request_id for one in decisions(found)}


async def test_a_disk_that_hangs_does_not_keep_the_picker(tmp_path, monkeypatch):
    """Telling returns at once, and the end is not waited for for ever."""
    hangs = threading.Event()
    monkeypatch.setattr(SegmentFolder, "append", lambda *_: hangs.wait(30))
    keeping = Keeping(tmp_path)
    keeping.journal._close_s_max = 0.05
    task = asyncio.create_task(keeping.journal.run())
    try:
        keeping.decide(50)
        keeping.recent.fold()
        await asyncio.sleep(0)
        with capture_logs() as lines:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert [line["event"] for line in lines] == [
            "the last records of the journal were not written because the disk takes too long"
        ]
    finally:
        hangs.set()


async def test_the_task_writes_what_there_is_when_it_ends(tmp_path):
    """As at the end of the picker."""
    keeping = Keeping(tmp_path)
    keeping.decide(5)
    keeping.recent.fold()
    task = asyncio.create_task(keeping.journal.run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(decisions(keeping.read())) == 5


def test_changes_of_the_configuration_are_kept(tmp_path):
    """Those that came into force, and documents that were refused."""
    keeping = Keeping(tmp_path)
    keeping.changes.apply(1, "a" * 64, "config.yaml", (), {})
    keeping.changes.apply(2, "b" * 64, "config.yaml", ["weight of queue-scorer: 2 > 3"], {})
    keeping.changes.refuse("config.yaml: no such plugin")
    keeping.end()
    found = [one.change for one in keeping.read() if isinstance(one, PastChange)]
    assert [getattr(one, "generation", None) for one in found] == [1, 2, None]
    assert found[1].changes == ("weight of queue-scorer: 2 > 3",)
    assert found[2].problem == "config.yaml: no such plugin"
