import json

from hypothesis import given
from hypothesis import strategies as st

from docs.row_lines import LINE_CHARACTERS_MAX, row_lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=60,
)


@given(JSON)
def test_it_reads_as_the_same(value):
    assert json.loads(row_lines(value)) == value


def test_what_fits_on_a_line_is_one():
    """A row, not the table; nothing that can be parted is longer than a line."""
    rows = [{"case": f"number {number}", "figures": [1.5] * 20} for number in range(3)]
    assert row_lines(rows).splitlines()[1] == " " + json.dumps(rows[0]) + ","
    long = [{"case": "a", "figures": [1.5] * 90}]
    assert all(len(line) <= LINE_CHARACTERS_MAX for line in row_lines(long).splitlines())
