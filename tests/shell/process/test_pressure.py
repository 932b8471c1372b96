import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.process.pressure import INDEX_SHARE_MIN, MemoryPressure


def after(*used):
    pressure = MemoryPressure(1_000)
    changed = [pressure.look(bytes_) for bytes_ in used]
    return pressure, changed


@pytest.mark.parametrize(
    ("used", "share", "bodies_pass", "level"),
    [
        ([790], 1.0, False, 0),
        ([810], 0.875, False, 1),
        ([810, 810], 0.75, False, 1),
        ([810] * 99, INDEX_SHARE_MIN, False, 1),
        ([910], 0.875, True, 2),
        ([910, 860], 0.75, True, 2),
        ([910, 840], 0.75, False, 1),
        ([810, 750], 0.875, False, 1),
        ([810, 690], 1.0, False, 0),
        ([910, 690, 690], 1.0, False, 0),
    ],
)
def test_indexes_shrink_first_then_bodies_pass_and_both_end_below_where_they_began(
    used, share, bodies_pass, level
):
    """Between its two marks each stays as it is."""
    pressure, _ = after(*used)
    assert (pressure.index_share, pressure.bodies_pass, pressure.level) == (
        share,
        bodies_pass,
        level,
    )


def test_a_change_is_told_once():
    """Whoever acts on it need not compare."""
    assert after(100, 850, 750, 750, 600, 600)[1] == [False, True, False, False, True, False]


@given(st.lists(st.integers(0, 2_000)))
def test_when_the_peak_is_over_all_is_as_before(used):
    """Whatever happened, in a bounded number of looks."""
    pressure, _ = after(*used)
    for _ in range(8):
        pressure.look(500)
    assert (pressure.index_share, pressure.level) == (1.0, 0)
    assert not pressure.look(500)
