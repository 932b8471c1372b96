from random import Random

from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.rendezvous import identity_hash
from epp.core.knowledge.sessions import LOOKED_AT, SESSIONS_MAX, SessionReturns


def told(sessions):
    returns = SessionReturns()
    for session in sessions:
        returns.note(session)
    return returns.expected


def test_of_nobody_seen_nobody_is_expected():
    assert not SessionReturns().expected
    assert not told(["one"])


def test_sessions_of_one_request_are_not_expected_again():
    assert not told(map(str, range(10_000)))


def test_second_turns_that_four_pickers_share_by_chance_are_enough():
    """One picker of four sees a quarter of the requests of sessions that have three turns."""
    random = Random(7)
    seen = [session for session in range(4_000) for _ in range(3) if random.random() < 0.25]
    assert told(map(str, seen))


def test_what_was_long_ago_is_forgotten():
    """Both ways: the last requests decide."""
    again = ["one"] * LOOKED_AT
    alone = [str(number) for number in range(LOOKED_AT)]
    assert told([*alone, *again])
    assert not told([*again, *alone])


@given(st.lists(st.text(max_size=3), max_size=200))
def test_it_is_the_share_of_the_last_requests(sessions):
    """By the definition, whatever is named."""
    returned = [session in sessions[:at] for at, session in enumerate(sessions)][-LOOKED_AT:]
    assert told(sessions) == (bool(returned) and sum(returned) * 8 >= len(returned))


def test_what_it_keeps_is_bounded():
    """A client that makes up sessions fills nothing, and what it pushed out is new again."""
    returns = SessionReturns()
    for number in range(SESSIONS_MAX + 1_000):
        returns.note(f"made up {number}")
    assert len(returns._known) == SESSIONS_MAX
    assert len(returns._returned) == LOOKED_AT
    assert identity_hash("made up 0") not in returns._known


def test_any_text_is_a_session():
    """A header may hold bytes that are no UTF-8."""
    assert identity_hash("\udcff") == identity_hash("\udcff") != identity_hash("")
