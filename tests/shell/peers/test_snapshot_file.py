import asyncio
import contextlib
import os
import stat

import pytest
import structlog

from epp.shell.peers import snapshot_file, snapshots
from epp.shell.peers.complaints import Complaints
from epp.shell.peers.snapshot_file import NAME, SnapshotFile
from tests.envoy.rig import until
from tests.shell.peers.rig import FakeExchange

FRAMES = [b"one", b"two" * 1000]


def file_of(folder, known=(), at_s=1_800_000_000.0, **options):
    exchange = FakeExchange(known)
    return exchange, SnapshotFile(
        str(folder), exchange, Complaints(), clock=lambda: at_s, **options
    )


async def test_what_is_saved_is_there_at_the_next_start(tmp_path):
    """With its age; for our own user only."""
    _, before = file_of(tmp_path / "made", FRAMES)
    assert await before.save()
    exchange, after = file_of(tmp_path / "made", at_s=1_800_000_010.0)
    assert await after.load()
    assert exchange.snapshot_frames == [(frame, 10.0) for frame in FRAMES]
    assert not exchange.pending()
    assert stat.S_IMODE(after.path.stat().st_mode) == 0o600
    assert [path.name for path in after.path.parent.iterdir()] == [NAME]
    assert (before.outcomes["saved"], after.outcomes["loaded"]) == (1, 1)


async def test_a_first_start_finds_nothing_and_says_nothing(tmp_path):
    exchange, file = file_of(tmp_path)
    with structlog.testing.capture_logs() as lines:
        assert not await file.load()
    assert lines == exchange.snapshot_frames == []


def _older(path):
    os.replace(path, path.with_name("kept"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "checksum"),
        (lambda path: path.write_bytes(b""), "it is not a snapshot"),
        (lambda path: path.write_bytes(os.urandom(5000)), "it is not a snapshot"),
        (lambda path: path.write_bytes(bytes(2_000_000)), "the file is larger than"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
    ids=["cut", "empty", "noise", "huge", "folder"],
)
async def test_a_file_that_does_not_fit_is_ignored_with_one_line(
    tmp_path, spoil, problem, monkeypatch
):
    """The start goes on without it, and the next save replaces it."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_BYTES_MAX", 1_000_000)
    _, before = file_of(tmp_path, FRAMES)
    await before.save()
    spoil(before.path)
    exchange, after = file_of(tmp_path, FRAMES)
    with structlog.testing.capture_logs() as lines:
        assert not await after.load()
    assert problem in lines[0]["problem"]
    assert len(lines) == 1
    assert exchange.snapshot_frames == []
    assert after.outcomes["ignored"] == 1
    if not after.path.is_dir():
        assert await after.save()
        assert await after.load()


async def test_a_file_that_is_too_old_is_ignored(tmp_path):
    _, before = file_of(tmp_path, FRAMES)
    await before.save()
    exchange, after = file_of(tmp_path, at_s=1_800_004_000.0)
    with structlog.testing.capture_logs() as lines:
        assert not await after.load()
    assert lines[0]["problem"] == "it is 4000 s old, expected -60 to 3600"
    assert exchange.snapshot_frames == []


async def test_it_is_saved_again_and_again(tmp_path):
    """The file is whole at any moment."""
    _, file = file_of(tmp_path, FRAMES, every_s=0.01)
    task = asyncio.create_task(file.run())
    await until(lambda: file.outcomes["saved"] >= 3, "saves")
    exchange, other = file_of(tmp_path)
    assert await other.load()
    assert len(exchange.snapshot_frames) == len(FRAMES)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_what_cannot_be_saved_is_counted_and_told_once_a_minute(tmp_path):
    """A folder in the way, or a defect of the core; the copy before stays."""
    exchange, file = file_of(tmp_path, FRAMES)
    await file.save()
    (tmp_path / f".{NAME}").mkdir()
    with structlog.testing.capture_logs() as lines:
        assert not await file.save()
        assert not await file.save()
        exchange.snapshot = lambda now: 1 / 0
        assert not await file.save()
    assert file.outcomes["failed"] == 3
    assert [line["problem"] for line in lines] == ["Is a directory"]
    _, after = file_of(tmp_path)
    assert await after.load()


async def test_a_link_that_somebody_left_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / f".{NAME}").symlink_to(tmp_path / "precious")
    _, file = file_of(tmp_path, FRAMES)
    assert not await file.save()
    assert (tmp_path / "precious").read_bytes() == b"precious"


async def test_the_last_save_takes_no_longer_than_it_may(tmp_path, monkeypatch):
    """A core that never ends, or a volume that hangs, does not keep the process."""
    monkeypatch.setattr(snapshot_file, "LAST_WRITE_S_MAX", 0.05)

    def endless(now):
        while True:
            yield b""

    exchange, file = file_of(tmp_path)
    exchange.snapshot = endless
    await file.save_last()
    assert file.outcomes == {"loaded": 0, "ignored": 0, "saved": 0, "failed": 1}
    exchange.snapshot = lambda now: iter(FRAMES)
    monkeypatch.setattr(snapshot_file, "LAST_WRITE_S_MAX", 5.0)
    await file.save_last()
    assert file.outcomes["saved"] == 1
