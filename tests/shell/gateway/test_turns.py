"""Turns by a clock that stands still unless it is moved."""

import asyncio

import pytest

from epp.shell.gateway.turns import PASS_S_MAX, TURN_S_MAX, TURN_STEPS_MAX, Turn, Turns


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Busy:
    """Has so many turns to take, each of which takes its time."""

    def __init__(self, name, turns, took, clock, turn_s=0.0):
        self.name, self.turns, self.took, self.clock, self.turn_s = name, turns, took, clock, turn_s

    def turn(self):
        self.took.append(self.name)
        self.clock.now += self.turn_s
        self.turns -= 1
        return self.turns > 0


async def loops(took):
    """Mark each turn of the loop among the turns."""
    while True:
        took.append("-")
        await asyncio.sleep(0)


def test_a_turn_is_over_after_so_many_steps_and_after_so_long():
    """Whichever is first; and before it has begun."""
    clock = Clock()
    turn = Turn(clock)
    assert not turn.take()
    turn.begin()
    assert [turn.take() for _ in range(TURN_STEPS_MAX + 1)] == [True] * TURN_STEPS_MAX + [False]
    turn.begin()
    clock.now += TURN_S_MAX
    assert not turn.take()
    turn.begin()
    assert turn.take()


async def test_turns_go_round_and_the_loop_is_given_back_after_each_round():
    """Who came first has no more of them than who came last."""
    took, clock = [], Clock()
    turns = Turns(clock)
    assert turns.idle
    for name, count in (("a", 3), ("b", 1), ("c", 2)):
        turns.due(Busy(name, count, took, clock))
    assert not turns.idle
    beside = asyncio.create_task(loops(took))
    while not turns.idle:
        await asyncio.sleep(0)
    beside.cancel()
    rounds = "".join(took).replace("--", "-").strip("-").split("-")
    assert rounds == ["abc", "ac", "a"]


async def test_a_round_that_takes_long_lets_the_loop_go_on_in_between():
    """And goes on where it was."""
    took, clock = [], Clock()
    turns = Turns(clock)
    for name in "abcd":
        turns.due(Busy(name, 1, took, clock, turn_s=PASS_S_MAX * 0.6))
    beside = asyncio.create_task(loops(took))
    while not turns.idle:
        await asyncio.sleep(0)
    beside.cancel()
    assert "".join(took).strip("-") == "ab-cd"


async def test_a_turn_that_fails_costs_nobody_else_theirs():
    """The defect goes to the loop."""
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(about))
    took, clock = [], Clock()
    turns = Turns(clock)

    class Broken:
        def turn(self):
            raise ZeroDivisionError

    turns.due(Broken())
    turns.due(Busy("a", 2, took, clock))
    while not turns.idle:
        await asyncio.sleep(0)
    assert took == ["a", "a"]
    assert [type(about["exception"]) for about in problems] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        Broken().turn()
