"""Agent sessions in flow control: admitted ones pass, others wait for room, in order and not for ever."""

from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.core.flow.agent_admission import AgentAdmission, Rank
from epp.core.flow.bands import State, Ticket
from epp.core.flow.control import FlowControl
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings
from epp.core.knowledge.agent_sessions import (
    ROOM,
    AgentSessions,
    AgentSessionSettings,
    Room,
    Standing,
)
from tests.builders import request

CAPACITY = 1_000
HEAD_WAIT_S = 20.0
AGENTS = BandSettings(fairness=Fairness.SESSIONS)


class Pods:
    """Endpoints that count agent sessions, and have any number of slots while `is_open`."""

    def __init__(self, count=1, head_wait_s_max=HEAD_WAIT_S):
        self.count = count
        self.is_open = True
        self.admission = AgentAdmission(head_wait_s_max=head_wait_s_max)
        self.index = AgentSessions(
            AgentSessionSettings(capacity_tokens=CAPACITY, idle_lease_seconds=5.0)
        )
        self.running = {}
        self.forced = False

    def is_empty(self, now):
        return False

    def has_room(self, asked, now):
        return self.is_open

    def hold_s(self, asked, now):
        return 0.0

    def ranks(self, tickets, now):
        return [
            self.admission.rank(self.index.standing(one.request), now - one.enqueued_at_s)
            for one in tickets
        ]

    def admits(self, asked, waited_s, now):
        room = self.index.rooms(asked, self.count, now)
        return room.max() >= self.admission.least_room(waited_s)

    def place(self, asked, now):
        match = self.index.match(asked, self.count, now)
        slot = int((match.columns[ROOM] + match.matched / 2).argmax())
        if match.columns[ROOM][slot] == Room.NONE:
            self.forced = True
        self.running[asked.request_id] = (asked, slot, self.index.record(asked, slot, now))
        return slot

    def saturation(self, asked, now):
        return 1.0

    def cost_tokens(self, asked, decision):
        return 1.0

    def why_full(self, asked, now):
        return "no room"

    def end(self, name, now):
        asked, slot, key = self.running.pop(name)
        self.index.release(asked, slot, key, now)


def queue(pods, **fields):
    settings = FlowSettings(default_band=AGENTS, agents=pods.admission, wait_s_max=0.0, **fields)
    return FlowControl(settings, pods, 0.0)


def ticket(name, session, tokens=100, **fields):
    asked = request(
        request_id=name,
        headers={"session-id": session} if session else {},
        prompt_tokens=tokens - 1,
        output_tokens_max=1,
        **fields,
    )
    return Ticket(request=asked, flow=session)


def names(verdicts):
    return [verdict.ticket.request.request_id for verdict in verdicts]


def test_new_sessions_wait_for_room_in_their_order():
    """A smaller one does not pass a larger one."""
    pods = Pods(head_wait_s_max=0.0)
    control = queue(pods)
    assert names(control.enqueue(ticket("a1", "a", 900), 0.0)) == ["a1"]
    assert control.enqueue(ticket("b1", "b", 600), 1.0) == []
    assert control.enqueue(ticket("c1", "c", 50), 2.0) == []
    assert control.pump(3.0) == []
    pods.end("a1", 4.0)
    assert control.pump(4.0) == [], "the session keeps its room for the time of a tool call"
    assert names(control.pump(9.0)) == ["b1", "c1"]
    assert pods.index.standing(ticket("a2", "a").request) is Standing.PAUSED


def test_turns_of_admitted_sessions_pass_those_that_wait():
    pods = Pods()
    control = queue(pods, requests_max=1)
    control.enqueue(ticket("a1", "a", 900), 0.0)
    control.enqueue(ticket("b1", "b", 600), 0.5)
    pods.end("a1", 1.0)
    assert names(control.enqueue(ticket("a2", "a", 950), 1.5)) == ["a2"], "the queue is full"
    assert control.requests == 1


def test_admitted_sessions_are_first_once_the_gate_opens():
    pods = Pods()
    control = queue(pods)
    control.enqueue(ticket("a1", "a", 300), 0.0)
    pods.end("a1", 0.0)
    pods.is_open = False
    for name, session in (("b1", "b"), ("x", ""), ("a2", "a")):
        assert control.enqueue(ticket(name, session, 300), 1.0) == []
    pods.is_open = True
    assert names(control.pump(2.0)) == ["x", "a2", "b1"]


def test_a_paused_session_comes_before_a_new_one():
    pods = Pods(head_wait_s_max=0.0)
    control = queue(pods)
    control.enqueue(ticket("a1", "a", 600), 0.0)
    pods.end("a1", 0.0)
    control.enqueue(ticket("b1", "b", 600), 6.0)
    assert control.enqueue(ticket("c1", "c", 600), 7.0) == []
    assert control.enqueue(ticket("a2", "a", 600), 8.0) == []
    pods.end("b1", 9.0)
    assert names(control.pump(14.0)) == ["a2"]


def test_a_session_that_waits_long_takes_the_room_of_any_idle_one():
    """And is admitted without room in the end."""
    pods = Pods()
    control = queue(pods)
    control.enqueue(ticket("a1", "a", 900), 0.0)
    control.enqueue(ticket("b1", "b", 600), 1.0)
    assert control.pump(1.0 + HEAD_WAIT_S / 2) == []
    pods.end("a1", 11.5)
    assert names(control.pump(11.5)) == ["b1"]
    control.enqueue(ticket("c1", "c", 600), 12.0)
    assert control.pump(11.9 + HEAD_WAIT_S) == []
    assert names(control.pump(12.0 + HEAD_WAIT_S)) == ["c1"]


def test_a_session_limited_to_full_endpoints_blocks_no_other():
    pods = Pods(head_wait_s_max=0.0)
    control = queue(pods)
    control.enqueue(ticket("a1", "a", 900), 0.0)
    control.enqueue(ticket("b1", "b", 600, subset=("elsewhere",)), 1.0)
    assert names(control.enqueue(ticket("c1", "c", 100), 1.0) + control.pump(1.0)) == ["c1"]


def test_the_rank_follows_standing_and_wait():
    admission = AgentAdmission(head_wait_s_max=20.0)
    assert admission.rank(Standing.ADMITTED, 100.0) is Rank.ADMITTED
    assert admission.rank(Standing.NEW, 9.9) is Rank.NEW
    assert admission.rank(Standing.PAUSED, 9.9) is Rank.PAUSED
    assert admission.rank(Standing.NEW, 10.0) is Rank.OVERDUE
    assert AgentAdmission(head_wait_s_max=0.0).rank(Standing.NEW, 1e9) is Rank.NEW


class AnyAgents(RuleBasedStateMachine):
    """Random turns of sessions through flow control; each session has one turn at a time."""

    head_wait_s = HEAD_WAIT_S

    def __init__(self):
        super().__init__()
        self.pods = Pods(count=2, head_wait_s_max=self.head_wait_s)
        self.control = queue(self.pods)
        self.now = 0.0
        self.turns = 0
        self.waiting = {}

    def placed(self, verdicts):
        for verdict in verdicts:
            assert verdict.ticket.state is State.PLACED
            self.waiting.pop(verdict.ticket.request.request_id, None)

    @rule(session=st.sampled_from("abcdefg"), tokens=st.integers(10, 700))
    def take_a_turn(self, session, tokens):
        busy = [one.flow for one in self.waiting.values()]
        if session in (*busy, *(name[0] for name in self.pods.running)):
            return
        self.turns += 1
        one = ticket(f"{session}{self.turns}", session, tokens)
        admitted = self.pods.index.standing(one.request) is Standing.ADMITTED
        self.waiting[one.request.request_id] = one
        verdicts = self.control.enqueue(one, self.now)
        if admitted and self.pods.is_open:
            assert names(verdicts) == [one.request.request_id], "an admitted turn does not wait"
        self.placed(verdicts)
        self.placed(self.control.pump(self.now))

    @precondition(lambda self: self.pods.running)
    @rule(data=st.data())
    def end_a_turn(self, data):
        name = data.draw(st.sampled_from(sorted(self.pods.running)))
        self.pods.end(name, self.now)
        self.placed(self.control.pump(self.now))

    @rule(after_s=st.floats(0, 30))
    def time_passes(self, after_s):
        self.now += after_s
        self.placed(self.control.pump(self.now))

    @rule()
    def the_gate_closes_for_a_moment(self):
        self.pods.is_open = not self.pods.is_open
        self.placed(self.control.pump(self.now))

    @invariant()
    def no_admitted_turn_waits_while_the_gate_is_open(self):
        if self.pods.is_open:
            for one in self.waiting.values():
                assert self.pods.index.standing(one.request) is not Standing.ADMITTED

    @invariant()
    def nothing_waits_longer_than_the_bound(self):
        if self.pods.is_open and self.head_wait_s:
            for one in self.waiting.values():
                assert self.now - one.enqueued_at_s < self.head_wait_s

    @invariant()
    def the_first_that_waits_has_no_room(self):
        waiting = sorted(
            self.waiting.values(),
            key=lambda one: (
                self.pods.ranks([one], self.now)[0],
                one.number,
            ),
        )
        if waiting and self.pods.is_open:
            first = waiting[0]
            assert not self.pods.admits(first.request, self.now - first.enqueued_at_s, self.now)

    @invariant()
    def sessions_fit_unless_one_was_forced_in(self):
        if self.pods.forced:
            return
        for slot in range(self.pods.count):
            there = [
                session
                for session in self.pods.index._sessions.values()
                if session.admitted and session.slot == slot
            ]
            if self.pods.index.tokens_needed(slot) > CAPACITY and len(there) > 1:
                # Only turns of admitted sessions, which may not wait, can need more.
                assert all(session.running for session in there)


class AgentsWithoutForce(AnyAgents):
    head_wait_s = 0.0


TestAnyAgents = AnyAgents.TestCase
TestAgentsWithoutForce = AgentsWithoutForce.TestCase
for each in (TestAnyAgents, TestAgentsWithoutForce):
    each.settings = limits(max_examples=60, stateful_step_count=40, deadline=None)
