"""The line in which requests wait before they are placed."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.protocol.waiting_line import WaitingLine
from tests.builders import request


class Held:
    """What a test holds, and who was let go, by request id."""

    def __init__(self, **settings):
        self.busy = True
        self.room = None
        """How many may go before all are held again; None: no limit."""
        self.gone = []
        self.line = WaitingLine(self.holds, **settings)

    def holds(self, asked):
        return self.busy or self.room == 0

    def come(self, name):
        return self.line.begin(request(request_id=name), b"", self.go)

    def go(self, resolution):
        self.gone.append(resolution.request_id)
        if self.room:
            self.room -= 1


def test_who_is_not_held_does_not_wait():
    """And takes no place."""
    held = Held()
    held.busy = False
    assert held.come("a") is None
    assert len(held.line) == 0


def test_who_is_held_goes_once_nothing_holds_it():
    """In the order in which they came, and each once."""
    held = Held()
    for name in "abc":
        held.come(name)
    held.line.admit()
    assert held.gone == []
    held.busy = False
    held.line.admit()
    held.line.admit()
    assert held.gone == ["a", "b", "c"]


def test_who_goes_may_fill_what_was_free():
    """Each is asked for after the one before it was placed."""
    held = Held()
    for name in "abc":
        held.come(name)
    held.busy, held.room = False, 2
    held.line.admit()
    assert held.gone == ["a", "b"]
    assert len(held.line) == 1


def test_nobody_overtakes_who_waits():
    """A request that nothing holds waits behind the others."""
    held = Held()
    held.come("a")
    held.busy = False
    assert held.come("b") is not None
    held.line.admit()
    assert held.gone == ["a", "b"]


def test_a_client_that_leaves_gives_up_its_place():
    """It is not placed, and nobody waits for it."""
    held = Held()
    first, _ = held.come("a"), held.come("b")
    first.cancel()
    first.cancel()
    held.busy = False
    held.line.admit()
    assert held.gone == ["b"]


def test_a_full_line_holds_nobody_more():
    """Who comes then is placed at once."""
    held = Held(requests_max=2)
    assert [held.come(name) is None for name in "abc"] == [False, False, True]
    assert len(held.line) == 2


def test_all_can_be_let_go():
    """Whatever holds them, as at a drain."""
    held = Held()
    for name in "abc":
        held.come(name)
    held.line.let_all_go()
    assert held.gone == ["a", "b", "c"]
    assert len(held.line) == 0


def test_who_asks_again_while_one_goes_changes_no_order():
    """Placing one may end another, and whoever hears of that looks at the line."""
    held = Held()
    for name in "abc":
        held.line.begin(
            request(request_id=name), b"", lambda one: (held.go(one), held.line.admit())
        )
    held.busy = False
    held.line.admit()
    assert held.gone == ["a", "b", "c"]


def test_what_fails_as_it_goes_does_not_stop_the_line():
    """The next look finds the others."""
    held = Held()

    def fail(one):
        raise ValueError(one.request_id)

    held.line.begin(request(request_id="a"), b"", fail)
    held.come("b")
    held.busy = False
    with pytest.raises(ValueError, match="a"):
        held.line.admit()
    held.line.admit()
    assert held.gone == ["b"]


_EVENTS = st.lists(
    st.one_of(
        st.just(("come",)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("room"), st.integers(0, 4)),
    ),
    max_size=60,
)


@given(_EVENTS, st.integers(1, 5))
def test_it_is_a_queue(events, requests_max):
    """Of a fixed length, which clients leave as they like."""
    held = Held(requests_max=requests_max)
    held.busy = False
    held.room = 0
    waits, model, gone = {}, deque(), []
    for number, event in enumerate(events):
        match event:
            case ("come",):
                name = str(number)
                wait = held.come(name)
                assert (wait is None) == (
                    len(model) == requests_max or not (model or held.room == 0)
                )
                if wait is not None:
                    waits[name] = wait
                    model.append(name)
            case ("leave", at):
                if at < len(model):
                    name = model[at]
                    waits[name].cancel()
                    model.remove(name)
            case (_, room):
                held.room = room
                held.line.admit()
                gone += [model.popleft() for _ in range(min(room, len(model)))]
        assert held.gone == gone
        assert len(held.line) == len(model)
