"""Files in segments: whole members, bounded, and what others put there is left alone."""

import errno
import gzip
import os
import stat
from base64 import b64encode
from random import Random

import pytest

from epp.shell.files.segment_folder import LONG_LINE_BYTES, SegmentFolder, packed

OLD, NEW = "20260101T000000-0000000a", "20260102T000000-0000000b"


def noise(count, seed=0):
    return b"".join(
        (seed * 1000 + at).to_bytes(4, "big").hex().encode() + b"\n" for at in range(count)
    )


def pairs(folder, origin, **limits):
    return SegmentFolder(
        folder, origin, kinds=("requests", "events"), ending="jsonl.gz", pack=packed, **limits
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_pair_is_written_member_by_member(tmp_path):
    """Nobody but the owner reads it, and it is whole after each append."""
    folder = pairs(tmp_path / "new", NEW, total_bytes_max=10**6)
    folder.begin(0)
    folder.append(b"1\n2\n", b"a\n")
    folder.append(b"", b"b\n")
    requests, events = (
        tmp_path / "new" / f"{kind}-{NEW}-000000.jsonl.gz" for kind in ("requests", "events")
    )
    assert gzip.decompress(requests.read_bytes()) == b"1\n2\n"
    assert gzip.decompress(events.read_bytes()) == b"a\nb\n"
    assert stat.S_IMODE(events.stat().st_mode) == 0o600
    assert folder.segment_bytes == requests.stat().st_size + events.stat().st_size
    assert folder.total_bytes == folder.segment_bytes
    folder.close()
    assert not folder.is_open


@pytest.mark.parametrize("line_bytes", [300, LONG_LINE_BYTES, 2 * LONG_LINE_BYTES])
def test_lines_of_any_length_are_read_as_any_gzip(line_bytes):
    """Of hashes, three quarters of which are those of another line: what repeats nearby is found."""
    random = Random(line_bytes)
    heads = [random.randbytes(line_bytes * 9 // 16) for _ in range(2)]
    lines = b"".join(
        b64encode(random.choice(heads) + random.randbytes(line_bytes * 3 // 16)) + b"\n"
        for _ in range(64)
    )
    found = packed(lines)
    assert gzip.decompress(found) == lines
    # Six bits are in a character of eight.
    assert len(found) < len(lines) * (0.4 if line_bytes == 300 else 0.78)


def test_above_the_total_the_oldest_pairs_go(tmp_path):
    """Those of a process before us first; what is no capture stays."""
    (tmp_path / "notes.txt").write_bytes(b"x" * 5000)
    before = pairs(tmp_path, OLD, total_bytes_max=10**6)
    for number in range(2):
        before.begin(number)
        before.append(noise(200, number), noise(200, number))
    before.close()
    folder = pairs(tmp_path, NEW, total_bytes_max=3000)
    for number in range(6):
        folder.begin(number)
        folder.append(noise(200, 10 + number), noise(200, 10 + number))
        assert folder.total_bytes <= 3000
    left = names(tmp_path)
    assert "notes.txt" in left
    assert not any(OLD in name for name in left)
    assert f"events-{NEW}-000005.jsonl.gz" in left
    assert f"events-{NEW}-000000.jsonl.gz" not in left


def test_the_pair_that_is_written_is_never_removed(tmp_path):
    """Even if it alone is above the total."""
    folder = pairs(tmp_path, NEW, total_bytes_max=10)
    folder.begin(0)
    folder.append(noise(100), noise(100))
    assert len(names(tmp_path)) == 2


def test_half_a_member_is_cut_off_again(tmp_path, monkeypatch):
    """A disk that fills up in the middle of a write."""
    folder = pairs(tmp_path, NEW, total_bytes_max=10**6)
    folder.begin(0)
    folder.append(b"1\n", b"a\n")
    write = os.write

    def short(descriptor, data):
        if len(data) > 10:
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space"):
        folder.append(b"2\n", b"b\n")
    assert not folder.is_open
    assert gzip.decompress((tmp_path / f"requests-{NEW}-000000.jsonl.gz").read_bytes()) == b"1\n"


def test_a_file_that_is_there_is_not_written_to(tmp_path):
    """Nor is a link followed."""
    (tmp_path / f"events-{NEW}-000000.jsonl.gz").symlink_to(tmp_path / "elsewhere")
    folder = pairs(tmp_path, NEW, total_bytes_max=10**6)
    with pytest.raises(FileExistsError):
        folder.begin(0)
    assert not folder.is_open
    assert not (tmp_path / "elsewhere").exists()


def test_a_pair_that_vanishes_meanwhile_is_no_problem(tmp_path, monkeypatch):
    """Another process of the same folder makes room too."""
    before = pairs(tmp_path, OLD, total_bytes_max=10**6)
    before.begin(0)
    before.append(noise(100), noise(100))
    before.close()
    folder = pairs(tmp_path, NEW, total_bytes_max=100)
    folder.begin(0)
    scandir, lost = os.scandir, [name for name in names(tmp_path) if OLD in name]

    def racing(path):
        found = list(scandir(path))
        for name in lost:
            (tmp_path / name).unlink(missing_ok=True)
        return iter(found)

    with monkeypatch.context() as raced:
        raced.setattr(os, "scandir", racing)
        folder.append(b"1\n", b"a\n")
    assert not any(OLD in name for name in names(tmp_path))


def test_what_is_too_old_is_removed(tmp_path):
    """By when it was last written; the segment that is being written stays."""
    before = pairs(tmp_path, OLD, total_bytes_max=10**6)
    before.begin(0)
    before.append(b"1\n", b"")
    before.close()
    for path in tmp_path.iterdir():
        os.utime(path, (1_000, 1_000))
    limits = {"total_bytes_max": 10**6, "age_max_s": 60.0}
    pairs(tmp_path, NEW, clock=lambda: 1_050.0, **limits).begin(0)
    folder = pairs(tmp_path, NEW, clock=lambda: 1_050.0, **limits)
    folder.begin(1)
    folder.append(b"1\n", b"")
    assert any(OLD in name for name in names(tmp_path))
    folder = pairs(tmp_path, NEW, clock=lambda: 1_061.0, **limits)
    folder.begin(2)
    folder.append(b"1\n", b"")
    assert not any(OLD in name for name in names(tmp_path))
    assert f"requests-{NEW}-000002.jsonl.gz" in names(tmp_path)
