import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("llama-3.1 8B/é", "llama-3.1 8B/é"),
        ("a\nb\r\0", "a\\nb\\r\\x00"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\ud800", "\\ud800"),
        ("\u202e\u2028", "\\u202e\\u2028"),
        ("\\n", "\\n"),
        ("\\n\n", "\\\\n\\n"),
    ],
)
def test_what_is_not_printable_is_spelt_out(text, shown):
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_becomes_one_printable_line(text):
    """Surrogates too."""
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
