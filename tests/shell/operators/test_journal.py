"""The journal of a running picker: bounded queue, a disk that fails or hangs, a clean end."""

import asyncio
import errno
import gzip
import os
import threading

import msgspec
import pytest
from structlog.testing import capture_logs

from epp.core.journal.events import Heard, Level, Lost, Opened, Replaced, Scheduled, Seen
from epp.core.kv_events.mirror import Changed
from epp.core.types import EndpointMetrics
from epp.journal.frames import FRAME_BYTES_MAX, frame_of
from epp.journal.reading import frames_of, journals
from epp.journal.reenacting import decide_again
from epp.shell.files.segment_folder import SegmentFolder
from epp.shell.operators import journal as module
from epp.shell.operators.journal import (
    DecisionsFolder,
    InputsFolder,
    Journal,
    decisions_limits,
    inputs_limits,
    read_salt,
)
from epp.shell.starting import StartError
from sim.traces.formats import open_trace
from tests.core.journal.traffic import PLUGINS, Live, configured, document


@pytest.fixture(autouse=True)
def due_at_once(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.005)
    monkeypatch.setattr(module, "SLICE_PAUSE_S", 0.0)


def opened(tmp_path, *, journal=None, limits=None, **more):
    """Return a folder of inputs that is written at once."""
    limits = msgspec.structs.replace(limits or inputs_limits(), flush_s=0.0)
    options = {"seed": 1, "salt": b"a salt of twenty bytes"}
    return InputsFolder(journal or Journal(), str(tmp_path), limits, **(options | more))


def busy(capture, steps, text=None):
    """Return a picker of this capture and its traffic."""
    live = Live(text or document())
    capture.tell(configured(text or document()))
    live.scheduler.witness = capture.witness(live.scheduler)
    live.run(steps)
    return live


def write(capture):
    capture._journal.write_queued()


def events(folder):
    return [event for journal in journals(folder, Level.INPUTS) for event in journal.events()]


def decided(folder):
    return [event for event in events(folder) if isinstance(event, Scheduled)]


async def started(capture):
    task = asyncio.create_task(capture._journal.run())
    await asyncio.sleep(0)
    return task


async def stop(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_told_is_in_the_files_when_it_ends(tmp_path):
    """All of it; and it is decided again as it was."""
    capture = opened(tmp_path)
    task = await started(capture)
    live = busy(capture, 150)
    await stop(task)
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.same) == (150, 150)
    assert result.caveats() == []
    assert len(decided(tmp_path)) == 150
    told = capture.snapshot()
    assert (told.requests, told.dropped) == (150, {"queue": 0, "disk": 0})
    assert told.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(live.decisions) == 150


async def test_files_turn_over_and_the_whole_stays_bounded(tmp_path):
    """By size; what is left can be decided again, and says that its beginning is missing."""
    limits = inputs_limits(segment_bytes_max=8_000, total_bytes_max=60_000)
    capture = opened(tmp_path, limits=limits)
    live = busy(capture, 100)
    for _ in range(8):
        write(capture)
        live.run(100)
    write(capture)
    assert len(list(tmp_path.iterdir())) > 2
    assert capture.snapshot().bytes <= 68_000
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert result.begins_late
    assert 100 < result.decisions < 900


async def test_files_turn_over_by_age(tmp_path):
    """With an age of zero each flush makes a segment."""
    capture = opened(tmp_path, limits=inputs_limits(segment_age_max_s=0.0))
    live = busy(capture, 20)
    for _ in range(3):
        write(capture)
        live.run(20)
    write(capture)
    assert len(list(tmp_path.iterdir())) == 4
    capture._journal.end()
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.same) == (80, 80)


async def test_a_full_queue_drops_and_says_so(tmp_path):
    """In the count, and at the place in the file; memory stays what it is."""
    capture = opened(
        tmp_path, limits=msgspec.structs.replace(inputs_limits(), queue_bytes_max=50_000)
    )
    live = busy(capture, 100)
    dropped = capture.snapshot().dropped["queue"]
    assert dropped > 100
    assert capture._bytes_put - capture._bytes_taken <= 50_000
    assert len(capture._journal.queue) < 130
    write(capture)
    live.run(1)
    write(capture)
    lost = [event.events for event in events(tmp_path) if isinstance(event, Lost)]
    assert lost[0] == dropped


async def test_the_bytes_of_the_queue_are_bounded_too(tmp_path):
    """A prompt of a megabyte has chains of 32 KB."""
    capture = opened(
        tmp_path, limits=msgspec.structs.replace(inputs_limits(), queue_bytes_max=20_000)
    )
    live = busy(capture, 1)
    write(capture)
    for _ in range(10):
        live.ask(prompts=(b"x" * 256 * 1000,), prompt_tokens=64_000, priority=0)
    assert capture.snapshot().dropped["queue"] >= 7
    write(capture)
    assert capture._bytes_put == capture._bytes_taken


@pytest.mark.parametrize("what", ["begin", "append"])
async def test_a_disk_that_fails_costs_notes_alone(tmp_path, monkeypatch, what):
    """Counted, logged once, tried again; decisions go on, and the files say what is missing."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    capture = opened(tmp_path)
    live = busy(capture, 20)
    if what == "append":
        write(capture)
    works = getattr(SegmentFolder, what)

    def full(folder, *given):
        folder.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentFolder, what, full)
    with capture_logs() as lines:
        for _ in range(5):
            live.run(20)
            write(capture)
        assert [line["event"] for line in lines] == ["capture cannot be written, requests continue"]
        assert str(tmp_path) not in str(lines)
        monkeypatch.setattr(SegmentFolder, what, works)
        live.run(20)
        write(capture)
        assert lines[-1]["event"] == "capture is written again"
    told = capture.snapshot()
    assert told.write_errors >= 5
    assert told.dropped["disk"] > 100
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert result.lost or result.gaps
    assert result.decisions + result.unknown >= 20
    assert len(live.decisions) == 140


async def test_a_disk_that_hangs_does_not_keep_the_picker(tmp_path, monkeypatch):
    """Telling returns at once, and the end is not waited for for ever."""
    hangs = threading.Event()
    monkeypatch.setattr(SegmentFolder, "append", lambda *_: hangs.wait(30))
    capture = opened(tmp_path, journal=Journal(close_s_max=0.05))
    task = await started(capture)
    try:
        live = busy(capture, 50)
        assert len(live.decisions) == 50
        with capture_logs() as lines:
            await stop(task)
        assert [line["log_level"] for line in lines] == ["error"]
    finally:
        hangs.set()


async def test_a_defect_of_the_thread_ends_the_capture_alone(tmp_path, monkeypatch):
    """It is logged and counted."""
    capture = opened(tmp_path)
    monkeypatch.setattr(capture._transcript, "event", None)
    with capture_logs() as lines:
        task = await started(capture)
        live = busy(capture, 30)
        await stop(task)
    assert [line["event"] for line in lines] == ["capture failed and has ended, requests continue"]
    assert capture.snapshot().write_errors == 1
    assert len(live.decisions) == 30


async def test_one_salt_joins_two_captures(tmp_path):
    """And without it they have nothing in common."""
    for name, salt in (("a", b"s" * 20), ("b", b"s" * 20), ("c", None)):
        capture = opened(tmp_path / name, salt=salt)
        busy(capture, 20)
        write(capture)
        capture._journal.end()
    blocks = {
        name: {event.shape.chains[0][:8] for event in decided(tmp_path / name)} - {b""}
        for name in "abc"
    }
    assert blocks["a"] == blocks["b"]
    assert not blocks["a"] & blocks["c"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"short", "has 5 bytes, expected 16 to 64"),
        (b"x" * 200, "expected 16 to 64"),
        (None, "cannot be read"),
    ],
)
def test_a_salt_that_is_none_is_refused(tmp_path, content, told):
    """It is not quoted."""
    path = tmp_path / "salt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartError, match=told) as refused:
        read_salt(str(path))
    assert "short" not in str(refused.value)
    path.write_bytes(b"0123456789abcdef\n")
    assert read_salt(str(path)) == b"0123456789abcdef"


def history_in(folder, journal):
    return DecisionsFolder(journal, str(folder), decisions_limits(2**24, 3_600.0))


def test_both_levels_share_an_origin_and_may_share_a_folder(tmp_path):
    """Their files have different names, and each level counts its own records."""
    journal = Journal()
    capture, history = opened(tmp_path, journal=journal), history_in(tmp_path, journal)
    busy(capture, 20)
    history.tell(frame_of(Lost(events=3)))
    journal.end()
    found = {level: journals(tmp_path, level) for level in Level}
    assert [[one.origin for one in each] for each in found.values()] == [[journal.origin]] * 2
    assert len(decided(tmp_path)) == 20
    assert history.snapshot().events == 1
    assert capture.snapshot().requests == 20


def test_a_level_whose_disk_fails_does_not_cost_the_other(tmp_path):
    """A folder that cannot be made is counted at its level alone."""
    (tmp_path / "file").write_text("")
    journal = Journal()
    capture, history = opened(tmp_path, journal=journal), history_in(tmp_path / "file", journal)
    history.tell(frame_of(Lost(events=3)))
    busy(capture, 20)
    with capture_logs() as lines:
        journal.end()
    assert [line["event"] for line in lines] == [
        "decision history cannot be written, requests continue"
    ]
    assert history.snapshot().dropped == {"queue": 0, "disk": 1}
    assert capture.snapshot().dropped == {"queue": 0, "disk": 0}
    assert len(decided(tmp_path)) == 20


def test_a_level_that_fails_does_not_end_the_other(tmp_path, monkeypatch):
    """A defect is logged once, and what is told afterwards is counted as lost."""
    journal = Journal()
    capture, history = opened(tmp_path, journal=journal), history_in(tmp_path / "a", journal)
    history.tell(b"j not a record")
    busy(capture, 20)
    with capture_logs() as lines:
        journal.write_queued()
        history.tell(frame_of(Lost(events=1)))
        journal.end()
    assert [line["event"] for line in lines] == [
        "decision history failed and has ended, requests continue"
    ]
    assert history.snapshot().dropped["queue"] == 1
    assert len(decided(tmp_path)) == 20


def test_a_read_only_disk_costs_records_alone(tmp_path, monkeypatch):
    """No file is made, and the next segment says what is missing."""

    def refused(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module, "RETRY_S", 0.0)
    capture = opened(tmp_path)
    live = busy(capture, 20)
    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(os, "open", refused)
        write(capture)
        live.run(20)
        write(capture)
    assert [line["problem"] for line in lines] == ["Read-only file system"]
    assert list(tmp_path.iterdir()) == []
    live.run(20)
    capture._journal.end()
    missing = capture.snapshot().dropped["disk"]
    assert [event.events for event in events(tmp_path) if isinstance(event, Lost)] == [missing]
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.begins_late) == (20, True)


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    """A write that stops in the middle is cut off, and the next segment says what is missing."""
    capture = opened(tmp_path)
    live = busy(capture, 20)
    write(capture)
    written = os.write

    def full(descriptor, content):
        if len(content) > 100:
            return written(descriptor, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "RETRY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        live.run(10)
        write(capture)
    live.run(20)
    capture._journal.end()
    first, second = sorted(tmp_path.iterdir())
    assert all(gzip.decompress(path.read_bytes()) for path in (first, second))
    missing = capture.snapshot().dropped["disk"]
    assert missing > 10
    assert [event.events for event in events(tmp_path) if isinstance(event, Lost)] == [missing]
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.lost, result.gaps) == (40, missing, 0)


def test_a_record_that_is_too_long_is_left_out(tmp_path, monkeypatch):
    """The writer drops what no reader accepts, counts it, and goes on."""
    monkeypatch.setattr(module, "FRAME_BYTES_MAX", 2_000)
    capture = opened(tmp_path)
    live = busy(capture, 10)
    live.ask(prompts=(b"x" * 256 * 1000,), prompt_tokens=64_000, priority=0)
    live.run(10)
    capture._journal.end()
    assert capture.snapshot().dropped["queue"] == 1
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.lost) == (20, 1)


async def test_a_defect_of_the_writer_ends_every_level(tmp_path, monkeypatch):
    """It is logged for each, and the picker goes on."""
    journal = Journal()
    capture, history = opened(tmp_path, journal=journal), history_in(tmp_path, journal)
    monkeypatch.setattr(module, "packed_frames", None)
    history.tell(frame_of(Lost(events=1)))
    with capture_logs() as lines:
        task = asyncio.create_task(journal.run())
        await asyncio.sleep(0)
        live = busy(capture, 10)
        await stop(task)
    assert {line["event"] for line in lines} == {
        "capture failed and has ended, requests continue",
        "decision history failed and has ended, requests continue",
    }
    assert history.snapshot().write_errors == 1
    assert len(live.decisions) == 10


@pytest.mark.parametrize(
    "note",
    [
        Heard(0.0, 0, False, 16, [Changed(True, "GPU", list(range(10**6)))], 0),
        configured("x" * 2**25),
    ],
)
def test_a_hostile_note_takes_its_size_from_the_queue(tmp_path, note):
    """An engine's million keys, and a document without end, do not pass for small records."""
    capture = opened(tmp_path)
    capture.tell(note)
    assert capture.snapshot().dropped["queue"] == 1
    assert not capture._journal.queue


def test_a_segment_repeats_the_state_before_it(tmp_path):
    """Configuration, pool and last pages precede the records of the segment."""
    capture = opened(tmp_path, limits=inputs_limits(segment_age_max_s=0.0))
    live = busy(capture, 20)
    write(capture)
    live.run(5)
    capture._journal.end()
    (journal,) = journals(tmp_path, Level.INPUTS)
    first, *context = list(journal.newest_records())[:8]
    assert isinstance(first, Opened)
    assert (first.segment, first.context, first.seed) == (1, 7, 1)
    assert [type(event).__name__ for event in context] == ["Configured", "Replaced"] + [
        "Observed"
    ] * 5
    assert len(decided(tmp_path)) == 25


def test_an_index_of_other_blocks_has_a_segment_of_its_own(tmp_path):
    """The first configuration does not leave an empty segment behind."""
    capture = opened(tmp_path)
    capture.tell(msgspec.structs.replace(configured(document()), block_tokens=16))
    write(capture)
    capture.tell(msgspec.structs.replace(configured(document()), block_tokens=32))
    capture._journal.end()
    sizes = [event.block_tokens for event in events(tmp_path) if isinstance(event, Opened)]
    assert sizes == [16, 32]


def test_a_capture_of_other_blocks_is_replayed_and_decided_again(tmp_path):
    """The size is that of the index, from the first segment on."""
    index = "plugins:\n- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 128}}"
    text = document().replace("plugins:", index, 1)
    capture = opened(tmp_path)
    live = Live(text)
    capture.tell(msgspec.structs.replace(configured(text), block_tokens=128))
    live.scheduler.witness = capture.witness(live.scheduler)
    live.run(40)
    capture._journal.end()
    assert len(list(open_trace(tmp_path))) == 40
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.same) == (40, 40)


def test_frames_are_whole(tmp_path):
    """Each has its length, at most the largest that readers accept."""
    capture = opened(tmp_path)
    capture.tell(Replaced(members=()))
    capture.tell(Seen(0.0, 0, EndpointMetrics()))
    capture._journal.end()
    (path,) = tmp_path.iterdir()
    lengths = list(map(len, frames_of(path)))
    assert len(lengths) == 3
    assert max(lengths) < FRAME_BYTES_MAX
