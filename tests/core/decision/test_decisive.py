"""What decided is what could not be left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.decisive import decisive

PARTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6
)  # in eighths, which floats add up exactly


@pytest.mark.parametrize(
    ("chosen", "other", "decided"),
    [
        ([3.0, 2.0, 2.0], [0.0, 2.0, 2.0], (0,)),
        ([3.0, 0.0], [0.0, 2.0], (0,)),
        ([1.0, 1.0], [0.5, 0.4], (1, 0)),
        ([1.0, 1.0], [1.0, 1.0], ()),
        ([0.0], [1.0], ()),
        ([], [], ()),
    ],
)
def test_the_fewest_that_turn_the_scales_decided(chosen, other, decided):
    """The greatest lead first; between equals, and for who is behind, nothing did."""
    assert decisive(chosen, other) == decided


@given(parts=PARTS)
def test_without_what_decided_the_chosen_one_is_not_ahead(parts):
    """And with any fewer of the greatest it still is."""
    chosen, other = ([number / 8 for number in side] for side in zip(*parts, strict=True))
    found = decisive(chosen, other)
    leads = [mine - theirs for mine, theirs in zip(chosen, other, strict=True)]
    assert bool(found) == (sum(leads) > 0)
    if found:
        assert sum(leads) - sum(leads[at] for at in found) <= 0
        assert sum(leads) - sum(leads[at] for at in found[:-1]) > 0
