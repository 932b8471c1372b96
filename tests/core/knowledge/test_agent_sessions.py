"""Agent sessions: what they need at each endpoint, who is paused, and invariants with random turns."""

import pytest
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.core.knowledge.agent_sessions import (
    ROOM,
    AgentSessions,
    AgentSessionSettings,
    Room,
    Standing,
)
from tests.builders import request

CAPACITY = 1_000


def sessions(**parameters):
    parameters = {"capacity_tokens": CAPACITY, "idle_lease_seconds": 30.0} | parameters
    return AgentSessions(AgentSessionSettings(**parameters))


def turn(session, tokens=100, **fields):
    """Return a request of `session` that needs `tokens` with its answer."""
    headers = {"session-id": session} if session else {}
    return request(headers=headers, prompt_tokens=tokens - 1, output_tokens_max=1, **fields)


def run(index, session, slot=0, now=0.0, tokens=100):
    """Begin and end a turn."""
    one = turn(session, tokens)
    index.release(one, slot, index.record(one, slot, now), now)


def test_a_session_is_new_then_admitted_then_paused():
    index = sessions()
    assert index.standing(turn("a")) is Standing.NEW
    run(index, "a", tokens=600)
    assert index.standing(turn("a")) is Standing.ADMITTED
    run(index, "b", tokens=600, now=1.0)
    assert index.standing(turn("a")) is Standing.PAUSED
    assert index.standing(turn("b")) is Standing.ADMITTED
    assert (index.tokens_needed(0), index.paused) == (600.0, 1)


def test_a_request_without_a_session_is_not_counted():
    index = sessions()
    one = turn("")
    assert index.standing(one) is Standing.ADMITTED
    assert index.record(one, 0, 0.0) is None
    index.release(one, 0, None, 1.0)
    assert index.tokens_needed(0) == 0.0
    assert index.match(one, 2, 0.0).total == 0


def test_the_longest_idle_session_is_paused_first():
    index = sessions()
    for now, name in enumerate("abc"):
        run(index, name, tokens=300, now=float(now))
    run(index, "a", tokens=300, now=3.0)
    run(index, "d", tokens=400, now=4.0)
    paused = [name for name in "abcd" if index.standing(turn(name)) is Standing.PAUSED]
    assert paused == ["b"]


def test_a_running_session_is_never_paused():
    index = sessions()
    one = turn("a", 700)
    key = index.record(one, 0, 0.0)
    run(index, "b", tokens=700, now=1.0)
    # The session that just ended its turn is idle, and is the only one that may be paused.
    assert index.standing(turn("a")) is Standing.ADMITTED
    assert index.standing(turn("b")) is Standing.PAUSED
    index.release(one, 0, key, 2.0)
    assert index.standing(turn("a")) is Standing.ADMITTED


def test_one_session_alone_may_need_more_than_there_is():
    index = sessions()
    assert index.rooms(turn("a", 5_000), 1, 0.0).tolist() == [Room.FREE]
    run(index, "a", tokens=5_000)
    assert index.standing(turn("a")) is Standing.ADMITTED


def test_the_room_of_idle_sessions_counts_by_their_time():
    index = sessions(idle_lease_seconds=30.0)
    for now, name in ((0.0, "a"), (20.0, "b")):
        run(index, name, tokens=500, now=now)
    rooms = [index.rooms(turn("c", size), 2, 31.0).tolist() for size in (500, 501, 1_000)]
    assert rooms == [
        [Room.OF_LONG_IDLE, Room.FREE],
        [Room.OF_IDLE, Room.FREE],
        [Room.OF_IDLE, Room.FREE],
    ]
    running = turn("b", 500)
    index.record(running, 0, 32.0)
    assert index.rooms(turn("c", 501), 1, 33.0).tolist() == [Room.NONE]


def test_a_match_names_the_endpoint_of_the_last_turn_and_the_room():
    index = sessions()
    run(index, "a", slot=1)
    run(index, "b", slot=0, tokens=950)
    known = index.match(turn("a"), 3, 1.0)
    assert (known.matched.tolist(), known.total) == ([0, 1, 0], 1)
    assert known.columns[ROOM].tolist() == [Room.FREE] * 3
    new = index.match(turn("c"), 3, 1.0)
    assert new.matched.tolist() == [0, 0, 0]
    assert new.columns[ROOM].tolist() == [Room.OF_IDLE, Room.FREE, Room.FREE]


def test_the_size_that_an_engine_reports_replaces_the_configured_one():
    index = sessions(util_threshold=0.5)
    assert index.rooms(turn("b", 400), 1, 0.0).tolist() == [Room.FREE]
    run(index, "a", tokens=300)
    assert index.rooms(turn("b", 400), 1, 0.0).tolist() == [Room.OF_IDLE]
    index.resize(0, 100, 16)
    assert index.rooms(turn("b", 400), 1, 0.0).tolist() == [Room.FREE]


def test_an_endpoint_that_leaves_takes_its_sessions_room():
    index = sessions()
    one = turn("a", 300)
    key = index.record(one, 0, 0.0)
    index.forget(0)
    assert index.standing(one) is Standing.NEW
    assert index.tokens_needed(0) == 0.0
    index.release(one, 0, key, 1.0)
    assert index.tokens_needed(0) == 0.0


def test_a_session_moves_with_its_turns():
    index = sessions()
    run(index, "a", slot=0, tokens=300)
    run(index, "a", slot=1, tokens=400)
    assert (index.tokens_needed(0), index.tokens_needed(1)) == (0.0, 400.0)


def test_parallel_requests_count_as_the_largest():
    index = sessions()
    first, second = turn("a", 500), turn("a", 200)
    keys = [index.record(one, 0, 0.0) for one in (first, second)]
    assert index.tokens_needed(0) == 500.0
    index.release(first, 0, keys[0], 1.0)
    run(index, "b", tokens=600, now=1.0)
    assert index.standing(turn("a")) is Standing.ADMITTED, "it still runs"


def test_old_and_surplus_sessions_are_forgotten():
    index = sessions(sessions_max=2, eviction_ttl_seconds=10.0)
    for now, name in enumerate("abc"):
        run(index, name, now=float(now))
    assert [index.standing(turn(name)) for name in "abc"] == [
        Standing.NEW,
        Standing.ADMITTED,
        Standing.ADMITTED,
    ]
    index.expire(11.5)
    assert index.standing(turn("b")) is Standing.NEW
    assert index.measures().entries == 1
    assert index.tokens_needed(0) == 100.0


def test_a_session_is_named_by_the_first_header():
    settings = AgentSessionSettings(headers=("x-mine", "session-id"))
    named = [
        settings.session_in(request(headers=headers, session_id=own))
        for headers, own in (
            ({"session-id": "b", "x-mine": "a"}, ""),
            ({"session-id": "b", "x-mine": ""}, ""),
            ({"session-id": "b"}, "c"),
            ({}, ""),
        )
    ]
    assert named == ["a", "b", "c", ""]


class AnyTurns(RuleBasedStateMachine):
    """Random turns of sessions at two endpoints, each admitted where the index sees room."""

    def __init__(self):
        super().__init__()
        self.index = sessions(idle_lease_seconds=5.0)
        self.now = 0.0
        self.running = []
        self.grown = {0: False, 1: False}

    @rule(name=st.sampled_from("abcdef"), tokens=st.integers(10, 700))
    def take_a_turn(self, name, tokens):
        one = turn(name, tokens)
        match = self.index.match(one, 2, self.now)
        if self.index.standing(one) is Standing.ADMITTED:
            slot = int(match.matched.argmax())
        else:
            room = match.columns[ROOM]
            slot = int(room.argmax())
            if room[slot] == Room.NONE:
                return
        key = self.index.record(one, slot, self.now)
        self.running.append((one, slot, key))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_a_turn(self, data):
        at = data.draw(st.integers(0, len(self.running) - 1))
        one, slot, key = self.running.pop(at)
        self.index.release(one, slot, key, self.now)

    @rule(after_s=st.floats(0, 10))
    def time_passes(self, after_s):
        self.now += after_s

    @rule(slot=st.integers(0, 1))
    def an_endpoint_restarts(self, slot):
        self.index.forget(slot)
        self.running = [entry for entry in self.running if entry[1] != slot]

    @invariant()
    def sessions_fit_unless_all_run_or_one_is_alone(self):
        for slot in (0, 1):
            there = [
                session
                for session in self.index._sessions.values()
                if session.admitted and session.slot == slot
            ]
            needed = sum(session.tokens for session in there)
            assert self.index.tokens_needed(slot) == pytest.approx(needed)
            if needed > CAPACITY and len(there) > 1:
                assert all(session.running for session in there)

    @invariant()
    def a_running_session_is_admitted(self):
        for session in self.index._sessions.values():
            assert session.admitted or not session.running


TestAnyTurns = AnyTurns.TestCase
TestAnyTurns.settings = limits(max_examples=80, stateful_step_count=40, deadline=None)
