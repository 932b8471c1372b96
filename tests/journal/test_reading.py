"""Files of a journal: several processes and segments, cut off, broken, hostile."""

import gzip
import os
from pathlib import Path

import pytest

from epp.core.journal.events import Level, Lost, Opened, Ticked
from epp.journal.frames import FRAME_BYTES_MAX, frame_of, framed, packed_frames, segment_file
from epp.journal.problem import JournalError
from epp.journal.reading import frames_of, journals

ORIGIN, OTHER = "20260101T000000-0000000a", "20260102T000000-0000000b"


def opened(segment, **fields):
    return Opened(level=Level.INPUTS, origin=ORIGIN, segment=segment, **fields)


def ticks(*at_s):
    return [Ticked(at_s=at) for at in at_s]


def put(folder, segment, records, *, origin=ORIGIN, level=Level.INPUTS, members=1):
    """Write a segment as one member of gzip, or each record as one."""
    frames = [framed(frame_of(record)) for record in records]
    path = folder / segment_file(level, origin, segment)
    parts = frames if members > 1 else [b"".join(frames)]
    path.write_bytes(b"".join(packed_frames(part, 1) for part in parts))
    return path


def read(folder, level=Level.INPUTS, **period):
    """Return the times of ticks and the numbers of lost records, by process."""
    return {
        journal.origin: [
            record.at_s if isinstance(record, Ticked) else ("lost", record.events)
            for record in journal.records(**period)
            if isinstance(record, Ticked | Lost)
        ]
        for journal in journals(folder, level)
    }


def test_the_state_that_a_segment_repeats_is_read_once(tmp_path):
    """It is read where the segment before is missing."""
    put(tmp_path, 0, [opened(0), *ticks(1, 2)])
    second = put(tmp_path, 1, [opened(1, context=1), *ticks(2, 3)])
    put(tmp_path, 2, [opened(2, context=1), *ticks(3, 4)])
    assert read(tmp_path) == {ORIGIN: [1, 2, 3, 4]}
    second.unlink()
    assert read(tmp_path) == {ORIGIN: [1, 2, 3, 4]}


def test_what_is_missing_before_a_segment_is_told(tmp_path):
    """Its state is then read, because records that changed it may be missing."""
    put(tmp_path, 0, [opened(0), *ticks(1)])
    put(tmp_path, 1, [opened(1, context=1, missing=7), *ticks(2, 3)])
    assert read(tmp_path) == {ORIGIN: [1, ("lost", 7), 2, 3]}


def test_processes_and_subfolders_are_told_apart(tmp_path):
    """Several pickers may share a volume. A copy of a file is read once."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    put(tmp_path / "a", 0, [opened(0), *ticks(1)])
    put(tmp_path / "b", 0, [opened(0), *ticks(1)])
    put(tmp_path / "b", 0, [opened(0), *ticks(5)], origin=OTHER)
    (tmp_path / "notes.txt").write_text("x")
    assert read(tmp_path) == {ORIGIN: [1], OTHER: [5]}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_the_end_that_a_killed_writer_left_is_passed_over(tmp_path, cut):
    """Complete records before it are read."""
    path = put(tmp_path, 0, [opened(0), *ticks(*range(50))], members=51)
    path.write_bytes(path.read_bytes()[:-cut])
    (found,) = read(tmp_path).values()
    assert found == list(range(len(found)))
    assert 45 < len(found) <= 50


def test_a_segment_that_is_cut_off_in_the_middle_is_told(tmp_path):
    """The writer went on, so something is missing, and the state is read again."""
    path = put(tmp_path, 0, [opened(0), *ticks(*range(9))], members=10)
    path.write_bytes(path.read_bytes()[:-20])
    put(tmp_path, 1, [opened(1, context=1), *ticks(10, 11)])
    (found,) = read(tmp_path).values()
    assert found[-3:] == [("lost", 1), 10, 11]


@pytest.mark.parametrize("at", [0, 12, 40, -30])
def test_garbage_in_a_segment_ends_it(tmp_path, at):
    """The checksums of gzip find it, and the next segment is read."""
    path = put(tmp_path, 0, [opened(0), *ticks(*range(5))], members=6)
    content = bytearray(path.read_bytes())
    content[at : at + 8] = b"garbage!"
    path.write_bytes(content)
    put(tmp_path, 1, [opened(1), *ticks(9)])
    (found,) = read(tmp_path).values()
    assert found[-2:] == [("lost", 1), 9]
    assert [one for one in found if one in range(5)] != list(range(5))


def test_a_file_that_is_no_gzip_is_passed_over(tmp_path):
    (tmp_path / segment_file(Level.INPUTS, ORIGIN, 0)).write_bytes(b"no journal")
    (tmp_path / segment_file(Level.INPUTS, ORIGIN, 1)).write_bytes(b"")
    assert read(tmp_path) == {ORIGIN: []}


@pytest.mark.parametrize("claimed", [FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_frame_that_claims_to_be_huge_is_refused(tmp_path, claimed):
    """Nothing of that size is read or reserved."""
    path = put(tmp_path, 0, [opened(0)])
    path.write_bytes(path.read_bytes() + gzip.compress(claimed.to_bytes(4, "little") + b"x"))
    with pytest.raises(JournalError, match=f"is broken: it has a frame of {claimed} bytes"):
        read(tmp_path)


def test_a_frame_that_expands_beyond_its_limit_is_not_expanded(tmp_path):
    """A gigabyte of zeros is a frame of no bytes, which ends the segment."""
    path = put(tmp_path, 0, [opened(0), *ticks(1)])
    path.write_bytes(path.read_bytes() + gzip.compress(b"\0" * 2**24))
    assert read(tmp_path) == {ORIGIN: [1]}


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (Opened(level=Level.INPUTS, origin="a", segment=0, version=2), "version 1, got homing-jou"),
        (Opened(level=Level.INPUTS, origin="a", segment=0, format="b"), "homing-journal version 1"),
        (Opened(level=Level.DECISIONS, origin="a", segment=0), "the level decisions, expected inp"),
        (Ticked(), "does not begin with an `opened` record"),
    ],
)
def test_another_format_is_named(tmp_path, first, expected):
    path = put(tmp_path, 0, [first])
    with pytest.raises(JournalError, match=expected) as found:
        read(tmp_path)
    assert str(path) in str(found.value)


def test_an_unknown_record_is_named_with_its_file(tmp_path):
    path = put(tmp_path, 0, [opened(0)])
    unknown = framed(b"j" + b"\x81\xa5event\xa7nothing")
    path.write_bytes(path.read_bytes() + packed_frames(unknown, 1))
    with pytest.raises(JournalError, match="nothing") as found:
        read(tmp_path)
    assert str(path) in str(found.value)


def test_folders_without_a_journal_are_named(tmp_path):
    """The message says which flag writes the level that is needed."""
    with pytest.raises(JournalError, match="none cannot be read: No such file"):
        journals(tmp_path / "none", Level.INPUTS)
    put(tmp_path, 0, [opened(0)], level=Level.DECISIONS)
    with pytest.raises(JournalError, match="expected files of `epp serve --capture`"):
        journals(tmp_path, Level.INPUTS)


def test_the_first_level_of_a_process_is_read(tmp_path):
    """Its decisions are in both, and are read once."""
    put(tmp_path, 0, [opened(0)])
    put(tmp_path, 0, [opened(0)], level=Level.DECISIONS)
    put(tmp_path, 0, [opened(0)], origin=OTHER)
    found = journals(tmp_path, Level.DECISIONS, Level.INPUTS)
    assert [(one.origin, one.level) for one in found] == [
        (ORIGIN, Level.DECISIONS),
        (OTHER, Level.INPUTS),
    ]


def test_files_outside_a_period_are_not_read(tmp_path):
    """By the time of their last write, and by the time at which they began."""
    for number in range(3):
        path = put(tmp_path, number, [opened(number, began_s=100.0 * number), *ticks(number)])
        os.utime(path, (0, 100.0 * number + 99))
    assert read(tmp_path, since_s=150.0) == {ORIGIN: [1, 2]}
    assert read(tmp_path, until_s=150.0) == {ORIGIN: [0, 1]}


def test_a_file_that_is_removed_meanwhile_is_passed_over(tmp_path):
    """The writer may remove its oldest one at any time."""
    put(tmp_path, 0, [opened(0), *ticks(0)])
    put(tmp_path, 1, [opened(1), *ticks(1)])
    (journal,) = journals(tmp_path, Level.INPUTS)
    Path(journal.files[0]).unlink()
    assert [one.at_s for one in journal.records() if isinstance(one, Ticked)] == [1]


def test_complete_frames_come_before_the_error(tmp_path):
    path = put(tmp_path, 0, [opened(0), *ticks(1)])
    path.write_bytes(path.read_bytes()[:-4])
    frames = frames_of(path)
    assert next(frames)[:1] == b"j"
    with pytest.raises(EOFError):
        list(frames)
