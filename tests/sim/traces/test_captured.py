"""The folder of a live capture is a trace like any other.

Some tests write lines of the previous format, because a test can break these easily.
"""

import gzip

import msgspec
import pytest

from epp.core.journal.lines import CaptureHeader, CaptureLine
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.reading import ReadOptions, content_hash
from tests.core.journal.traffic import Live, document
from tests.journal.test_reenacting import ORIGIN, write

OTHER = "20260101T000500-0000000b"


class Coarse(Live):
    """A picker with blocks of 128 tokens."""

    def begin_segment(self):
        self.transcript.block_tokens = lambda: 128
        super().begin_segment()


def put(folder, times, *, origin=ORIGIN, number=0, block_tokens=64):
    header = CaptureHeader(format="homing-capture", version=1, block_tokens=block_tokens)
    lines = [header, *(CaptureLine(time_s=at, prompt_tokens=9, output_tokens=1) for at in times)]
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    path = folder / f"requests-{origin}-{number:06d}.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    return path


def test_what_a_picker_captured_is_read(tmp_path):
    """Every request, with its blocks, from the first moment on."""
    live = write(tmp_path, 120, files=3)
    trace = open_trace(tmp_path)
    arrivals = list(trace)
    assert trace.format.name == "capture"
    assert len(arrivals) == len(live.decisions) == trace.requests_expected() == 120
    assert [one.index for one in arrivals] == list(range(120))
    assert arrivals[0].time_s == 0.0
    assert len({one.blocks[0] for one in arrivals if one.blocks}) < 60


def test_processes_are_merged_by_time(tmp_path):
    """Their files overlap."""
    put(tmp_path, [10.0, 14.0, 12.0])
    put(tmp_path, [16.0], number=1)
    put(tmp_path, [11.0, 15.0], origin=OTHER)
    assert [one.time_s for one in open_trace(tmp_path)] == [0, 1, 2, 4, 5, 6]


def test_the_end_that_a_killed_writer_left_is_passed_over(tmp_path):
    """What is whole is read."""
    path = put(tmp_path, range(50))
    path.write_bytes(path.read_bytes()[:-12])
    assert 0 < len(list(open_trace(tmp_path))) <= 50


def test_a_line_that_is_none_is_named(tmp_path):
    """Or skipped, as in any trace."""
    path = put(tmp_path, [1.0])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b'{"time_s": 2}\n'))
    with pytest.raises(TraceError, match="prompt_tokens"):
        list(open_trace(tmp_path))
    trace = open_trace(tmp_path, ReadOptions(skip_bad=True))
    assert len(list(trace)) == 1
    assert trace.bad_lines == 1


def test_segments_of_two_block_sizes_are_refused(tmp_path):
    """They cannot be one trace."""
    write(tmp_path, 20)
    write(tmp_path, 20, origin=OTHER, live=Coarse(document()))
    with pytest.raises(TraceError, match="blocks of one size in all files, got 64, 128"):
        open_trace(tmp_path)


def test_captures_of_both_formats_are_one_trace(tmp_path):
    """An upgrade leaves files of the previous format behind."""
    put(tmp_path, [10.0, 14.0, 12.0])
    write(tmp_path, 20, origin=OTHER)
    assert len(list(open_trace(tmp_path))) == 23


def test_blocks_of_two_sizes_are_refused(tmp_path):
    """They cannot be one trace in the previous format either."""
    put(tmp_path, [1.0])
    put(tmp_path, [2.0], number=1, block_tokens=128)
    with pytest.raises(TraceError, match="blocks of one size in all files, got 64, 128"):
        open_trace(tmp_path)


def test_a_folder_without_captures_is_named(tmp_path):
    with pytest.raises(TraceError, match="expected files of `epp serve --capture`"):
        open_trace(tmp_path)


def test_a_captured_folder_is_known_by_its_lines(tmp_path):
    """So that what was tuned on it can be gone on with; packed again it is the same."""
    put(tmp_path, [1.0, 2.0])
    before = content_hash(tmp_path)
    path = put(tmp_path, [1.0, 2.0])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1))
    assert content_hash(tmp_path) == before
    put(tmp_path, [3.0], number=1)
    assert content_hash(tmp_path) != before
