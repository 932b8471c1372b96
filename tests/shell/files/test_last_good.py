import asyncio
import os
import stat

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.files import last_good
from epp.shell.files.last_good import COPY_MAX_BYTES, LastGood
from epp.shell.starting import StartError
from tests.envoy.rig import until


class Kept:
    """A `LastGood` of `configuration` in `folder`, and how often it failed to write."""

    def __init__(self, folder):
        self.failures = 0
        self.copy = LastGood(str(folder), "configuration", self._failed, retry_s=0.01)
        self.path = folder / "configuration"

    def _failed(self):
        self.failures += 1

    async def written(self, content):
        """Let `run` write `content`."""
        self.copy.keep(content)
        await self.running(lambda: self.path.exists() and self.path.read_bytes().endswith(content))

    async def running(self, condition):
        """Let `run` run until `condition`."""
        task = asyncio.create_task(self.copy.run())
        try:
            await until(lambda: task.done() or condition(), "the copy")
            assert not task.done(), task.exception()
        finally:
            task.cancel()


def broken(*_):
    raise StartError("line 1: broken\nline 2: broken")


def start(copy, content=None):
    """With the file broken, or holding `content`; returns what is made."""
    return copy.start(broken if content is None else lambda: content, bytes.decode)


async def test_what_came_into_force_is_there_at_the_next_start(tmp_path):
    """The warning has every reason and names the copy; the newest content counts."""
    await Kept(tmp_path).written(b"one")
    await Kept(tmp_path).written(b"two")
    after = Kept(tmp_path).copy
    with structlog.testing.capture_logs() as lines:
        assert start(after) == "two"
    assert after.in_force
    ((line),) = lines
    assert line["log_level"] == "warning"
    assert line["problems"] == ["line 1: broken", "line 2: broken"]
    assert line["copy"] == str(tmp_path / "configuration")


async def test_a_file_that_is_whole_goes_before_its_copy(tmp_path):
    """And replaces it; nothing is said."""
    await Kept(tmp_path).written(b"one")
    kept = Kept(tmp_path)
    with structlog.testing.capture_logs() as lines:
        assert start(kept.copy, b"two") == "two"
        assert not kept.copy.in_force
        await kept.running(lambda: kept.path.read_bytes().endswith(b"two"))
    assert lines == []


async def test_a_mended_file_is_in_force_again(tmp_path):
    """The copy is no longer what the picker runs by."""
    await Kept(tmp_path).written(b"one")
    kept = Kept(tmp_path)
    start(kept.copy)
    await kept.written(b"mended")
    assert not kept.copy.in_force


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not match the checksum"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "does not match the checksum"),
        (lambda path: path.write_bytes(b""), "does not match the checksum"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    ],
)
async def test_a_copy_that_is_not_whole_is_ignored(spoil, problem, tmp_path):
    """The start fails as it would without one, with the reasons of the file."""
    await Kept(tmp_path).written(b"one")
    spoil(tmp_path / "configuration")
    after = Kept(tmp_path).copy
    with structlog.testing.capture_logs() as lines, pytest.raises(StartError, match="line 2"):
        start(after)
    assert not after.in_force
    ((line),) = lines
    assert problem in line["problems"][0]


async def test_a_copy_that_no_longer_fits_is_ignored(tmp_path):
    """The version that starts may refuse what an older one took."""
    await Kept(tmp_path).written(b"one")

    def refuse(content):
        raise StartError(f"{content.decode()}: not supported any more")

    with structlog.testing.capture_logs() as lines, pytest.raises(StartError, match="line 2"):
        Kept(tmp_path).copy.start(broken, refuse)
    assert lines[0]["problems"] == ["one: not supported any more"]


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    """A broken file ends the start, and no file is written."""
    monkeypatch.chdir(tmp_path)
    kept = LastGood("", "configuration", pytest.fail)
    assert start(kept, b"one") == "one"
    with pytest.raises(StartError, match="line 1"):
        start(kept)
    asyncio.run(kept.run())
    assert list(tmp_path.iterdir()) == []


async def test_only_our_own_user_can_read_a_copy(tmp_path):
    """The folder is made where there is none."""
    await Kept(tmp_path / "made").written(b"one")
    assert stat.S_IMODE((tmp_path / "made" / "configuration").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["configuration"]


async def test_a_copy_that_cannot_be_written_is_tried_again(tmp_path):
    """Counted each time, told once; the copy before stays, and there is one in the end."""
    await Kept(tmp_path).written(b"one")
    kept = Kept(tmp_path)
    hindrance = tmp_path / ".configuration"
    hindrance.mkdir()
    with structlog.testing.capture_logs() as lines:
        kept.copy.keep(b"two")
        await kept.running(lambda: kept.failures >= 3)
        assert start(Kept(tmp_path).copy) == "one"
        hindrance.rmdir()
        await kept.written(b"three")
    told = [line["problem"] for line in lines if line["log_level"] == "error"]
    assert told == [f"{tmp_path / 'configuration'} cannot be written: Is a directory"]


async def test_a_link_that_somebody_left_is_not_followed(tmp_path):
    """What it points to is not ours to write."""
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    (tmp_path / ".configuration").symlink_to(other)
    kept = Kept(tmp_path)
    kept.copy.keep(b"one")
    await kept.running(lambda: kept.failures)
    assert other.read_bytes() == b"precious"


async def test_a_volume_that_hangs_holds_nobody(tmp_path):
    """The loop goes on, and what came into force meanwhile is written when the volume is back."""
    os.mkfifo(tmp_path / ".configuration")
    kept = Kept(tmp_path)
    task = asyncio.create_task(kept.copy.run())
    try:
        kept.copy.keep(b"one")
        turns = 0
        while turns < 1_000:
            # Opening a pipe that nobody reads hangs its thread, and only that.
            await asyncio.sleep(0)
            turns += 1
        assert not kept.path.exists()
        kept.copy.keep(b"two")
        reader = os.open(tmp_path / ".configuration", os.O_RDONLY | os.O_NONBLOCK)
        await until(lambda: kept.path.exists() and kept.path.is_file(), "the copy")
        os.close(reader)
        assert start(Kept(tmp_path).copy) == "two"
    finally:
        task.cancel()


@given(st.binary(max_size=300), st.integers(0, 370), st.integers(1, 255))
def test_any_byte_that_changed_is_noticed(tmp_path_factory, content, position, change):
    """A copy is all of what came into force, or no copy."""
    path = tmp_path_factory.getbasetemp() / "any-byte"
    assert last_good._write(path, content) is None
    assert last_good._read(path) == content
    text = bytearray(path.read_bytes())
    text[position % len(text)] ^= change
    path.write_bytes(text)
    with pytest.raises(StartError, match="checksum"):
        last_good._read(path)


async def test_the_largest_file_that_is_watched_can_be_kept(tmp_path):
    """And what is larger was not written by us."""
    content = os.urandom(COPY_MAX_BYTES)
    await Kept(tmp_path).written(content)
    assert Kept(tmp_path).copy.start(broken, bytes) == content
    with (tmp_path / "configuration").open("ab") as file:
        file.write(b"x" * 100)
    # What follows the largest content is not even read.
    assert Kept(tmp_path).copy.start(broken, bytes) == content
