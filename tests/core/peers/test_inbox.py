"""What waits to be learnt, in bounds."""

from itertools import pairwise

from epp.core.decision.scheduler import Scheduler
from epp.core.peers.frames import Frame, Kind, Record, encode_record
from epp.core.peers.inbox import CHAIN_BYTES_MAX, WAITING_BYTES_MAX, Inbox, Received


class Learner(Scheduler):
    """Keeps what it is told."""

    def __init__(self):
        self.learnt = []

    def take(self, given, now):
        self.learnt.append((given.index, given.keys, given.slot, given.stamp))


def frame(*records, indexes=(5,)):
    return Frame(b"8 bytes.", 1, Kind.LIVE, 0.0, indexes, b"".join(map(encode_record, records)))


def applied(inbox, records_max=100, now=2.0):
    learner = Learner()
    looked_at = inbox.apply(records_max, learner, {7: 3}, {5: "prefix"}, now)
    return looked_at, learner.learnt


def test_records_are_learnt_in_order_and_a_piece_at_a_time():
    inbox = Inbox(Received())
    inbox.put(frame(*(Record(7, 500, ((bytes([n]),),)) for n in range(5))), 1.0)
    inbox.put(frame(Record(7, 0, ((b"last",),))), 1.0, age_s=10.0)
    looked_at, learnt = applied(inbox, 3)
    assert (looked_at, bool(inbox)) == (3, True)
    assert learnt == [("prefix", [bytes([n])], 3, 0.5) for n in range(3)]
    assert inbox.lag_s == 1.5
    _, learnt = applied(inbox)
    assert not inbox
    assert learnt[-1] == ("prefix", [b"last"], 3, -9.0)
    assert applied(inbox) == (0, [])


def test_each_record_is_counted_by_what_became_of_it():
    counts = Received()
    inbox = Inbox(counts)
    suffix = (b"unknown!", b"12345678")
    inbox.put(
        frame(
            Record(7, 0, ((b"key",), (b"of an index that is not here",))),
            Record(8, 0, ((b"key",),)),
            Record(7, 0, ((suffix, b"known"),)),
            indexes=(5, 6),
        ),
        1.0,
    )
    inbox.put(Frame(b"8 bytes.", 2, Kind.LIVE, 0.0, (5,), b"broken"), 1.0)
    _, learnt = applied(inbox)
    assert [keys for _, keys, _, _ in learnt] == [[b"key"], [b"known"]]
    assert (counts.applied, counts.unknown_endpoint, counts.unknown_chain) == (1, 1, 1)
    assert counts.unreadable == 1
    assert inbox.chain_lost


def test_a_chain_goes_on_where_one_ended_that_was_for_another_endpoint():
    """Nothing is learnt of an endpoint that is not here, but its chain is remembered."""
    inbox = Inbox(Received())
    whole = bytes(range(200))
    more = (whole[-8:], b"abcdefgh")
    inbox.put(frame(Record(8, 0, ((whole,),)), Record(7, 0, ((more,),))), 1.0)
    _, learnt = applied(inbox)
    assert [keys for _, keys, _, _ in learnt] == [[whole + b"abcdefgh"]]


def test_no_chain_grows_without_end():
    counts = Received()
    inbox = Inbox(counts)
    piece = bytes(100_000)
    ends = [bytes([number] * 8) for number in range(10)]
    inbox.put(frame(Record(7, 0, ((piece + ends[0],),))), 1.0)
    for before, after in pairwise(ends):
        inbox.put(frame(Record(7, 0, (((before, piece + after),),))), 1.0)
    _, learnt = applied(inbox)
    assert max(len(key) for _, keys, _, _ in learnt for key in keys) <= CHAIN_BYTES_MAX
    assert counts.unknown_chain > 0


def test_of_more_than_may_wait_the_oldest_goes():
    counts = Received()
    inbox = Inbox(counts)
    record = Record(7, 0, ((bytes(60_000),),))
    frames = 3 * WAITING_BYTES_MAX // 60_000
    for _ in range(frames):
        inbox.put(frame(record), 1.0)
    inbox.put(frame(), 1.0)
    _, learnt = applied(inbox, 1_000)
    assert len(learnt) == frames - counts.dropped
    assert len(learnt) * 60_000 <= WAITING_BYTES_MAX
