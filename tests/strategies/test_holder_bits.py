"""Bits and slots say the same."""

from hypothesis import given
from hypothesis import strategies as st

from epp.strategies.holder_bits import slots_of


@given(slots=st.sets(st.integers(0, 300)))
def test_slots_come_back_in_order(slots):
    """Also behind the width of a word."""
    assert list(slots_of(sum(1 << slot for slot in slots))) == sorted(slots)
