"""Frames: what is packed comes back, and is a number of bytes that says itself."""

import gzip
from typing import ClassVar

import msgspec
import pytest
from epp.shell.operators.decisions.history_format import (
    APPLIED,
    HEAD,
    LENGTH_BYTES,
    LOST,
    REFUSED_DOCUMENT,
    SETTING,
    STATES,
    Head,
    length_of,
    told_of,
)

from epp.core.duration import Duration
from epp.journal.frames import ended_frame, ended_of, frame_of, framed, packed_frames
from epp.journal.records import (
    Applied,
    EndpointState,
    RefusedDocument,
    ToldRefused,
    ToldSetting,
    ToldStates,
    told_plugin,
)
from epp.plugins.contract import Parameters


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (HEAD, Head(origin="a", picker="homing-0", began_s=1.5)),
        (
            SETTING,
            ToldSetting(
                number=1, generation=2, scorers=("a",), weights=(1.0,), by_blocks=(), costs=(None,)
            ),
        ),
        (STATES, ToldStates(number=1, at_s=2.0, states={"pod-1": EndpointState("slow", "x", 1.0)})),
        (APPLIED, Applied(generation=2, hash="b", changes=("c",), weights={"q": 1.0})),
        (REFUSED_DOCUMENT, ToldRefused(document=RefusedDocument(at_s=1.0, problem="p"))),
        (LOST, 7),
    ],
)
def test_what_is_told_comes_back(kind, told):
    """By its first byte."""
    assert told_of(frame_of(kind, told)) == told


def test_an_end_names_its_decision():
    """Any number, and the bytes as they were."""
    assert ended_of(ended_frame(2**40, b"head")) == (2**40, b"head")


def test_frames_say_their_length_in_any_gzip():
    """Members one after another are one file."""
    file = packed_frames(framed(b"one")) + packed_frames(framed(b"three"))
    frames = gzip.decompress(file)
    assert length_of(frames[:LENGTH_BYTES]) == 3
    assert frames[LENGTH_BYTES:].startswith(b"one")


class Odd(Parameters, frozen=True):
    type_name: ClassVar[str] = "odd-scorer"
    wait: Duration = Duration(1.5)
    other: object = None


def test_a_plugin_is_kept_as_a_configuration_spells_it():
    """One with a parameter that cannot be is left out."""
    told = told_plugin("odd-scorer", Odd())
    assert msgspec.msgpack.decode(told.parameters)["wait"] == "1.500000000s"
    assert told_plugin("odd-scorer", Odd(other=object())) is None
