"""What is kept of what was told, and what is known of what was missed: both bounded."""

import pytest

from epp.core.peers.frames import Frame, Kind
from epp.core.peers.retelling import (
    AGAIN_BYTES_PER_OUTGOING,
    AGAIN_PER_OUTGOING_MAX,
    ASKS_MAX,
    KEPT_BYTES_MAX,
    KEPT_FRAMES_MAX,
    KEPT_S_MAX,
    RANGE_FRAMES_MAX,
    RANGES_MAX,
    MissedFrames,
    SentFrames,
)


def frame(number, records=b"r"):
    return Frame(b"original", number, Kind.LIVE, 1.0, records=records, load=b"l" * 16, whole=True)


def told(*numbers, records=b"r", step_s=0.0):
    kept = SentFrames()
    for turn, number in enumerate(numbers):
        kept.keep(frame(number, records), turn * step_s)
    return kept


def numbers(kept, now=0.0):
    """All that is told again, however many turns it takes."""
    found = []
    while frames := kept.again(now):
        found += [each.number for each in frames]
    return found


def test_what_is_wanted_is_told_once_with_its_age_and_without_its_load():
    kept = told(5, 6, 7)
    kept.want(6, 6)
    kept.want(6, 6)
    (again,) = kept.again(3.0)
    assert (again.number, again.records, again.load, again.whole) == (6, b"r", b"", False)
    assert again.age_s == 3.0
    assert kept.again(3.0) == []


def test_what_is_not_kept_is_not_told():
    """Too old, never told, or before a number that was left out; of nonsense nothing."""
    kept = told(5, 6, 9, 10)
    for first, last in ((0, 8), (11, 2**63), (10, 9), (-5, -1)):
        kept.want(first, last)
    assert numbers(kept) == []
    kept.want(-(2**63), 2**63)
    assert numbers(kept) == [9, 10]
    SentFrames().want(1, 2)


@pytest.mark.parametrize(
    ("records", "step_s", "left"),
    [
        (b"", 0.0, KEPT_FRAMES_MAX),
        (bytes(KEPT_BYTES_MAX // 100), 0.0, 100),
        (b"", 1.0, int(KEPT_S_MAX) + 1),
    ],
    ids=["frames", "bytes", "age"],
)
def test_what_is_kept_is_bounded(records, step_s, left):
    kept = told(*range(1, 2 * KEPT_FRAMES_MAX), records=records, step_s=step_s)
    kept.want(1, 2 * KEPT_FRAMES_MAX)
    assert len(numbers(kept)) == left


def test_what_is_told_at_once_is_bounded():
    kept = told(*range(100))
    kept.want(0, 100)
    assert len(kept.again(0.0)) == AGAIN_PER_OUTGOING_MAX
    large = told(*range(10), records=bytes(AGAIN_BYTES_PER_OUTGOING))
    large.want(0, 100)
    assert len(large.again(0.0)) == 1


def test_a_gap_closes_from_wherever_it_is_filled():
    missed = MissedFrames()
    missed.add(3, 7)
    assert missed.came(5)
    assert not missed.came(5)
    assert not missed.came(8)
    assert missed.asked() == ([(3, 4), (6, 7)], False)
    assert all(missed.came(number) for number in (3, 4, 7, 6))
    assert not missed


def test_who_asks_in_vain_gives_up_and_says_so():
    missed = MissedFrames()
    missed.add(1, 2)
    asked = [missed.asked() for _ in range(ASKS_MAX)]
    assert asked == [([(1, 2)], False)] * ASKS_MAX
    assert missed.asked() == ([], True)
    assert not missed


def test_who_drops_a_gap_says_so_once():
    """Because there are too many, whether they came or were split."""
    missed = MissedFrames()
    for number in range(0, 2 * RANGES_MAX, 2):
        missed.add(number, number)
    assert not missed.asked()[1]
    missed.add(2 * RANGES_MAX, 2 * RANGES_MAX + 2)
    assert missed.asked()[1]
    assert not missed.asked()[1]
    missed.came(2 * RANGES_MAX + 1)
    assert missed.asked()[1]
    assert not missed.asked()[1]


def test_who_cuts_a_gap_says_so_once():
    missed = MissedFrames()
    missed.add(1, RANGE_FRAMES_MAX)
    assert not missed.asked()[1]
    missed.add(RANGE_FRAMES_MAX + 2, 2 * RANGE_FRAMES_MAX + 2)
    assert missed.asked()[1]
    assert not missed.asked()[1]


def test_what_a_liar_can_make_us_ask_for_is_bounded():
    """A number may be anything, and every second one may be missing."""
    missed = MissedFrames()
    missed.add(1, 2**63)
    ((first, last),), _ = missed.asked()
    assert last - first + 1 == RANGE_FRAMES_MAX
    for number in range(0, 10 * RANGES_MAX, 2):
        missed.add(number, number)
    assert len(missed._gaps) == RANGES_MAX
    missed.add(0, RANGE_FRAMES_MAX)
    for number in range(1, RANGE_FRAMES_MAX, 2):
        missed.came(number)
    assert len(missed._gaps) <= RANGES_MAX
