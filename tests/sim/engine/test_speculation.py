"""How many drafted tokens are accepted."""

import pytest

from sim.engine.speculation import DRAFTED_MAX, Speculation, acceptance_of


def test_each_position_is_accepted_as_often_as_is_told():
    """Of ten thousand passes of a request, within two points; none without the one before."""
    one = Speculation(acceptance=(0.7, 0.45, 0.3))
    counts = [one.accepted("17", place) for place in range(10_000)]
    for position, share in enumerate(one.acceptance, start=1):
        assert sum(count >= position for count in counts) / 10_000 == pytest.approx(share, abs=0.02)
    assert 1 + sum(counts) / 10_000 == pytest.approx(one.length, abs=0.04)


def test_a_request_meets_the_same_acceptances_wherever_it_is_served():
    """They are drawn from itself and the place; other requests meet others."""
    one, same = (Speculation(acceptance=(0.5,)) for _ in range(2))
    places = range(200)
    told = [one.accepted("a", place) for place in places]
    assert told == [same.accepted("a", place) for place in places]
    assert told != [one.accepted("b", place) for place in places]


def test_who_accepts_more_accepts_it_everywhere():
    """Not only on average: one number decides, against higher shares."""
    less, more = Speculation(acceptance=(0.5, 0.2)), Speculation(acceptance=(0.8, 0.6))
    assert all(less.accepted("a", place) <= more.accepted("a", place) for place in range(500))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_can_be_accepted(share):
    """Whatever is drawn."""
    one = Speculation(acceptance=(share, share))
    assert {one.accepted("a", place) for place in range(500)} == {int(2 * share)}


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
    assert acceptance_of("0.7/0.45") == (0.7, 0.45)
    with pytest.raises(ValueError, match=r"got '0\.7/x'"):
        acceptance_of("0.7/x")
