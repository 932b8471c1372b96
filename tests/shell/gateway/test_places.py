"""Who stays and who leaves, without a socket."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epp.shell.gateway.places import Places


class Connected:
    def __init__(self, host, heard_at_s=0.0, open_streams=0):
        self.host, self.heard_at_s, self.open_streams = host, heard_at_s, open_streams

    def __repr__(self):
        return f"{self.host} heard at {self.heard_at_s} with {self.open_streams}"


def test_of_an_address_that_has_all_it_may_the_idlest_leaves():
    """One with a stream stays before one without, whenever either was heard."""
    places = Places(100, 3)
    busy, old, new = Connected("a", 1.0, 1), Connected("a", 2.0), Connected("a", 3.0)
    for guest in (busy, old, new, Connected("b", 0.0)):
        assert places.take(guest).evicted is None
    assert places.take(Connected("a", 4.0)).evicted is old
    assert places.take(Connected("a", 5.0)).evicted is new


def test_where_all_places_are_taken_the_address_with_most_gives_one_up():
    """Not the one that has been idle for longest elsewhere."""
    places = Places(4, 3)
    many = [Connected("many", at) for at in (5.0, 6.0, 7.0)]
    for guest in (Connected("one", 0.0), *many):
        places.take(guest)
    assert places.take(Connected("new", 8.0)).evicted is many[0]


def test_as_many_again_may_be_on_their_way_out_and_then_the_newest_is_refused():
    """Until one of them has left; other addresses do not notice."""
    places = Places(100, 2)
    guests = [Connected("a", float(number), 1) for number in range(4)]
    assert [places.take(guest).evicted for guest in guests] == [None, None, *guests[:2]]
    refused = places.take(Connected("a", 9.0))
    assert (refused.admitted, refused.evicted) == (False, None)
    assert places.take(Connected("b", 9.0)).admitted
    places.left(guests[0])
    assert places.take(Connected("a", 9.0)).evicted is guests[2]


def test_who_is_asked_to_leave_twice_leaves_once():
    """By its age, say, when it was evicted a moment before."""
    places = Places(10, 1)
    first, second = Connected("a"), Connected("a")
    places.take(first)
    assert places.take(second).evicted is first
    places.leaving(first)
    places.left(first)
    places.left(second)
    assert repr(places) == "<Places [0 taken, 0 leaving]>"


class Coming(RuleBasedStateMachine):
    """Whoever comes, leaves and goes: so many stay, of each address too, and all are counted."""

    def __init__(self):
        super().__init__()
        self.places = Places(5, 3)
        self.staying, self.leaving = [], []
        self.now = 0.0

    @rule(host=st.sampled_from("abcd"), streams=st.integers(0, 1))
    def come(self, host, streams):
        self.now += 1
        guest = Connected(host, self.now, streams)
        admission = self.places.take(guest)
        if admission.evicted is not None:
            self.staying.remove(admission.evicted)
            self.leaving.append(admission.evicted)
        if admission.admitted:
            self.staying.append(guest)
        else:
            # Only for those of which as many again are leaving already, or where all are.
            assert len(self.leaving) >= 5 or max(self._by_host(self.leaving)) >= 3

    @rule(index=st.integers(0, 20))
    def ask(self, index):
        if self.staying:
            guest = self.staying.pop(index % len(self.staying))
            self.places.leaving(guest)
            self.leaving.append(guest)

    @rule(index=st.integers(0, 20))
    def go(self, index):
        guests = self.staying + self.leaving
        if guests:
            guest = guests[index % len(guests)]
            (self.staying if guest in self.staying else self.leaving).remove(guest)
            self.places.left(guest)

    @staticmethod
    def _by_host(guests):
        return [sum(one.host == host for one in guests) for host in "abcd"]

    @invariant()
    def is_bounded(self):
        assert len(self.staying) <= 5
        assert max(self._by_host(self.staying)) <= 3
        expected = f"<Places [{len(self.staying)} taken, {len(self.leaving)} leaving]>"
        assert repr(self.places) == expected


Coming.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_places_are_bounded = Coming.TestCase
