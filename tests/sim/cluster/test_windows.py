"""Windows of a run."""

import pytest

from sim.cluster.windows import check_window


def test_a_window_has_a_length():
    """It may be as short as a float can say."""
    check_window(1.0, 1.0000001)
    for to_s in (1.0, 0.5):
        with pytest.raises(ValueError, match=rf"expected to_s after from_s, 1 s, got {to_s:g} s"):
            check_window(1.0, to_s)
