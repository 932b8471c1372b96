"""The last records, in memory that is taken once."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.operators.decisions.record_ring import GONE, RecordRing


def framed_bytes(record):
    return 8 + (len(record) + 3) // 4 * 4


class Remembers:
    """What a ring must keep, by its contract: the newest that fit."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self.kept = []

    def append(self, record):
        if framed_bytes(record) > self.size_bytes:
            return
        self.kept.append(record)
        while sum(map(framed_bytes, self.kept)) > self.size_bytes:
            del self.kept[0]


@given(
    words=st.integers(4, 40),
    records=st.lists(st.binary(max_size=60) | st.binary(max_size=200), max_size=60),
)
def test_the_newest_that_fit_are_kept_whole(words, records):
    """Newest first, by place as by turn, wherever the end of the buffer falls."""
    ring, model = RecordRing(4 * words), Remembers(4 * words)
    places = []
    for record in records:
        places.append((ring.append(record), record))
        model.append(record)
        assert list(ring.newest_first()) == model.kept[::-1]
        assert len(ring) == len(model.kept)
        kept = [(place, one) for place, one in places if place != GONE]
        still = len(kept) - len(model.kept)
        assert [ring.get(place) for place, _ in kept] == [None] * still + model.kept


@given(
    kept=st.lists(st.binary(max_size=40), min_size=1, max_size=20),
    meanwhile=st.lists(st.lists(st.binary(max_size=40), max_size=6), max_size=20),
)
def test_what_is_kept_between_two_records_does_not_disturb(kept, meanwhile):
    """A reader is given what was there when it began, as far as it is still there."""
    ring = RecordRing(256)
    for record in kept:
        ring.append(record)
    expected = list(ring.newest_first())
    given_ = []
    reading = ring.newest_first()
    for appended in [*meanwhile, *([[]] * len(kept))]:
        record = next(reading, None)
        if record is None:
            break
        given_.append(record)
        for one in appended:
            ring.append(one)
    assert given_ == expected[: len(given_)]
    assert next(reading, None) is None


def test_a_record_longer_than_the_ring_is_not_kept():
    """Nor does it drop any other."""
    ring = RecordRing(64)
    place = ring.append(b"a" * 20)
    assert ring.append(b"b" * 57) == GONE
    assert ring.get(GONE) is None
    assert ring.get(place) == b"a" * 20
    assert ring.append(b"c" * 56) != GONE
    assert list(ring.newest_first()) == [b"c" * 56]


def test_all_memory_is_taken_at_once():
    """What is kept later needs no more."""
    tracemalloc.start()
    try:
        ring = RecordRing(100_000)
        empty, _ = tracemalloc.get_traced_memory()
        for number in range(10_000):
            ring.append(b"%0100d" % number)
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100_000 < empty < 110_000
    assert full < empty + 1_000


@pytest.mark.parametrize("size_bytes", [0, 12, 18, 2**32])
def test_a_size_that_words_do_not_fill_is_refused(size_bytes):
    """The sentence says what is possible."""
    with pytest.raises(ValueError, match=f"multiple of 4 bytes .* got {size_bytes}"):
        RecordRing(size_bytes)


@given(
    words=st.integers(4, 40),
    records=st.lists(st.tuples(st.binary(max_size=60), st.binary(max_size=60)), max_size=40),
)
def test_the_head_of_a_record_can_be_written_anew(words, records):
    """Wherever the end of the buffer falls; its rest and all others stay, and what is gone is gone."""
    ring, model = RecordRing(4 * words), Remembers(4 * words)
    places = []
    for number, (rest, longer) in enumerate(records):
        # No two alike, so that the model knows which goes first.
        record = bytes([number]) + rest
        places.append(ring.append(record))
        model.append(record)
        place = places[len(longer) % len(places)]
        known = ring.get(place)
        if known is None:
            assert not ring.overwrite(place, b"")
            continue
        head = (known[:1] + longer)[: len(known)]
        at = model.kept.index(known)
        assert ring.overwrite(place, head)
        assert ring.get(place) == head + known[len(head) :]
        model.kept[at] = head + known[len(head) :]
        assert sorted(ring.newest_first()) == sorted(model.kept)


@given(records=st.lists(st.binary(max_size=60), max_size=20), count=st.integers(0, 25))
def test_the_oldest_go_while_they_are_wanted_no_more(records, count):
    """In their order, no more at once than asked for; those behind one that stays remain."""
    ring = RecordRing(4096)
    for record in records:
        ring.append(record)
    short = next((at for at, record in enumerate(records) if len(record) >= 30), len(records))
    expected = min(short, count)
    assert ring.drop_oldest(lambda record: len(record) < 30, count) == expected
    assert list(ring.newest_first()) == records[expected:][::-1]
    ring.append(b"next")
    assert next(ring.newest_first()) == b"next"
