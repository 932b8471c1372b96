import asyncio

import pytest

from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.starting import StartError


class Seen:
    def __init__(self, path, **limits):
        self.contents = []
        self.problems = []
        self.changed = asyncio.Event()
        self.watcher = FileWatcher(path, self._change, self.problems.append, poll_s=0.001, **limits)

    def _change(self, content):
        self.contents.append(content)
        self.changed.set()


def test_only_another_content_is_a_change(tmp_path):
    """Touching, rewriting or replacing a file by an equal one is not reported."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"one")
    seen = Seen(path)
    seen.watcher.poll()
    path.touch()
    seen.watcher.poll()
    (tmp_path / "new").write_bytes(b"one")
    (tmp_path / "new").rename(path)
    seen.watcher.poll()
    path.write_bytes(b"two")
    seen.watcher.poll()
    assert seen.contents == [b"one", b"two"]


def test_what_was_read_at_the_start_is_not_reported_again(tmp_path):
    """The owner reads once itself, to fail at once, and then hears only of changes."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"one")
    seen = Seen(path)
    assert seen.watcher.read() == b"one"
    seen.watcher.poll()
    assert seen.contents == []


def test_the_symlink_swap_of_the_kubelet_is_seen(tmp_path):
    """`file -> ..data/file`, `..data -> ..1`: only the inner link is replaced, atomically."""
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(version)
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "config.yaml"
    path.symlink_to("..data/config.yaml")
    seen = Seen(path)
    seen.watcher.poll()
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    seen.watcher.poll()
    assert seen.contents == [b"..1", b"..2"]


def test_a_missing_file_is_reported_once_and_its_return_is_no_change(tmp_path):
    """The last content stays in force; every failed poll is counted."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"one")
    seen = Seen(path)
    seen.watcher.poll()
    for _ in range(2):
        path.unlink()
        seen.watcher.poll()
        seen.watcher.poll()
        path.write_bytes(b"one")
        seen.watcher.poll()
    assert seen.contents == [b"one"]
    assert len(seen.problems) == 2
    assert "config.yaml cannot be read, its last content stays" in seen.problems[0]
    assert seen.watcher.errors_total == 4


def test_a_file_over_the_limit_is_a_problem(tmp_path):
    """At the limit it is read, one byte more is refused."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"1234")
    seen = Seen(path, bytes_max=4)
    seen.watcher.poll()
    path.write_bytes(b"12345")
    seen.watcher.poll()
    assert seen.contents == [b"1234"]
    assert "larger than 4 bytes" in seen.problems[0]
    with pytest.raises(OSError, match="larger than 4 bytes"):
        seen.watcher.read()


async def test_the_loop_polls_until_cancelled(tmp_path):
    """`run` finds a file that comes later and stops when it is told."""
    path = tmp_path / "config.yaml"
    seen = Seen(path)
    task = asyncio.create_task(seen.watcher.run())
    path.write_bytes(b"one")
    await seen.changed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen.contents == [b"one"]


def test_a_file_that_must_be_there_is_told_by_its_flag(tmp_path):
    """Once it is there its content counts."""
    path = tmp_path / "config.yaml"
    watcher = FileWatcher(path, lambda content: None, lambda sentence: None)
    with pytest.raises(StartError, match=r"^--config-file x cannot be read: No such file"):
        first_read(watcher, "--config-file x")
    path.write_text("a")
    assert first_read(watcher, "--config-file x") == b"a"
