"""Frames: a record comes back, and a sequence of frames can be split again."""

import gzip
from base64 import b64encode
from random import Random
from typing import ClassVar

import msgspec
import pytest

from epp.core.duration import Duration
from epp.core.journal.events import Level, Lost, Opened, Ticked
from epp.journal.frames import (
    LONG_FRAME_BYTES,
    SEGMENT_NAME,
    ended_frame,
    ended_of,
    frame_of,
    framed,
    packed_frames,
    record_of_frame,
    segment_file,
)
from epp.journal.records import (
    Applied,
    EndpointState,
    RefusedDocument,
    ToldApplied,
    ToldRefused,
    ToldSetting,
    ToldStates,
    told_change,
    told_plugin,
)
from epp.plugins.contract import Parameters


@pytest.mark.parametrize(
    "record",
    [
        Opened(level=Level.INPUTS, origin="a", segment=3, picker="homing-0", began_s=1.5),
        ToldSetting(
            number=1, generation=2, scorers=("a",), weights=(1.0,), by_blocks=(), costs=(None,)
        ),
        ToldStates(number=1, at_s=2.0, states={"pod-1": EndpointState("slow", "x", 1.0)}),
        told_change(Applied(generation=2, hash="b", changes=("c",), weights={"q": 1.0})),
        told_change(RefusedDocument(at_s=1.0, problem="p")),
        Lost(events=7),
        Ticked(at_s=0.1 + 0.2),
    ],
)
def test_a_record_comes_back(record):
    """Its type is in the frame."""
    assert record_of_frame(frame_of(record)) == record


def test_changes_have_a_record_each():
    """A document came into force, or was rejected."""
    assert isinstance(told_change(Applied()), ToldApplied)
    assert isinstance(told_change(RefusedDocument(at_s=1.0, problem="p")), ToldRefused)


@pytest.mark.parametrize("frame", [b"", b"?", b"j", b"d\x00", frame_of(Lost(events=1))[:-1]])
def test_other_bytes_are_no_record(frame):
    with pytest.raises(msgspec.DecodeError):
        record_of_frame(frame)


@pytest.mark.parametrize("level", list(Level))
def test_the_name_of_a_file_says_level_origin_and_number(level):
    """The pattern of the other level does not match it."""
    name = segment_file(level, "20260101T000000-0000000a", 7)
    (found,) = [level for level in Level if SEGMENT_NAME[level].fullmatch(name)]
    assert found is level
    assert SEGMENT_NAME[level].fullmatch(name).groups() == ("20260101T000000-0000000a", "000007")


@pytest.mark.parametrize("frame_bytes", [300, LONG_FRAME_BYTES, 2 * LONG_FRAME_BYTES])
def test_frames_of_any_length_are_read_as_any_gzip(frame_bytes):
    """Three quarters of each frame are those of another one, and repetition nearby is found."""
    random = Random(frame_bytes)
    heads = [random.randbytes(frame_bytes * 9 // 16) for _ in range(2)]
    frames = b"".join(
        framed(b64encode(random.choice(heads) + random.randbytes(frame_bytes * 3 // 16)))
        for _ in range(64)
    )
    found = packed_frames(frames, 64)
    assert gzip.decompress(found) == frames
    # Six bits are in a character of eight.
    assert len(found) < len(frames) * (0.4 if frame_bytes == 300 else 0.78)


def test_an_end_names_its_decision():
    """Any number, and the bytes as they were."""
    assert ended_of(ended_frame(2**40, b"head")) == (2**40, b"head")


def test_members_one_after_another_are_one_file():
    """Each frame has its length before it."""
    file = packed_frames(framed(b"one"), 1) + packed_frames(framed(b"three"), 1)
    assert gzip.decompress(file) == b"\x03\0\0\0one\x05\0\0\0three"


class Odd(Parameters, frozen=True):
    type_name: ClassVar[str] = "odd-scorer"
    wait: Duration = Duration(1.5)
    other: object = None


def test_a_plugin_is_kept_as_a_configuration_spells_it():
    """One with a parameter that cannot be is left out."""
    told = told_plugin("odd-scorer", Odd())
    assert msgspec.msgpack.decode(told.parameters)["wait"] == "1.500000000s"
    assert told_plugin("odd-scorer", Odd(other=object())) is None
