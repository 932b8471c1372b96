"""Every row of the table of what a sequence number can mean, and what a snapshot makes of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.kv_events import stream as module
from epp.core.kv_events.stream import (
    GAP_FRAMES_MAX,
    Apply,
    AskReplay,
    AskSnapshot,
    Forget,
    KVEventStream,
    StreamState,
)

FORGET = Forget()
DAMAGED = 10**16
NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 200) | st.integers(0, 2 * GAP_FRAMES_MAX)


def frame(number):
    return b"frame %d" % number


def opened(*, replays=True, snapshots=False):
    """A stream whose socket is connected and whose first question is answered: nothing so far."""
    stream = KVEventStream(replays=replays, snapshots=snapshots, now=0.0)
    stream.watched(1, 0.0, math.nan, 0.0)
    stream.connected(0.0)
    if replays and not snapshots:
        assert stream.actions() == [AskReplay(0)]
        stream.replay_ended(0.0, marked=True)
    return stream


def came(stream, *numbers, now=1.0):
    """What is to be done when these frames come."""
    for number in numbers:
        stream.received(number, frame(number), now)
    return stream.actions()


def applied(*numbers):
    return [Apply(frame(number)) for number in numbers]


def answered(stream, *numbers, now=1.0, marked=True):
    """What is to be done when these frames are the answer to a question."""
    for number in numbers:
        stream.replayed(number, frame(number), now)
    stream.replay_ended(now, marked=marked)
    return stream.actions()


def seen(stream, now, lives=1):
    """What is to be done when a scrape of `now` shows the process."""
    stream.watched(lives, now, math.nan, now)
    return stream.actions()


def test_frames_in_turn_are_applied():
    """From 0 on all is known."""
    stream = opened()
    assert came(stream, 0, 1, 2) == applied(0, 1, 2)
    assert (stream.state, stream.complete, stream.last) == (StreamState.LIVE, True, 2)


def test_a_frame_that_comes_twice_counts_once():
    """By its number and what is in it."""
    stream = opened()
    came(stream, 0, 1, 2)
    assert came(stream, 1, 2, 3) == applied(3)
    assert stream.counts.duplicates == 2


def test_a_counter_that_begins_anew_is_a_restart():
    """Another frame under an old number: all is forgotten, and asked for from 0."""
    stream = opened()
    came(stream, 0, 1, 2)
    stream.received(1, b"of another process", 2.0)
    assert stream.actions() == [FORGET, AskReplay(0)]
    stream.replayed(0, b"zero", 2.0)
    stream.replayed(1, b"of another process", 2.0)
    stream.replay_ended(2.0, marked=True)
    assert stream.actions() == [Apply(b"zero"), Apply(b"of another process")]
    assert stream.complete
    assert stream.counts.restarts == 1


def test_what_is_missing_is_asked_for_and_grafted_once_the_process_was_seen():
    """Live frames wait meanwhile; those that came twice are applied once."""
    stream = opened()
    came(stream, 0, 1)
    assert came(stream, 4) == [AskReplay(2)]
    assert stream.state is StreamState.REPLAYING
    assert came(stream, 5) == []
    assert answered(stream, 2, 3, 4) == []
    assert seen(stream, 1.0) == [], "a scrape that is not newer than the gap says nothing of it"
    assert seen(stream, 1.2) == applied(2, 3, 4, 5)
    assert (stream.state, stream.complete) == (StreamState.LIVE, True)


def test_a_gap_behind_which_there_is_another_process_is_not_grafted():
    """The hole in the protocol: its counter is beyond our last number already."""
    stream = opened()
    came(stream, 0, 1)
    assert came(stream, 4) == [AskReplay(2)]
    assert answered(stream, 2, 3, 4) == []
    assert seen(stream, 1.2, lives=2) == [FORGET, AskReplay(0)]
    assert answered(stream, 0, 1, 2, 3, 4, now=1.3) == applied(0, 1, 2, 3, 4)
    assert stream.complete


def test_a_gap_behind_which_no_process_is_seen_is_a_restart():
    """Scrapes may have ended with it."""
    stream = opened()
    came(stream, 0, 1, 4)
    answered(stream, 2, 3, 4)
    assert seen(stream, 0.9) == []
    stream.watched(1, 0.9, math.nan, 6.1)
    assert stream.actions() == [FORGET, AskReplay(0)]


def test_a_process_that_the_pool_knows_as_another_begins_anew():
    """Even where its frames look as if nothing had happened."""
    stream = opened()
    came(stream, 0, 1)
    assert seen(stream, 2.0, lives=2) == [FORGET, AskReplay(0)]
    assert not stream.complete


def test_a_damaged_number_is_a_frame_that_did_not_come():
    """The stream asks for that frame as for any other, and nothing counts as lost."""
    stream = opened()
    came(stream, 0, 1)
    stream.received(DAMAGED, frame(2), 1.0)
    assert stream.actions() == []
    assert came(stream, 3) == [AskReplay(2)]
    answered(stream, 2, 3)
    assert seen(stream, 1.2) == applied(2, 3)
    assert (stream.complete, stream.counts.lost, stream.counts.implausible) == (True, 0, 1)
    assert stream.counts.restarts == 0


def test_a_damaged_number_costs_one_frame_where_none_can_be_asked_for():
    """What was told before it does not hold any more."""
    stream = opened(replays=False)
    came(stream, 0, 1)
    stream.received(DAMAGED, frame(2), 1.0)
    assert stream.actions() == []
    assert came(stream, 3) == [FORGET, *applied(3)]
    assert stream.counts.lost == 1


def test_a_damaged_number_among_frames_that_wait_is_left_out():
    """While older frames are asked for."""
    stream = opened()
    came(stream, 0, 1, 4)
    stream.received(DAMAGED, frame(5), 1.0)
    came(stream, 6)
    answered(stream, 2, 3, 4)
    assert seen(stream, 1.2) == [*applied(2, 3, 4), AskReplay(5)]
    assert answered(stream, 5, 6) == applied(5, 6)
    assert stream.counts.lost == 0


def test_numbers_that_go_on_far_ahead_are_those_of_another_process():
    """The second of them shows that it was no damage."""
    stream = opened()
    came(stream, 0, 1)
    assert came(stream, DAMAGED) == []
    assert came(stream, DAMAGED + 1) == [FORGET, AskReplay(0)]
    assert answered(stream, DAMAGED - 1, DAMAGED, DAMAGED + 1) == applied(
        DAMAGED - 1, DAMAGED, DAMAGED + 1
    )
    assert (stream.last, stream.complete) == (DAMAGED + 1, False)
    assert (stream.counts.lost, stream.counts.restarts) == (0, 1)


@given(st.lists(NUMBERS, max_size=60), st.booleans(), st.lists(NUMBERS, max_size=5))
def test_no_frame_makes_more_lost_than_an_engine_could_send(numbers, replays, again):
    """Whatever its number is, and whatever the engine answers when it is asked."""
    stream = opened(replays=replays)
    stream.actions()
    for at, number in enumerate(numbers):
        before = stream.counts.lost
        now = 1.0 + at
        stream.received(number, b"%d" % number, now)
        for action in stream.actions():
            if isinstance(action, AskReplay):
                for old in again:
                    stream.replayed(old, b"%d" % old, now)
                stream.replay_ended(now, marked=True)
        stream.watched(1, now + 0.5, math.nan, now + 0.5)
        assert 0 <= stream.counts.lost - before <= 3 * GAP_FRAMES_MAX
    assert stream.counts.lost <= GAP_FRAMES_MAX * len(numbers)


def test_what_the_engine_does_not_keep_any_more_is_forgotten():
    """It never says that it is too old: the first number tells."""
    stream = opened()
    came(stream, 0, 1, 9)
    answered(stream, 5, 6, 7, 8, 9)
    assert seen(stream, 1.2) == [FORGET, AskReplay(0)]
    assert answered(stream, 5, 6, 7, 8, 9) == applied(5, 6, 7, 8, 9)
    assert (stream.complete, stream.last) == (False, 9)
    assert stream.counts.lost == 3


def test_a_late_join_asks_for_all():
    """What is not kept any more makes it incomplete, and never wrong."""
    stream = KVEventStream(replays=True, now=0.0)
    stream.connected(0.0)
    assert stream.actions() == [AskReplay(0)]
    assert came(stream, 7) == []
    assert answered(stream, 3, 4, 5, 6) == applied(3, 4, 5, 6, 7)
    assert not stream.complete


@pytest.mark.parametrize("held", [False, True])
def test_who_hears_the_first_frame_knows_all_though_nobody_answered(held):
    """Before or after it gave up to ask what there was before."""
    stream = KVEventStream(replays=True, now=0.0)
    stream.connected(0.0)
    if held:
        came(stream, 0)
    stream.replay_ended(1.0, marked=False)
    assert stream.complete is held
    if not held:
        came(stream, 0)
    came(stream, 1)
    assert (stream.state, stream.complete, stream.last) == (StreamState.LIVE, True, 1)


def test_an_answer_with_holes_is_good_up_to_the_first():
    """The rest is asked for again, from the last good frame."""
    stream = opened()
    came(stream, 0, 9)
    answered(stream, 1, 2, 5, 6)
    assert seen(stream, 1.2) == [*applied(1, 2), AskReplay(3)]
    assert answered(stream, 3, 4, 5, 6, 7, 8) == applied(3, 4, 5, 6, 7, 8, 9)
    assert stream.complete


def test_an_answer_that_lost_its_end_is_good_so_far():
    """The marker is lost where a queue was full; what follows shows it."""
    stream = opened()
    came(stream, 0, 4)
    answered(stream, 1, 2, marked=False)
    assert seen(stream, 1.2) == [*applied(1, 2), AskReplay(3)]


def test_who_asks_in_vain_goes_on_with_what_comes():
    """After a few attempts; then it does not know all."""
    stream = opened()
    came(stream, 0, 4)
    answered(stream)
    assert seen(stream, 1.2) == [AskReplay(1)]
    assert answered(stream) == [AskReplay(1)]
    assert answered(stream) == [FORGET, *applied(4)]
    assert (stream.state, stream.complete) == (StreamState.LIVE, False)
    assert stream.counts.replays_vain == 1


def test_nobody_answers_who_has_never_been_heard():
    """Then nothing says that nothing was cached."""
    stream = KVEventStream(replays=True, now=0.0)
    stream.connected(0.0)
    assert answered(stream, marked=False) == [AskReplay(0)]
    assert not stream.complete


def test_replays_have_a_rate():
    """An engine sends nothing new while it sends what is old."""
    stream = opened()
    asked = 0
    for number in range(0, 200, 2):
        stream.received(number, b"%d" % number, 1.0)
        stream.replay_ended(1.0, marked=True)
        stream.watched(1, 2.0, math.nan, 1.0)
        asked += sum(isinstance(action, AskReplay) for action in stream.actions())
    assert asked < module.REPLAYS_MAX
    assert stream.state is StreamState.LIVE
    assert not stream.complete


def worn_out():
    """A stream that has lost frames more often than it may ask for; the time, and its last number."""
    stream = opened()
    for number in range(0, 100, 2):
        stream.received(number, frame(number), 1.0)
        stream.replay_ended(1.0, marked=True)
        seen(stream, 1.0 + 1e-3 * number)
    stream.actions()
    assert (stream.state, stream.complete) == (StreamState.LIVE, False)
    return stream, 98


def test_who_has_asked_too_often_asks_for_all_later():
    """What comes meanwhile counts, until all that the engine keeps takes its place."""
    stream, last = worn_out()
    assert came(stream, last + 1, now=30.0) == applied(last + 1)
    assert seen(stream, 1.0 + module.REPLAYS_S) == [AskReplay(0)]
    assert stream.state is StreamState.REPLAYING
    assert came(stream, last + 2, now=62.0) == []
    told = range(last + 2)
    assert answered(stream, *told, now=62.0) == [FORGET, *applied(*told, last + 2)]
    assert (stream.state, stream.complete) == (StreamState.LIVE, True)
    assert seen(stream, 200.0) == []


@pytest.mark.parametrize("way", ["a gap", "a connection"])
def test_who_has_asked_too_often_asks_for_all_also_where_more_is_missing(way):
    """What is missing since is not all: a stream that goes on to lose frames would never know all."""
    stream, last = worn_out()
    later_s = 1.0 + module.REPLAYS_S
    if way == "a gap":
        assert came(stream, last + 2, now=later_s) == [AskReplay(0)]
    else:
        stream.disconnected(later_s)
        stream.connected(later_s)
        assert came(stream, last + 2, now=later_s) == [AskReplay(0)]
    told = range(last + 2)
    assert answered(stream, *told, now=later_s) == [FORGET, *applied(*told, last + 2)]
    assert (stream.state, stream.complete) == (StreamState.LIVE, True)
    # The next gap is one like any other.
    assert came(stream, last + 4, now=later_s) == [AskReplay(last + 3)]


def test_who_asks_for_all_in_vain_keeps_what_it_knows():
    """And asks again, later still."""
    stream, last = worn_out()
    at_s = 1.0 + module.REPLAYS_S
    for _ in range(3):
        assert seen(stream, at_s) == [AskReplay(0)]
        assert came(stream, last + 1, now=at_s) == []
        assert answered(stream, now=at_s, marked=False) == applied(last + 1)
        assert (stream.state, stream.complete) == (StreamState.LIVE, False)
        last += 1
        assert seen(stream, at_s + module.REPLAYS_S / 2) == []
        at_s += module.REPLAYS_S


def test_who_keeps_less_than_all_is_not_asked_again():
    """It answered: more there is not."""
    stream = KVEventStream(replays=True, now=0.0)
    stream.connected(0.0)
    stream.actions()
    assert answered(stream, 3, 4) == applied(3, 4)
    assert seen(stream, 1_000.0) == []


def test_without_replay_a_gap_forgets():
    """What is gone since may have been in it."""
    stream = opened(replays=False)
    assert came(stream, 0, 1) == applied(0, 1)
    assert stream.complete
    assert came(stream, 3, 4) == [FORGET, *applied(3, 4)]
    assert not stream.complete
    stream.received(2, b"another", 1.0)
    assert stream.actions() == [FORGET, Apply(b"another")]
    stream.received(0, b"another", 1.0)
    assert stream.actions() == [FORGET, Apply(b"another")]
    assert stream.complete, "it begins with this one"


def test_without_replay_a_late_join_is_incomplete():
    stream = opened(replays=False)
    assert came(stream, 5, 6) == applied(5, 6)
    assert not stream.complete


def test_who_comes_back_soon_asks_for_what_was_missed():
    """And grafts it only on the same process."""
    stream = opened()
    came(stream, 0, 1)
    stream.disconnected(2.0)
    seen(stream, 3.0)
    assert stream.state is StreamState.LIVE
    stream.connected(3.5)
    assert stream.actions() == [AskReplay(2)]
    answered(stream, 2, 3, now=3.6)
    assert seen(stream, 3.8) == applied(2, 3)
    assert stream.complete


def test_without_a_connection_it_is_stale_and_then_forgotten():
    """Two seconds, and ten more."""
    stream = opened()
    came(stream, 0, 1)
    stream.disconnected(2.0)
    assert seen(stream, 4.1) == []
    assert stream.state is StreamState.STALE
    assert seen(stream, 14.0) == []
    assert seen(stream, 14.2) == [FORGET]
    stream.connected(20.0)
    assert stream.actions() == [AskReplay(0)]


def test_a_source_that_is_silent_while_its_engine_works_is_stale():
    """There is no heartbeat: the tokens that it computed tell."""
    stream = opened()
    came(stream, 0, 1)
    stream.watched(1, 2.0, 10_000.0, 2.0)
    stream.watched(1, 31.5, 10_100.0, 31.5)
    assert not stream.silent, "a few tokens fill no block"
    stream.watched(1, 32.0, 13_000.0, 32.0)
    assert stream.silent
    assert stream.state is StreamState.STALE
    assert came(stream, 2, now=33.0) == applied(2)
    assert not stream.silent
    assert stream.state is StreamState.LIVE


def test_an_idle_engine_is_not_stale():
    """It computes nothing."""
    stream = opened()
    came(stream, 0)
    for now in range(2, 200):
        stream.watched(1, float(now), 10_000.0, float(now))
    assert stream.state is StreamState.LIVE


def test_what_waits_is_bounded(monkeypatch):
    """Above it all is forgotten and asked for again."""
    monkeypatch.setattr(module, "HELD_BYTES_MAX", 30)
    stream = opened()
    came(stream, 0, 5)
    assert came(stream, 6, 7, 8, 9, 10) == [FORGET, AskReplay(0)]
    assert stream.counts.overflows == 1
    assert stream.waiting_bytes <= 30


def test_an_answer_is_bounded(monkeypatch):
    """What is above is asked for in the next."""
    monkeypatch.setattr(module, "REPLAYED_BYTES_MAX", 20)
    stream = opened()
    came(stream, 0, 6)
    answered(stream, 1, 2, 3, 4, 5)
    assert seen(stream, 1.2) == [*applied(1, 2), AskReplay(3)]


def test_a_payload_that_could_not_be_read_forgets():
    """And then it does not know all."""
    stream = opened()
    came(stream, 0)
    stream.broken(1.0)
    assert stream.actions() == [FORGET]
    assert not stream.complete
    assert came(stream, 1) == applied(1)


def test_an_engine_that_does_not_balance_is_asked_for_all():
    stream = opened()
    came(stream, 0)
    stream.unbalanced(1.0)
    assert stream.actions() == [FORGET, AskReplay(0)]


def test_a_snapshot_takes_the_place_of_a_replay():
    """It names the frame with which the stream goes on; what came meanwhile is applied from there."""
    stream = opened(snapshots=True)
    assert stream.actions() == [AskSnapshot()]
    assert came(stream, 6, 7, 8) == []
    stream.snapshot("epoch-1", 7, [b"all", b"of it"], 1.0)
    assert stream.actions() == [FORGET, Apply(b"all"), Apply(b"of it"), *applied(7, 8)]
    assert (stream.complete, stream.last) == (True, 8)


def test_a_heartbeat_tells_another_epoch_and_lost_frames():
    """Either way a snapshot is asked for; one in place changes nothing."""
    stream = opened(snapshots=True)
    stream.snapshot("epoch-1", 1, [], 1.0)
    stream.actions()
    stream.heartbeat("epoch-1", 0, 1.0, 1.0)
    assert stream.actions() == []
    stream.heartbeat("epoch-1", 3, 1.0, 2.0)
    assert stream.actions() == [AskSnapshot()]
    stream.snapshot("epoch-1", 4, [], 2.0)
    stream.actions()
    stream.heartbeat("epoch-2", 3, 1.0, 3.0)
    assert stream.actions() == [AskSnapshot()]


def test_a_gap_asks_for_a_snapshot_where_there_is_one():
    stream = opened(snapshots=True)
    stream.snapshot("epoch-1", 1, [], 1.0)
    stream.actions()
    assert came(stream, 1, 5) == [*applied(1), AskSnapshot()]


def test_heartbeats_that_are_missed_make_it_stale():
    stream = opened(snapshots=True)
    stream.snapshot("epoch-1", 1, [], 1.0)
    stream.heartbeat("epoch-1", 0, 1.0, 1.0)
    stream.actions()
    seen(stream, 3.0)
    assert stream.state is StreamState.LIVE
    seen(stream, 4.5)
    assert stream.state is StreamState.STALE


@pytest.mark.parametrize("replays", [True, False])
def test_nothing_that_comes_unasked_does_anything(replays):
    """Answers to no question."""
    stream = opened(replays=replays)
    came(stream, 0)
    stream.replayed(5, frame(5), 1.0)
    stream.replay_ended(1.0, marked=True)
    assert stream.actions() == []
    assert stream.last == 0
