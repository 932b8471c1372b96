"""A configuration as it is handed over: a document that says what was measured, and a ConfigMap."""

from collections.abc import Sequence
from textwrap import fill, indent
from typing import Final

KEY: Final = "config.yaml"
"""Where the chart's ConfigMap has its document."""
_COLUMNS: Final = 100


def with_comment(paragraphs: Sequence[str], text: str) -> str:
    """`text`, YAML, under comments: what `kubectl apply` keeps, since it is part of the value."""
    wrapped = [
        fill(
            _printable(paragraph),
            width=_COLUMNS,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for paragraph in paragraphs
    ]
    return "\n".join([*wrapped, text])


def config_map(name: str, text: str) -> str:
    """A manifest with `text`, a document that ends with a line end and begins in the first column."""
    return (
        f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n"
        f"  {KEY}: |\n{indent(text, '    ')}"
    )


def _printable(text: str) -> str:
    """On one line: names of files may hold anything, and a line end would end the comment."""
    return "".join(one if one.isprintable() else "?" for one in text)
