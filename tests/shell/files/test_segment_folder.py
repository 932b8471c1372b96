"""Files in segments: whole members, bounded, and what others put there is left alone."""

import errno
import gzip
import os
import re
import stat

import pytest

from epp.shell.files.segment_folder import SegmentFolder

OLD, NEW = "20260101T000000-0000000a", "20260102T000000-0000000b"
NAMES = (
    re.compile(r"inputs-(\d{8}T\d{6}-[0-9a-f]{8})-(\d{6})\.journal\.gz"),
    re.compile(r"events-(\d{8}T\d{6}-[0-9a-f]{8})-(\d{6})\.jsonl\.gz"),
    re.compile(r"requests-(\d{8}T\d{6}-[0-9a-f]{8})-(\d{6})\.jsonl\.gz"),
)


def noise(seed=0):
    return gzip.compress(
        b"".join((seed * 1000 + at).to_bytes(4, "big").hex().encode() for at in range(400))
    )


def segments(folder, origin, **limits):
    return SegmentFolder(
        folder, lambda number: f"inputs-{origin}-{number:06d}.journal.gz", names=NAMES, **limits
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_segment_is_written_member_by_member(tmp_path):
    """Only the owner can read it, and it is whole after each append."""
    folder = segments(tmp_path / "new", NEW, total_bytes_max=10**6)
    folder.begin(0)
    folder.append(gzip.compress(b"1\n2\n"))
    folder.append(gzip.compress(b"3\n"))
    path = tmp_path / "new" / f"inputs-{NEW}-000000.journal.gz"
    assert gzip.decompress(path.read_bytes()) == b"1\n2\n3\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert folder.segment_bytes == path.stat().st_size
    assert folder.total_bytes == folder.segment_bytes
    folder.close()
    assert not folder.is_open


def test_above_the_total_the_oldest_segments_go(tmp_path):
    """The segments of earlier processes are removed first, and other files stay."""
    (tmp_path / "notes.txt").write_bytes(b"x" * 5000)
    before = segments(tmp_path, OLD, total_bytes_max=10**6)
    for number in range(2):
        before.begin(number)
        before.append(noise(number))
    before.close()
    folder = segments(tmp_path, NEW, total_bytes_max=3 * len(noise()))
    for number in range(6):
        folder.begin(number)
        folder.append(noise(10 + number))
        assert folder.total_bytes <= 3.1 * len(noise())
    left = names(tmp_path)
    assert "notes.txt" in left
    assert not any(OLD in name for name in left)
    assert f"inputs-{NEW}-000005.journal.gz" in left
    assert f"inputs-{NEW}-000000.journal.gz" not in left


def test_files_of_the_previous_format_count_and_go(tmp_path):
    """Both files of a pair go together, so that an upgrade does not fill the volume."""
    for kind in ("events", "requests"):
        for number in range(2):
            (tmp_path / f"{kind}-{OLD}-{number:06d}.jsonl.gz").write_bytes(noise(number))
    folder = segments(tmp_path, NEW, total_bytes_max=4 * len(noise()))
    folder.begin(0)
    folder.append(noise(5))
    assert names(tmp_path) == [
        f"events-{OLD}-000001.jsonl.gz",
        f"inputs-{NEW}-000000.journal.gz",
        f"requests-{OLD}-000001.jsonl.gz",
    ]


def test_the_segment_that_is_written_is_never_removed(tmp_path):
    """It stays even if it alone is above the total."""
    folder = segments(tmp_path, NEW, total_bytes_max=10)
    folder.begin(0)
    folder.append(noise())
    assert len(names(tmp_path)) == 1


def test_half_a_member_is_cut_off_again(tmp_path, monkeypatch):
    """A disk may fill up in the middle of a write."""
    folder = segments(tmp_path, NEW, total_bytes_max=10**6)
    folder.begin(0)
    folder.append(gzip.compress(b"1\n"))
    write = os.write

    def short(descriptor, data):
        if len(data) > 10:
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space"):
        folder.append(gzip.compress(b"2\n"))
    assert not folder.is_open
    assert gzip.decompress((tmp_path / names(tmp_path)[0]).read_bytes()) == b"1\n"


def test_a_file_that_is_there_is_not_written_to(tmp_path):
    """A link is not followed either."""
    (tmp_path / f"inputs-{NEW}-000000.journal.gz").symlink_to(tmp_path / "elsewhere")
    folder = segments(tmp_path, NEW, total_bytes_max=10**6)
    with pytest.raises(FileExistsError):
        folder.begin(0)
    assert not folder.is_open
    assert not (tmp_path / "elsewhere").exists()


def test_a_segment_that_vanishes_meanwhile_is_no_problem(tmp_path, monkeypatch):
    """Another process of the same folder makes room too."""
    before = segments(tmp_path, OLD, total_bytes_max=10**6)
    before.begin(0)
    before.append(noise())
    before.close()
    folder = segments(tmp_path, NEW, total_bytes_max=100)
    folder.begin(0)
    scandir, lost = os.scandir, [name for name in names(tmp_path) if OLD in name]

    def racing(path):
        found = list(scandir(path))
        for name in lost:
            (tmp_path / name).unlink(missing_ok=True)
        return iter(found)

    with monkeypatch.context() as raced:
        raced.setattr(os, "scandir", racing)
        folder.append(noise())
    assert not any(OLD in name for name in names(tmp_path))


def test_what_is_too_old_is_removed(tmp_path):
    """The time of the last write decides; the segment that is being written stays."""
    before = segments(tmp_path, OLD, total_bytes_max=10**6)
    before.begin(0)
    before.append(noise())
    before.close()
    for path in tmp_path.iterdir():
        os.utime(path, (1_000, 1_000))
    limits = {"total_bytes_max": 10**6, "age_max_s": 60.0}
    folder = segments(tmp_path, NEW, clock=lambda: 1_050.0, **limits)
    folder.begin(1)
    folder.append(noise())
    assert any(OLD in name for name in names(tmp_path))
    folder = segments(tmp_path, NEW, clock=lambda: 1_061.0, **limits)
    folder.begin(2)
    folder.append(noise())
    assert not any(OLD in name for name in names(tmp_path))
    assert f"inputs-{NEW}-000002.journal.gz" in names(tmp_path)
