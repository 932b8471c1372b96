import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.peers.snapshots import (
    SNAPSHOT_AGE_S_MAX,
    SnapshotError,
    feed,
    gathered,
    pack,
    unpack,
)
from tests.shell.peers.rig import FakeExchange

NOW_S = 1_800_000_000.0


@given(st.lists(st.binary(max_size=200), max_size=20), st.floats(0.0, SNAPSHOT_AGE_S_MAX - 1))
def test_what_was_packed_comes_out(frames, age_s):
    """With its age, to a millisecond."""
    found, found_age_s = unpack(pack(frames, NOW_S - age_s), NOW_S)
    assert found == frames
    assert math.isclose(found_age_s, age_s, abs_tol=0.001)


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(0, 1_000), st.integers(1, 255))
def test_any_byte_that_changed_is_noticed(frames, position, change):
    """In the head, the checksum or a frame."""
    content = bytearray(pack(frames, NOW_S))
    content[position % len(content)] ^= change
    with pytest.raises(SnapshotError):
        unpack(bytes(content), NOW_S)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(content):
    with pytest.raises(SnapshotError):
        unpack(content, NOW_S)


@pytest.mark.parametrize("cut", [1, 3, 4, 10])
def test_a_snapshot_that_lies_about_its_lengths_is_refused(cut, monkeypatch):
    """Somebody may write the checksum of nonsense."""
    monkeypatch.setattr("epp.shell.peers.snapshots._digest", lambda *_: bytes(32))
    content = pack([b"one", b"another"], NOW_S)
    with pytest.raises(SnapshotError, match="frame"):
        unpack(content[:-cut], NOW_S)


@pytest.mark.parametrize(
    ("age_s", "problem"),
    [(3601.0, "it is 3601 s old"), (-61.0, "it is -61 s old"), (1e9, "old, expected -60 to 3600")],
)
def test_what_is_too_old_or_of_the_future_is_refused(age_s, problem):
    with pytest.raises(SnapshotError, match=problem):
        unpack(pack([b"x"], NOW_S - age_s), NOW_S)


def test_clocks_may_differ_a_little():
    """What was made a moment from now is new."""
    assert unpack(pack([b"x"], NOW_S + 30), NOW_S) == ([b"x"], 0.0)


def test_another_version_is_told():
    content = bytearray(pack([], NOW_S))
    content[4] = 2
    with pytest.raises(SnapshotError, match="it has version 2, expected 1"):
        unpack(bytes(content), NOW_S)


async def test_of_too_much_the_newest_is_kept():
    """Frames come oldest first."""
    exchange = FakeExchange([bytes((number,)) * 100 for number in range(10)])
    frames = await gathered(exchange, bytes_max=400)
    assert frames == exchange.known[-3:]
    assert len(pack(frames, NOW_S)) <= 400


async def test_what_is_fed_is_applied_before_the_next_is_fed():
    """So that nothing piles up."""
    exchange = FakeExchange()
    await feed(exchange, [b"a", b"b"], 7.0)
    assert exchange.snapshot_frames == [(b"a", 7.0), (b"b", 7.0)]
    assert (exchange.applied, exchange.pending()) == (2, False)
