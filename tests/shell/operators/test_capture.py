"""The capture of a running picker: bounded queue, a disk that fails or hangs, a clean end."""

import asyncio
import errno
import threading

import msgspec
import pytest
from epp.configuration.past_decisions import lines_of, past_files
from structlog.testing import capture_logs

from epp.core.journal.events import Event, Lost
from epp.core.journal.lines import CaptureLine
from epp.core.journal.witness import CaptureWitness
from epp.journal.reenacting import decide_again
from epp.shell.files.segment_folder import SegmentFolder
from epp.shell.operators import capture as module
from epp.shell.operators.journal import Capture, CaptureLimits, read_salt
from epp.shell.starting import StartError
from tests.core.journal.traffic import PLUGINS, Live, configured, document


@pytest.fixture(autouse=True)
def due_at_once(monkeypatch):
    monkeypatch.setattr(module, "FLUSH_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.005)
    monkeypatch.setattr(module, "SLICE_PAUSE_S", 0.0)


def opened(tmp_path, **more):
    options = {
        "seed": 1,
        "salt": b"a salt of twenty bytes",
        "share": 1.0,
        "limits": CaptureLimits(),
    }
    return Capture(str(tmp_path), **(options | more))


def busy(capture, steps, text=None):
    """A picker of this capture and its traffic."""
    live = Live(text or document())
    capture.tell(configured(text or document()))
    live.scheduler.witness = CaptureWitness(
        live.scheduler,
        sample=capture.sample,
        tell=capture.tell,
        failed=capture.failed,
    )
    live.run(steps)
    return live


def written(tmp_path, kind, of):
    return [
        msgspec.json.decode(line, type=of)
        for files in past_files(tmp_path, kind).values()
        for path in files
        for line in lines_of(path)
        if b"homing-capture" not in line
    ]


async def started(capture):
    task = asyncio.create_task(capture.run())
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
    assert len(written(tmp_path, "requests", CaptureLine)) == 150
    told = capture.snapshot()
    assert (told.requests, told.dropped) == (150, {"queue": 0, "disk": 0})
    assert told.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(live.decisions) == 150


async def test_files_turn_over_and_the_whole_stays_bounded(tmp_path):
    """By size; what is left can be decided again, and says that its beginning is missing."""
    limits = CaptureLimits(file_bytes_max=8_000, total_bytes_max=60_000)
    capture = opened(tmp_path, limits=limits)
    live = busy(capture, 100)
    for _ in range(8):
        capture.write_queued()
        live.run(100)
    capture.write_queued()
    assert len(list(tmp_path.iterdir())) > 4
    assert capture.snapshot().bytes <= 68_000
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert result.begins_late
    assert 100 < result.decisions < 900


async def test_files_turn_over_by_age(tmp_path):
    """An age of nothing makes a pair a flush."""
    capture = opened(tmp_path, limits=CaptureLimits(file_age_max_s=0.0))
    live = busy(capture, 20)
    for _ in range(3):
        capture.write_queued()
        live.run(20)
    capture.write_queued()
    assert len(list(tmp_path.iterdir())) == 8
    capture.end_files()
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.same) == (80, 80)


async def test_a_full_queue_drops_and_says_so(tmp_path, monkeypatch):
    """In the count, and at the place in the file; memory stays what it is."""
    monkeypatch.setattr(module, "NOTES_MAX", 50)
    capture = opened(tmp_path)
    live = busy(capture, 100)
    dropped = capture.snapshot().dropped["queue"]
    assert dropped > 100
    assert len(capture._queue) <= 51
    capture.write_queued()
    live.run(1)
    capture.write_queued()
    lost = [event.events for event in written(tmp_path, "events", Event) if isinstance(event, Lost)]
    assert lost[0] == dropped


async def test_the_bytes_of_the_queue_are_bounded_too(tmp_path, monkeypatch):
    """A prompt of a megabyte has chains of 32 KB."""
    monkeypatch.setattr(module, "NOTES_BYTES_MAX", 20_000)
    capture = opened(tmp_path)
    live = busy(capture, 1)
    capture.write_queued()
    for _ in range(10):
        live.ask(prompts=(b"x" * 256 * 1000,), prompt_tokens=64_000, priority=0)
    assert capture.snapshot().dropped["queue"] >= 7
    capture.write_queued()
    assert capture._bytes_put == capture._bytes_taken


@pytest.mark.parametrize("what", ["begin", "append"])
async def test_a_disk_that_fails_costs_notes_alone(tmp_path, monkeypatch, what):
    """Counted, logged once, tried again; decisions go on, and the files say what is missing."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    capture = opened(tmp_path)
    live = busy(capture, 20)
    if what == "append":
        capture.write_queued()
    works = getattr(SegmentFolder, what)

    def full(folder, *given):
        folder.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentFolder, what, full)
    with capture_logs() as lines:
        for _ in range(5):
            live.run(20)
            capture.write_queued()
        assert [line["event"] for line in lines] == ["capture cannot be written, requests continue"]
        assert str(tmp_path) not in str(lines)
        monkeypatch.setattr(SegmentFolder, what, works)
        live.run(20)
        capture.write_queued()
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
    capture = opened(tmp_path, close_s_max=0.05)
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
    monkeypatch.setattr(capture._transcript, "note", None)
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
        capture.write_queued()
        capture.end_files()
    blocks = {
        name: {
            line.blocks[:8]
            for line in written(tmp_path / name, "requests", CaptureLine)
            if line.blocks
        }
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
