"""How many drafted tokens are accepted."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.speculation import (
    CONTEXTS_MAX,
    DRAFTED_MAX,
    AcceptanceAt,
    Speculation,
    speculation_of,
)


def test_each_position_is_accepted_as_often_as_is_told():
    """Of ten thousand passes of a request, within two points; none without the one before."""
    one = Speculation(acceptance=(0.7, 0.45, 0.3))
    counts = [one.accepted("17", place, 100) for place in range(10_000)]
    for position, share in enumerate(one.acceptance, start=1):
        assert sum(count >= position for count in counts) / 10_000 == pytest.approx(share, abs=0.02)
    assert sum(counts) / 10_000 == pytest.approx(sum(one.acceptance), abs=0.04)


def test_a_request_meets_the_same_acceptances_wherever_it_is_served():
    """They are drawn from itself and the place; other requests meet others."""
    one, same = (Speculation(acceptance=(0.5,)) for _ in range(2))
    places = range(200)
    told = [one.accepted("a", place, 100) for place in places]
    assert told == [same.accepted("a", place, 100) for place in places]
    assert told != [one.accepted("b", place, 100) for place in places]


def test_who_accepts_more_accepts_it_everywhere():
    """Not only on average: one number decides, against higher shares."""
    less, more = Speculation(acceptance=(0.5, 0.2)), Speculation(acceptance=(0.8, 0.6))
    assert all(
        less.accepted("a", place, 100) <= more.accepted("a", place, 100) for place in range(500)
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_can_be_accepted(share):
    """Whatever is drawn."""
    one = Speculation(acceptance=(share, share))
    assert {one.accepted("a", place, 100) for place in range(500)} == {int(2 * share)}


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((), "1 to 16 acceptances, got 0"),
        ((0.5,) * (DRAFTED_MAX + 1), "1 to 16 acceptances, got 17"),
        ((0.5, 0.6), "none above the one before it, got 0.5/0.6"),
        ((1.5,), "from 0 to 1"),
        ((float("nan"),), "from 0 to 1"),
    ],
)
def test_acceptances_that_cannot_be_are_refused(shares, told):
    """With what was expected."""
    with pytest.raises(ValueError, match=told):
        Speculation(acceptance=shares)


def test_acceptances_are_written_with_slashes():
    """Numbers, or a sentence."""
    assert speculation_of("0.7/0.45") == Speculation(acceptance=(0.7, 0.45))
    with pytest.raises(ValueError, match=r"got '0\.7/x'"):
        speculation_of("0.7/x")


BY_CONTEXT = "1000:0.8/0.4+3000:0.4/0.2"


def test_acceptances_at_lengths_of_context_are_written_with_plus():
    """That of the first is that of whatever is shorter."""
    assert speculation_of(BY_CONTEXT) == Speculation(
        acceptance=(0.8, 0.4),
        longer=(AcceptanceAt(1_000, (0.8, 0.4)), AcceptanceAt(3_000, (0.4, 0.2))),
    )


@pytest.mark.parametrize(
    ("context_tokens", "shares"),
    [
        (1, (0.8, 0.4)),
        (1_000, (0.8, 0.4)),
        (1_500, (0.7, 0.35)),
        (2_000, (0.6, 0.3)),
        (3_000, (0.4, 0.2)),
        (1_000_000, (0.4, 0.2)),
    ],
)
def test_acceptance_is_on_the_line_between_two_contexts(context_tokens, shares):
    """And beyond the ends as there."""
    assert speculation_of(BY_CONTEXT).acceptance_at(context_tokens) == pytest.approx(shares)


def test_a_context_accepts_what_it_is_told():
    """Of ten thousand passes, within two points."""
    one = speculation_of(BY_CONTEXT)
    counts = [one.accepted("17", place, 2_000) for place in range(10_000)]
    assert sum(count >= 1 for count in counts) / 10_000 == pytest.approx(0.6, abs=0.02)
    assert sum(count == 2 for count in counts) / 10_000 == pytest.approx(0.3, abs=0.02)


_SHARES = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(
    lambda found: tuple(sorted(found, reverse=True))
)


@given(
    st.dictionaries(st.integers(0, 200_000), _SHARES, min_size=1, max_size=CONTEXTS_MAX),
    st.integers(0, 300_000),
    st.integers(0, 1_000),
)
def test_no_context_has_acceptances_that_cannot_be(told, context_tokens, place):
    """From the least that is told to the most, none above the one before it."""
    points = tuple(AcceptanceAt(at, told[at]) for at in sorted(told))
    one = Speculation(acceptance=points[0].acceptance, longer=points)
    shares = one.acceptance_at(context_tokens)
    for _position, share in enumerate(shares):
        column = [share for shares in told.values()]
        assert min(column) - 1e-12 <= share <= max(column) + 1e-12
    assert all(before >= after - 1e-12 for before, after in itertools.pairwise(shares))
    assert 0 <= one.accepted("a", place, context_tokens) <= 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1000:0.8+2000:0.5/0.2", "1 acceptances at each context, got 0.5/0.2"),
        ("1000:0.8+1000:0.5", "longer than the one before it"),
        ("2000:0.8+1000:0.5", "longer than the one before it"),
        ("1000:0.8+2000:1.5", "from 0 to 1"),
        ("+".join(f"{at}:0.5" for at in range(CONTEXTS_MAX + 1)), "at most 16 contexts, got 17"),
    ],
)
def test_tables_that_cannot_be_are_refused(text, told):
    """With what was expected."""
    with pytest.raises(ValueError, match=told):
        speculation_of(text)
