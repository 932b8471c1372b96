"""Rows as a table."""

from epp.shell.operators.pages.text_table import cell, table


def test_columns_are_aligned_under_their_names():
    """What a row does not have is a dash; no rows are said to be none."""
    assert table([{"a": 1, "b": "long"}, {"a": None, "c": 0.5}]) == (
        "a  b     c\n1  long  -\n-  -     0.5\n"
    )
    assert table([]) == "none\n"


def test_nothing_in_a_cell_can_steer_a_terminal():
    """Nor forge a line."""
    assert cell("a\x1b[2J\nb") == "a?[2J?b"
    assert cell("") == "-"
